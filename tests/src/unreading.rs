//! A client that does not read what its server sends.

use std::process::{Child, Stdio};

use anyhow::Result;

use crate::Cluster;

/// A client that reads nothing of a large result; its session is in `secure_write` with all its
/// locks.
#[derive(Debug)]
pub struct UnreadingClient(Child);

impl UnreadingClient {
    /// Returns when the session waits. The query must return more than the buffers of socket and
    /// pipe hold.
    ///
    /// # Errors
    /// When there is no such session after a while.
    pub fn new(cluster: &Cluster, database: &str, query: &str) -> Result<UnreadingClient> {
        let copy = format!("COPY ({query}) TO STDOUT");
        let mut psql = cluster.program("psql");
        psql.args(["-q", "-d", database, "-c", &copy]).stdout(Stdio::piped());
        let unreading = UnreadingClient(psql.spawn()?);
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite'";
        cluster.eventually(waits, "1")?;
        Ok(unreading)
    }

    /// The client's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for UnreadingClient {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
