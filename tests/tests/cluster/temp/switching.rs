//! Changes of the setting, and creation of the first key, at any time: a file keeps its initial
//! state.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::datafile::holds;
use pagevault_tests::{Cluster, Settings};

use super::{CANARY, LITTLE_MEMORY, SETUP, check, held, spilled};

const SORTED: &str = "SELECT t FROM data ORDER BY t DESC";
const JOINED: &str = "
    SELECT count(*) || ' ' || sum(hashtext(hold(a.t) || b.t)) FROM data a JOIN data b USING (id)";

#[test]
fn the_first_key_turns_on_encryption_without_a_restart() -> Result<()> {
    let cluster = Cluster::start(&Settings::default())?;
    cluster.sql(SETUP)?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql(&keys.add_provider("local"))?;
    let expected = cluster.text(JOINED)?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    run_sql(&mut client, "SET enable_mergejoin = off; SET enable_nestloop = off")?;
    let answer = held(&cluster, &mut client, JOINED, || {
        check(&spilled(&cluster), false)?;
        cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")
    })?;
    ensure!(answer == expected, "the join that was under way: {answer}, not {expected}");
    let answer = held(&cluster, &mut client, JOINED, || check(&spilled(&cluster), true))?;
    ensure!(answer == expected, "the next join: {answer}, not {expected}");
    cluster.finish()
}

/// Open files keep their state, even if the same query opens more of them, and reopens old ones
/// after closing them for others.
#[test]
fn open_files_keep_their_state() -> Result<()> {
    // So few that the server closes files of sorts to open others.
    let cluster = Cluster::start(&Settings::default().conf("max_files_per_process = 64"))?;
    cluster.sql(SETUP)?;
    let mut client = cluster.client()?;
    run_sql(&mut client, LITTLE_MEMORY)?;
    let expected = column(&mut client, SORTED)?;
    run_sql(&mut client, "BEGIN")?;
    const CURSORS: usize = 80;
    let mut rows = vec![Vec::new(); CURSORS];
    for (number, rows) in rows.iter_mut().enumerate() {
        let setting = if number % 2 == 0 { "on" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        run_sql(&mut client, &format!("DECLARE c{number} CURSOR FOR {SORTED}"))?;
        rows.extend(column(&mut client, &format!("FETCH 100 FROM c{number}"))?);
    }
    let files = spilled(&cluster);
    let marked = files.iter().filter(|file| file.marked).count();
    ensure!(marked > 0 && marked < files.len(), "{marked} of {} are sealed", files.len());
    for _ in 0..3 {
        for (number, rows) in rows.iter_mut().enumerate() {
            rows.extend(column(&mut client, &format!("FETCH 2000 FROM c{number}"))?);
        }
    }
    for (number, rows) in rows.iter_mut().enumerate() {
        rows.extend(column(&mut client, &format!("FETCH ALL FROM c{number}"))?);
        ensure!(*rows == expected, "cursor {number} has other rows");
    }
    run_sql(&mut client, "COMMIT")?;
    cluster.finish()
}

/// Its pages show their state.
#[test]
fn a_temporary_table_may_be_a_mixture() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("temp_buffers = '800kB'"))?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE TEMP TABLE mixed (i int, t text)")?;
    for setting in ["off", "auto", "on"] {
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        run_sql(
            &mut client,
            &format!(
                "INSERT INTO mixed SELECT i, '{setting} {CANARY} ' || i FROM generate_series(1, 20000) i"
            ),
        )?;
    }
    let path = text(&mut client, "SELECT pg_relation_filepath('mixed')")?;
    let bytes = std::fs::read(cluster.data_directory().join(path))?;
    for (setting, shown) in [("off", true), ("auto", false), ("on", false)] {
        let text = format!("{setting} {CANARY}");
        ensure!(holds(&bytes, text.as_bytes()) == shown, "{text}: seen is {}", !shown);
    }
    let rows = text(
        &mut client,
        "SELECT count(*) FROM mixed WHERE t LIKE '% kanarienvogel-auf-zeit ' || i",
    )?;
    ensure!(rows == "60000", "{rows} rows are right");
    drop(client);
    cluster.finish()
}
