//! Power failures: writes since the last checkpoint may be missing on disk, each sector of 512
//! bytes independently.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, DataFile, StopMode};

use super::meanwhile::end;
use super::{SUM, cluster, versions};

const SECTOR: usize = 512;

/// The files of `t` and its related relations, as of a checkpoint.
pub(super) struct AtCheckpoint(Vec<(DataFile, Vec<u8>)>);

impl AtCheckpoint {
    pub(super) fn of(cluster: &Cluster) -> Result<AtCheckpoint> {
        cluster.sql("CHECKPOINT")?;
        AtCheckpoint::since_start(cluster)
    }

    /// As of the start of the server: recovery ends with a checkpoint.
    pub(super) fn since_start(cluster: &Cluster) -> Result<AtCheckpoint> {
        let mut files = Vec::new();
        for name in cluster.text(super::FAMILY)?.split(' ') {
            files.extend(cluster.files(name)?);
        }
        let read = files.into_iter().map(|file| Ok((file.bytes()?, file)));
        let read: Result<Vec<_>> = read.collect();
        Ok(AtCheckpoint(read?.into_iter().map(|(bytes, file)| (file, bytes)).collect()))
    }

    /// Kills the server and restores half of the sectors written since. Returns their number.
    pub(super) fn cut_power(&self, cluster: &Cluster, seed: u64) -> Result<usize> {
        cluster.kill()?;
        let (mut torn, mut random) = (0, seed);
        for (file, old) in &self.0 {
            let mut new = file.bytes()?;
            for (at, sector) in new.chunks_mut(SECTOR).enumerate() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let Some(before) = old.get(at * SECTOR..at * SECTOR + sector.len()) else { break };
                if random >> 63 == 0 && *sector != *before {
                    sector.copy_from_slice(before);
                    torn += 1;
                }
            }
            std::fs::write(&file.path, new)?;
        }
        Ok(torn)
    }
}

#[test]
fn the_power_fails() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 4MB\nshared_buffers = 1MB")?;
    let before = cluster.text(SUM)?;
    for round in 0..3_u16 {
        let old = AtCheckpoint::of(&cluster)?;
        let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
        let far = format!(
            "SELECT (pages_done > {})::text FROM pagevault.rekey_jobs WHERE job = {job}",
            300 * (round + 1)
        );
        cluster.eventually(&far, "true")?;
        // Lets many pages reach the kernel.
        cluster.sql("SELECT pg_sleep(0.3)")?;
        let torn = old.cut_power(&cluster, u64::from(round) + 1)?;
        ensure!(torn > 0 || round > 0, "nothing was written: the test proves nothing");
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == before, "round {round}: contents differ");
        end(&cluster, &job)?;
        cluster.set(&[("pagevault.rekey_rate", "4MB")])?;
        // A key created just before the power failure may not be recorded as the job's yet; then
        // there is one more.
        for (name, versions) in versions(&cluster)? {
            ensure!(versions.len() == 1 && versions[0] >= round + 2, "{name}: {versions:?}");
        }
    }
    cluster.stop(StopMode::Fast)?;
    cluster.pg_checksums()?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}
