//! A file that had pages in plaintext contains encrypted pages only when a rekey job has proven it:
//! not only from this server's disk, but for each server that replays its WAL.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::text;
use pagevault_tests::datafile::PageState;
use pagevault_tests::installation::run;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, KeyFile, Settings, Standby};

use super::{HONEST, cluster, ensure_refused, file, is_sealed_only, plant, read_again, wait};

/// Everything that follows a table.
const FAMILY: &str = "
    CREATE TABLE v (id serial PRIMARY KEY, name text, long text);
    ALTER TABLE v ALTER long SET STORAGE EXTERNAL;
    INSERT INTO v (name, long)
        SELECT 'honest', CASE WHEN i % 100 = 0 THEN repeat('x', 9000) END FROM generate_series(1, 1000) i;
    CREATE UNLOGGED TABLE u (id serial PRIMARY KEY, name text);
    INSERT INTO u (name) SELECT 'honest' FROM generate_series(1, 1000);
    CREATE TABLE bare (id int PRIMARY KEY, long text)";

/// Files of the family of a table of which the keystore does not say it.
fn unproven(cluster: &Cluster, table: &str) -> Result<String> {
    cluster.text(&format!(
        "SELECT count(*) FROM pagevault.relations WHERE sealed_only IS NOT TRUE AND relation IN (
             SELECT relation::regclass FROM pagevault.verify('{table}'))"
    ))
}

/// `v`, `u` and `bare` in plaintext.
fn plain(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = cluster(settings)?;
    cluster.sql(FAMILY)?;
    Ok((cluster, keys))
}

/// How a statement is run until everything is encrypted.
type Encrypt = fn(&Cluster, &str) -> Result<()>;

fn job(cluster: &Cluster, statement: &str) -> Result<()> {
    wait(cluster, statement)
}

fn at_once(cluster: &Cluster, statement: &str) -> Result<()> {
    cluster.sql(statement)
}

#[test]
fn a_job_and_a_command_prove_it() -> Result<()> {
    let by_job = Settings::default().conf("pagevault.rekey_threshold = 0");
    let ways: [(Settings, Encrypt); 2] = [(by_job, job), (Settings::default(), at_once)];
    for (settings, encrypt) in ways {
        let (cluster, _keys) = plain(&settings)?;
        for table in ["v", "u", "bare"] {
            encrypt(&cluster, &format!("SELECT pagevault.encrypt('{table}')"))?;
            ensure!(unproven(&cluster, table)? == "0", "{table}");
        }
        let (forged, v) = (file(&cluster, "forged")?, file(&cluster, "v")?);
        for _ in 0..2 {
            read_again(&cluster)?;
            cluster.sql("INSERT INTO v (name) VALUES ('more'); INSERT INTO bare VALUES (1)")?;
            cluster.sql("DELETE FROM bare")?;
            cluster.crash()?;
            ensure!(unproven(&cluster, "v")? == "0" && unproven(&cluster, "bare")? == "0");
            ensure!(cluster.text("SELECT count(*) FROM v WHERE name = 'honest'")? == "1000");
            ensure!(cluster.text("SELECT count(*) FROM u")? == "0", "it is reset");
        }
        cluster.stop(pagevault_tests::StopMode::Fast)?;
        let before = plant(&forged, &v)?;
        cluster.start_server()?;
        ensure_refused(&cluster.error("SELECT count(*) FROM v")?)?;
        cluster.stop(pagevault_tests::StopMode::Fast)?;
        v.write_page(0, &before)?;
        cluster.start_server()?;
        wait(&cluster, "SELECT pagevault.decrypt('v')")?;
        ensure!(!is_sealed_only(&cluster, "v")?, "decrypted");
        read_again(&cluster)?;
        ensure!(cluster.text("SELECT count(*) FROM v WHERE name = 'honest'")? == "1000");
        encrypt(&cluster, "SELECT pagevault.encrypt('v')")?;
        ensure!(unproven(&cluster, "v")? == "0", "encrypted again");
        cluster.finish()?;
    }
    Ok(())
}

/// Of a file that was encrypted before, another key is the occasion: here of a database that the
/// file system has copied.
#[test]
fn a_rotation_proves_it() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    cluster.sql("CREATE DATABASE copied TEMPLATE postgres STRATEGY file_copy")?;
    let query = |query: &str| text(&mut cluster.client_to("copied")?, query);
    let sealed_only = "SELECT sealed_only FROM pagevault.relations WHERE relation = 't'::regclass";
    ensure!(query(sealed_only)? == "f");
    let job = query("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(query(&format!("SELECT pagevault.wait_for_rekey({job}, '1min')"))? == "t");
    for _ in 0..2 {
        ensure!(query(sealed_only)? == "t");
        ensure!(query(HONEST)? == "1000");
        cluster.crash()?;
    }
    cluster.finish()
}

/// The page was changed before the key, and written after it: on the primary it is encrypted, and
/// no record in WAL follows the change of keys. A standby has written it in plaintext before. Such
/// a page is rewritten, or the standby would refuse a page of its own.
#[test]
fn a_page_that_a_standby_wrote_before_is_not_refused() -> Result<()> {
    let (primary, _keys) = cluster(&quiet())?;
    primary.sql(
        "CREATE TABLE filler AS SELECT i AS id, repeat('x', 2000) AS name FROM generate_series(1, 2000) i;
         CREATE INDEX ON filler (id)",
    )?;
    let mut standby = Standby::default().conf("shared_buffers = 1MB").start(&primary)?;
    standby.allow_log("could not");
    primary.sql(
        "CREATE TABLE late (id int, name text); CHECKPOINT;
         INSERT INTO late SELECT i, 'honest' FROM generate_series(1, 1000) i",
    )?;
    wait_for(&standby, &primary)?;
    // Other pages take the place of these in the standby's buffers.
    standby.sql("SET enable_seqscan = off; SET enable_bitmapscan = off; SELECT sum(length(name)) FROM filler WHERE id > 0")?;
    let states = |cluster: &Cluster| file(cluster, "late")?.states();
    let on_standby = states(&standby)?;
    ensure!(on_standby.contains(&PageState::Plaintext), "nothing was written: {on_standby:?}");
    let on_primary = states(&primary)?;
    ensure!(!on_primary.contains(&PageState::Plaintext), "the test shows nothing: {on_primary:?}");

    wait(&primary, "SELECT pagevault.encrypt('late')")?;
    ensure!(is_sealed_only(&primary, "late")?);
    wait_for(&standby, &primary)?;
    // The record counts only when no page in plaintext is on this disk.
    ensure!(is_sealed_only(&standby, "late")?);
    ensure!(!states(&standby)?.contains(&PageState::Plaintext), "{:?}", states(&standby)?);
    // A map that only the standby has written may be in plaintext there, and is read as empty.
    let others = "SELECT string_agg(v::text, ' ') FROM pagevault.verify('late') v
        WHERE fork IN ('main', 'init') AND state NOT IN ('encrypted', 'empty')";
    ensure!(standby.text(&format!("SELECT coalesce(({others}), '')"))?.is_empty());
    for _ in 0..2 {
        ensure!(standby.text("SELECT count(*) FROM late WHERE name = 'honest'")? == "1000");
        standby.crash()?;
        wait_for(&standby, &primary)?;
    }
    standby.promote()?;
    read_again(&standby)?;
    ensure!(standby.text("SELECT count(*) FROM late WHERE name = 'honest'")? == "1000");
    standby.finish()?;
    primary.finish()
}

/// A job that is killed, or paused, does not begin again when it goes on. So WAL has no images of
/// its own run of all pages, and it proves nothing of other servers. The next job may.
#[test]
fn a_job_that_goes_on_does_not_begin_again() -> Result<()> {
    let settings =
        Settings::default().conf("pagevault.rekey_threshold = 0").conf("autovacuum = off");
    let (mut cluster, _keys) = plain(&settings)?;
    cluster.allow_log("terminat");
    cluster.stop_at("rekey.proved")?;
    cluster.sql("SELECT pagevault.encrypt('forged')")?;
    let worker = cluster.stopped_at("rekey.proved")?;
    let lsns = |cluster: &Cluster| -> Result<Vec<Vec<u8>>> {
        let forged = file(cluster, "forged")?;
        let blocks = forged.states()?.len() as u32;
        (0..blocks).map(|block| Ok(forged.read_page(block)?[..8].to_vec())).collect()
    };
    let before = lsns(&cluster)?;
    cluster.resume();
    cluster.stop_at("rekey.claimed")?;
    cluster.crash_process(worker)?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.stopped_at("rekey.claimed")?;
    ensure!(!is_sealed_only(&cluster, "forged")?);
    cluster.resume();
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('forged'::regclass, '1min')")? == "t");
    ensure!(!is_sealed_only(&cluster, "forged")?);
    ensure!(lsns(&cluster)? == before, "pages were rewritten again");
    wait(&cluster, "SELECT pagevault.rotate_data_key('forged')")?;
    ensure!(is_sealed_only(&cluster, "forged")?);
    cluster.finish()
}

/// Where nothing is proven of other servers, the keystore does not say it: without checksums, and
/// for system catalogs.
#[test]
fn where_it_is_not_proven() -> Result<()> {
    let (cluster, _keys) = plain(&Settings::default().without_checksums())?;
    cluster.sql("SELECT pagevault.encrypt('v')")?;
    ensure!(!is_sealed_only(&cluster, "v")? && is_sealed_only(&cluster, "t")?);
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()?;
    let (cluster, _keys) = plain(&Settings::default())?;
    cluster.sql("SELECT pagevault.encrypt_database()")?;
    cluster.eventually(
        "SELECT count(*) FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running')",
        "0",
    )?;
    let catalogs = "SELECT count(*) FILTER (WHERE sealed_only), count(*) > 50
        FROM pagevault.relations WHERE encrypted AND relation::oid < 16384";
    ensure!(cluster.text(&format!("SELECT c::text FROM ({catalogs}) c"))? == "(0,t)");
    cluster.finish()
}

/// Without `full_page_writes`, a record about hint bits has no image. It changes the LSN of the
/// page here, and nothing on a standby (`XLOG_FPI_FOR_HINT`, xlog.c), whose page is still in
/// plaintext then. So a later LSN would prove nothing of the standby.
#[test]
fn a_page_with_new_hint_bits_is_not_refused_on_a_standby() -> Result<()> {
    hints_without_images(&quiet().conf("full_page_writes = off"), set_hints)?;
    // The setting is off only for a while between the change of keys and the proof.
    hints_without_images(&quiet(), |primary| {
        let works = |value| primary.eventually("SHOW full_page_writes", value);
        primary.set(&[("full_page_writes", "off")])?;
        works("off")?;
        set_hints(primary)?;
        primary.set(&[("full_page_writes", "on")])?;
        works("on")
    })
}

fn set_hints(primary: &Cluster) -> Result<()> {
    primary.sql("SELECT count(*) FROM late; CHECKPOINT")
}

/// Nothing but the test writes pages. Some tests write pages without images, which ciphers that
/// authenticate pages do not allow.
fn quiet() -> Settings {
    Settings::default()
        .conf("pagevault.cipher = 'aes-256-xts'")
        .conf("pagevault.rekey_threshold = 0")
        .conf("autovacuum = off")
        .conf("bgwriter_lru_maxpages = 0")
        .conf("checkpoint_timeout = 1d")
}

/// `meanwhile` is done after the change of keys, and before the job looks at the pages.
fn encrypt_late(primary: &Cluster, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
    primary.stop_at("rekey.switched")?;
    let job = primary.text("SELECT pagevault.encrypt('late')")?;
    primary.stopped_at("rekey.switched")?;
    meanwhile()?;
    primary.resume();
    ensure!(primary.text(&format!("SELECT pagevault.wait_for_rekey({job}, '1min')"))? == "t");
    ensure!(is_sealed_only(primary, "late")?, "the test shows nothing");
    Ok(())
}

fn hints_without_images(settings: &Settings, meanwhile: fn(&Cluster) -> Result<()>) -> Result<()> {
    let (primary, _keys) = cluster(settings)?;
    let standby = Standby::default().start(&primary)?;
    primary.sql(
        "CREATE TABLE late (id int, name text);
         INSERT INTO late SELECT i, 'honest' FROM generate_series(1, 1000) i; CHECKPOINT",
    )?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    encrypt_late(&primary, || meanwhile(&primary))?;
    wait_for(&standby, &primary)?;
    for _ in 0..2 {
        ensure!(standby.text("SELECT count(*) FROM late WHERE name = 'honest'")? == "1000");
        read_again(&standby)?;
    }
    standby.finish()?;
    primary.finish()
}

/// A standby without checksums does not change the LSN of a page that becomes all-visible
/// (`heap_xlog_visible`, heapam.c), and would leave it in plaintext without the job's image.
#[test]
fn nothing_is_refused_on_a_standby_without_checksums() -> Result<()> {
    let (primary, _keys) = cluster(&quiet())?;
    primary.sql(
        "CREATE TABLE filler AS SELECT i AS id, repeat('x', 2000) AS name FROM generate_series(1, 2000) i;
         CREATE INDEX ON filler (id)",
    )?;
    let mut standby = Standby::default().conf("shared_buffers = 1MB").start(&primary)?;
    standby.allow_log("could not");
    standby.stop(pagevault_tests::StopMode::Fast)?;
    let mut disable = standby.program("pg_checksums");
    run(disable.arg("--disable").arg("-D").arg(standby.data_directory()))?;
    standby.start_server()?;
    ensure!(standby.text("SHOW data_checksums")? == "off");
    primary.sql(
        "CREATE TABLE late (id int, name text); CHECKPOINT;
         INSERT INTO late SELECT i, 'honest' FROM generate_series(1, 1000) i; SELECT count(*) FROM late",
    )?;
    wait_for(&standby, &primary)?;
    let evict = "SET enable_seqscan = off; SET enable_bitmapscan = off; SELECT sum(length(name)) FROM filler WHERE id > 0";
    standby.sql(evict)?;
    encrypt_late(&primary, || primary.sql("VACUUM (INDEX_CLEANUP off, TRUNCATE off) late"))?;
    wait_for(&standby, &primary)?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    for _ in 0..2 {
        read_again(&standby)?;
        ensure!(standby.text("SELECT count(*) FROM late WHERE name = 'honest'")? == "1000");
    }
    standby.finish()?;
    primary.finish()
}
