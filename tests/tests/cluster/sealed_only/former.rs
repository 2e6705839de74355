//! Pages under former keys. When a rotation has proven of all servers that no page is left under an
//! earlier key, such a page is an old copy that somebody has put back, and is refused.

use anyhow::{Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::errors::SqlError;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, Standby, StopMode};

use super::backups::of_copy;
use super::{HONEST, TABLES, cluster, file, is_sealed_only, read_again, wait};

const MESSAGE: &str = "is under a former key, which is not accepted there";

fn settings() -> Settings {
    Settings::default().conf("pagevault.rekey_threshold = 0").conf("autovacuum = off")
}

fn rotate(cluster: &Cluster, table: &str) -> Result<()> {
    wait(cluster, &format!("SELECT pagevault.rotate_data_key('{table}')"))
}

/// Block 0 as it is on disk, under this version of the key.
fn block_under(file: &DataFile, version: u16) -> Result<Vec<u8>> {
    let page = file.read_page(0)?;
    ensure!(PageState::of(&page) == PageState::Sealed(version), "{:?}", PageState::of(&page));
    Ok(page)
}

fn ensure_refused(error: &SqlError) -> Result<()> {
    ensure!(error.sqlstate == "XX001" && error.message.ends_with(MESSAGE), "{error}");
    ensure!(error.text().contains("rewritten under a later key"), "{error}");
    Ok(())
}

/// The standby has replayed all of the primary's WAL, of which a job does not flush the end.
fn catch_up(standby: &Cluster, primary: &Cluster) -> Result<()> {
    primary.sql("SELECT pg_logical_emit_message(true, '', '')")?;
    wait_for(standby, primary)
}

/// Whether a page of the file is under this version.
fn has(file: &DataFile, version: u16) -> Result<bool> {
    Ok(file.states()?.contains(&PageState::Sealed(version)))
}

#[test]
fn a_page_from_before_a_rotation_is_refused() -> Result<()> {
    let (cluster, _keys) = cluster(&settings())?;
    cluster.sql("CHECKPOINT")?;
    let t = file(&cluster, "t")?;
    let old = block_under(&t, 1)?;
    cluster.sql("DELETE FROM t WHERE id = 1")?;
    rotate(&cluster, "t")?;
    cluster.stop(StopMode::Fast)?;
    let before = block_under(&t, 2)?;
    t.write_page(0, &old)?;
    cluster.pg_checksums()?;
    let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
    ensure!(code == Some(2) && text.contains("block 0: under a former key"), "{text}");

    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    for setting in ["ignore_checksum_failure", "zero_damaged_pages"] {
        ensure_refused(&cluster.error(&format!("SET {setting} = on; {HONEST}"))?)?;
    }
    ensure!(cluster.text("SELECT count(*) > 0 FROM t WHERE ctid >= '(1,0)'")? == "t");
    let refused = "SELECT decrypt_failures > 2 FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(cluster.text(refused)? == "t", "not counted");
    let states = "SELECT string_agg(concat_ws(' ', fork, state, data_key_version, pages), ',')
        FROM pagevault.verify('t') WHERE state = 'refused'";
    ensure!(cluster.text(states)? == "main refused 1 1", "{}", cluster.text(states)?);

    cluster.stop(StopMode::Fast)?;
    ensure!(t.read_page(0)? == old, "the server has changed the page");
    t.write_page(0, &before)?;
    let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
    ensure!(code == Some(0), "{text}");
    cluster.start_server()?;
    ensure!(cluster.text(HONEST)? == "999");

    // Decryption accepts what is there.
    cluster.stop(StopMode::Fast)?;
    t.write_page(0, &old)?;
    cluster.start_server()?;
    wait(&cluster, "SELECT pagevault.decrypt('t')")?;
    ensure!(cluster.text(HONEST)? == "1000");
    wait(&cluster, "SELECT pagevault.encrypt('t')")?;
    read_again(&cluster)?;
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()
}

/// The last rotation counts, and a process that has used a former key notices that it is one now.
#[test]
fn a_process_that_knows_the_former_key_refuses_it() -> Result<()> {
    let (cluster, _keys) = cluster(&settings())?;
    cluster.sql("CREATE EXTENSION IF NOT EXISTS pg_prewarm; CHECKPOINT")?;
    let t = file(&cluster, "t")?;
    let mut old = block_under(&t, 1)?;
    let mut client = cluster.client()?;
    // Reads from disk.
    let prewarm = "SELECT pg_prewarm('t', 'read', 'main', 0, 0)";
    client.query_one(prewarm, &[])?;
    for version in [2, 3] {
        rotate(&cluster, "t")?;
        client.query_one(prewarm, &[])?;
        let honest = block_under(&t, version)?;
        t.write_page(0, &old)?;
        let error = client.query_one(prewarm, &[]).err();
        let error = error.and_then(|e| e.as_db_error().map(|e| e.message().to_owned()));
        ensure!(error.as_ref().is_some_and(|text| text.ends_with(MESSAGE)), "{error:?}");
        t.write_page(0, &honest)?;
        client.query_one(prewarm, &[])?;
        old = honest;
    }
    drop(client);
    cluster.finish()
}

/// A cipher that authenticates pages: a page from before has no tag, so anybody can change it.
#[test]
fn authenticated_pages_are_not_downgraded() -> Result<()> {
    let (mut cluster, _keys) = cluster(&settings().conf("pagevault.cipher = 'aes-256-xts'"))?;
    cluster.sql("CHECKPOINT")?;
    let t = file(&cluster, "t")?;
    let mut old = block_under(&t, 1)?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-256-xts-auth'")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    let authenticated =
        "SELECT authenticated FROM pagevault.relations WHERE relation = 't'::regclass";
    ensure!(cluster.text(authenticated)? == "t");
    cluster.stop(StopMode::Fast)?;
    block_under(&t, 2)?;
    t.write_page(0, &old)?;
    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    // Neither a wrong checksum, nor bytes that are no ciphertext, make it another one.
    cluster.stop(StopMode::Fast)?;
    old[4000..4300].fill(7);
    t.write_page(0, &old)?;
    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    ensure_refused(&cluster.error(&format!("SET ignore_checksum_failure = on; {HONEST}"))?)?;
    // PostgreSQL rejects this one itself, and its own remedies apply: pd_upper is 0.
    cluster.stop(StopMode::Fast)?;
    old[14..16].fill(0);
    t.write_page(0, &old)?;
    cluster.start_server()?;
    cluster.allow_log("invalid page");
    cluster.allow_log("page verification failed");
    let error = cluster.error(HONEST)?;
    ensure!(error.message.contains("invalid page in block 0"), "{error}");
    cluster.finish()
}

/// By an old visibility map, rows that were deleted since would be visible to all.
#[test]
fn an_old_visibility_map_is_empty() -> Result<()> {
    let (cluster, _keys) = cluster(&settings())?;
    cluster.sql("CREATE INDEX ON t (id)")?;
    cluster.sql("VACUUM t")?;
    cluster.sql("CHECKPOINT")?;
    let files = cluster.files("t")?;
    let map = files.into_iter().find(|file| file.path.to_string_lossy().ends_with("_vm"));
    let Some(map) = map else { anyhow::bail!("no map") };
    let old = block_under(&map, 1)?;
    cluster.sql("DELETE FROM t WHERE id <= 10")?;
    rotate(&cluster, "t")?;
    cluster.stop(StopMode::Fast)?;
    block_under(&map, 2)?;
    map.write_page(0, &old)?;
    let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
    ensure!(code == Some(0), "{text}");
    cluster.start_server()?;
    let mut client = cluster.client()?;
    client.batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off")?;
    let found: i64 = client.query_one("SELECT count(id) FROM t WHERE id <= 500", &[])?.get(0);
    ensure!(found == 490, "{found} rows");
    drop(client);
    cluster.sql("VACUUM t")?;
    read_again(&cluster)?;
    ensure!(cluster.text("SELECT count(id) FROM t WHERE id <= 500")? == "490");
    cluster.finish()
}

/// While a file gets another key, a page whose LSN is that of the page on disk keeps the key that
/// it has there. One below the floor does not count, or the server would write what it refuses.
#[test]
fn a_planted_page_does_not_make_the_server_use_a_former_key() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&settings().conf("checkpoint_timeout = 1d"))?;
    // Older than the rows: no query prunes their pages, nor marks them in the visibility map, as
    // PostgreSQL 19 does (heap_page_prune_opt). Both would change the LSN.
    let mut older = cluster.client()?;
    older.batch_execute("BEGIN; SELECT pg_current_xact_id()")?;
    cluster.sql(TABLES)?;
    cluster.sql("CHECKPOINT")?;
    let t = file(&cluster, "t")?;
    let old = block_under(&t, 1)?;
    rotate(&cluster, "t")?;
    let before = block_under(&t, 2)?;
    cluster.stop_at("rekey.barrier_passed")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.barrier_passed")?;
    let mut forged = before.clone();
    forged[10..12].copy_from_slice(&old[10..12]);
    t.write_page(0, &forged)?;
    ensure!(PageState::of(&t.read_page(0)?) == PageState::Sealed(1), "not forged");
    // Notes on the page that its rows are committed; WAL has an image since the last checkpoint.
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.sql("CHECKPOINT")?;
    let after = block_under(&t, 3)?;
    ensure!(after[..8] == before[..8], "the page has another LSN");
    older.batch_execute("COMMIT")?;
    cluster.resume();
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    read_again(&cluster)?;
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()
}

/// A standby has pages under the former key on disk, which the primary has written under the later
/// one, or not at all. It refuses none of them, and old copies later.
#[test]
fn a_standby_refuses_none_of_its_own() -> Result<()> {
    let settings = settings().conf("bgwriter_lru_maxpages = 0").conf("checkpoint_timeout = 1d");
    let (primary, _keys) = cluster(&settings)?;
    primary.sql(
        "CREATE TABLE filler AS SELECT i AS id, repeat('x', 2000) AS name FROM generate_series(1, 2000) i;
         CREATE INDEX ON filler (id);
         SET pagevault.default_encryption = on;
         CREATE TABLE late (id int, name text); CHECKPOINT",
    )?;
    let mut standby = Standby::default().conf("shared_buffers = 1MB").start(&primary)?;
    standby.allow_log("could not");
    let rows = "INSERT INTO late SELECT i, 'honest' FROM generate_series(1, 1000) i";
    primary.sql(rows)?;
    primary.sql("VACUUM (TRUNCATE off) late")?;
    catch_up(&standby, &primary)?;
    let evict = "SET enable_seqscan = off; SET enable_bitmapscan = off; SELECT sum(length(name)) FROM filler WHERE id > 0";
    standby.sql(evict)?;
    let on_standby = file(&standby, "late")?;
    ensure!(has(&on_standby, 1)?, "nothing was written: {:?}", on_standby.states()?);
    let on_primary = file(&primary, "late")?;
    ensure!(!has(&on_primary, 1)?, "the test shows nothing: {:?}", on_primary.states()?);
    let old = block_under(&on_standby, 1)?;

    rotate(&primary, "late")?;
    catch_up(&standby, &primary)?;
    ensure!(!has(&on_standby, 1)?, "{:?}", on_standby.states()?);
    let others = "SELECT string_agg(v::text, ' ') FROM pagevault.verify('late') v
        WHERE state NOT IN ('encrypted', 'empty') OR data_key_version = 1";
    let others = format!("SELECT coalesce(({others}), '')");
    ensure!(primary.text(&others)?.is_empty(), "primary: {}", primary.text(&others)?);
    ensure!(standby.text(&others)?.is_empty(), "{}", standby.text(&others)?);
    let count = "SELECT count(*) FROM late WHERE name = 'honest'";
    for _ in 0..2 {
        ensure!(standby.text(count)? == "1000");
        standby.crash()?;
        catch_up(&standby, &primary)?;
    }
    let failures = "SELECT decrypt_failures FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(standby.text(failures)? == "0");

    // Otherwise redo restores the page from its image when the standby starts.
    primary.sql("CHECKPOINT")?;
    catch_up(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    standby.stop(StopMode::Fast)?;
    let honest = block_under(&on_standby, 2)?;
    on_standby.write_page(0, &old)?;
    standby.start_server()?;
    standby.eventually("SELECT pg_is_in_recovery()", "t")?;
    ensure_refused(&standby.error(count)?)?;
    standby.promote()?;
    ensure_refused(&standby.error(count)?)?;
    standby.stop(StopMode::Fast)?;
    on_standby.write_page(0, &honest)?;
    standby.start_server()?;
    ensure!(standby.text(count)? == "1000");
    standby.finish()?;
    primary.finish()
}

/// A standby that starts again replays from before the rotation, with a keystore from after it.
#[test]
fn a_standby_that_starts_again_refuses_none() -> Result<()> {
    let settings = settings().conf("checkpoint_timeout = 1d").conf("full_page_writes = off");
    let (primary, _keys) = cluster(&settings)?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    catch_up(&standby, &primary)?;
    primary.sql("CHECKPOINT")?;
    catch_up(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    let t = file(&standby, "t")?;
    block_under(&t, 1)?;
    // Redo reads these pages, and has no images of them.
    primary.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 0")?;
    rotate(&primary, "t")?;
    catch_up(&standby, &primary)?;
    let old = t.states()?.len();
    standby.crash()?;
    catch_up(&standby, &primary)?;
    ensure!(standby.text(HONEST)? == "1000" && old > 0);
    standby.promote()?;
    read_again(&standby)?;
    ensure!(standby.text(HONEST)? == "1000");
    standby.finish()?;
    primary.finish()
}

/// The server crashes at each step of a rotation. Nothing is refused, and the run that goes on
/// proves nothing; the next rotation does.
#[test]
fn a_crash_during_rotation() -> Result<()> {
    for step in ["rekey.switched", "rekey.batch_done", "rekey.proved", "rekey.rewritten"] {
        let (cluster, _keys) = cluster(&settings())?;
        cluster.sql("CHECKPOINT")?;
        let t = file(&cluster, "t")?;
        let old = block_under(&t, 1)?;
        cluster.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 0")?;
        cluster.stop_at(step)?;
        cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
        cluster.stopped_at(step)?;
        cluster.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 1")?;
        cluster.resume();
        cluster.crash()?;
        ensure!(cluster.text(HONEST)? == "1000", "{step}");
        ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
        ensure!(is_sealed_only(&cluster, "t")?, "{step}");
        for _ in 0..2 {
            read_again(&cluster)?;
            ensure!(cluster.text(HONEST)? == "1000", "{step}");
        }
        rotate(&cluster, "t")?;
        cluster.stop(StopMode::Fast)?;
        let honest = t.read_page(0)?;
        t.write_page(0, &old)?;
        cluster.start_server()?;
        ensure_refused(&cluster.error(HONEST)?)?;
        cluster.stop(StopMode::Fast)?;
        t.write_page(0, &honest)?;
        cluster.start_server()?;
        cluster.finish()?;
    }
    Ok(())
}

/// After a crash of its own a server has no page under a former key, so redo does not read one.
#[test]
fn after_a_crash_redo_does_not_read_it() -> Result<()> {
    let (mut cluster, _keys) = cluster(&settings().conf("full_page_writes = off"))?;
    cluster.without_witness("somebody changes the files of this server only");
    cluster.sql("CHECKPOINT")?;
    let t = file(&cluster, "t")?;
    let old = block_under(&t, 1)?;
    rotate(&cluster, "t")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("UPDATE t SET id = id WHERE ctid = '(0,1)'")?;
    cluster.kill()?;
    let before = block_under(&t, 2)?;
    t.write_page(0, &old)?;
    let Err(error) = cluster.start_server() else { anyhow::bail!("the server starts") };
    let error = format!("{error:#}");
    ensure!(error.contains(MESSAGE) && error.contains("ignore_invalid_pages"), "{error}");
    cluster.allow_log(MESSAGE);
    cluster.allow_log("startup process");
    t.write_page(0, &before)?;
    cluster.start_server()?;
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()
}

/// Pages and keystore of a base backup are from before and after a rotation, in either order.
#[test]
fn a_backup_during_rotation() -> Result<()> {
    for keystore_first in [true, false] {
        let (primary, _keys) = cluster(&settings())?;
        primary.sql("CHECKPOINT")?;
        let backup = match keystore_first {
            true => Backup::begin(&primary)?,
            false => Backup::begin_with_files(&primary)?,
        };
        primary.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 0")?;
        rotate(&primary, "t")?;
        primary.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 1; CHECKPOINT")?;
        let restored = backup.end()?;
        let t = of_copy(&primary, "t", &restored)?;
        ensure!(has(&t, if keystore_first { 2 } else { 1 })?, "{:?}", t.states()?);
        // Nor does the program take them for damage. (It cannot without the keystore's last key.)
        if !keystore_first {
            let (text, code) = restored.verify_offline(&restored.data_directory())?;
            ensure!(code == Some(0), "{text}");
        }
        restored.start_server()?;
        for _ in 0..2 {
            ensure!(restored.text(HONEST)? == "1000");
            ensure!(is_sealed_only(&restored, "t")?);
            read_again(&restored)?;
        }
        ensure!(!has(&t, 1)?, "{:?}", t.states()?);
        let (text, code) = {
            restored.stop(StopMode::Fast)?;
            restored.verify_offline(&restored.data_directory())?
        };
        ensure!(code == Some(0), "{text}");
        restored.start_server()?;
        restored.finish()?;
        primary.finish()?;
    }
    Ok(())
}

/// Unlogged relations are made anew from their init forks, which get the later key as well.
#[test]
fn an_unlogged_table_is_read_after_a_crash() -> Result<()> {
    let (cluster, _keys) = cluster(&settings())?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE UNLOGGED TABLE u (id int PRIMARY KEY); INSERT INTO u SELECT generate_series(1, 1000)",
    )?;
    for _ in 0..2 {
        rotate(&cluster, "u")?;
        ensure!(cluster.text("SELECT count(*) FROM u")? == "1000");
        cluster.crash()?;
        ensure!(cluster.text("SELECT count(*) FROM u")? == "0", "it is reset");
        cluster.sql("INSERT INTO u SELECT generate_series(1, 1000)")?;
        read_again(&cluster)?;
        ensure!(cluster.text("SELECT count(*) FROM u WHERE id > 0")? == "1000");
    }
    cluster.finish()
}

/// A database that the file system copies, moves, and moves back.
#[test]
fn copies_of_databases_are_read() -> Result<()> {
    use pagevault_tests::cluster::{run_sql, text};
    let (cluster, _keys) = cluster(&settings())?;
    cluster.make_tablespace("elsewhere")?;
    cluster.sql("CREATE DATABASE moved")?;
    let run =
        |statements: &str| -> Result<()> { run_sql(&mut cluster.client_to("moved")?, statements) };
    let rotate = || -> Result<()> {
        run("SELECT pagevault.rotate_data_key('t')")?;
        run("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")
    };
    run("CREATE EXTENSION IF NOT EXISTS pagevault")?;
    run("SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    rotate()?;
    let read = |database: &str| -> Result<()> {
        for _ in 0..2 {
            let mut client = cluster.client_to(database)?;
            ensure!(text(&mut client, "SELECT count(*) FROM t")? == "1000", "{database}");
            drop(client);
            read_again(&cluster)?;
        }
        Ok(())
    };
    cluster.sql("CREATE DATABASE copied TEMPLATE moved STRATEGY file_copy")?;
    read("copied")?;
    cluster.sql("ALTER DATABASE moved SET TABLESPACE elsewhere")?;
    read("moved")?;
    // New pages are under another key, the others are not.
    run("ALTER SYSTEM SET pagevault.rekey_workers = 0")?;
    read_again(&cluster)?;
    run("SELECT pagevault.rotate_data_key('t')")?;
    cluster.sql("ALTER DATABASE moved SET TABLESPACE pg_default")?;
    read("moved")?;
    run("ALTER SYSTEM RESET pagevault.rekey_workers")?;
    read_again(&cluster)?;
    run("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
    rotate()?;
    read("moved")?;
    cluster.finish()
}
