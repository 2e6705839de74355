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
    /// First and last rows of each series without a gap.
    acknowledged: Mutex<Vec<(u64, u64)>>,
    /// Rows whose commit is uncertain.
    unknown: AtomicU64,
    /// Milliseconds between two rows.
    pace: AtomicU64,
    paused: AtomicBool,
    /// The writer has seen that it is to pause.
    is_idle: AtomicBool,
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
        self.pgbench_with(group, node, &[])
    }

    /// The same with other arguments.
    pub(crate) fn pgbench_with(
        &mut self,
        group: &Group,
        node: usize,
        arguments: &[&str],
    ) -> Result<()> {
        self.end_pgbench();
        let mut command = group.pgbench(node);
        self.pgbench = Some(command.args(["-n", "-c", "2", "-T", "600"]).args(arguments).spawn()?);
        Ok(())
    }

    /// Inserts a row in so many milliseconds at most.
    pub(crate) fn set_pace(&self, milliseconds: u64) {
        self.state.pace.store(milliseconds, Ordering::Relaxed);
    }

    /// Nothing is written from now on, until `resume`.
    pub(crate) fn pause(&mut self, group: &Group) -> Result<()> {
        self.end_pgbench();
        self.state.paused.store(true, Ordering::Relaxed);
        group.eventually("the writer pauses", |_| {
            ensure!(self.state.is_idle.load(Ordering::Acquire), "its row is not acknowledged");
            Ok(())
        })
    }

    pub(crate) fn resume(&self) {
        self.state.is_idle.store(false, Ordering::Relaxed);
        self.state.paused.store(false, Ordering::Release);
    }

    fn end_pgbench(&mut self) {
        if let Some(mut child) = self.pgbench.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn acknowledged(&self) -> Vec<(u64, u64)> {
        self.state.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.acknowledged().iter().map(|(first, last)| last + 1 - first).sum()
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
        let acknowledged = self.acknowledged();
        ensure!(!acknowledged.is_empty(), "nothing was written");
        let list = |end: fn(&(u64, u64)) -> u64| {
            acknowledged.iter().map(|row| end(row).to_string()).collect::<Vec<_>>().join(",")
        };
        let lost = node.text(&format!(
            "SELECT count(*)
             FROM unnest('{{{}}}'::bigint[], '{{{}}}'::bigint[]) series (one, other),
                 generate_series(one, other) wanted
             WHERE NOT EXISTS (SELECT FROM ledger WHERE id = wanted AND digest = md5(id::text))",
            list(|(first, _)| *first),
            list(|(_, last)| *last)
        ))?;
        ensure!(
            lost == "0",
            "{lost} of {} acknowledged rows are not on {}",
            acknowledged.iter().map(|(first, last)| last + 1 - first).sum::<u64>(),
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
        self.is_all_on(node)
    }

    /// Checks the same of one that is paused.
    pub(crate) fn is_all_on(&self, node: &Node) -> Result<()> {
        self.is_on(node)?;
        let rows: u64 = node.text("SELECT count(*) FROM ledger")?.parse()?;
        let (known, unknown) = (self.count(), self.state.unknown.load(Ordering::Relaxed));
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
            // There is nothing under way.
            state.is_idle.store(state.paused.load(Ordering::Acquire), Ordering::Release);
            continue;
        };
        while !state.end.load(Ordering::Relaxed) {
            if state.paused.load(Ordering::Acquire) {
                state.is_idle.store(true, Ordering::Release);
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
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
            match acknowledged.last_mut() {
                Some((_, last)) if *last + 2 == next => *last += 1,
                _ => acknowledged.push((next - 1, next - 1)),
            }
            drop(acknowledged);
            let pace = state.pace.load(Ordering::Relaxed);
            if pace > 0 {
                std::thread::sleep(Duration::from_millis(pace));
            }
        }
    }
}
