//! Inserts rows one by one on the current primary, and records which were acknowledged.

use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, ensure};
use postgres::NoTls;

use super::CANARY;
use super::nodes::{Group, Node};

/// Inserts rows until it is dropped.
pub(crate) struct Load {
    state: Arc<State>,
    writer: Option<JoinHandle<()>>,
    pgbench: Option<Child>,
}

#[derive(Default)]
struct State {
    end: AtomicBool,
    acknowledged: Mutex<Vec<u64>>,
    /// Rows whose commit is uncertain.
    unknown: AtomicU64,
}

impl Load {
    /// Starts inserting into the table `ledger`.
    pub(crate) fn start(group: &Group) -> Load {
        let state = Arc::new(State::default());
        let (own, servers) = (Arc::clone(&state), group.writable());
        let writer = std::thread::spawn(move || write(&own, &servers));
        Load { state, writer: Some(writer), pgbench: None }
    }

    /// Runs pgbench on a node as well, until that node stops or the next call.
    pub(crate) fn pgbench_on(&mut self, group: &Group, node: usize) -> Result<()> {
        self.end_pgbench();
        self.pgbench = Some(group.pgbench(node).args(["-n", "-c", "2", "-T", "600"]).spawn()?);
        Ok(())
    }

    fn end_pgbench(&mut self) {
        if let Some(mut child) = self.pgbench.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.state.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Waits until a hundred more rows are acknowledged.
    pub(crate) fn goes_on(&self, group: &Group) -> Result<()> {
        let before = self.count();
        group.eventually("rows", |_| {
            ensure!(self.count() >= before + 100, "{} more of 100", self.count() - before);
            Ok(())
        })
    }

    /// Checks that a node has every row acknowledged so far, and no other.
    pub(crate) fn is_on(&self, node: &Node) -> Result<()> {
        let acknowledged =
            self.state.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ensure!(!acknowledged.is_empty(), "nothing was written");
        let list = acknowledged.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let lost = node.text(&format!(
            "SELECT count(*) FROM unnest('{{{list}}}'::bigint[]) wanted
             WHERE NOT EXISTS (SELECT FROM ledger WHERE id = wanted AND digest = md5(id::text))"
        ))?;
        ensure!(
            lost == "0",
            "{lost} of {} acknowledged rows are not on {}",
            acknowledged.len(),
            node.name
        );
        Ok(())
    }

    /// Stops, and checks that a node has the acknowledged rows and no others except uncertain ones.
    pub(crate) fn finish(mut self, node: &Node) -> Result<()> {
        self.end_pgbench();
        self.state.end.store(true, Ordering::Relaxed);
        if let Some(writer) = self.writer.take() {
            writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
        }
        self.is_on(node)?;
        let rows: u64 = node.text("SELECT count(*) FROM ledger")?.parse()?;
        let (known, unknown) = (self.count() as u64, self.state.unknown.load(Ordering::Relaxed));
        ensure!(
            (known..=known + unknown).contains(&rows),
            "{rows} rows of {known} or {unknown} more"
        );
        Ok(())
    }
}

impl Drop for Load {
    /// The writer stops at the latest when its servers are gone.
    fn drop(&mut self) {
        self.state.end.store(true, Ordering::Relaxed);
        self.end_pgbench();
    }
}

fn write(state: &State, servers: &postgres::Config) {
    let mut next = 1;
    while !state.end.load(Ordering::Relaxed) {
        let Ok(mut client) = servers.connect(NoTls) else {
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        while !state.end.load(Ordering::Relaxed) {
            let row = format!(
                "INSERT INTO ledger VALUES ({next}, md5('{next}'), '{} ' || {next})",
                CANARY
            );
            let written = client.batch_execute(&row);
            let mut acknowledged =
                state.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
            next += 1;
            if written.is_err() {
                state.unknown.fetch_add(1, Ordering::Relaxed);
                break;
            }
            acknowledged.push(next - 1);
        }
    }
}
