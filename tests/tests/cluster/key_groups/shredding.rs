//! `shred_key_group()`: everything of a tenant is gone, here, on standbys, and in what comes later.

use std::collections::BTreeSet;
use std::fs;

use anyhow::bail;

use super::*;

const SHRED: &str =
    "SELECT item || ' ' || object FROM pagevault.shred_key_group('acme', confirm => 'acme')";

fn is_destroyed(cluster: &Cluster, table: &str) -> Result<()> {
    let error = cluster.error(&format!("{COUNT} {table}"))?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    Ok(())
}

/// The wrapped key of the group, and its wrapped data keys, are in no file of the keystore.
fn ensure_no_keys_of(cluster: &Cluster, wrapped: &[Vec<u8>]) -> Result<()> {
    for entry in fs::read_dir(cluster.data_directory().join("pagevault"))? {
        let path = entry?.path();
        let bytes = if path.is_file() { fs::read(&path)? } else { Vec::new() };
        for key in wrapped {
            let found = bytes.windows(key.len()).any(|part| part == key);
            ensure!(!found, "a destroyed key is in {}", path.display());
        }
    }
    Ok(())
}

/// The wrapped keys of a group: its own, and the data keys under it.
fn wrapped_keys_of(cluster: &Cluster, number: u32) -> Result<Vec<Vec<u8>>> {
    use pagevault_keystore::{Record, Scope, log};
    let directory = cluster.data_directory().join("pagevault");
    let mut keys = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(home) = log::scope_of(name) else { continue };
        for record in log::replay(&fs::read(&path)?, home)?.records {
            match record {
                Record::DatabaseKey { scope, key, .. } if scope == Scope::from_number(number) => {
                    keys.push(key.first.wrapped);
                }
                Record::DataKey { scope, wrapped, .. } if scope == Scope::from_number(number) => {
                    keys.push(wrapped);
                }
                _ => {}
            }
        }
    }
    Ok(keys)
}

#[test]
fn a_group_is_shredded_here_and_on_standbys() -> Result<()> {
    let (cluster, keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    cluster.sql("CREATE TABLE acme.old AS SELECT 1 AS id; ANALYZE acme.t; DROP TABLE acme.old")?;
    let all = count(&cluster, "umbrella.t")?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("terminating connection due to conflict with recovery");
    wait_for(&standby, &cluster)?;
    let wrapped = wrapped_keys_of(&cluster, 100)?;
    ensure!(wrapped.len() >= 7, "{} keys", wrapped.len());
    // The server does not need the provider for that.
    keys[1].take_away()?;
    let error = cluster.error("SELECT * FROM pagevault.shred_key_group('acme', 'acm')")?;
    ensure!(error.sqlstate == "22023", "{error}");
    let error = cluster.error("BEGIN; SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    ensure!(error.sqlstate == "25001", "{error}");
    let rows = column(&mut cluster.client()?, SHRED)?;
    // A restore from before would need it.
    keys[1].bring_back()?;
    for item in ["destroyed acme.t", "destroyed acme.t_pkey", "key group acme"] {
        ensure!(rows.iter().any(|row| row == item), "{item} is not in {rows:?}");
    }
    let destroyed = || rows.iter().filter(|row| row.starts_with("destroyed"));
    let each: BTreeSet<_> = destroyed().collect();
    ensure!(each.len() == destroyed().count(), "a file is there twice: {rows:?}");
    ensure_no_keys_of(&cluster, &wrapped)?;
    let check = |server: &Cluster| -> Result<()> {
        is_destroyed(server, "acme.t")?;
        ensure!(count(server, "umbrella.t")? == all && count(server, "public.t")? == all);
        let groups = "SELECT string_agg(key_group, ',') FROM pagevault.key_groups";
        ensure!(server.text(groups)? == "umbrella");
        let statistics = "SELECT count(*) FROM pg_statistic WHERE starelid = 'acme.t'::regclass";
        ensure!(server.text(statistics)? == "0");
        Ok(())
    };
    check(&cluster)?;
    wait_for(&standby, &cluster)?;
    check(&standby)?;
    ensure_no_keys_of(&standby, &wrapped)?;
    // Neither a crash nor older WAL brings the key back.
    cluster.crash()?;
    check(&cluster)?;
    standby.kill()?;
    standby.start_server()?;
    check(&standby)?;
    cluster.sql("DROP SCHEMA acme CASCADE")?;
    wait_for(&standby, &cluster)?;
    standby.stop(StopMode::Fast)?;
    standby.start_server()?;
    ensure!(count(&standby, "umbrella.t")? == all);
    standby.finish()?;
    cluster.finish()
}

/// A kill at each step: nothing is destroyed, or the relations are, or all is; and it can be called
/// again.
#[test]
fn a_kill_while_a_group_is_shredded() -> Result<()> {
    for point in [
        "shred.decided",
        "shred.destroyed",
        "shred.compacted",
        "shred.group_relations_destroyed",
        "key_group.files_destroyed",
        "key_group.ended",
    ] {
        let (cluster, _keys) = with_groups(&Settings::default())?;
        tables(&cluster)?;
        cluster.sql("CREATE TABLE acme.old AS SELECT 1 AS id; DROP TABLE acme.old")?;
        let all = count(&cluster, "umbrella.t")?;
        cluster.stop_at(point)?;
        cluster.restart()?;
        let mut client = cluster.client()?;
        let shredding = std::thread::spawn(move || client.batch_execute(SHRED).is_err());
        cluster.stopped_at(point)?;
        cluster.kill()?;
        cluster.resume();
        ensure!(shredding.join().is_ok_and(|failed| failed), "{point}: it was not stopped");
        cluster.start_server()?;
        ensure!(
            count(&cluster, "umbrella.t")? == all && count(&cluster, "public.t")? == all,
            "{point}"
        );
        if point == "shred.decided" {
            ensure!(count(&cluster, "acme.t")? == all, "{point}");
        } else {
            is_destroyed(&cluster, "acme.t")?;
        }
        let left =
            cluster.text("SELECT count(*) FROM pagevault.key_groups WHERE key_group = 'acme'")?;
        if left == "1" {
            cluster.sql(SHRED)?;
        }
        is_destroyed(&cluster, "acme.t")?;
        ensure!(cluster.text("SELECT count(*) FROM pagevault.key_groups")? == "1", "{point}");
        cluster.crash()?;
        ensure!(count(&cluster, "umbrella.t")? == all, "{point}");
        cluster.finish()?;
    }
    Ok(())
}

/// What would stay readable, or be lost with the group, prevents it.
#[test]
fn what_is_not_destroyed_is_said() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    let all = count(&cluster, "acme.t")?;
    // Relations in another database.
    cluster.sql("CREATE DATABASE other")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault; CREATE SCHEMA acme;
        SECURITY LABEL FOR pagevault ON SCHEMA acme IS 'encrypted key_group=acme'; CREATE TABLE acme.t (id int)")?;
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "55006" && error.text().contains("\"other\""), "{error}");
    // Not there, as if a file system were not mounted.
    drop(other);
    let oid = cluster.text("SELECT oid FROM pg_database WHERE datname = 'other'")?;
    let base = cluster.data_directory().join("base");
    cluster.sql("CHECKPOINT")?;
    fs::rename(base.join(&oid), base.join("away"))?;
    let error = cluster.error(SHRED)?;
    fs::rename(base.join("away"), base.join(&oid))?;
    ensure!(error.sqlstate == "55006" && error.text().contains("\"other\""), "{error}");
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "DROP SCHEMA acme CASCADE")?;
    run_sql(&mut other, "SELECT * FROM pagevault.shred_former_files('other')")?;
    drop(other);
    // Tables outside with a sequence or an index in it.
    cluster.sql(
        "CREATE TABLE beside (id int, name text);
         SECURITY LABEL FOR pagevault ON TABLE beside IS 'encrypted';
         CREATE SEQUENCE acme.s OWNED BY NONE; INSERT INTO beside VALUES (1, 'x');
         SECURITY LABEL FOR pagevault ON SEQUENCE acme.s IS 'encrypted key_group=acme'",
    )?;
    cluster.sql("ALTER SEQUENCE acme.s OWNED BY NONE; ALTER SEQUENCE acme.s SET SCHEMA public")?;
    cluster.sql("ALTER SEQUENCE public.s OWNED BY public.beside.id")?;
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "55000" && error.text().contains("partly"), "{error}");
    ensure!(cluster.text("SELECT name FROM beside")? == "x" && count(&cluster, "acme.t")? == all);
    cluster.sql("DROP SEQUENCE public.s")?;
    // A table that another transaction is making.
    let mut maker = cluster.client()?;
    run_sql(&mut maker, "BEGIN; CREATE TABLE acme.coming (id int)")?;
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "55006" && error.text().contains("no relation has"), "{error}");
    ensure!(!error.hint.is_empty() && count(&cluster, "acme.t")? == all, "{error}");
    run_sql(&mut maker, "ROLLBACK")?;
    // One that a label puts into the group, and that was not moved.
    cluster.sql("CREATE TABLE before (id int)")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE before IS 'encrypted'")?;
    cluster.sql("ALTER TABLE before SET SCHEMA acme")?;
    let is_said = |problem: &str| -> Result<()> {
        let error = cluster.error(SHRED)?;
        ensure!(error.sqlstate == "55000" && error.text().contains(problem), "{error}");
        ensure!(!error.hint.is_empty() && count(&cluster, "acme.t")? == all, "{error}");
        Ok(())
    };
    is_said("acme.before is not in it yet")?;
    cluster.sql("ALTER TABLE acme.before SET SCHEMA public")?;
    // One that is in the group, and no label says so.
    cluster.sql("CREATE TABLE unsaid (id int)")?;
    let label = "SECURITY LABEL FOR pagevault ON TABLE unsaid IS";
    cluster.sql(&format!("{label} 'encrypted key_group=acme'"))?;
    cluster.sql(&format!("{label} NULL"))?;
    is_said("public.unsaid is in it")?;
    cluster.sql("DROP TABLE unsaid")?;
    // A partition in another group stays, and the sequence of the partitioned table does not.
    cluster.sql(
        "CREATE TABLE acme.ev (id serial, kind int) PARTITION BY LIST (kind);
         CREATE TABLE acme.ev1 PARTITION OF acme.ev FOR VALUES IN (1);
         CREATE TABLE umbrella.ev2 PARTITION OF acme.ev FOR VALUES IN (2);
         SECURITY LABEL FOR pagevault ON TABLE umbrella.ev2 IS 'encrypted key_group=umbrella'",
    )?;
    cluster.sql("INSERT INTO acme.ev (kind) SELECT 1 + i % 2 FROM generate_series(1, 10) i")?;
    // One that has left the group, and whose former key standbys may need.
    cluster.sql(
        "CREATE TABLE moved AS SELECT 1 AS id;
        SECURITY LABEL FOR pagevault ON TABLE moved IS 'encrypted key_group=acme';
        SECURITY LABEL FOR pagevault ON TABLE moved IS 'encrypted'",
    )?;
    ensure!(count(&cluster, "acme.t")? == all);
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "55000" && error.hint.contains("keep_former_keys"), "{error}");
    ensure!(count(&cluster, "acme.t")? == all);
    cluster.set(&[("pagevault.keep_former_keys", "0")])?;
    let left = "SELECT count(*) FROM pagevault.data_keys WHERE key_group = 'acme' AND relation = 'moved'::regclass";
    after_checkpoints(&cluster, left, "0")?;
    cluster.sql(SHRED)?;
    is_destroyed(&cluster, "acme.t")?;
    ensure!(cluster.text("SELECT id FROM moved")? == "1");
    ensure!(cluster.text("SELECT count(*) FROM umbrella.ev2")? == "5");
    is_destroyed(&cluster, "(SELECT kind::text AS name FROM acme.ev1) x")?;
    cluster.finish()
}

/// A crash leaves files of transactions that had not ended. No relation has them, and they are
/// under the key of the group; a table that is being made is not one of them.
#[test]
fn what_a_crash_has_left_is_destroyed_as_well() -> Result<()> {
    let (mut cluster, _keys) =
        with_groups(&Settings::default().conf("max_prepared_transactions = 2"))?;
    cluster.allow_log("were destroyed");
    tables(&cluster)?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN; ALTER TABLE acme.t ALTER id TYPE bigint")?;
    run_sql(&mut client, "CREATE TABLE acme.orphan AS SELECT 'secret' AS name; CHECKPOINT")?;
    cluster.crash()?;
    drop(client);
    let orphans = "SELECT count(*) FROM pg_ls_dir('base/' || (SELECT oid FROM pg_database WHERE datname = 'postgres')) f
        WHERE f ~ '^[0-9]+$' AND f::oid >= 16384 AND NOT EXISTS (SELECT 1 FROM pg_class WHERE pg_relation_filenode(oid) = f::oid)";
    ensure!(cluster.text(orphans)? != "0", "the crash has left nothing");
    let all = count(&cluster, "umbrella.t")?;
    cluster.sql("BEGIN; CREATE TABLE acme.prepared (id int); PREPARE TRANSACTION 'p'")?;
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "55006" && error.text().contains("no relation has"), "{error}");
    cluster.sql("ROLLBACK PREPARED 'p'")?;
    cluster.sql(SHRED)?;
    is_destroyed(&cluster, "acme.t")?;
    let groups = "SELECT string_agg(key_group, ' ') FROM pagevault.key_groups";
    ensure!(cluster.text(groups)? == "umbrella", "{}", cluster.text(groups)?);
    cluster.crash()?;
    ensure!(count(&cluster, "umbrella.t")? == all);
    cluster.finish()
}

const WAITS: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";

/// Begins to shred the group in a session of its own, which waits for a reader of `acme.t`; calls
/// `meanwhile`, ends the reader's transaction, and returns the outcome.
fn shredded_while_it_waits(
    cluster: &Cluster,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<Result<()>> {
    let (mut reader, mut session) = (cluster.client()?, cluster.client()?);
    run_sql(&mut reader, "BEGIN; SELECT count(*) FROM acme.t")?;
    let shredding = std::thread::spawn(move || run_sql(&mut session, SHRED));
    cluster.eventually(WAITS, "1")?;
    meanwhile()?;
    run_sql(&mut reader, "COMMIT")?;
    shredding.join().map_err(|_| anyhow::anyhow!("the thread panicked"))
}

/// Shredding waits for readers as long as they like. What leaves the group meanwhile is not
/// destroyed; and nothing comes into it, so that it can end. Nobody else waits for the readers.
#[test]
fn what_changes_while_shredding_waits_is_not_destroyed() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    cluster.sql(&format!(
        "CREATE TABLE acme.sold AS SELECT i AS id, name FROM ({ROWS}) r (i, name)"
    ))?;
    cluster.sql("CREATE TABLE acme.dropped (id int); CREATE TABLE acme.emptied (id int)")?;
    let all = count(&cluster, "acme.t")?;
    let refused = |outcome: Result<()>, problem: &str| -> Result<()> {
        let Err(error) = outcome else { bail!("it was shredded: not {problem}") };
        let error = format!("{error:#}");
        ensure!(error.contains(problem), "{error}");
        ensure!(count(&cluster, "acme.t")? == all, "something was destroyed: {error}");
        Ok(())
    };
    // A table is moved out of the schema whose label puts it into the group.
    let outcome = shredded_while_it_waits(&cluster, || {
        cluster.sql("ALTER TABLE acme.sold SET SCHEMA public")?;
        cluster.sql("SET lock_timeout = '1min'; SELECT pagevault.rotate_cluster_master_key()")?;
        let error = cluster.error("CREATE TABLE acme.more (id int)")?;
        ensure!(error.sqlstate == "55006" && error.text().contains("is being shredded"), "{error}");
        let error = cluster.error(SHRED)?;
        ensure!(error.sqlstate == "55006" && error.text().contains("is being shredded"), "{error}");
        let error = cluster.error("TRUNCATE acme.emptied")?;
        ensure!(error.text().contains("is being shredded"), "{error}");
        Ok(())
    })?;
    refused(outcome, "public.sold is in it, and no label says so")?;
    cluster.sql("ALTER TABLE public.sold SET SCHEMA acme")?;
    // The schema goes to another tenant.
    let label = |name: &str| {
        format!("SECURITY LABEL FOR pagevault ON SCHEMA acme IS 'encrypted key_group={name}'")
    };
    let outcome = shredded_while_it_waits(&cluster, || cluster.sql(&label("umbrella")))?;
    refused(outcome, "no label says so")?;
    cluster.sql(&label("acme"))?;
    // The same, in a transaction that has not ended.
    let mut other = cluster.client()?;
    run_sql(&mut other, "BEGIN")?;
    run_sql(&mut other, &label("umbrella"))?;
    let outcome = shredded_while_it_waits(&cluster, || Ok(()))?;
    refused(outcome, "labels are being changed")?;
    run_sql(&mut other, "ROLLBACK")?;
    // The group ends although files of dropped relations exist until the next checkpoint.
    shredded_while_it_waits(&cluster, || cluster.sql("DROP TABLE acme.dropped"))??;
    is_destroyed(&cluster, "acme.t")?;
    is_destroyed(&cluster, "acme.sold")?;
    ensure!(
        cluster.text("SELECT string_agg(key_group, ' ') FROM pagevault.key_groups")? == "umbrella"
    );
    cluster.finish()
}

/// Storage of which it is not known yet to which group it belongs is under the key of the database.
/// If a crash leaves it, it is destroyed with the group.
#[test]
fn what_a_crash_has_left_in_doubt_is_destroyed() -> Result<()> {
    let (mut cluster, _keys) = with_groups(&Settings::default())?;
    cluster.allow_log("were destroyed");
    tables(&cluster)?;
    let files = "SELECT string_agg(f, ',') FROM pg_ls_dir('base/' || (SELECT oid FROM pg_database WHERE datname = 'postgres')) f
        WHERE f ~ '^[0-9]+$' AND f::oid >= 16384 AND NOT EXISTS (SELECT 1 FROM pg_class WHERE pg_relation_filenode(oid) = f::oid)";
    ensure!(cluster.text(&format!("SELECT coalesce(({files}), '')"))?.is_empty());
    cluster.sql(
        "CREATE FUNCTION pause() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(600); END';
         CREATE EVENT TRIGGER pause ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION pause()",
    )?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "BEGIN; LOCK TABLE umbrella.t IN ACCESS EXCLUSIVE MODE")?;
    let rewriting = std::thread::spawn(move || {
        run_sql(&mut session, "ALTER TABLE acme.t ALTER id TYPE bigint")
    });
    let pauses = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    cluster.eventually(pauses, "1")?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    ensure!(rewriting.join().is_ok_and(|outcome| outcome.is_err()), "it ended");
    cluster.sql("DROP EVENT TRIGGER pause")?;
    let left = cluster.text(files)?;
    cluster.sql(SHRED)?;
    is_destroyed(&cluster, "acme.t")?;
    // Whoever gives such a file to another relation does not read it.
    cluster.sql("CREATE TABLE shape (id bigint, name text)")?;
    for file in left.split(',') {
        let mut client = cluster.client()?;
        run_sql(
            &mut client,
            &format!(
                "SET allow_system_table_mods = on;
                 UPDATE pg_class SET relfilenode = {file} WHERE oid = 'shape'::regclass"
            ),
        )?;
        let error = cluster.error("SELECT * FROM shape")?;
        ensure!(error.text().contains("were destroyed"), "{file}: {error}");
    }
    cluster.finish()
}
