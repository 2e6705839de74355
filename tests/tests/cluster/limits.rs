//! A server that has no room for another key refuses to make one, loses none, and comes back from a
//! crash.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

/// The least that the setting allows.
const MAX_KEYS: u32 = 1000;

#[test]
fn a_full_key_directory_refuses_and_survives_a_crash() -> Result<()> {
    let settings = Settings::default()
        .conf(&format!("pagevault.max_keys = {MAX_KEYS}"))
        .conf("pagevault.default_encryption = on")
        .conf("pagevault.protect_statistics = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(&format!(
        "DO $$ BEGIN FOR i IN 1..{MAX_KEYS} LOOP
            EXECUTE format('CREATE TABLE full_%s AS SELECT %s AS id', i, i);
            IF i % 50 = 0 THEN COMMIT; END IF;
        END LOOP; END $$"
    ))?;
    let keys = || cluster.text("SELECT data_keys FROM pagevault.status");
    ensure!(keys()? == MAX_KEYS.to_string(), "{} keys", keys()?);
    for _ in 0..3 {
        let refused = cluster.error("CREATE TABLE one_more (id int)")?;
        ensure!(refused.sqlstate == "54000", "{refused:?}");
    }
    ensure!(keys()? == MAX_KEYS.to_string(), "what was refused left {} keys", keys()?);
    cluster.crash()?;
    ensure!(keys()? == MAX_KEYS.to_string(), "after a crash {} keys", keys()?);
    ensure!(cluster.text(&format!("SELECT id FROM full_{MAX_KEYS}"))? == MAX_KEYS.to_string());
    cluster.append_conf("pagevault.max_keys = 1010")?;
    cluster.restart()?;
    cluster.sql("CREATE TABLE one_more (id int)")?;
    cluster.finish()
}
