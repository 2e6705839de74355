//! WAL is authoritative for keys: no server uses a key that is not in WAL, and no key file is ahead
//! of WAL. Each crash is also verified by a standby that has followed and by a restored backup.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use pagevault_keystore::log::{HEADER, Log, Trust, replay, scopes};
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{KeyVersion, Lsn, Record, RelFile, Scope, batch};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, Standby, StopMode};

use crate::assert_sealed;
use crate::life::each;

const SUM: &str = "SELECT count(*) || ' ' || coalesce(sum(hashtext(t::text)::bigint), 0) FROM t";

fn cluster() -> Result<(Cluster, KeyFile)> {
    cluster_of(Settings::default(), 3000)
}

fn cluster_of(settings: Settings, rows: u32) -> Result<(Cluster, KeyFile)> {
    let settings = settings
        .conf("fsync = on") // else checkpoints settle nothing
        .conf("checkpoint_timeout = 1h")
        .conf("allow_in_place_tablespaces = on")
        .conf("autovacuum = off")
        .conf("wal_keep_size = 512MB");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql(&format!(
        "CREATE TABLE t AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, {rows}) i"
    ))?;
    Ok((cluster, keys))
}

fn directory(cluster: &Cluster) -> PathBuf {
    cluster.data_directory().join("pagevault")
}

/// The key files that are not yet settled.
fn unsettled(cluster: &Cluster) -> Result<Vec<Scope>> {
    let mut found = Vec::new();
    for scope in scopes(&FileStorage::new(&directory(cluster))?)? {
        let name = pagevault_keystore::log::file_name(scope);
        let contents = replay(&fs::read(directory(cluster).join(name))?, scope)?;
        if !contents.position.is_settled() {
            found.push(scope);
        }
    }
    Ok(found)
}

/// What a power failure may leave of key files: the settled part.
fn cut_power(cluster: &Cluster) -> Result<u64> {
    let mut lost = 0;
    for scope in scopes(&FileStorage::new(&directory(cluster))?)? {
        let path = directory(cluster).join(pagevault_keystore::log::file_name(scope));
        let contents = replay(&fs::read(&path)?, scope)?;
        if !contents.position.is_settled() {
            // A file has its first mark from the beginning.
            let durable = contents.position.settled.max((HEADER + batch::HEADER) as u64);
            lost += contents.position.end - durable;
            OpenOptions::new().write(true).open(&path)?.set_len(durable)?;
        }
    }
    Ok(lost)
}

/// After a crash between writing a key to the file and to WAL, no server has the key.
#[test]
fn after_a_crash_between_file_and_wal_all_servers_agree() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("could not");
    let mut before = Standby::default().create(&cluster)?;
    before.allow_log("could not");
    let steps = [
        // Keys of a table with pages, of a new table, of the hierarchy above, and of WAL.
        "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'",
        "CREATE TABLE made AS SELECT * FROM t; SECURITY LABEL FOR pagevault ON TABLE made IS 'encrypted'",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.rotate_data_key('t')",
    ];
    for statement in steps {
        cluster.stop_at("keys.in_file")?;
        let mut client = cluster.client()?;
        let session = std::thread::spawn(move || run_sql(&mut client, statement));
        cluster.stopped_at("keys.in_file")?;
        cluster.kill()?;
        cluster.resume();
        let _ = session.join();
        cluster.start_server()?;
        if !statement.contains("rotate_data_key") {
            cluster.sql(statement)?; // jobs continue by themselves
        }
        cluster.sql("INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 500) i")?;
        let sum = cluster.text(SUM)?;
        wait_for(&standby, &cluster)?;
        ensure!(standby.text(SUM)? == sum, "{statement}: the standby differs");
    }
    cluster.eventually("SELECT pagevault.wait_for_rekey('t'::regclass)", "t")?;
    before.start_server()?;
    let sum = cluster.text(SUM)?;
    for standby in [standby, before] {
        wait_for(&standby, &cluster)?;
        standby.sql("CHECKPOINT")?;
        assert_sealed(&standby.family_files("t")?)?;
        standby.crash()?;
        ensure!(standby.text(SUM)? == sum, "a standby differs");
        ensure!(
            standby.text("SELECT count(*) FROM made")?
                == cluster.text("SELECT count(*) FROM made")?
        );
        standby.promote()?;
        standby.sql("INSERT INTO t VALUES (0, 'after'); SELECT pagevault.rotate_database_key()")?;
        standby.finish()?;
    }
    cluster.finish()
}

/// PostgreSQL forgets sync requests for a database that is moved or dropped.
#[test]
fn checkpoints_settle_keys_of_databases_that_are_moved_or_dropped() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLESPACE away LOCATION ''")?;
    for database in ["moved", "dropped"] {
        cluster.sql(&format!("CREATE DATABASE {database}"))?;
    }
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("unexpected directory entry"); // of the tablespace in place
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    for database in ["moved", "dropped"] {
        run_sql(
            &mut cluster.client_to(database)?,
            "CREATE EXTENSION pagevault; CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i;
             SELECT pagevault.encrypt('t')",
        )?;
    }
    cluster.sql("ALTER DATABASE moved SET TABLESPACE away")?;
    cluster.sql("DROP DATABASE dropped")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(unsettled(&cluster)?.is_empty(), "of the primary {:?}", unsettled(&cluster)?);
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    ensure!(unsettled(&standby)?.is_empty(), "of the standby {:?}", unsettled(&standby)?);
    for server in [standby, cluster] {
        server.kill()?;
        cut_power(&server)?;
        server.start_server()?;
        server.eventually_that("the moved database", || {
            ensure!(text(&mut server.client_to("moved")?, "SELECT count(*) FROM t")? == "1000");
            Ok(())
        })?;
        server.finish()?;
    }
    Ok(())
}

/// A base backup of a standby ends at its minimum recovery point, so everything in the backup's key
/// files must be replayed by then.
#[test]
fn a_standby_is_consistent_only_after_its_key_files() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let standby = standby_of(&cluster, &[])?;
    for statement in
        ["SELECT pagevault.rotate_database_key()", "SELECT pagevault.rotate_data_key('t')"]
    {
        wait_for(&standby, &cluster)?;
        standby.sql("CHECKPOINT")?;
        let before = cluster.text("SELECT pg_current_wal_insert_lsn()")?;
        let keys = |server: &Cluster| -> Result<String> {
            server.text("SELECT count(*) || ' ' || max(version) FROM pagevault.database_keys")
        };
        cluster.sql(statement)?;
        if statement.contains("data_key") {
            cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass)")?;
        }
        wait_for(&standby, &cluster)?;
        ensure!(keys(&standby)? == keys(&cluster)?);
        // Everything settled in the files is before the minimum recovery point.
        let minimum = "SELECT min_recovery_end_lsn FROM pg_control_recovery()";
        let is_moved = standby.text(&format!("SELECT ({minimum}) > '{before}'"))?;
        ensure!(is_moved == "t", "{statement}: the minimum recovery point was left behind");
        let mut settled = Vec::new();
        for scope in scopes(&FileStorage::new(&directory(&standby))?)? {
            let path = directory(&standby).join(pagevault_keystore::log::file_name(scope));
            let storage_copy = standby.directory().join("copy");
            fs::create_dir_all(&storage_copy)?;
            fs::copy(&path, storage_copy.join(path.file_name().context("a name")?))?;
            let storage = FileStorage::new(&storage_copy)?;
            let trust = Trust::Settled { redo: Lsn::INVALID };
            let (_, contents) = Log::open(&storage, scope, trust)?.context("a log")?;
            settled.extend(contents.records);
        }
        let newest = newest_version(&settled).context("no database key is settled")?;
        let state = standby.text("SELECT max(version) FROM pagevault.database_keys")?;
        ensure!(newest.to_string() == state, "the files say {newest}, memory {state}");
        let backup = Standby::default().create(&standby)?;
        backup.append_conf("primary_conninfo = ''\nrestore_command = 'false'")?;
        fs::remove_file(backup.data_directory().join("standby.signal"))?;
        let signal = backup.data_directory().join("recovery.signal");
        fs::write(&signal, "")?;
        backup.installation().give(&signal)?;
        let mut backup = backup;
        backup.allow_log("could not");
        backup.start_server()?;
        backup.eventually("SELECT pg_is_in_recovery()", "f")?;
        let restored = backup.text("SELECT max(version) FROM pagevault.database_keys")?;
        ensure!(restored == state, "restored {restored}, before {state}");
        // Another standby gets all of it from the new timeline.
        let follower = standby_of(&backup, &["restore_command = ''"])?;
        backup.sql("INSERT INTO t VALUES (0, 'restored')")?;
        wait_for(&follower, &backup)?;
        ensure!(follower.text(SUM)? == backup.text(SUM)?);
        follower.finish()?;
        backup.finish()?;
    }
    standby.finish()?;
    cluster.finish()
}

fn newest_version(records: &[Record]) -> Option<KeyVersion> {
    let versions = records.iter().filter_map(|record| match record {
        Record::DatabaseKey { version, .. } => Some(*version),
        _ => None,
    });
    versions.max()
}

/// Pages under a new key of a file in use may be on a standby's disk before its next restart point.
/// Replay reads them again before it replays the key: without checksums, the WAL record that sets a
/// heap page all-visible contains no image of it (`heap_xlog_visible`, heapam.c).
#[test]
fn a_standby_has_the_keys_of_files_in_use_after_a_power_failure() -> Result<()> {
    let (cluster, _keys) = cluster_of(Settings::default().without_checksums(), 30_000)?;
    each(&cluster, &["SELECT pagevault.encrypt('t')", "CHECKPOINT"])?;
    let mut standby = standby_of(&cluster, &["shared_buffers = 400kB"])?;
    standby.allow_log("could not");
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    each(&cluster, &["VACUUM t", "SELECT pagevault.rotate_data_key('t')"])?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    let sum = cluster.text(SUM)?;
    wait_for(&standby, &cluster)?;
    // The table does not fit in its buffers, so pages are on its disk.
    ensure!(standby.text(SUM)? == sum);
    standby.kill()?;
    cut_power(&standby)?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == sum, "contents differ");
    standby.finish()?;
    cluster.finish()
}

/// Records that contradict the keystore are refused before they are written to it.
#[test]
fn contradictory_records_are_refused_before_they_are_written() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut standby = standby_of(&cluster, &[])?;
    wait_for(&standby, &cluster)?;
    standby.stop(StopMode::Fast)?;
    // Here the key that the primary will create exists already, with other contents.
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let file = cluster.text("SELECT pg_relation_filenode('t')")?.parse()?;
    let database: u32 =
        cluster.text("SELECT oid FROM pg_database WHERE datname = current_database()")?.parse()?;
    let file = RelFile { tablespace: 1663, database, relation: file };
    let scope = file.scope();
    let storage = FileStorage::new(&directory(&cluster))?;
    cluster.sql("CHECKPOINT")?;
    let name = pagevault_keystore::log::file_name(scope);
    let theirs = replay(&fs::read(directory(&cluster).join(&name))?, scope)?;
    drop(storage);
    let mut other = theirs
        .records
        .iter()
        .find(|r| matches!(r, Record::DataKey { file: of, .. } if *of == file))
        .context("the primary has a key")?
        .clone();
    if let Record::DataKey { cipher, wrapped, .. } = &mut other {
        // With another cipher: that is detected without keys.
        *cipher = if *cipher == 1 { 2 } else { 1 };
        wrapped.truncate(60);
        wrapped.resize(if *cipher == 1 { 92 } else { 60 }, 7);
    }
    let own = FileStorage::new(&directory(&standby))?;
    let mut log = match Log::open(&own, scope, Trust::All)? {
        Some((log, _)) => log,
        None => Log::create(&own, theirs.position.keystore_id, scope, &[])?,
    };
    log.append(&[other])?;
    standby.installation().give(&directory(&standby).join(&name))?;
    let records = |standby: &Cluster| -> Result<Vec<Record>> {
        Ok(replay(&fs::read(directory(standby).join(&name))?, scope)?.records)
    };
    let before = records(&standby)?;
    for expected in [
        "contradicts this server's keystore",
        "terminated by signal 6",
        "could not",
        "startup process",
        "shutting down due to",
    ] {
        standby.allow_log(expected);
    }
    for _ in 0..2 {
        let _ = standby.start_server();
        standby.eventually_logs("a record of keys in WAL contradicts this server's keystore")?;
        standby.eventually_that("the server is down", || {
            ensure!(!standby.data_directory().join("postmaster.pid").exists());
            Ok(())
        })?;
        ensure!(records(&standby)? == before, "something was written down");
    }
    ensure!(standby.log().contains("has another data key of version 1"), "{}", standby.log());
    ensure!(standby.log().contains("Make this server anew from a base backup"));
    cluster.finish()
}

/// Recovery that ends early has replayed an older wrapping, whose master key may no longer exist.
/// The newer wrapping stays.
#[test]
fn recovery_that_ends_early_keeps_the_newest_wrapping() -> Result<()> {
    let (cluster, keys) = cluster()?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    let older = cluster.key_file("older", "k")?;
    let newer = cluster.key_file("newer", "k")?;
    cluster.sql(&older.add_provider("older"))?;
    cluster.sql(&newer.add_provider("newer"))?;
    cluster.sql("CHECKPOINT")?;
    let sum = cluster.text(SUM)?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('older', 'k')")?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('newer', 'k')")?;
    cluster.without_witness("WAL from before needs keys that are gone");
    for gone in [&keys, &older] {
        fs::remove_file(gone.path())?;
    }
    cluster.kill()?;
    cluster.stop_at("redo.keys_in_file")?;
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| cluster.start_server());
        cluster.stopped_at("redo.keys_in_file")?;
        cluster.kill()?;
        let _ = start.join();
        Ok(())
    })?;
    cluster.resume();
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ");
    let by = "SELECT DISTINCT provider FROM pagevault.database_keys";
    ensure!(cluster.text(by)? == "newer", "{}", cluster.text(by)?);
    cluster.finish()
}

/// Without fsync no checkpoint settles keys. But none may complete between writing a key to the
/// file and to WAL, because the key would then be considered logged.
#[test]
fn without_fsync_no_checkpoint_completes_before_a_key_is_logged() -> Result<()> {
    killed_without_fsync("keys.in_file", |cluster| {
        let mut session = cluster.client()?;
        std::thread::spawn(move || run_sql(&mut session, "CHECKPOINT"));
        let waits = "SELECT wait_event FROM pg_stat_activity WHERE backend_type = 'checkpointer'";
        cluster.eventually(waits, "ReplicationSlotAllocation")
    })
}

/// A checkpoint that completes after the key is logged must not lose it.
#[test]
fn without_fsync_a_checkpoint_completes_after_a_key_is_logged() -> Result<()> {
    killed_without_fsync("keys.in_wal", |cluster| cluster.sql("CHECKPOINT"))
}

/// Kills the server while it creates a key for a new file, and checks that a standby has the same
/// keys.
fn killed_without_fsync(step: &str, meanwhile: impl FnOnce(&Cluster) -> Result<()>) -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE first (id int)")?;
    cluster.set(&[("fsync", "off")])?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("could not");
    cluster.stop_at(step)?;
    let mut client = cluster.client()?;
    let session = std::thread::spawn(move || {
        run_sql(&mut client, "SET pagevault.default_encryption = on; CREATE TABLE u (id int)")
    });
    cluster.stopped_at(step)?;
    cluster.sql("INSERT INTO t VALUES (0, 'meanwhile')")?;
    meanwhile(&cluster)?;
    cluster.kill()?;
    cluster.resume();
    let _ = session.join();
    cluster.start_server()?;
    cluster.sql("SELECT pagevault.encrypt('t'); INSERT INTO t VALUES (1, 'after')")?;
    let sum = cluster.text(SUM)?;
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == sum, "the standby differs");
    let keys = "SELECT count(*) || ' ' || max(version) FROM pagevault.data_keys";
    ensure!(standby.text(keys)? == cluster.text(keys)?, "other keys");
    standby.finish()?;
    cluster.finish()
}

/// A tool has changed the mode of a key file. Nothing is written then, so the server goes on.
#[test]
fn a_key_file_that_may_not_be_written_refuses_changes() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    cluster.allow_log("key file");
    cluster.sql("SELECT pagevault.encrypt('t'); CREATE TABLE u (id int)")?;
    cluster.sql("CHECKPOINT")?;
    let database = Scope::database(
        cluster.text("SELECT oid FROM pg_database WHERE datname = current_database()")?.parse()?,
    );
    let path = directory(&cluster).join(pagevault_keystore::log::file_name(database));
    let mode = |mode| fs::set_permissions(&path, Permissions::from_mode(mode));
    mode(0o400)?;
    let mut other = cluster.client()?;
    let error = cluster.error("SELECT pagevault.encrypt('u')")?;
    ensure!(error.sqlstate == "58030" && error.text().contains("could not open"), "{error}");
    ensure!(error.text().contains("Nothing was changed."), "{error}");
    ensure!(error.hint.contains("owner and mode"), "{error}");
    ensure!(text(&mut other, "SELECT count(*) FROM t")? == "3000", "a session was ended");
    cluster.sql("CHECKPOINT")?;
    drop(other);
    // A start makes durable what an earlier server may not have.
    cluster.stop(StopMode::Fast)?;
    let Err(refused) = cluster.start_server() else { bail!("the server has started") };
    let refused = format!("{refused:#}");
    ensure!(refused.contains("FATAL") && refused.contains("owner and mode"), "{refused}");
    mode(0o600)?;
    cluster.start_server()?;
    cluster.sql("SELECT pagevault.encrypt('u'); INSERT INTO u VALUES (1)")?;
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("u")?)?;
    cluster.finish()
}
