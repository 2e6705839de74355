//! The mark of a sealed file is a bit of its mode, which not every file system supports.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use super::{CANARY, LITTLE_MEMORY, SETUP, files_below, spilled};

/// Simulates a file system without the sticky bit, such as FAT and some network file systems, by
/// replacing the server's calls of the C library. This needs neither root nor such a file system in
/// the kernel.
const DROPS_THE_BIT: &str = r#"
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdarg.h>
    #include <sys/stat.h>

    static int open_without(const char *name, const char *path, int flags, va_list rest)
    {
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
        return real(path, flags, mode & ~S_ISVTX);
    }

    #define OPEN(name) \
        int name(const char *path, int flags, ...) \
        { \
            va_list rest; \
            va_start(rest, flags); \
            int fd = open_without(#name, path, flags, rest); \
            va_end(rest); \
            return fd; \
        }
    OPEN(open)
    OPEN(open64)

    int fchmod(int fd, mode_t mode)
    {
        int (*real)(int, mode_t) = dlsym(RTLD_NEXT, "fchmod");
        return real(fd, mode & ~S_ISVTX);
    }
"#;

/// Starts the server with that simulation.
fn start_where_the_bit_is_dropped(cluster: &Cluster) -> Result<()> {
    let library = cluster.directory().join("drops_the_bit.so");
    let source = library.with_extension("c");
    fs::write(&source, DROPS_THE_BIT)?;
    // A C compiler is required for building Rust programs.
    run(Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .arg("-ldl"))?;
    cluster.installation().give(&library)?;
    run(cluster
        .installation()
        .command("pg_ctl")
        .args(["start", "--wait", "--silent", "--timeout=60", "--log"])
        .arg(cluster.directory().join("log"))
        .arg("-D")
        .arg(cluster.data_directory())
        .env("LD_PRELOAD", library))
    .map(drop)
}

const SORT: &str = "SELECT md5(string_agg(t, ',')) FROM (SELECT t FROM data ORDER BY t DESC) s";

const DECODE: &str = "
    SELECT count(*) FROM pg_logical_slot_get_binary_changes('slot', NULL, NULL,
        'proto_version', '1', 'publication_names', 'all_data')";

#[test]
fn without_marks_no_file_is_created() -> Result<()> {
    let settings = Settings::default()
        .conf("wal_level = logical")
        .conf("logical_decoding_work_mem = 64kB")
        .conf("pagevault.temp_encryption = on");
    let cluster = Cluster::create(&settings)?;
    start_where_the_bit_is_dropped(&cluster)?;
    cluster.sql(SETUP)?;
    cluster.sql("CREATE PUBLICATION all_data FOR TABLE data")?;
    cluster.sql("SELECT pg_create_logical_replication_slot('slot', 'pgoutput')")?;
    cluster.sql("INSERT INTO data SELECT id, t FROM data")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    let mut listener = cluster.client()?;
    run_sql(&mut listener, "LISTEN birds; BEGIN")?;
    let notify = format!(
        "DO $$ BEGIN FOR i IN 1 .. 300 LOOP
             PERFORM pg_notify('birds', i || repeat(' {CANARY}', 340));
         END LOOP; END $$"
    );
    // The messages are PostgreSQL's; the cause is in pagevault.
    let of_queue = match cluster.installation().major {
        ..19 => "could not access status of transaction",
        _ => "could not open file \"pg_notify/",
    };
    let cases = [
        (SORT, "could not create temporary file \"base/pgsql_tmp/"),
        (DECODE, "could not open file \"pg_replslot/slot/xid-"),
        (&notify, of_queue),
    ];
    for (statement, message) in cases {
        let error = expect_error(&mut client, statement)?;
        ensure!(error.message.contains(message), "{error}");
        ensure!(error.to_string().contains("Operation not supported"), "{error}");
    }
    ensure!(spilled(&cluster).is_empty(), "files of a sort");
    for directory in ["base/pgsql_tmp", "pg_replslot/slot", "pg_notify"] {
        let path = cluster.data_directory().join(directory);
        let left: Vec<_> = fs::read_dir(&path)
            .with_context(|| directory)?
            .map(|entry| Ok(entry?.file_name()))
            .collect::<Result<_>>()?;
        ensure!(left.is_empty() || left == ["state"], "{left:?} in {directory}");
    }
    run_sql(&mut listener, "COMMIT")?;

    // Without encryption of temporary data such a file system works.
    cluster.set(&[("pagevault.temp_encryption", "off")])?;
    let expected = text(&mut client, &format!("SET work_mem = '64MB'; {SORT}"))?;
    ensure!(
        text(&mut client, &format!("SET work_mem = '64kB'; {SORT}"))? == expected,
        "another order"
    );
    ensure!(text(&mut client, DECODE)?.parse::<u32>()? > 8000, "changes are missing");
    run_sql(&mut client, &notify)?;
    ensure!(!files_below(&cluster.data_directory().join("pg_notify")).is_empty(), "no queue");
    cluster.finish()
}
