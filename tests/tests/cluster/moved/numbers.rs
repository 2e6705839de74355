//! Files with the number of a relation of a moved database, and another fate.

use super::*;
use pagevault_tests::installation::run;

const DESTROYED: &str =
    "SELECT item || ' ' || file FROM pagevault.shred_former_files('app') WHERE item <> 'notice'";

/// The file of `t`, below the data directory.
fn path_of_t(cluster: &Cluster) -> Result<String> {
    text(&mut cluster.client_to("app")?, "SELECT pg_relation_filepath('t')")
}

/// A crash while the server removes the files at the former place leaves some (`movedb`,
/// dbcommands.c). No relation has them, so they protect no keys.
#[test]
fn files_that_a_move_has_left_keep_no_keys() -> Result<()> {
    let (cluster, _keys) = with_app(&["there"])?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")?;
    run_sql(&mut client, "SELECT pagevault.encrypt('t'); CHECKPOINT")?;
    drop(client);
    let former = path_of_t(&cluster)?;
    let left = cluster.data_directory().join(&former);
    let pages = fs::read(&left)?;
    move_app(&cluster, "there")?;
    let directory = left.parent().context("a directory")?;
    fs::create_dir_all(directory)?;
    fs::write(&left, pages)?;
    [directory, &left].iter().try_for_each(|path| cluster.installation().give(path))?;
    let moved = path_of_t(&cluster)?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "DROP TABLE t; CHECKPOINT")?;
    let rows = column(&mut client, DESTROYED)?;
    ensure!(rows.contains(&format!("destroyed {moved}")), "{rows:?}");
    ensure!(rows.contains(&format!("same key {former}")), "{rows:?}");
    cluster.finish()
}

/// When OIDs begin again, a relation at the former place may get the number of one that was moved.
#[test]
fn a_later_relation_with_the_number_of_a_moved_one_loses_its_key() -> Result<()> {
    let (cluster, _keys) = with_app(&["there"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")?;
    // Its OID, which is taken, and the number of its file are the same until then.
    in_app("SELECT pagevault.encrypt('t')")?;
    in_app("TRUNCATE t; INSERT INTO t SELECT generate_series(1, 1000)")?;
    let former = path_of_t(&cluster)?;
    move_app(&cluster, "there")?;
    let number = "SELECT pg_relation_filenode('t')";
    let number: u32 = text(&mut cluster.client_to("app")?, number)?.parse()?;
    cluster.stop(StopMode::Fast)?;
    let mut reset = cluster.program("pg_resetwal");
    run(reset.args(["-o", &(number - 20).to_string(), "-D"]).arg(cluster.data_directory()))?;
    cluster.start_server()?;
    let mut client = cluster.client_to("app")?;
    while text(&mut client, "SELECT lo_creat(-1)")? != (number - 1).to_string() {}
    run_sql(&mut client, "CREATE TABLE later (id int) TABLESPACE pg_default")?;
    let later = text(&mut client, "SELECT pg_relation_filepath('later')")?;
    ensure!(later == former, "{later} instead of {former}");
    run_sql(&mut client, "SELECT pagevault.encrypt('later'); INSERT INTO later VALUES (1)")?;
    run_sql(&mut client, "DROP TABLE later; CHECKPOINT; SELECT pagevault.rotate_data_key('t')")?;
    run_sql(&mut client, "SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    let rows = column(&mut client, DESTROYED)?;
    ensure!(rows.contains(&format!("destroyed {former}")), "{rows:?}");
    let sum = text(&mut client, "SELECT sum(id) FROM t")?;
    ensure!(sum == "500500", "{sum}");
    drop(client);
    cluster.restart()?;
    let sum = text(&mut cluster.client_to("app")?, "SELECT sum(id) FROM t")?;
    ensure!(sum == "500500", "{sum} after a restart");
    cluster.finish()
}
