//! Pages that change without a WAL record during rekeying, and are torn by a power failure. They
//! keep their former key, so both parts have the same key.

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, DataFile, Settings};

const SECTOR: usize = 512;

fn cluster(settings: Settings) -> Result<Cluster> {
    let settings = settings.conf("pagevault.rekey_threshold = 0").conf("wal_keep_size = 1GB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    // Encrypts the catalogs that are encrypted together with the first relation.
    cluster.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('first'::regclass, '1min')")? == "t");
    Ok(cluster)
}

fn file_of(cluster: &Cluster, relation: &str, suffix: &str) -> Result<DataFile> {
    let files = cluster.files(relation)?;
    let found = files.into_iter().find(|file| file.path.to_string_lossy().ends_with(suffix));
    found.with_context(|| format!("{relation} has no file {suffix}"))
}

/// A page, and the control file that determines where recovery begins, as of a checkpoint.
struct AtCheckpoint {
    file: DataFile,
    page: Vec<u8>,
    control: Vec<u8>,
}

impl AtCheckpoint {
    fn of(cluster: &Cluster, file: DataFile) -> Result<AtCheckpoint> {
        cluster.sql("CHECKPOINT")?;
        let control = std::fs::read(cluster.data_directory().join("global/pg_control"))?;
        Ok(AtCheckpoint { page: file.read_page(0)?, file, control })
    }

    /// Kills the server during the next checkpoint: the first sector of the page is written, but
    /// the record of the completed checkpoint is not.
    fn tear(&self, cluster: &Cluster) -> Result<()> {
        cluster.sql("CHECKPOINT")?;
        cluster.kill()?;
        cluster.resume();
        let mut page = self.file.read_page(0)?;
        page[SECTOR..].copy_from_slice(&self.page[SECTOR..]);
        self.file.write_page(0, &page)?;
        std::fs::write(cluster.data_directory().join("global/pg_control"), &self.control)?;
        cluster.start_server()
    }
}

/// `h` has 3,000 pages. Some rows are deleted, which only the table itself shows.
const LARGE: &str = "CREATE TABLE h (id int, pad text);
    ALTER TABLE h ALTER pad SET STORAGE PLAIN;
    INSERT INTO h SELECT i, repeat('x', 4500) FROM generate_series(1, 3000) i;
    CREATE INDEX ON h (id)";

/// Row counts by the visibility map, and by the table.
fn counts(cluster: &Cluster) -> Result<(String, String)> {
    let mut client = cluster.client()?;
    client.batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off")?;
    let count = "SELECT count(id)::text FROM h WHERE id > 0";
    let plan: Vec<String> =
        client.query(&format!("EXPLAIN {count}"), &[])?.iter().map(|row| row.get(0)).collect();
    ensure!(plan.iter().any(|line| line.contains("Index Only Scan")), "{plan:?}");
    let by_map: String = client.query_one(count, &[])?.get(0);
    client.batch_execute(
        "SET enable_seqscan = on; SET enable_indexonlyscan = off; SET enable_indexscan = off",
    )?;
    let by_table: String = client.query_one(count, &[])?.get(0);
    Ok((by_map, by_table))
}

/// In 15, no WAL record contains the visibility map page whose bits are cleared; in 17.11 and 18.6
/// it does.
#[test]
fn a_torn_visibility_map() -> Result<()> {
    let settings = Settings::default().without_checksums().conf("wal_log_hints = on");
    let cluster = cluster(settings)?;
    cluster.sql(LARGE)?;
    cluster.sql("VACUUM h")?;
    cluster.sql("DELETE FROM h WHERE id > 2000 AND id % 2 = 0")?;
    let before = AtCheckpoint::of(&cluster, file_of(&cluster, "h", "_vm")?)?;
    cluster.stop_at("rekey.switched")?;
    cluster.sql("SELECT pagevault.encrypt('h')")?;
    cluster.stopped_at("rekey.switched")?;
    cluster.sql("DELETE FROM h WHERE id = 1")?;
    before.tear(&cluster)?;
    let (by_map, by_table) = counts(&cluster)?;
    ensure!((by_map.as_str(), by_table.as_str()) == ("2499", "2499"), "{by_map} of {by_table}");
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('h'::regclass, '1min')")? == "t");
    ensure!(counts(&cluster)? == ("2499".into(), "2499".into()), "after the job");
    cluster.finish()
}

/// The meta page caches where there was free space; no WAL record contains it (spgutils.c,
/// SpGistUpdateMetaPage).
fn torn_meta_page(settings: Settings) -> Result<()> {
    let cluster = cluster(settings)?;
    cluster.sql(
        "CREATE TABLE s (place point);
         INSERT INTO s SELECT point(i % 100, i / 100) FROM generate_series(1, 5000) i;
         CREATE INDEX s_place ON s USING spgist (place)",
    )?;
    let before = AtCheckpoint::of(&cluster, file_of(&cluster, "s_place", "")?)?;
    // First the table, then its index.
    cluster.stop_at("rekey.switched")?;
    cluster.sql("SELECT pagevault.encrypt('s')")?;
    cluster.stopped_at("rekey.switched")?;
    for point in ["rekey.proved", "rekey.switched"] {
        cluster.stop_at(point)?;
        cluster.stopped_at(point)?;
    }
    cluster.sql("INSERT INTO s VALUES (point(7, 7000))")?;
    before.tear(&cluster)?;
    let mut client = cluster.client()?;
    client.batch_execute("SET enable_seqscan = off")?;
    let found: i64 = client
        .query_one("SELECT count(*) FROM s WHERE place <@ box '(0,0),(100,10000)'", &[])?
        .get(0);
    ensure!(found == 5001, "{found} rows");
    cluster.sql("INSERT INTO s VALUES (point(7, 7001))")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('s'::regclass, '1min')")? == "t");
    cluster.finish()
}

#[test]
fn a_torn_meta_page_of_an_index_with_checksums() -> Result<()> {
    torn_meta_page(Settings::default())
}

#[test]
fn a_torn_meta_page_of_an_index_without_checksums() -> Result<()> {
    torn_meta_page(Settings::default().without_checksums())
}

/// An added page of a map is all zero until it is used, so tearing has no effect; it has no WAL
/// record.
#[test]
fn an_added_page_of_a_map_is_torn() -> Result<()> {
    let cluster = cluster(Settings::default().without_checksums())?;
    cluster.sql(&format!("SET pagevault.default_encryption = on; {LARGE}"))?;
    // Pages are not all-visible while a snapshot may see other rows.
    let mut reader = cluster.client()?;
    reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")?;
    cluster.sql("UPDATE h SET id = id")?;
    cluster.sql("DELETE FROM h WHERE id > 2000")?;
    cluster.sql("VACUUM h")?;
    let files = [file_of(&cluster, "h", "_vm")?, file_of(&cluster, "h", "_fsm")?];
    cluster.kill()?;
    for file in &files {
        for block in 0..file.bytes()?.len() / 8192 {
            let mut page = file.read_page(block as u32)?;
            page[SECTOR..].fill(0);
            file.write_page(block as u32, &page)?;
        }
    }
    cluster.start_server()?;
    ensure!(counts(&cluster)? == ("2000".into(), "2000".into()), "{:?}", counts(&cluster)?);
    cluster.finish()
}

/// A table grows by a page, and the row for it is not inserted: in `heap_insert` the serialization
/// failure is raised after `RelationGetBufferForTuple` has initialized the page. There is no WAL
/// record of it.
#[test]
fn an_added_page_of_a_table_is_torn() -> Result<()> {
    let cluster = cluster(Settings::default())?;
    cluster.sql(
        "SET pagevault.default_encryption = on; CREATE TABLE h (id int); CREATE TABLE g (id int)",
    )?;
    let (mut one, mut other) = (cluster.client()?, cluster.client()?);
    one.batch_execute("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT * FROM h")?;
    other.batch_execute("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT * FROM g")?;
    one.batch_execute("INSERT INTO g VALUES (1); COMMIT")?;
    let error = pagevault_tests::cluster::expect_error(&mut other, "INSERT INTO h VALUES (1)")?;
    ensure!(error.sqlstate == "40001", "{error}");
    other.batch_execute("ROLLBACK")?;
    let file = file_of(&cluster, "h", "")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(file.bytes()?.len() == 8192, "the table has not grown");
    cluster.kill()?;
    let mut page = file.read_page(0)?;
    page[SECTOR..].fill(0);
    file.write_page(0, &page)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM h")? == "0");
    cluster.sql("INSERT INTO h VALUES (1)")?;
    cluster.sql("VACUUM h")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.text("SELECT count(*) FROM h")? == "1");
    pagevault_tests::datafile::assert_sealed(&[file])?;
    cluster.finish()
}

/// PostgreSQL replaces a damaged page of a map and continues; so does rekeying.
#[test]
fn damaged_maps_do_not_stop_a_job() -> Result<()> {
    let mut cluster = cluster(Settings::default())?;
    cluster.allow_log("page verification failed");
    cluster.allow_log("invalid page in block");
    cluster.sql("CREATE TABLE h AS SELECT i AS id FROM generate_series(1, 20000) i")?;
    cluster.sql("VACUUM h")?;
    for (function, version) in [("encrypt", 1), ("rotate_data_key", 2)] {
        cluster.sql("CHECKPOINT")?;
        let files = [file_of(&cluster, "h", "_vm")?, file_of(&cluster, "h", "_fsm")?];
        cluster.stop(pagevault_tests::StopMode::Fast)?;
        for file in &files {
            file.flip_bit(0, 100, 3)?;
        }
        cluster.start_server()?;
        cluster.sql(&format!("SELECT pagevault.{function}('h')"))?;
        ensure!(cluster.text("SELECT pagevault.wait_for_rekey('h'::regclass, '1min')")? == "t");
        cluster.sql("CHECKPOINT")?;
        for file in &files {
            use pagevault_tests::datafile::PageState::{Sealed, Zero};
            let states = file.states()?;
            ensure!(states.iter().all(|s| *s == Zero || *s == Sealed(version)), "{states:?}");
        }
        ensure!(cluster.text("SELECT count(*) FROM h")? == "20000");
        cluster.sql("VACUUM h")?;
    }
    cluster.finish()
}
