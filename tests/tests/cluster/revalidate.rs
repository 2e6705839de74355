//! Revalidation: keys in use are requested periodically. An outage changes nothing. A revocation is
//! logged and, if configured, locks what the key protects until the key is valid again.

use std::os::unix::fs::PermissionsExt;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

const TABLES: &str = "CREATE TABLE open (id int);
    INSERT INTO open VALUES (1);
    SET pagevault.default_encryption = on;
    CREATE TABLE secret (id int PRIMARY KEY, name text);
    INSERT INTO secret SELECT i, md5(i::text) FROM generate_series(1, 1000) i;
    CREATE TABLE parts (id int) PARTITION BY RANGE (id);
    CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10)";

pub(crate) const STATE: &str = "SELECT state FROM pagevault.status";
const KEY_STATES: &str = "SELECT string_agg(DISTINCT state, ' ') FROM pagevault.database_keys";

/// Revalidation every second.
pub(crate) fn watchful() -> Settings {
    Settings::default().conf("pagevault.revalidate_interval = 1s")
}

/// Revoked keys lock at once.
pub(crate) fn strict() -> Settings {
    watchful().conf("pagevault.revoked_key_action = lock").conf("pagevault.revoked_key_grace = 0")
}

/// Replaces the key file by one with another key.
pub(crate) fn replace(cluster: &Cluster, keys: &KeyFile, key: &str) -> Result<()> {
    keys.take_away()?;
    let name = keys.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    cluster.key_file(&name, key).map(drop)
}

/// Undoes [`replace`].
pub(crate) fn put_back(keys: &KeyFile) -> Result<()> {
    // A rename replaces the other file.
    keys.bring_back()
}

#[test]
fn an_outage_is_logged_once_and_changes_nothing() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&strict())?;
    cluster.sql(TABLES)?;
    cluster.eventually("SELECT last_revalidation_at IS NOT NULL FROM pagevault.status", "t")?;
    keys.take_away()?;
    cluster.eventually("SELECT unreachable_providers FROM pagevault.status", "{local}")?;
    let failures = "SELECT consecutive_failures >= 3 FROM pagevault.providers";
    cluster.eventually(failures, "t")?;
    ensure!(cluster.text(STATE)? == "unlocked", "status");
    ensure!(cluster.text(KEY_STATES)? == "unlocked", "master keys");
    cluster.sql("INSERT INTO secret VALUES (1001, 'x')")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE more (id int)")?;
    let output = "LOG:  pagevault: could not revalidate the key of the cluster";
    ensure!(cluster.log().matches(output).count() == 1, "it is to be said once");
    keys.bring_back()?;
    cluster.eventually("SELECT unreachable_providers FROM pagevault.status", "{}")?;
    cluster.eventually_logs("key provider \"local\" answers again")?;

    // The helper itself may be missing.
    cluster.set(&[("pagevault.keyring_command", "/nonexistent/helper")])?;
    cluster.eventually_logs("LOG:  pagevault: could not run \"/nonexistent/helper\"")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1001", "rows are missing");
    cluster.set(&[("pagevault.keyring_command", "")])?;
    cluster.eventually_logs("the key provider helper answers again")?;

    cluster.set(&[("pagevault.revalidate_interval", "0")])?;
    cluster.finish()
}

/// A permission error of the key file comes from the file system, not from the owner of the key.
#[test]
fn a_key_file_that_cannot_be_read_is_an_outage() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&strict())?;
    cluster.sql(TABLES)?;
    cluster.eventually("SELECT last_revalidation_at IS NOT NULL FROM pagevault.status", "t")?;
    let mode = |mode| std::fs::set_permissions(keys.path(), PermissionsExt::from_mode(mode));
    mode(0)?;
    cluster.eventually("SELECT consecutive_failures >= 2 FROM pagevault.providers", "t")?;
    ensure!(cluster.text("SELECT last_error_class FROM pagevault.providers")? == "unreachable");
    ensure!(cluster.text(KEY_STATES)? == "unlocked", "master keys");
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    mode(0o600)?;
    cluster.eventually("SELECT unreachable_providers FROM pagevault.status", "{}")?;
    // A file that is being copied is empty at first.
    let text = std::fs::read(keys.path())?;
    std::fs::write(keys.path(), "")?;
    cluster.eventually("SELECT consecutive_failures >= 2 FROM pagevault.providers", "t")?;
    ensure!(cluster.text(KEY_STATES)? == "unlocked", "master keys");
    std::fs::write(keys.path(), text)?;
    cluster.eventually("SELECT unreachable_providers FROM pagevault.status", "{}")?;
    cluster.finish()
}

#[test]
fn a_revoked_key_is_only_logged_by_default() -> Result<()> {
    let settings = watchful().conf("pagevault.revoked_key_grace = 0");
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("was revoked");
    cluster.sql(TABLES)?;
    replace(&cluster, &keys, "another")?;
    cluster.eventually(KEY_STATES, "revoked")?;
    cluster.eventually_logs("WARNING:  pagevault: master key \"main\" of provider \"local\" was revoked: the key does not exist there")?;
    ensure!(cluster.text(STATE)? == "unlocked", "status");
    cluster.sql("INSERT INTO secret VALUES (1001, 'x')")?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE more (id int)")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1001", "rows are missing");
    let error = cluster.error("SELECT pagevault.unlock()")?;
    ensure!(error.sqlstate == "42704", "{error}");
    put_back(&keys)?;
    cluster.eventually(KEY_STATES, "unlocked")?;
    cluster.eventually_logs("the master key of the cluster is usable again")?;

    // After a timely move to another key, the revoked one has no effect.
    replace(&cluster, &keys, "another")?;
    cluster.eventually(KEY_STATES, "revoked")?;
    let other = cluster.key_file("other", "main")?;
    cluster.sql(&other.add_provider("other"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('other', 'main')")?;
    ensure!(cluster.text(KEY_STATES)? == "unlocked", "after the move");
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1001", "rows are missing");
    cluster.finish()
}

/// A raw copy would be under another key.
#[test]
fn a_database_whose_key_is_revoked_is_neither_copied_nor_moved() -> Result<()> {
    let settings = strict().conf("allow_in_place_tablespaces = on").conf("autovacuum = off");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("was revoked");
    cluster.sql("CREATE DATABASE app")?;
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    let own = cluster.key_file("own", "main")?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "CREATE EXTENSION pagevault")?;
    run_sql(&mut client, &own.add_provider("own"))?;
    run_sql(&mut client, "SELECT pagevault.set_database_master_key('own', 'main')")?;
    run_sql(&mut client, "CREATE TABLE t AS SELECT 7 AS id")?;
    run_sql(&mut client, "SELECT pagevault.encrypt('t')")?;
    drop(client);
    let copying = "CREATE DATABASE copied TEMPLATE app STRATEGY file_copy";
    let moving = "ALTER DATABASE app SET TABLESPACE there";
    replace(&cluster, &own, "another")?;
    cluster.eventually_that("the key is refused", || {
        let error = expect_error(&mut cluster.client_to("app")?, "SELECT * FROM t")?;
        ensure!(error.message.contains("locked"), "{error}");
        Ok(())
    })?;
    for statement in [copying, moving] {
        let error = cluster.error(statement)?;
        ensure!(error.message.starts_with("the key of database"), "{statement}: {error}");
        ensure!(error.sqlstate == "55000", "{statement}: {error}");
        ensure!(error.detail.contains("\"own\""), "{statement}: {error}");
    }
    put_back(&own)?;
    cluster.sql("SELECT pagevault.unlock()")?;
    for statement in [copying, moving] {
        cluster.sql(statement)?;
    }
    let row = text(&mut cluster.client_to("copied")?, "SELECT id FROM t")?;
    ensure!(row == "7", "{row}");
    cluster.finish()
}

#[test]
fn a_revoked_key_is_locked_only_after_the_grace_period() -> Result<()> {
    let settings = watchful()
        .conf("pagevault.revoked_key_action = lock")
        .conf("pagevault.revoked_key_grace = 1h");
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("was revoked");
    cluster.sql(TABLES)?;
    replace(&cluster, &keys, "another")?;
    cluster.eventually(KEY_STATES, "revoked")?;
    cluster.eventually_logs("Unless this changes, relations encrypted under it are locked from")?;
    // An outage in between is no answer: the grace period runs from the first refusal.
    std::fs::remove_file(keys.path())?;
    let class = "SELECT last_error_class FROM pagevault.providers";
    cluster.eventually(class, "unreachable")?;
    ensure!(cluster.text(KEY_STATES)? == "revoked", "an outage ended a revocation");
    cluster.set(&[("pagevault.revoked_key_grace", "0")])?;
    let asked_again = "SELECT consecutive_failures FROM pagevault.providers";
    let before: i64 = cluster.text(asked_again)?.parse()?;
    let more = format!("SELECT consecutive_failures > {before} + 1 FROM pagevault.providers");
    cluster.eventually(&more, "t")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "an outage locked");
    put_back(&keys)?;
    cluster.eventually(KEY_STATES, "unlocked")?;
    cluster.finish()
}

/// Checks all operations that must be refused while the cluster's key is locked.
fn assert_locked(cluster: &Cluster) -> Result<()> {
    for statement in [
        "SELECT count(*) FROM secret",
        "INSERT INTO secret VALUES (5000, 'x')",
        "UPDATE secret SET name = 'x'",
        "COPY secret TO STDOUT",
        "EXPLAIN SELECT * FROM secret",
        "INSERT INTO parts VALUES (1)",
        "SELECT o.id FROM open o WHERE EXISTS (SELECT FROM secret s WHERE s.id = o.id)",
        "CREATE TABLE copied AS SELECT * FROM secret",
        "SET pagevault.default_encryption = on; CREATE TABLE more (id int)",
        "SELECT pagevault.encrypt('open')",
        "TRUNCATE secret",
        "SELECT pagevault.rotate_cluster_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.set_cluster_master_key('other', 'main')",
        "SELECT pagevault.set_database_master_key('other', 'main')",
    ] {
        let error = cluster.error(statement)?;
        ensure!(
            error.sqlstate == "55000" && error.message.contains("locked"),
            "{statement}: {error}"
        );
        let detail = &error.detail;
        ensure!(
            detail.contains("\"local\"") && detail.contains("\"main\""),
            "{statement}: {error}"
        );
        ensure!(detail.contains(" since 2"), "no time: {error}");
        ensure!(error.hint.contains("pagevault.unlock()"), "{error}");
    }
    Ok(())
}

#[test]
fn a_revoked_key_locks_its_data_until_it_is_valid_again() -> Result<()> {
    let (mut cluster, keys) =
        Cluster::with_keys(&strict().conf("pagevault.revalidate_interval = 0"))?;
    cluster.allow_log("was revoked");
    cluster.sql(TABLES)?;
    // After decryption it no longer depends on the key.
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE once AS SELECT 1 AS id; CREATE TABLE dropped AS SELECT 1 AS id")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE once IS 'plaintext'")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('once'::regclass, '60 s')")?;
    let other = cluster.key_file("other", "main")?;
    cluster.sql(&other.add_provider("other"))?;
    // This session has the table's pages in shared buffers, and its key in the key cache.
    let mut session = cluster.client()?;
    run_sql(
        &mut session,
        "SELECT sum(id) FROM secret; PREPARE cached AS SELECT count(*) FROM secret; EXECUTE cached",
    )?;
    run_sql(&mut session, "UPDATE secret SET name = 'dirty' WHERE id = 7")?;
    replace(&cluster, &keys, "main")?;
    cluster.set(&[("pagevault.revalidate_interval", "1s")])?;
    cluster.eventually(STATE, "locked")?;
    ensure!(
        cluster.text("SELECT locked_database_keys FROM pagevault.status")? == "1",
        "locked_database_keys"
    );
    ensure!(cluster.text(KEY_STATES)? == "locked", "master keys");
    let cause = cluster.text("SELECT unlock_error FROM pagevault.status")?;
    ensure!(cause.contains("\"local\"") && cause.contains("not the one"), "{cause}");
    assert_locked(&cluster)?;
    for statement in ["SELECT count(*) FROM secret", "EXECUTE cached"] {
        let error = expect_error(&mut session, statement)?;
        ensure!(error.sqlstate == "55000", "{statement}: {error}");
    }
    // Plaintext can be used, and dirty pages are written to disk.
    for plain in ["open", "once"] {
        let id = cluster.text(&format!("SELECT id FROM {plain}"))?;
        ensure!(id == "1", "the plain table {plain} is not usable");
    }
    cluster.sql("CREATE TABLE open_later (id int); INSERT INTO open_later VALUES (1)")?;
    cluster.sql("CHECKPOINT")?;
    // DROP TABLE would have to read its statistics, which are sealed.
    let error = cluster.error("DROP TABLE dropped")?;
    ensure!(error.sqlstate == "55000" && error.message.contains("locked"), "{error}");
    let error = cluster.error("SELECT pagevault.unlock()")?;
    ensure!(error.sqlstate == "22000", "{error}");

    // The operator switches to logging only.
    cluster.set(&[("pagevault.revoked_key_action", "log")])?;
    cluster.eventually(KEY_STATES, "revoked")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.set(&[("pagevault.revoked_key_action", "lock")])?;
    cluster.eventually(STATE, "locked")?;

    // An outage does not end the lock.
    std::fs::remove_file(keys.path())?;
    let class = "SELECT last_error_class FROM pagevault.providers WHERE provider = 'local'";
    cluster.eventually(class, "unreachable")?;
    assert_locked(&cluster)?;
    put_back(&keys)?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(cluster.text(STATE)? == "unlocked", "status");
    ensure!(cluster.text("SELECT unlock_error IS NULL FROM pagevault.status")? == "t", "cause");
    ensure!(text(&mut session, "EXECUTE cached")? == "1000", "rows are missing");
    ensure!(
        text(&mut session, "SELECT name FROM secret WHERE id = 7")? == "dirty",
        "an update is lost"
    );
    run_sql(&mut session, "DROP TABLE dropped")?;
    drop(session);
    cluster.restart()?;
    ensure!(cluster.text("SELECT name FROM secret WHERE id = 7")? == "dirty", "an update is lost");
    cluster.finish()
}

#[test]
fn pages_that_must_be_read_from_disk_are_refused_too() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&strict())?;
    cluster.allow_log("was revoked");
    cluster.sql(TABLES)?;
    cluster
        .sql("INSERT INTO secret SELECT i, repeat('x', 500) FROM generate_series(2001, 5000) i")?;
    cluster.restart()?;
    // One page is in shared buffers, and the session has the key in its key cache. VACUUM and
    // ANALYZE do not run the checks of queries.
    let mut session = cluster.client()?;
    run_sql(&mut session, "SELECT name FROM secret WHERE id = 1")?;
    replace(&cluster, &keys, "main")?;
    cluster.eventually(STATE, "locked")?;
    for statement in ["VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) secret", "ANALYZE secret"] {
        let error = expect_error(&mut session, statement)?;
        ensure!(error.sqlstate == "55000" && error.message.contains("locked"), "{error}");
        ensure!(error.detail.contains("\"local\"") && error.detail.contains(" since 2"), "{error}");
    }
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    run_sql(&mut session, "VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) secret")?;
    drop(session);
    cluster.finish()
}

#[test]
fn a_lock_survives_a_backend_crash_and_recovery_reads_pages() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&strict())?;
    cluster.allow_log("was revoked");
    cluster.allow_log("terminating connection because of crash of another server process");
    cluster.sql(TABLES)?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("UPDATE secret SET name = 'redone' WHERE id = 7")?;
    replace(&cluster, &keys, "main")?;
    cluster.eventually(STATE, "locked")?;
    let mut client = cluster.client()?;
    let pid =
        rustix::process::Pid::from_raw(text(&mut client, "SELECT pg_backend_pid()")?.parse()?);
    let pid = pid.ok_or_else(|| anyhow::anyhow!("no process id"))?;
    cluster.crash_process(pid)?;
    drop(client);
    // The worker has been restarted and asks soon; until then locked keys stay locked.
    ensure!(cluster.text("SELECT id FROM open")? == "1", "a plaintext table");
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.sqlstate == "55000", "{error}");
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    ensure!(cluster.text("SELECT name FROM secret WHERE id = 7")? == "redone", "an update is lost");

    // A server that is started while the key is revoked starts locked, as with any refusing
    // provider.
    cluster.allow_log("server starts with encrypted relations locked");
    cluster.stop(StopMode::Fast)?;
    replace(&cluster, &keys, "main")?;
    cluster.start_server()?;
    ensure!(cluster.text(STATE)? == "locked", "status");
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

#[test]
fn a_locked_standby_continues_to_replay() -> Result<()> {
    let (primary, keys) =
        Cluster::with_keys(&watchful().conf("pagevault.revalidate_interval = 0"))?;
    primary.sql(TABLES)?;
    primary.sql("CHECKPOINT")?;
    let mut standby = standby_of(
        &primary,
        &[
            "pagevault.revalidate_interval = 1s",
            "pagevault.revoked_key_action = lock",
            "pagevault.revoked_key_grace = 0",
            "shared_buffers = 1MB",
        ],
    )?;
    standby.allow_log("was revoked");
    standby.eventually("SELECT count(*) FROM secret", "1000")?;
    replace(&primary, &keys, "main")?;
    standby.eventually(STATE, "locked")?;
    // Every page of the table changes, without a full-page image: redo has to read it.
    primary.sql("UPDATE secret SET name = name || 'x'")?;
    primary.sql("UPDATE secret SET name = name || 'y' WHERE id % 2 = 0")?;
    primary
        .sql("SET pagevault.default_encryption = on; CREATE TABLE later AS SELECT * FROM secret")?;
    wait_for(&standby, &primary)?;
    let error = standby.error("SELECT count(*) FROM later")?;
    ensure!(error.sqlstate == "55000", "{error}");
    ensure!(standby.text("SELECT id FROM open")? == "1", "the plain table is not usable");
    standby.sql("CHECKPOINT")?;
    put_back(&keys)?;
    standby.eventually(STATE, "unlocked")?;
    let count = "SELECT count(*) FROM secret WHERE name LIKE '%xy'";
    ensure!(standby.text(count)? == "500", "rows are missing");
    ensure!(standby.text("SELECT count(*) FROM later")? == "1000", "rows are missing");
    standby.finish()?;
    primary.finish()
}

/// A session that waits for one does not block other sessions from the keystore.
#[test]
fn no_wal_key_is_created_while_the_cluster_is_locked() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&strict())?;
    cluster.allow_log("was revoked");
    cluster.allow_log("the key of the cluster is locked");
    cluster.sql(TABLES)?;
    replace(&cluster, &keys, "another")?;
    cluster.eventually(STATE, "locked")?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    // Read from the log: a blocked server answers no queries.
    cluster.eventually_that("the worker is refused", || {
        let failed = "\"to\":\"on\",\"outcome\":\"failed\",\"sqlstate\":\"55000\"";
        ensure!(cluster.log().contains(failed), "it has not tried");
        Ok(())
    })?;
    let problem = "SELECT wal_error FROM pagevault.status";
    cluster.eventually(problem, "the key of the cluster is locked")?;
    put_back(&keys)?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    replace(&cluster, &keys, "another")?;
    cluster.eventually(STATE, "locked")?;
    let error = cluster.error("SELECT pagevault.rotate_wal_key()")?;
    ensure!(error.sqlstate == "55000" && error.detail.contains("\"local\""), "{error}");
    ensure!(cluster.text(STATE)? == "locked", "status");
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.finish()
}
