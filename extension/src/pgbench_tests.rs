//! pgbench in `cargo pgrx test`: encrypted and plaintext tables in one server, compared by counters
//! and CPU time, never by elapsed time. Also measures the cost of a page on the server's own path.
//!
//! The tests can also be called from psql on a server with a build with `--features pg_test`:
//! `SELECT tests.pgbench_...()`.

#[pgrx::pg_schema]
mod tests {
    use std::hint::black_box;
    use std::path::PathBuf;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use pagevault_cipher::{
        CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, Page, PageKey, page,
    };
    use pagevault_keystore::RelFile;
    use pgrx::prelude::*;

    use crate::keys::provider::helper;
    use crate::page::io;
    use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
    use crate::pg::{clock, image, process};
    use crate::shmem;
    use crate::shmem::counters::StatsKind;

    const DATABASE: &str = "pagevault_pgbench";

    /// Tests run in parallel, and these would count each other's pages.
    const LOCK: &str = "SELECT pg_advisory_xact_lock(20240607)";

    /// A database with pgbench's tables in two schemas, `plain` and `sealed`, and its own master
    /// key, because other tests need a cluster without one. Dropped at the end.
    struct Bench {
        keys: PathBuf,
    }

    impl Bench {
        /// `None`, with a notice, if there is no key provider helper.
        fn prepare() -> Option<Bench> {
            assert!(Spi::run(LOCK).is_ok());
            let keyring = match helper::program() {
                Ok(keyring) if keyring.exists() => keyring,
                other => {
                    notice!("skipped: there is no helper: {other:?}");
                    return None;
                }
            };
            let keys =
                process::data_directory().with_extension(format!("keys-{}", std::process::id()));
            run(Command::new(keyring).args(["file", "create"]).arg(&keys).args(["--key", "main"]));
            let name = format!("pgbench-{}", std::process::id());
            let bench = Bench { keys };
            bench.psql("template1", &format!("DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)"));
            bench.psql("template1", &format!("CREATE DATABASE {DATABASE}"));
            bench.psql(
                "template1",
                &format!("ALTER DATABASE {DATABASE} SET pagevault.data_catalog_encryption = off"),
            );
            let path = bench.keys.display();
            for statement in [
                "CREATE EXTENSION pagevault",
                &format!(
                    "SELECT pagevault.add_provider('{name}', 'file', '{{\"path\": \"{path}\"}}')"
                ),
                &format!("SELECT pagevault.set_database_master_key('{name}', 'main')"),
                "CREATE SCHEMA plain",
                "CREATE SCHEMA sealed",
                "SECURITY LABEL FOR pagevault ON SCHEMA sealed IS 'encrypted'",
            ] {
                bench.sql(statement);
            }
            for schema in ["plain", "sealed"] {
                bench.pgbench(schema, &["-i", "-q", "-s", "1"]);
                // Read all of table and index into shared buffers.
                bench.sql(&format!(
                    "SET search_path = {schema}; SELECT count(*), sum(abalance) FROM pgbench_accounts;
                     SET enable_seqscan = off; SELECT count(*) FROM pgbench_accounts WHERE aid > 0"
                ));
                // Loads what pgbench itself reads when it starts.
                bench.pgbench(schema, &["-n", "-t", "1", "-S"]);
            }
            bench.sql("CHECKPOINT");
            Some(bench)
        }

        fn connect(&self, program: &str) -> Command {
            let mut command = Command::new(image::server_binary().with_file_name(program));
            let ask = |what| Spi::get_one::<String>(what).ok().flatten().unwrap_or_default();
            let directory =
                ask("SELECT split_part(current_setting('unix_socket_directories'), ',', 1)");
            command
                .env("PGHOST", directory)
                .env("PGPORT", ask("SHOW port"))
                .env("PGUSER", ask("SELECT session_user::text"));
            command
        }

        fn psql(&self, database: &str, statements: &str) -> String {
            let mut command = self.connect("psql");
            run(command.args(["-XqAt", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", statements]))
        }

        fn sql(&self, statements: &str) -> String {
            self.psql(DATABASE, statements)
        }

        fn pgbench(&self, schema: &str, arguments: &[&str]) {
            let mut command = self.connect("pgbench");
            command.env("PGOPTIONS", format!("-c search_path={schema}"));
            run(command.args(arguments).arg(DATABASE));
        }

        /// Runs pgbench on a schema. Returns the numbers of encrypted and decrypted pages, and the
        /// CPU seconds of all processes.
        fn measure(&self, schema: &str, arguments: &[&str]) -> (u64, u64, f64) {
            let (before, cpu) = (counted(), cpu_seconds());
            self.pgbench(schema, &[&["-n", "-c", "2"], arguments].concat());
            self.sql("CHECKPOINT");
            let (after, cpu) = (counted(), cpu_seconds() - cpu);
            (after.0 - before.0, after.1 - before.1, cpu)
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.keys);
            if !std::thread::panicking() {
                self.psql("template1", &format!("DROP DATABASE {DATABASE} WITH (FORCE)"));
            }
        }
    }

    /// The output of a program that must succeed. Meanwhile this process handles interrupts: CREATE
    /// DATABASE and DROP DATABASE wait until all processes have done so.
    fn run(command: &mut Command) -> String {
        let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let finished = started.and_then(|mut child| {
            while child.try_wait()?.is_none() {
                process::check_for_interrupts();
                std::thread::sleep(Duration::from_millis(5));
            }
            child.wait_with_output()
        });
        let output = match finished {
            Ok(output) => output,
            Err(error) => panic!("{command:?}: {error}"),
        };
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {stderr}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Numbers of relation pages encrypted and decrypted so far.
    fn counted() -> (u64, u64) {
        let totals = shmem::get().map(|shared| shared.counters.totals(StatsKind::Relation));
        totals.map_or((0, 0), |totals| (totals.sealed, totals.opened))
    }

    /// CPU time of the server: the postmaster, its children, and its former children.
    fn cpu_seconds() -> f64 {
        const HERTZ: f64 = 100.0; // USER_HZ, the unit of these fields on Linux
        let postmaster = std::os::unix::process::parent_id();
        let children = format!("/proc/{postmaster}/task/{postmaster}/children");
        let children = std::fs::read_to_string(children).unwrap_or_default();
        // utime, stime, and of terminated children cutime and cstime: proc(5).
        let ticks = |pid: &str, fields: usize| -> f64 {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let after_name = stat.rsplit(')').next().unwrap_or_default();
            let numbers = after_name.split_whitespace().skip(11).take(fields);
            numbers.filter_map(|number| number.parse::<f64>().ok()).sum()
        };
        let living: f64 = children.split_whitespace().map(|pid| ticks(pid, 2)).sum();
        (ticks(&postmaster.to_string(), 4) + living) / HERTZ
    }

    /// Compares with a wide margin, because other tests run at the same time.
    fn assert_similar(what: &str, plain: f64, sealed: f64) {
        notice!("{what}: CPU seconds plain {plain:.2}, encrypted {sealed:.2}");
        assert!(sealed < plain * 2.0 + 1.0, "{what}: CPU plain {plain} s, encrypted {sealed} s");
    }

    #[pg_test]
    fn pgbench_pages_and_cpu_time_are_within_bounds() {
        let Some(bench) = Bench::prepare() else { return };
        let few: &[&str] = &["-t", "2000", "-S"];
        let plain = bench.measure("plain", few);
        let sealed = bench.measure("sealed", few);
        assert_eq!((plain.0, plain.1), (0, 0), "plain tables are sealed or opened");
        assert_eq!(sealed.1, 0, "a page in shared buffers was opened again");
        assert_similar("read-only", plain.2, sealed.2);

        let few: &[&str] = &["-t", "500"];
        let plain = bench.measure("plain", few);
        let sealed = bench.measure("sealed", few);
        assert_eq!((plain.0, plain.1), (0, 0), "plain tables are sealed or opened");
        let at_least: u64 = bench
            .sql("SELECT pg_relation_size('sealed.pgbench_history') / 8192 + 2")
            .parse()
            .unwrap_or_default();
        // Each transaction changes four rows, on at most as many pages, and sometimes an index page
        // or a map.
        let most = 2 * 500 * 6 + 100;
        assert!((at_least..most).contains(&sealed.0), "{} pages were sealed", sealed.0);
        assert_similar("read-write", plain.2, sealed.2);
    }

    /// CPU nanoseconds of this process for each of `count` calls: the best of many rounds.
    fn nanoseconds(count: u32, mut turn: impl FnMut(u32)) -> f64 {
        let cpu = || clock::cpu_time() as f64;
        let rounds = (0..200).map(|_| {
            let start = cpu();
            (0..count).for_each(&mut turn);
            (cpu() - start) / f64::from(count)
        });
        rounds.fold(f64::INFINITY, f64::min)
    }

    /// Encrypts and decrypts as the storage manager's functions do: with decision, key and
    /// counters.
    #[pg_test]
    fn pgbench_page_costs_little_more_than_the_cipher() {
        const PAGES: u32 = 64;
        let Some(bench) = Bench::prepare() else { return };
        let ask = |sql: &str| bench.sql(sql).parse::<u32>().unwrap_or_default();
        let file = RelFile {
            tablespace: pg_sys::DEFAULTTABLESPACE_OID.to_u32(),
            database: ask(&format!("SELECT oid FROM pg_database WHERE datname = '{DATABASE}'")),
            relation: ask("SELECT pg_relation_filenode('sealed.pgbench_accounts')"),
        };
        let file = SmgrFile { file, backend: SHARED_BACKEND };
        assert!(io::seal_target(file).is_some(), "the table is not encrypted");
        let checksums = process::data_checksums();

        let mut plain: Vec<Page> = vec![[7; PAGE_SIZE]; PAGES as usize];
        for page in &mut plain {
            page[10..12].fill(0); // pd_flags: no version
            // pd_pagesize_version
            page[18..20].copy_from_slice(&(PAGE_SIZE as u16 | 4).to_le_bytes());
        }
        let mut sealed = plain.clone();
        let seal = nanoseconds(PAGES, |block| {
            let source = black_box(&plain[block as usize]);
            let into = &mut sealed[block as usize..][..1];
            let done = io::seal_target(file).map(|target| {
                io::seal(target, 0, block, into, |_, copy| copy.copy_from_slice(source))
            });
            assert!(matches!(done, Some(Ok(()))), "not sealed");
        });
        let mut work = Box::new([0; PAGE_SIZE]);
        let copy =
            nanoseconds(PAGES, |block| work.copy_from_slice(black_box(&sealed[block as usize])));
        let open = nanoseconds(PAGES, |block| {
            work.copy_from_slice(black_box(&sealed[block as usize]));
            assert!(io::open(file, 0, block, &mut work).is_ok());
        });
        assert!(work[12..] == plain[0][12..], "it is not what it was");

        let key = DataKey::random(CipherId::Aes256Xts).map(|key| PageKey::new(&key));
        let Ok(key) = key else { panic!("no random key") };
        let bare = nanoseconds(PAGES, |block| {
            work.copy_from_slice(black_box(&plain[block as usize]));
            page::seal(&mut work, &key, DataKeyVersion::FIRST, block, Fork::Main, checksums);
        });
        let (seal, open, bare) = (seal - copy, open - copy, bare - copy);
        notice!(
            "ns of CPU per page, {}: sealing {seal:.0}, opening {open:.0}; the cipher alone {bare:.0}",
            key.backend()
        );
        // Encryption copies the page, and code around the cipher is slow in a debug build.
        let most = if cfg!(debug_assertions) { 20.0 } else { 1.5 };
        assert!(seal < bare * most && open < bare * most, "{seal} and {open}, against {bare}");
    }
}
