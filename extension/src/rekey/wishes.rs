//! Databases with jobs to do: told by those who commit them, heard by the launcher of workers.

use std::sync::atomic::{AtomicU32, Ordering::*};

use crate::keys::shared;
use crate::pg::process;

/// Words of shared memory: the launcher's process, "look everywhere", and so many databases.
pub(crate) const WORDS: usize = 2 + DATABASES;
const LAUNCHER: usize = 0;
const EVERYWHERE: usize = 1;
const DATABASES: usize = 62;

fn words() -> &'static [AtomicU32] {
    shared::get().map_or(&[], |shared| shared.control.rekey_wishes())
}

/// This process is the launcher.
pub(crate) fn attend() {
    if let Some(launcher) = words().first() {
        launcher.store(std::process::id(), Release);
    }
}

/// Asks for workers in a database. Cannot fail: called when the job is committed already.
pub(crate) fn wish(database: u32) {
    let words = words();
    let Some((head, databases)) = words.split_at_checked(2) else { return };
    let noted = databases.iter().any(|slot| {
        slot.compare_exchange(0, database, AcqRel, Acquire).is_ok()
            || slot.load(Acquire) == database
    });
    if !noted {
        head[EVERYWHERE].store(1, Release);
    }
    process::wake(head[LAUNCHER].load(Acquire));
}

/// What has been asked for since the last call: the databases, and whether to look in all of them.
pub(crate) fn take() -> (Vec<u32>, bool) {
    let Some((head, databases)) = words().split_at_checked(2) else { return (Vec::new(), false) };
    let everywhere = head[EVERYWHERE].swap(0, AcqRel) != 0;
    let wished = databases.iter().map(|slot| slot.swap(0, AcqRel)).filter(|&oid| oid != 0);
    (wished.collect(), everywhere)
}
