//! `postgres --single`: there are no other processes, so no job runs.

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::assert_sealed;

#[test]
fn a_requested_job_runs_when_the_server_starts() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE TABLE large (id int, name text);
         INSERT INTO large SELECT i, md5(i::text) FROM generate_series(1, 300000) i",
    )?;
    cluster.stop(StopMode::Fast)?;
    let mut server = cluster.installation().command("postgres");
    server.args(["--single", "-D"]).arg(cluster.data_directory()).arg("postgres");
    let mut server =
        server.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let commands = "SELECT pagevault.encrypt('large')\nSELECT count(*) FROM large\n\
                    CREATE TABLE small AS SELECT 1 AS id\nSELECT pagevault.encrypt('small')\n";
    server.stdin.take().context("its input")?.write_all(commands.as_bytes())?;
    let output = server.wait_with_output()?;
    let response = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success() && !response.contains("ERROR"), "{response}");
    ensure!(response.contains("count = \"300000\""), "{response}");
    cluster.start_server()?;
    assert_sealed(&cluster.family_files("small")?)?;
    let done = cluster.text("SELECT pagevault.wait_for_rekey('large'::regclass, '1min')")?;
    ensure!(done == "t", "{done}\n{response}");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("large")?)?;
    ensure!(cluster.text("SELECT count(DISTINCT name) FROM large")? == "300000", "rows");
    cluster.finish()
}
