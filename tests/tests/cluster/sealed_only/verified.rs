//! What `verify()` says while a job changes which pages are refused: no page of the server's own is
//! called refused.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::text;
use pagevault_tests::{Cluster, Settings};

use super::{cluster, is_sealed_only, wait};

const STATES: &str = "SELECT string_agg(concat_ws(' ', state, data_key_version), ',')
    FROM pagevault.verify('t') WHERE relation = 't'::regclass AND fork = 'main'";

/// What `verify()` says if a job runs from beginning to end while it is at a fault point.
fn states_with_job(cluster: &Cluster, point: &str, job: &str) -> Result<String> {
    let point = format!("{point} {}", cluster.text("SELECT pg_relation_filenode('t')")?);
    cluster.stop_at(&point)?;
    let mut client = cluster.client()?;
    let verifying = std::thread::spawn(move || text(&mut client, STATES));
    cluster.stopped_at(&point)?;
    let done = wait(cluster, job);
    cluster.resume();
    let states = verifying.join().ok().context("the session's thread")??;
    done.map(|()| states)
}

#[test]
fn pages_that_were_right_when_they_were_read_are_not_refused() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings.conf("autovacuum = off"))?;
    cluster.sql("CREATE EXTENSION IF NOT EXISTS pagevault; CHECKPOINT")?;
    ensure!(is_sealed_only(&cluster, "t")?);
    // The job proves that no page is left under the key under which the pages were read.
    let rotate = "SELECT pagevault.rotate_data_key('t')";
    let states = states_with_job(&cluster, "verify.counted", rotate)?;
    ensure!(states == "encrypted 1", "rotated after the reading: {states}");
    ensure!(cluster.text(STATES)? == "encrypted 2", "{}", cluster.text(STATES)?);
    // The job writes in plaintext what was encrypted only when verify() began.
    let decrypt = "SELECT pagevault.decrypt('t')";
    let states = states_with_job(&cluster, "verify.begins", decrypt)?;
    ensure!(states == "plaintext", "decrypted before the reading: {states}");
    // And the other way round.
    let encrypt = "SELECT pagevault.encrypt('t')";
    let states = states_with_job(&cluster, "verify.counted", encrypt)?;
    ensure!(states == "plaintext", "encrypted after the reading: {states}");
    ensure!(cluster.text(STATES)? == "encrypted 3", "{}", cluster.text(STATES)?);
    cluster.finish()
}
