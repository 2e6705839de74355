//! A relfilenumber that is used again while another session still has state of its former relation.
//!
//! Relfilenumbers repeat after 2^32. Here the server runs in binary-upgrade mode (`postgres -b`),
//! in which SQL may choose them. In that mode new relations are encrypted neither by policy
//! (pg_upgrade provides the files) nor by their labels, so the test encrypts them explicitly.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

const FILE: u32 = 70_001;

fn start_in_upgrade_mode(cluster: &Cluster) -> Result<()> {
    cluster.stop(StopMode::Fast)?;
    cluster.start_server_with(&["-b"])
}

/// Some minor releases stamp attributes with an LSN, which must be set then.
const ATTRIBUTE_VERSIONS: &str =
    "SELECT pg_catalog.binary_upgrade_set_next_attribute_versions('{0/1}')";

/// Statements that create the encrypted table `name` with OIDs from `oid` on and the relfilenumber
/// [`FILE`].
fn create(name: &str, oid: u32, cipher: &str) -> String {
    format!(
        "SELECT pg_catalog.binary_upgrade_set_next_pg_type_oid('{}'::oid);
         SELECT pg_catalog.binary_upgrade_set_next_array_pg_type_oid('{}'::oid);
         SELECT pg_catalog.binary_upgrade_set_next_heap_pg_class_oid('{oid}'::oid);
         SELECT pg_catalog.binary_upgrade_set_next_heap_relfilenode('{FILE}'::oid);
         CREATE TABLE {name} (id int);
         INSERT INTO {name} SELECT i FROM generate_series({oid}, {oid} + 999) i;
         SELECT pagevault.encrypt('{name}', '{cipher}');
         SELECT pagevault.reconcile('{name}')",
        oid + 1,
        oid + 2,
    )
}

#[test]
fn a_reused_file_number_reads_right_in_sessions_with_stale_handles() -> Result<()> {
    let mut settings =
        Settings::default().conf("shared_buffers = 1MB").conf("max_connections = 20");
    if Installation::get()?.major >= 18 {
        // I/O workers keep files open, process no invalidations (method_worker.c), and so read
        // removed files.
        settings = settings.conf("io_method = sync");
    }
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    start_in_upgrade_mode(&cluster)?;
    let mut owner = cluster.client()?;
    let mut other = cluster.client()?;
    let mut versions = Vec::new();
    let has_attribute_versions =
        "SELECT to_regproc('pg_catalog.binary_upgrade_set_next_attribute_versions')";
    let has_attribute_versions = !text(&mut owner, has_attribute_versions)?.is_empty();
    // Each relation is read by the session that created it and by one that has read the former
    // relation with this number.
    for life in 0..4_u32 {
        let oid = 50_000 + 1_000 * life;
        let name = format!("life_{life}");
        // Another cipher each time requires another key, as policy does outside this mode.
        let cipher = ["aes-256-xts", "aes-128-xts"][life as usize % 2];
        if has_attribute_versions {
            run_sql(&mut owner, ATTRIBUTE_VERSIONS)?;
        }
        run_sql(&mut owner, &create(&name, oid, cipher)).context(name.clone())?;
        // Evict the pages, so that the other session reads the file itself.
        run_sql(&mut owner, "CHECKPOINT")?;
        evict(&mut owner)?;
        let sum = text(&mut other, &format!("SELECT sum(id) FROM {name}"))
            .with_context(|| format!("{name} in the other session"))?;
        let expected = (oid..oid + 1000).map(u64::from).sum::<u64>().to_string();
        ensure!(sum == expected, "{name}: the other session reads {sum}, not {expected}");
        let files = cluster.files(&name)?;
        let file = files.first().context("a file")?;
        ensure!(file.path.ends_with(FILE.to_string()), "{} is not {FILE}", file.path.display());
        match PageState::of(&file.read_page(0)?) {
            PageState::Sealed(version) => versions.push(version),
            state => anyhow::bail!("{name}: page 0 is {state:?}"),
        }
        // The other session writes too, with its cached state of the file.
        run_sql(&mut other, &format!("UPDATE {name} SET id = id WHERE id % 2 = 0; CHECKPOINT"))?;
        evict(&mut owner)?;
        let sum = text(&mut owner, &format!("SELECT sum(id) FROM {name}"))?;
        ensure!(sum == expected, "{name}: after the other session's writes {sum}");
        run_sql(&mut owner, &format!("DROP TABLE {name}"))?;
        // The number is free only after a checkpoint has removed the first segment.
        run_sql(&mut owner, "CHECKPOINT")?;
    }
    ensure!(
        versions.windows(2).all(|pair| pair[0] < pair[1]),
        "data key versions were used again: {versions:?}"
    );
    drop((owner, other));
    cluster.crash()?;
    cluster.finish()
}

/// Reads enough other pages to evict a small table from 1 MB of buffers.
fn evict(client: &mut postgres::Client) -> Result<()> {
    run_sql(client, "SELECT count(*) FROM pg_proc; SELECT count(prosrc) FROM pg_proc;")?;
    run_sql(client, "SELECT count(*) FROM pg_attribute; SELECT count(*) FROM pg_depend;")?;
    run_sql(client, "SELECT count(*) FROM pg_description; SELECT count(*) FROM pg_rewrite;")
}
