//! Keys that were replaced: older versions of database keys, of the WAL key, and of data keys.

use pagevault_keystore::KeyVersion;
use pagevault_keystore::wal::is_key_place;

use super::*;

/// Versions of the cluster's database key in the key file.
pub(super) fn database_keys(cluster: &Cluster) -> Result<Vec<u32>> {
    let state = state_of(cluster, Scope::CLUSTER)?;
    Ok(state.database_keys().map(|(_, version, _)| version.get()).collect())
}

/// Versions of the WAL key.
pub(super) fn wal_keys(cluster: &Cluster) -> Result<Vec<u16>> {
    let state = state_of(cluster, Scope::CLUSTER)?;
    let places = state.files().filter(|(file, _)| is_key_place(*file));
    Ok(places
        .flat_map(|(_, entry)| entry.keys.keys().map(|v| v.get()).collect::<Vec<_>>())
        .collect())
}

/// Versions of the data keys of `t`.
fn data_keys(cluster: &Cluster) -> Result<Vec<u16>> {
    let number: u32 = cluster.text("SELECT pg_relation_filenode('t')")?.parse()?;
    let state = state(cluster)?;
    let entry = state.files().find(|(file, _)| file.relation == number).context("no key")?.1;
    Ok(entry.keys.keys().map(|version| version.get()).collect())
}

/// Waits, with checkpoints, until `found` finds this.
fn becomes<T: PartialEq + std::fmt::Debug>(
    cluster: &Cluster,
    found: impl Fn(&Cluster) -> Result<Vec<T>>,
    wanted: &[T],
) -> Result<()> {
    cluster.eventually_that("keys that were replaced are forgotten", || {
        cluster.sql("CHECKPOINT")?;
        let found = found(cluster)?;
        ensure!(found == wanted, "{found:?}, not {wanted:?}");
        Ok(())
    })
}

/// What is kept, and what for: kind, first and last version.
fn kept(cluster: &Cluster, kind: &str) -> Result<String> {
    cluster.text(&format!(
        "SELECT coalesce(string_agg(concat_ws(' ', first_version, last_version, needed_for), ', '
                                    ORDER BY first_version), '')
           FROM pagevault.former_keys WHERE kind = '{kind}'"
    ))
}

fn in_memory(cluster: &Cluster) -> Result<String> {
    cluster
        .text("SELECT string_agg(version::text, ' ' ORDER BY version) FROM pagevault.database_keys")
}

/// Kills the server and restarts it, with the same rows at the end.
fn survives(cluster: &Cluster) -> Result<()> {
    let sum = cluster.text(SUM)?;
    cluster.sql("UPDATE t SET name = name")?;
    cluster.kill()?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "rows changed after a crash");
    cluster.restart()?;
    ensure!(cluster.text(SUM)? == sum, "rows changed after a restart");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?)
}

#[test]
fn database_keys_that_wrap_nothing_are_forgotten() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("CREATE DATABASE other")?;
    run_sql(
        &mut cluster.client_to("other")?,
        "CREATE TABLE o AS SELECT 7 AS id; SECURITY LABEL FOR pagevault ON TABLE o IS 'encrypted'",
    )?;
    for _ in 0..3 {
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
    }
    becomes(&cluster, database_keys, &[4])?;
    ensure!(in_memory(&cluster)? == "4", "in memory: {}", in_memory(&cluster)?);
    ensure!(kept(&cluster, "database")?.is_empty());
    survives(&cluster)?;
    ensure!(text(&mut cluster.client_to("other")?, "SELECT id FROM o")? == "7");
    // The numbers go on, and master keys can be rotated.
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(database_keys(&cluster)?.contains(&5));
    becomes(&cluster, database_keys, &[5])?;
    // A standby forgets by itself, after its own restart point, and not before it.
    wait_for(&standby, &cluster)?;
    forgets_when_its_primary_has_checkpoints(&standby, &cluster, || {
        ensure!(database_keys(&standby)? == [5]);
        Ok(())
    })?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == cluster.text(SUM)?, "rows of the standby differ");
    standby.promote()?;
    survives(&standby)
}

/// Decoding asks what is known of files, and never for such a key.
#[test]
fn a_logical_slot_keeps_no_database_key() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.append_conf("wal_level = logical")?;
    cluster.restart()?;
    cluster.sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    becomes(&cluster, database_keys, &[2])?;
    survives(&cluster)
}

/// A rotation that was interrupted leaves data keys under the former database key.
#[test]
fn a_database_key_that_wraps_something_is_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    // So that only the rotation writes keys.
    cluster.set(&[("pagevault.keep_former_keys", "-1")])?;
    let steps = ["keys.in_file", "keys.in_wal", "keys.in_file"];
    cluster.stop_at(steps[0])?;
    let mut client = cluster.client()?;
    let session =
        thread::spawn(move || client.batch_execute("SELECT pagevault.rotate_database_key()"));
    for (at, step) in steps.into_iter().enumerate() {
        if at > 0 {
            cluster.stop_at(step)?;
        }
        cluster.stopped_at(step)?;
    }
    cluster.kill()?;
    cluster.resume();
    ensure!(session.join().is_ok_and(|ended| ended.is_err()), "it ended");
    cluster.start_server()?;
    ensure!(database_keys(&cluster)? == [1, 2], "{:?}", database_keys(&cluster)?);
    cluster.set(&[("pagevault.keep_former_keys", "0")])?;
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    ensure!(database_keys(&cluster)? == [1, 2], "a key that wraps data keys is forgotten");
    ensure!(kept(&cluster, "database")? == "1 1 data keys that it wraps");
    survives(&cluster)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    becomes(&cluster, database_keys, &[3])?;
    survives(&cluster)
}

#[test]
fn wal_keys_are_forgotten_when_there_is_no_wal_under_them() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.wal_encryption", "on"), ("wal_keep_size", "0")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql("SELECT pg_create_physical_replication_slot('kept', true)")?;
    for _ in 0..3 {
        cluster.sql("SELECT pagevault.rotate_wal_key(); SELECT pg_switch_wal(); CHECKPOINT")?;
    }
    ensure!(wal_keys(&cluster)? == [1, 2, 3, 4]);
    thread::sleep(TWO_ROUNDS);
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    ensure!(wal_keys(&cluster)? == [1, 2, 3, 4], "a slot needs the WAL");
    ensure!(kept(&cluster, "wal")?.starts_with("1 3 WAL from "), "{}", kept(&cluster, "wal")?);
    cluster.sql("SELECT pg_drop_replication_slot('kept'); SELECT pg_switch_wal()")?;
    becomes(&cluster, wal_keys, &[4])?;
    ensure!(state_of(&cluster, Scope::CLUSTER)?.wal_switches().count() == 1);
    survives(&cluster)?;
    // After a restart it is not in memory either; the numbers go on.
    ensure!(cluster.text("SELECT pagevault.rotate_wal_key()")? == "5");
    survives(&cluster)?;
    cluster.sql("SELECT pg_switch_wal()")?;
    becomes(&cluster, wal_keys, &[5])?;
    // In plaintext, and encrypted again.
    cluster.set(&[("pagevault.wal_encryption", "off")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "f")?;
    cluster.sql("SELECT pg_switch_wal(); CHECKPOINT; SELECT pg_switch_wal(); CHECKPOINT")?;
    survives(&cluster)?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_key_version FROM pagevault.status", "6")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    becomes(&cluster, wal_keys, &[6])?;
    survives(&cluster)
}

#[test]
fn former_data_keys_are_forgotten_where_no_page_is_under_them() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let standby = standby_of(&cluster, &[])?;
    for _ in 0..2 {
        cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
        cluster.sql("SELECT pagevault.wait_for_rekey('t')")?;
    }
    becomes(&cluster, data_keys, &[3])?;
    survives(&cluster)?;
    // Those of the indexes and of the TOAST table, too.
    becomes(&cluster, |cluster| Ok(vec![kept(cluster, "data")?]), &[String::new()])?;
    wait_for(&standby, &cluster)?;
    forgets_when_its_primary_has_checkpoints(&standby, &cluster, || {
        ensure!(data_keys(&standby)? == [3]);
        Ok(())
    })?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    // A key that others wrap again does no harm where it is forgotten.
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == cluster.text(SUM)?, "rows of the standby differ");
    // Decrypted, its keys stay: nothing says that no page is under them.
    cluster.sql("SELECT pagevault.decrypt('t')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'); CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    ensure!(data_keys(&cluster)? == [3]);
    ensure!(kept(&cluster, "data")? == "3 3 pages that may be under it");
    standby.promote()?;
    standby.sql("UPDATE t SET name = name")?;
    standby.sql("VACUUM FULL t")
}

/// A backup whose key file was copied after keys were forgotten that its WAL needs, and one from
/// before, which replays all of it.
#[test]
fn backups_have_the_keys_of_their_time() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let change = |round: u32| -> Result<()> {
        cluster.sql(&format!("CREATE TABLE u{round} AS SELECT * FROM t"))?;
        cluster.sql(&format!(
            "SECURITY LABEL FOR pagevault ON TABLE u{round} IS 'encrypted';
             SELECT pagevault.rotate_database_key()"
        ))?;
        cluster.sql("SELECT pagevault.rotate_wal_key()")?;
        cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
        cluster.sql("SELECT pagevault.wait_for_rekey('t')")
    };
    let early = Backup::begin_unseen(&cluster)?;
    let long = Backup::begin_unseen_with_files(&cluster)?;
    change(1)?;
    becomes(&cluster, database_keys, &[2])?;
    becomes(&cluster, data_keys, &[2])?;
    change(2)?;
    becomes(&cluster, database_keys, &[3])?;
    becomes(&cluster, data_keys, &[3])?;
    let sum = cluster.text(SUM)?;
    let mut refused = long.end()?;
    refused.allow_log("is of a later time than the data directory");
    ensure!(refused.start_server().is_err(), "it has started");
    ensure!(refused.log().contains("is of a later time than the data directory"));
    let restored = early.end()?;
    restored.start_server()?;
    restored.sql(SUM)?;
    ensure!(restored.text(SUM)? == sum, "rows differ");
    becomes(&restored, database_keys, &[3])?;
    becomes(&restored, data_keys, &[3])?;
    survives(&restored)
}

/// The server is killed at each step of forgetting.
#[test]
fn a_crash_while_replaced_keys_are_forgotten_loses_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.wal_encryption", "on"), ("wal_keep_size", "0")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    for point in ["forget.decided", "keys.compaction", "forget.compacted"] {
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
        cluster.sql("SELECT pagevault.rotate_wal_key(); SELECT pg_switch_wal()")?;
        killed_at(&cluster, point)?;
        survives(&cluster).with_context(|| point.to_owned())?;
        let newest = database_keys(&cluster)?.pop().context("no key")?;
        becomes(&cluster, database_keys, &[newest])?;
        survives(&cluster).with_context(|| point.to_owned())?;
    }
    Ok(())
}

/// A standby replays WAL under former keys while its own keystore is of a later time: nothing is
/// forgotten before it is consistent.
#[test]
fn a_backup_that_is_not_consistent_forgets_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("CREATE TABLE u AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE u IS 'encrypted'")?;
    // Of a later time than what the backup replays first. Nothing is forgotten on the primary.
    cluster.set(&[("pagevault.keep_former_keys", "-1")])?;
    for _ in 0..2 {
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
        cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
        cluster
            .sql("SELECT pagevault.wait_for_rekey('t'); CHECKPOINT; UPDATE t SET name = name")?;
    }
    let sum = cluster.text(SUM)?;
    let restored = backup.end()?;
    restored.append_conf(
        "pagevault.keep_former_keys = 0
         checkpoint_timeout = 30s
         recovery_min_apply_delay = 0",
    )?;
    restored.start_server()?;
    restored.sql(SUM)?;
    ensure!(restored.text(SUM)? == sum, "rows differ");
    let newest = KeyVersion::new(3).context("a version")?;
    becomes(&restored, database_keys, &[newest.get()])?;
    survives(&restored)
}
