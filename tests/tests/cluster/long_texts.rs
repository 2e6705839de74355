//! Long texts of ordinary users, in sessions whose memory is limited, end in errors as in a stock
//! server. An allocation of ours that failed would end the process, and with it all sessions.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

/// What a session may allocate, in bytes.
const ROOM: u64 = 400_000_000;

/// `%s` is the text. Each is run within a block that catches its error, with texts of sizes from
/// those for which there is room to those that not even the server can copy.
const STATEMENTS: [&str; 6] = [
    "SECURITY LABEL FOR pagevault ON TABLE t IS '%s'",
    "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted %s'",
    "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted key_group=%s'",
    "ALTER ROLE bob SET shared_preload_libraries = '%s'",
    "ALTER SYSTEM SET pagevault.keyring_command = '%s'",
    "CREATE DATABASE d TEMPLATE '%s'",
];

/// A session of an ordinary user that may allocate so many more bytes.
pub(crate) fn session_with_room(cluster: &Cluster, room: u64) -> Result<Client> {
    let mut client = cluster.client()?;
    let process = text(&mut client, "SELECT pg_backend_pid()")?;
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size: u64 = size.context("its size")?.trim().trim_end_matches(" kB").parse()?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION bob")?;
    // Runs as the server's user, which has permission; root in a container may not.
    let mut prlimit = cluster.installation().command("/usr/bin/prlimit");
    let limit = size * 1024 + room;
    run(prlimit.args(["--pid", &process]).arg(format!("--as={limit}:")))?;
    Ok(client)
}

#[test]
fn long_texts_of_ordinary_users_end_no_process() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE bob; CREATE TABLE t (id int); ALTER TABLE t OWNER TO bob")?;
    for statement in STATEMENTS {
        for millions in [2, 8, 15, 22, 30, 40, 50, 65, 80] {
            let (before, after) = statement.split_once("%s").context("no text")?;
            let size = millions * 1_000_000;
            let block = format!(
                "DO $$ BEGIN
                     EXECUTE $q${before}$q$ || repeat('x', {size}) || $q${after}$q$;
                 EXCEPTION WHEN OTHERS THEN
                     NULL;
                 END $$"
            );
            let mut client = session_with_room(&cluster, ROOM)?;
            run_sql(&mut client, &block)
                .and_then(|()| run_sql(&mut client, "SELECT 1"))
                .with_context(|| format!("{millions} MB in {statement}"))?;
        }
    }
    ensure!(
        cluster.text("SELECT label FROM pagevault.relations WHERE relation = 't'::regclass")? == ""
    );
    cluster.finish()
}

#[test]
fn labels_that_are_too_long_are_refused() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id int); CREATE SCHEMA s")?;
    let long = format!("encrypted{:191}", "");
    let label = format!("IS '{long}'");
    for statement in [
        format!("SECURITY LABEL FOR pagevault ON TABLE t {label}"),
        format!("SECURITY LABEL FOR pagevault ON SCHEMA s {label}"),
        format!("SECURITY LABEL FOR pagevault ON COLUMN t.id {label}"),
        format!("SELECT pagevault.encrypt('t', '{:190}')", ""),
    ] {
        let error = cluster.error(&statement)?;
        ensure!(error.sqlstate == "22023", "{error}");
        ensure!(error.message == "text is too long for a pagevault label", "{error}");
        ensure!(error.detail == "It has 200 bytes; a label has at most 128.", "{error}");
        ensure!(error.hint.starts_with("Labels are 'encrypted', "), "{error}");
    }
    // The longest label.
    let group = "g".repeat(63);
    cluster.sql(&format!(
        "SELECT pagevault.create_key_group('{group}');
         SELECT pagevault.set_key_group_master_key('{group}', 'local', 'main')"
    ))?;
    let longest = format!("{:128}", format!("encrypted aes-128-xts key_group={group}"));
    cluster.sql(&format!("SECURITY LABEL FOR pagevault ON TABLE t IS '{longest}'"))?;
    cluster.finish()
}
