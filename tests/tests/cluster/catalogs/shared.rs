//! Shared catalogs: sealed by a setting, in a locked cluster, and on a standby.

use pagevault_tests::standby::{standby_of, wait_for};

use super::*;

#[test]
fn shared_catalogs_are_sealed_on_demand() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE ROLE wellensittich LOGIN PASSWORD 'x'")?;
    expect(&cluster, &mut client, true, false)?;
    cluster.set(&[("pagevault.shared_catalog_encryption", "on")])?;
    let mut client = cluster.client()?;
    expect(&cluster, &mut client, true, false)?;
    let drift = "SELECT concat_ws(', ', expected, reason, actual, fix) FROM pagevault.drift
                 WHERE relation = 'pg_authid'::regclass";
    let found = text(&mut client, drift)?;
    let wanted = "encrypted, setting pagevault.shared_catalog_encryption, plaintext, \
                  SELECT pagevault.encrypt('pg_catalog.pg_authid')";
    ensure!(found == wanted, "{found}");
    let encrypted = "SELECT count(*) > 8 AND count(job) = 0 FROM pagevault.encrypt_catalogs()";
    ensure!(text(&mut client, encrypted)? == "t" && text(&mut client, encrypted)? == "f");
    expect(&cluster, &mut client, true, true)?;
    expect_no_drift_of_catalogs(&mut client)?;
    expect(&cluster, &mut client, false, false)?;
    drop(client);

    cluster.crash()?;
    let mut client = cluster.client()?;
    for command in [
        "VACUUM FULL pg_authid",
        "REINDEX TABLE pg_database",
        "VACUUM FULL pg_shseclabel",
        "REINDEX INDEX pg_authid_rolname_index",
        "REINDEX SYSTEM postgres",
        "VACUUM FULL",
        "CREATE ROLE kohlmeise",
        "CREATE DATABASE more",
        "SELECT pagevault.rotate_database_key()",
    ] {
        run_sql(&mut client, command).with_context(|| command.to_owned())?;
        expect(&cluster, &mut client, true, true).with_context(|| command.to_owned())?;
    }
    // Files created now are not sealed.
    run_sql(
        &mut client,
        "BEGIN; LOCK pg_authid; CREATE TABLE open AS SELECT 1 AS id; COMMIT; CHECKPOINT",
    )?;
    assert_plain(&cluster.files("open")?)?;
    drop(client);
    cluster.restart()?;
    let roles = "SELECT count(*) FROM pg_roles WHERE rolname IN ('wellensittich', 'kohlmeise')";
    ensure!(cluster.text(roles)? == "2", "roles");

    // With the setting off they keep their state, and can be decrypted.
    let refused = cluster.error("SELECT pagevault.decrypt('pg_authid')")?;
    ensure!(refused.detail.contains("shared_catalog_encryption is on"), "{refused}");
    cluster.set(&[("pagevault.shared_catalog_encryption", "off")])?;
    cluster.sql("VACUUM FULL pg_authid")?;
    let mut client = cluster.client()?;
    expect(&cluster, &mut client, true, true)?;
    expect_no_drift_of_catalogs(&mut client)?;
    run_sql(
        &mut client,
        "SELECT pagevault.decrypt(oid) FROM pg_class WHERE oid < 16384 AND relkind = 'r' AND relisshared",
    )?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    expect(&cluster, &mut client, true, false)?;
    drop(client);
    cluster.crash()?;
    ensure!(cluster.text(roles)? == "2", "roles after a crash");
    cluster.finish()
}

/// Nobody can log in, and nobody needs to.
#[test]
fn a_locked_cluster_with_sealed_shared_catalogs_unlocks_by_itself() -> Result<()> {
    let (mut cluster, keys) = cluster()?;
    cluster.allow_log("locked");
    cluster.allow_log("pagevault");
    cluster.allow_log("background worker");
    // Include all processes without a client: the launchers of autovacuum and replication.
    cluster.set(&[("pagevault.shared_catalog_encryption", "on")])?;
    cluster.append_conf("autovacuum = on")?;
    cluster.sql("SELECT pagevault.encrypt_catalogs()")?;
    assert_sealed(&cluster.files("pg_authid")?)?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    for database in ["postgres", "app", "template1"] {
        let refused = match cluster.client_to(database) {
            Ok(_) => anyhow::bail!("logged in without keys"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(refused.contains("is locked"), "{database}: {refused}");
        ensure!(refused.contains("Nobody can log in until then"), "{database}: {refused}");
    }
    ensure!(cluster.log().contains("nobody can log in"), "the log does not tell");
    // Even then the server writes no plaintext that it should seal.
    cluster.restart()?;
    keys.bring_back()?;
    cluster.eventually_that("a login", || cluster.client().map(drop))?;
    ensure!(cluster.text("SELECT state FROM pagevault.status")? == "unlocked", "state");
    check_objects(&mut cluster.client_to("app")?)?;
    cluster.sql("CREATE ROLE afterwards")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM pg_roles WHERE rolname = 'afterwards'")? == "1");
    let mut client = cluster.client()?;
    expect(&cluster, &mut client, true, true)?;
    drop(client);
    cluster.finish()
}

/// Keys of catalogs, including shared ones, reach standbys through WAL.
#[test]
fn a_standby_follows_and_takes_over() -> Result<()> {
    let (cluster, keys) = cluster()?;
    let standby = standby_of(&cluster, &[])?;
    // The sealing itself happens while the standby follows.
    cluster.set(&[("pagevault.shared_catalog_encryption", "on")])?;
    cluster.sql("SELECT pagevault.encrypt_catalogs()")?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, &label(APP, "'encrypted'"))?;
    run_sql(&mut app, "VACUUM FULL pg_class; ")?;
    run_sql(&mut app, "VACUUM FULL pg_authid")?;
    run_sql(&mut app, "CREATE ROLE afterwards; CREATE TABLE afterwards AS SELECT 7 AS id")?;
    run_sql(&mut app, "CHECKPOINT")?; // without it the standby makes no restart point
    drop(app);
    wait_for(&standby, &cluster)?;
    let check = |cluster: &Cluster| -> Result<()> {
        let mut app = cluster.client_to("app")?;
        check_objects(&mut app)?;
        ensure!(text(&mut app, "SELECT id FROM afterwards")? == "7", "table");
        expect(cluster, &mut app, false, true)?;
        expect(cluster, &mut app, true, true)
    };
    check(&standby)?;
    cluster.stop(StopMode::Fast)?;
    standby.sql("SELECT pg_promote()")?;
    check(&standby)?;
    standby.sql("CREATE ROLE promoted")?;
    standby.crash()?;
    check(&standby)?;
    drop(keys);
    standby.finish()?;
    cluster.finish()
}
