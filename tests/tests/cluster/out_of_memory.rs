//! A session that gets no more memory fails alone, wherever that happens.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};

use super::long_texts::session_with_room;

/// Allocations in hooks, in functions that return rows, in commits.
const STATEMENTS: [&str; 4] = [
    "SELECT count(*) FROM pagevault.relation_rows()",
    "CREATE TABLE new (id int PRIMARY KEY, name text); INSERT INTO new VALUES (1, 'drossel'); DROP TABLE new",
    "SECURITY LABEL FOR pagevault ON TABLE t1 IS 'encrypted'; SECURITY LABEL FOR pagevault ON TABLE t1 IS NULL",
    "ALTER TABLE t1 ALTER COLUMN id TYPE bigint; ALTER TABLE t1 ALTER COLUMN id TYPE int",
];

#[test]
fn a_session_without_memory_ends_alone() -> Result<()> {
    let settings = Settings::default().conf("pagevault.default_encryption = on");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("out of memory");
    cluster.sql(
        "CREATE ROLE bob SUPERUSER;
         DO $$ BEGIN
             FOR i IN 1..300 LOOP
                 EXECUTE 'CREATE TABLE t' || i || ' (id int)';
             END LOOP;
         END $$",
    )?;
    let mut other = cluster.client()?;
    let (mut failed, mut done) = (0, 0);
    for statement in STATEMENTS {
        for room in (0..96).map(|step| step * 16 << 10) {
            let mut client = session_with_room(&cluster, room)?;
            match run_sql(&mut client, statement) {
                Ok(()) => done += 1,
                Err(_) => failed += 1,
            }
            drop(client);
            text(&mut other, "SELECT 1").with_context(|| format!("{room} bytes in {statement}"))?;
        }
    }
    ensure!(failed > 0 && done > 0, "{failed} failed, {done} were done");
    ensure!(cluster.log().contains("pagevault failed on request of size"), "{failed} failed");
    // What has failed has left nothing.
    ensure!(cluster.text("SELECT to_regclass('new') IS NULL")? == "t");
    cluster.finish()
}
