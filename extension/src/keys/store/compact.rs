//! Rewriting key files with only what is still needed.

use std::time::{Duration, Instant};

use pagevault_keystore::compaction::{self, Room};
use pagevault_keystore::log::{self, Log};
use pagevault_keystore::state::State;
use pagevault_keystore::{Record, Scope, wrappings};
use pgrx::prelude::PgLogLevel;

use super::failures::keystore_failure;
use super::persist::{read, state_of};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Result, internal};
use crate::pg::{process, wal};
use crate::{backups, fault, keystore_dir, shmem};

/// Rewrites the log of `scope` with only what is still needed, so that destroyed keys are no longer
/// in the file. (Remains of the old file on the disk are not erased.) A base backup may be in
/// progress; so older wrappings of data keys, and the order of records, are kept.
pub(crate) fn compact(lock: &KeystoreLock, scope: Scope) -> Result<()> {
    compact_changed(lock, scope, |_| true)
}

/// The same without what `change` takes out of the log's state; nothing is done if it returns
/// false.
pub(crate) fn compact_changed(
    lock: &KeystoreLock,
    scope: Scope,
    change: impl FnOnce(&mut State) -> bool,
) -> Result<()> {
    rewrite(lock, scope, Room::AsBefore, |_, state| change(state))
}

/// The same if `wanted` says so, with as much room as `room` says.
fn rewrite(
    _lock: &KeystoreLock,
    scope: Scope,
    room: Room,
    wanted: impl FnOnce(&[Vec<Record>], &mut State) -> bool,
) -> Result<()> {
    let control = &shmem::required()?.control;
    let Some(position) = control.position(scope) else { return Ok(()) };
    let storage = keystore_dir::storage()?;
    let batches = read(&storage, scope, log::batches)?.unwrap_or_default();
    let mut state = state_of(batches.iter().flatten().cloned())?;
    if !wanted(&batches, &mut state) {
        return Ok(());
    }
    let folded = state.records(scope);
    drop(state);
    let kept = wrappings::with_older(&folded, batches.iter().flatten());
    let batches = compaction::arrange(&kept, &batches, room);
    // A rewritten log is settled as a whole.
    wal::flush(control.logged());
    let mut log = Log::resume(&storage, position);
    fault::point("keys.compaction");
    log.compact_to(&batches).map_err(|e| keystore_failure(&e))?;
    control
        .set_position(&log.position())
        .map_err(|_| internal("a key file has lost its place".to_owned()))
}

/// Whether the cluster's key file had, and still has, wrappings of database keys that are not in
/// force any more.
#[derive(Clone, Copy)]
pub(crate) struct FormerWrappings {
    pub(crate) were_there: bool,
    pub(crate) are_left: bool,
}

/// Takes wrappings of database keys that are not in force any more out of the cluster's key file:
/// the master keys that made them would open later copies of it. They are left if a base backup is
/// in progress, or if the data directory is not consistent yet.
///
/// A server that replays WAL from before needs none of them: it unlocks with what is in force, and
/// redo does not bring back older records ([`crate::keys::redo`]), because the log keeps the
/// address of its last one ([`Log::compact_to`]).
pub(crate) fn remove_former_wrappings(lock: &KeystoreLock) -> Result<FormerWrappings> {
    let must_wait =
        backups::any() || process::in_recovery() && !shmem::required()?.control.was_consistent();
    let mut were_there = false;
    rewrite(lock, Scope::CLUSTER, Room::Any, |batches, _| {
        were_there = wrappings::has_former_of_database_keys(batches.iter().flatten());
        were_there && !must_wait
    })?;
    Ok(FormerWrappings { were_there, are_left: were_there && must_wait })
}

/// Pause between looks.
const PAUSE: Duration = Duration::from_secs(10);

/// What the worker remembers that removes what could not be removed at once.
#[derive(Default)]
pub(crate) struct Leftovers {
    last_look: Option<Instant>,
    /// The end of the log, as of a look that found nothing.
    clean: Option<(u32, u64)>,
}

impl Leftovers {
    /// When the next look is due.
    pub(crate) fn due_in(&self) -> Duration {
        self.last_look.map_or(Duration::ZERO, |look| PAUSE.saturating_sub(look.elapsed()))
    }

    /// In the worker.
    pub(crate) fn run_if_due(&mut self) {
        if !self.due_in().is_zero() {
            return;
        }
        if let Err(report) = self.run() {
            report.send(PgLogLevel::WARNING);
        }
        self.last_look = Some(Instant::now());
    }

    fn run(&mut self) -> Result<()> {
        let Some(shared) = shmem::get() else { return Ok(()) };
        let end = || shared.control.position(Scope::CLUSTER).map(|log| (log.generation, log.end));
        let lock = KeystoreLock::acquire();
        if end() == self.clean {
            return Ok(());
        }
        let found = remove_former_wrappings(&lock)?;
        self.clean = if found.are_left { None } else { end() };
        Ok(())
    }
}
