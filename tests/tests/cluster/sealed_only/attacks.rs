//! Somebody who can write to the data directory puts pages in plaintext into encrypted files.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

use super::{HONEST, cluster, ensure_refused, file, is_sealed_only, plant, read_again};

#[test]
fn a_page_in_plaintext_is_refused() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    ensure!(is_sealed_only(&cluster, "t")? && !is_sealed_only(&cluster, "forged")?);
    let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
    cluster.stop(StopMode::Fast)?;
    let before = plant(&forged, &t)?;
    let planted = t.read_page(0)?;
    cluster.pg_checksums().context("the forged page has a right checksum")?;
    let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
    ensure!(code == Some(2) && text.contains("block 0: in plaintext"), "{text}");

    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    // Neither setting serves or zeroes it.
    for setting in ["ignore_checksum_failure", "zero_damaged_pages"] {
        ensure_refused(&cluster.error(&format!("SET {setting} = on; {HONEST}"))?)?;
    }
    ensure!(cluster.text("SELECT count(*) > 0 FROM t WHERE ctid >= '(1,0)'")? == "t");
    ensure_refused(&cluster.error("UPDATE t SET name = 'other'")?)?;
    let refused = "SELECT decrypt_failures > 3 FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(cluster.text(refused)? == "t", "not counted");
    let states =
        "SELECT state, pages FROM pagevault.verify('t') WHERE state NOT IN ('encrypted', 'empty')";
    ensure!(
        cluster.text(&format!("SELECT string_agg(v::text, '') FROM ({states}) v"))?
            == "(refused,1)"
    );
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "f");
    ensure!(cluster.text("SELECT count(*) FROM forged WHERE name = 'forged'")? == "1000");

    cluster.stop(StopMode::Fast)?;
    ensure!(t.read_page(0)? == planted, "the server has changed the page");
    t.write_page(0, &before)?;
    let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
    ensure!(code == Some(0), "{text}");
    cluster.start_server()?;
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()
}

#[test]
fn without_checksums_it_is_refused_too() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default().without_checksums())?;
    let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
    cluster.stop(StopMode::Fast)?;
    plant(&forged, &t)?;
    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    cluster.finish()
}

/// PostgreSQL rejects such a page itself, and its own remedies apply.
#[test]
fn a_page_that_is_damaged_as_well_is_left_to_the_server() -> Result<()> {
    let (mut cluster, _keys) = cluster(&Settings::default())?;
    cluster.allow_log("invalid page");
    cluster.allow_log("page verification failed");
    let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
    cluster.stop(StopMode::Fast)?;
    plant(&forged, &t)?;
    // pd_upper is now 0: the page looks as if it was never initialised, and is not zero.
    let mut page = t.read_page(0)?;
    page[14..16].fill(0);
    t.write_page(0, &page)?;
    cluster.start_server()?;
    let error = cluster.error(HONEST)?;
    ensure!(error.message.contains("invalid page in block 0"), "{error}");
    let rest = format!("SET zero_damaged_pages = on; {HONEST}");
    let mut client = cluster.client()?;
    client.batch_execute("SET zero_damaged_pages = on")?;
    let rest: i64 = client.query_one(HONEST, &[]).context(rest)?.get(0);
    ensure!((1..1000).contains(&rest), "{rest}");
    cluster.finish()
}

/// A page of zeros says nothing: PostgreSQL adds such pages itself.
#[test]
fn a_page_of_zeros_is_accepted() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let t = file(&cluster, "t")?;
    cluster.stop(StopMode::Fast)?;
    t.write_page(0, &[0; 8192])?;
    cluster.start_server()?;
    let rest: i64 = cluster.text(HONEST)?.parse()?;
    ensure!((1..1000).contains(&rest), "{rest}");
    cluster.finish()
}

/// Maps in plaintext are taken for empty: nobody gains by a forged one, and no row is lost by it.
#[test]
fn maps_in_plaintext_are_read_as_empty() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    cluster.sql("CREATE INDEX ON t (id); CREATE INDEX ON forged (id)")?;
    cluster.sql("VACUUM t")?;
    cluster.sql("VACUUM forged")?;
    cluster.sql("DELETE FROM t WHERE id <= 10")?;
    cluster.sql("CHECKPOINT")?;
    let forks = |relation: &str| -> Result<Vec<DataFile>> {
        let files = cluster.files(relation)?;
        Ok(files.into_iter().filter(|file| file.path.to_string_lossy().contains('_')).collect())
    };
    let (forged, honest) = (forks("forged")?, forks("t")?);
    ensure!(forged.len() == 2 && honest.len() == 2, "{forged:?} {honest:?}");
    cluster.stop(StopMode::Fast)?;
    for (forged, honest) in forged.iter().zip(&honest) {
        for block in 0..forged.bytes()?.len() / 8192 {
            let page = forged.read_page(block as u32)?;
            if PageState::of(&page) == PageState::Plaintext {
                honest.write_page(block as u32, &page)?;
            }
        }
    }
    cluster.start_server()?;
    // By the forged visibility map all rows of all pages would be visible to all.
    let count = "SELECT count(id) FROM t WHERE id <= 500";
    let mut client = cluster.client()?;
    client.batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off")?;
    let plan = column(&mut client, &format!("EXPLAIN {count}"))?.concat();
    let found: i64 = client.query_one(count, &[])?.get(0);
    ensure!(found == 490 && plan.contains("Index Only Scan"), "{found} rows by {plan}");
    drop(client);
    cluster.sql("INSERT INTO t VALUES (1, 'honest')")?;
    cluster.sql("VACUUM t")?;
    read_again(&cluster)?;
    ensure!(cluster.text(count)? == "491");
    cluster.finish()
}

/// While a file gets another key, a page whose LSN is that of the page on disk keeps the key that
/// it has there. A forged page with this LSN does not make the server write plaintext.
#[test]
fn a_forged_page_does_not_make_the_server_write_plaintext() -> Result<()> {
    let settings = Settings::default()
        .without_checksums()
        .conf("pagevault.rekey_threshold = 0")
        .conf("autovacuum = off");
    let (cluster, _keys) = cluster(&settings)?;
    cluster.sql("CHECKPOINT")?;
    let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
    let before = t.read_page(0)?;
    ensure!(matches!(PageState::of(&before), PageState::Sealed(1)), "not under the first key");
    let mut page = forged.read_page(0)?;
    page[..8].copy_from_slice(&before[..8]);
    cluster.stop_at("rekey.barrier_passed")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.barrier_passed")?;
    t.write_page(0, &page)?;
    // Sets hint bits, without WAL.
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.sql("CHECKPOINT")?;
    let after = t.read_page(0)?;
    ensure!(matches!(PageState::of(&after), PageState::Sealed(2)), "{:?}", PageState::of(&after));
    ensure!(after[..8] == before[..8], "the page has another LSN");
    cluster.resume();
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    ensure!(is_sealed_only(&cluster, "t")?, "it is so under any key");
    read_again(&cluster)?;
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()
}

#[test]
fn a_restored_server_refuses_it() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let restored = Cluster::from_files(|target| cluster.base_backup(target))?;
    let of_restored = |file: DataFile| -> Result<DataFile> {
        let path = file.path.strip_prefix(cluster.data_directory())?;
        Ok(DataFile { path: restored.data_directory().join(path) })
    };
    let forged = of_restored(file(&cluster, "forged")?)?;
    plant(&forged, &of_restored(file(&cluster, "t")?)?)?;
    restored.start_server()?;
    ensure_refused(&restored.error(HONEST)?)?;
    restored.finish()?;
    cluster.finish()
}

#[test]
fn a_standby_refuses_it_also_after_its_promotion() -> Result<()> {
    let (primary, _keys) = cluster(&Settings::default())?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    wait_for(&standby, &primary)?;
    ensure!(is_sealed_only(&standby, "t")?);
    let (forged, t) = (file(&standby, "forged")?, file(&standby, "t")?);
    standby.sql("CHECKPOINT")?;
    standby.stop(StopMode::Fast)?;
    plant(&forged, &t)?;
    standby.start_server()?;
    standby.eventually("SELECT pg_is_in_recovery()", "t")?;
    ensure_refused(&standby.error(HONEST)?)?;
    standby.promote()?;
    ensure_refused(&standby.error(HONEST)?)?;
    standby.finish()?;
    primary.finish()
}

/// After a crash redo does not check pages; what it has not changed is refused when it is over.
#[test]
fn it_is_refused_after_a_crash() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
    cluster.without_witness("somebody changes the files of this server only");
    cluster.sql("CHECKPOINT")?;
    cluster.sql("CREATE TABLE other (id int); INSERT INTO other VALUES (1)")?;
    cluster.kill()?;
    plant(&forged, &t)?;
    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    ensure!(cluster.text("SELECT count(*) FROM other")? == "1");
    cluster.finish()
}

/// Redo that does not restore a page before it changes it would keep a forged one in shared
/// buffers. After a crash of its own a server has no page in plaintext there.
#[test]
fn after_a_crash_redo_does_not_read_it() -> Result<()> {
    let settings = || Settings::default().without_checksums().conf("autovacuum = off");
    // Without checksums a page becomes all-visible without an image of it. From 19 on there is one.
    if Installation::get()?.major < 19 {
        redo_does_not_read_it(&settings(), "VACUUM t")?;
    }
    let settings = settings().conf("full_page_writes = off");
    redo_does_not_read_it(&settings, "UPDATE t SET id = id WHERE ctid = '(0,1)'")
}

/// `change` is a statement that changes block 0 of `t`.
fn redo_does_not_read_it(settings: &Settings, change: &str) -> Result<()> {
    for has_page in [true, false] {
        let (mut cluster, _keys) = cluster(settings)?;
        cluster.without_witness("somebody changes the files of this server only");
        let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
        // Rows are known to be committed, and their pages are written.
        ensure!(cluster.text(HONEST)? == "1000");
        cluster.sql("CHECKPOINT")?;
        cluster.sql(change)?;
        // VACUUM does not wait until its WAL is on disk.
        cluster.sql("CREATE TABLE other (id int)")?;
        cluster.kill()?;
        let before = plant(&forged, &t)?;
        let error = format!("{:#}", cluster.start_server().err().context("the server starts")?);
        ensure!(error.contains("is in plaintext, which is not accepted there"), "{error}");
        ensure!(error.contains("ignore_invalid_pages"), "no remedy: {error}");
        cluster.allow_log("is in plaintext, which is not accepted there");
        cluster.allow_log("startup process");
        // Nothing is lost: with the right page everything is replayed. Who has none goes on.
        if has_page {
            t.write_page(0, &before)?;
        } else {
            cluster.append_conf("ignore_invalid_pages = on")?;
        }
        cluster.start_server()?;
        ensure!(!has_page || cluster.text(HONEST)? == "1000");
        cluster.finish()?;
    }
    Ok(())
}

/// The init fork is copied over the main fork after a crash.
#[test]
fn a_forged_init_fork_is_refused() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    cluster.sql(
        "CREATE UNLOGGED TABLE plain (id int); CREATE INDEX plain_key ON plain (id);
         SET pagevault.default_encryption = on;
         CREATE UNLOGGED TABLE u (id int); CREATE INDEX u_key ON u (id); INSERT INTO u VALUES (1);
         CHECKPOINT",
    )?;
    let init = |cluster: &Cluster, relation: &str| -> Result<DataFile> {
        let files = cluster.files(relation)?;
        let is_init = |file: &DataFile| file.path.to_string_lossy().ends_with("_init");
        files.into_iter().find(is_init).context("an init fork")
    };
    let (forged, honest) = (init(&cluster, "plain_key")?, init(&cluster, "u_key")?);
    let main = file(&cluster, "u_key")?;
    cluster.without_witness("somebody changes the files of this server only");
    cluster.kill()?;
    let before = plant(&forged, &honest)?;
    cluster.start_server()?;
    let select = "SET enable_seqscan = off; SELECT id FROM u WHERE id = 1";
    ensure_refused(&cluster.error(select)?)?;
    cluster.stop(StopMode::Immediate)?;
    honest.write_page(0, &before)?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO u VALUES (1)")?;
    ensure!(cluster.text("SELECT count(*) FROM u")? == "1");
    cluster.sql("CHECKPOINT")?;
    ensure!(matches!(PageState::of(&main.read_page(0)?), PageState::Sealed(_)));
    cluster.finish()
}
