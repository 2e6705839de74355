//! Writer marks: which processes are writing a page, or creating a file, at this moment.
//!
//! A process that writes a page first looks up the file's present key. When a file gets another
//! key, a process may have looked just before, and be about to write a page encrypted under the old
//! key. A process that changes the key and then proves that nothing of the old one is left waits
//! for such writers only. A barrier of the server (`WaitForProcSignalBarrier`, which processes
//! accept where they check for interrupts) would also wait for sessions that wait for a standby or
//! for their client, and for an archiver whose command hangs.
//!
//! Each process has its own slot in shared memory, by its number among the server's processes, with
//! one number for each kind of [`Activity`]. The process makes it odd before it looks up the key,
//! and even afterwards; it never has the same odd value twice in a row. Beside it is the file, so
//! that only writers of that file are waited for. So the number is odd from before the lookup until
//! after the write, and
//!
//! - the writer stores the odd number, and then looks up the key;
//! - the other process stores the key, and then reads the numbers.
//!
//! Both have a fence between their two steps. So at least one of them sees what the other has
//! stored: a writer that is not seen has seen the new key. (The same holds for a key stored by a
//! third process: a process that sees it as current comes after that store.)
//!
//! An ERROR between the two leaves the number odd although nothing is being written. The end of the
//! transaction makes it even. Processes without transactions (background writer, checkpointer)
//! return to their main loop, which is visible to others, or write again, with another number.
//!
//! All this is on the page path: no allocation, no lock, no error.

use std::time::{Duration, Instant};

use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};
use crate::pg::{compat, guc, process, processes};
use crate::shmem;
use crate::shmem::writers::{Slot, WriterMark};
use crate::sync::{Ordering::SeqCst, fence};

/// An action between looking up keys and using the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Activity {
    /// A page is encrypted and written.
    Writing,
    /// A key is created for a file, and then the file.
    Creating,
}

const ACTIVITIES: [Activity; 2] = [Activity::Writing, Activity::Creating];

impl Activity {
    #[inline]
    fn mark(self, slot: &Slot) -> &WriterMark {
        match self {
            Activity::Writing => &slot.writing,
            Activity::Creating => &slot.creating,
        }
    }
}

/// The mark of this process. The postmaster has none, and writes nothing.
#[inline]
fn own(activity: Activity) -> Option<&'static WriterMark> {
    Some(activity.mark(shmem::get()?.writers.slot(compat::process_number()?)?))
}

/// Marks that this process is about to look up the keys of a file, given by its number, and to use
/// the result.
#[inline]
pub(crate) fn begin(activity: Activity, file: u32) {
    if let Some(turn) = own(activity) {
        turn.begin(file);
    }
}

/// Marks the end of the action.
#[inline]
pub(crate) fn end(activity: Activity) {
    if let Some(turn) = own(activity) {
        turn.end();
    }
}

/// Ends actions that an ERROR may have interrupted.
pub(crate) fn end_all() {
    ACTIVITIES.into_iter().for_each(end);
}

/// The processes that were in an action when this was made.
pub(crate) struct Others {
    activity: Activity,
    /// Process number, number in its mark, pid.
    busy: Vec<(usize, u32, u32)>,
    since: Instant,
}

impl Others {
    /// The processes that may have looked up the keys of a file (by its number; `None`: any) before
    /// their last change, and are still using the result.
    pub(crate) fn at(activity: Activity, file: Option<u32>) -> Others {
        let mut busy = Vec::new();
        fence(SeqCst);
        let slots = shmem::get().map_or(&[][..], |shared| shared.writers.slots());
        for (process, slot) in slots.iter().enumerate() {
            if let Some(number) = activity.mark(slot).set_for(file) {
                busy.push((process, number, processes::pid(process)));
            }
        }
        Others { activity, busy, since: Instant::now() }
    }

    /// Whether all of them have ended their action.
    pub(crate) fn are_done(&mut self) -> bool {
        let activity = self.activity;
        self.busy.retain(|&(process, before, pid)| {
            let slot = shmem::get().and_then(|shared| shared.writers.slot(process));
            let goes_on = slot.is_some_and(|slot| activity.mark(slot).has(before));
            goes_on && !processes::has_left_its_work(process, pid)
        });
        if self.busy.is_empty() {
            // What they have written is visible after this.
            fence(SeqCst);
        }
        self.busy.is_empty()
    }

    /// Whether they have taken longer than `pagevault.writers_timeout`.
    pub(crate) fn take_too_long(&self) -> bool {
        guc::writers_timeout().is_some_and(|limit| self.since.elapsed() >= limit)
    }

    /// The pid of the first of them.
    pub(crate) fn first(&self) -> Option<u32> {
        self.busy.first().map(|(_, _, pid)| *pid)
    }

    /// The error that names the first of them. In a transaction.
    pub(crate) fn report(&self) -> Report {
        let pid = self.first().unwrap_or_default();
        let (message, consequence) = match self.activity {
            Activity::Writing => (
                format!("process {pid} is still writing a page"),
                "It may write under the key that was replaced, so nothing can be proven before it is done. Nothing is lost: what was written before stays readable.",
            ),
            Activity::Creating => (
                format!("process {pid} is still making a file"),
                "The file may have a key already, so it cannot be told from one that is gone. Nothing was destroyed.",
            ),
        };
        let who = processes::description(pid).unwrap_or_else(|| "It has just ended.".to_owned());
        Report::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, message)
        .detail(format!("{who} {consequence}"))
        .hint("Find out what delays it (pg_stat_activity, the disk), and try again; pagevault.writers_timeout limits the wait.")
    }
}

/// Waits for all processes that may have looked up the keys of a file, or of any file, before their
/// last change, and are still using the result.
///
/// # Errors
/// If a process exceeds `pagevault.writers_timeout`. Raises ERROR if this session is cancelled.
pub(crate) fn await_others(activity: Activity, file: Option<u32>) -> Result<()> {
    let mut others = Others::at(activity, file);
    let mut pause = Duration::from_millis(1);
    while !others.are_done() {
        if others.take_too_long() {
            return Err(others.report());
        }
        process::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(100));
    }
    Ok(())
}
