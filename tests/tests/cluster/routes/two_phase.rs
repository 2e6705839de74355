//! Relations created or rewritten in a prepared transaction, with a crash before its end.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

use crate::{assert_plain, assert_sealed};

const ROWS: &str = "SELECT i AS id, 'kanarienvogel-' || i AS name FROM generate_series(1, 100) i";

#[test]
fn prepared_transactions_keep_their_keys_across_a_crash() -> Result<()> {
    let settings = Settings::default().conf("max_prepared_transactions = 5");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE old (id int PRIMARY KEY, name text)")?;
    cluster.sql("CREATE TABLE plain (id int PRIMARY KEY, name text)")?;
    cluster.sql("SELECT pagevault.encrypt('old')")?;
    cluster.sql(&format!("INSERT INTO old {ROWS}"))?;
    for end in ["ROLLBACK", "COMMIT"] {
        for (name, statements) in [
            (
                "made",
                "SET pagevault.default_encryption = on;
                      CREATE TABLE made (id serial PRIMARY KEY, name text);
                      INSERT INTO made",
            ),
            ("truncated", "TRUNCATE old; INSERT INTO old"),
            ("twin", "TRUNCATE plain; INSERT INTO plain"),
        ] {
            cluster.sql(&format!("BEGIN; {statements} {ROWS}; PREPARE TRANSACTION '{name}'"))?;
        }
        cluster.crash()?;
        for name in ["made", "truncated", "twin"] {
            cluster.sql(&format!("{end} PREPARED '{name}'"))?;
        }
        cluster.sql("CHECKPOINT")?;
        ensure!(cluster.text("SELECT count(name) FROM old")? == "100", "{end}: rows of old");
        assert_sealed(&cluster.family_files("old")?)?;
    }
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM made")? == "100", "rows of made");
    ensure!(cluster.text("SELECT count(name) FROM plain")? == "100", "rows of plain");
    assert_sealed(&cluster.family_files("made")?)?;
    assert_sealed(&cluster.files("made_id_seq")?)?;
    assert_plain(&cluster.family_files("plain")?)?;
    cluster.finish()
}

/// Changes of keys are final, so a prepared transaction would only keep their lock.
#[test]
fn a_transaction_that_may_have_changed_keys_is_not_prepared() -> Result<()> {
    let settings = Settings::default().conf("max_prepared_transactions = 5");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    const ROTATE: &str = "SELECT pagevault.rotate_cluster_master_key()";
    let error = cluster.error(&format!("BEGIN; {ROTATE}; PREPARE TRANSACTION 'keys'"))?;
    ensure!(error.sqlstate == "0A000" && error.text().contains("cannot PREPARE"), "{error}");
    ensure!(!error.hint.is_empty(), "{error}");
    ensure!(cluster.text("SELECT count(*) FROM pg_prepared_xacts")? == "0", "it is prepared");
    // Of what was rolled back, the lock is not held any more.
    cluster
        .sql(&format!("BEGIN; SAVEPOINT s; {ROTATE}; ROLLBACK TO s; PREPARE TRANSACTION 'none'"))?;
    cluster.sql(&format!("SET lock_timeout = '10s'; {ROTATE}"))?;
    cluster.sql("COMMIT PREPARED 'none'")?;
    cluster.finish()
}
