//! Which processes are writing a page, or making a file, at this moment.
//!
//! Who writes a page first looks up the key that the file has now. When a file gets another key,
//! some process may have looked just before, and be about to write what it has sealed under the old
//! one. Whoever changes the key and then wants to prove that nothing of the old one is left waits
//! for those, and for nobody else: not for sessions that wait for a standby or for their client,
//! nor for the archiver whose command hangs, as a barrier of the server would
//! (`WaitForProcSignalBarrier`, which is accepted where a process checks for interrupts).
//!
//! Every process has a place of its own in shared memory, by its number among the server's
//! processes, with a number for each kind of [`Act`]. Before it looks up the key it makes that odd,
//! afterwards even again; it is never the same odd one twice in a row. Beside it stands which file
//! that is, so that only those who write that file are waited for. So the number is odd from before
//! the look until after the write, and
//!
//! - the writer stores the odd number, and then looks up the key;
//! - the other stores the key, and then reads the numbers.
//!
//! Between the two steps stands a fence on either side. So at least one sees what the other has
//! stored: a writer that is not seen has seen the new key. (A key that a third process has stored
//! counts as well: who sees it as current is behind that store.)
//!
//! An ERROR between the two leaves the number odd although nothing is being written. The end of the
//! transaction makes it even; where there is none (background writer, checkpointer) the process
//! goes back to its main loop, which it shows, or writes again, with another number.
//!
//! All this is on the page path: no allocation, no lock, no error.

use std::sync::atomic::{Ordering::*, fence};
use std::time::{Duration, Instant};

use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};
use crate::pg::{compat, guc, process, processes};
use crate::shmem;
use crate::shmem::writers::{Slot, Turn};

/// What takes its time between looking at keys and acting on what was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Act {
    /// A page is sealed and written.
    Writing,
    /// A key is made for a file, and then the file.
    Creating,
}

const ACTS: [Act; 2] = [Act::Writing, Act::Creating];

impl Act {
    #[inline]
    fn turn(self, slot: &Slot) -> &Turn {
        match self {
            Act::Writing => &slot.writing,
            Act::Creating => &slot.creating,
        }
    }
}

/// What this process is at. The postmaster has no such place, and writes nothing.
#[inline]
fn own(act: Act) -> Option<&'static Turn> {
    Some(act.turn(shmem::get()?.writers.slot(compat::process_number()?)?))
}

/// From here on this process looks at the keys of a file, given by its number, to act on what it
/// sees.
#[inline]
pub(crate) fn begin(act: Act, file: u32) {
    if let Some(turn) = own(act) {
        let before = turn.number.load(Relaxed);
        turn.file.store(file, Relaxed);
        // Release: with this number the file is seen, and what this process shows of itself is not
        // older.
        turn.number.store(before.wrapping_add(1 + (before & 1)), Release);
        fence(SeqCst);
    }
}

/// What was begun is done.
#[inline]
pub(crate) fn end(act: Act) {
    if let Some(Turn { number, .. }) = own(act) {
        // Nobody else writes here.
        number.store(number.load(Relaxed).wrapping_add(1) & !1, Release);
    }
}

/// Whatever an ERROR may have left begun is not going on any more.
pub(crate) fn end_all() {
    ACTS.into_iter().for_each(end);
}

/// Those that were at something when this was made.
pub(crate) struct Others {
    act: Act,
    /// Number of the process, that of its turn, its pid.
    busy: Vec<(usize, u32, u32)>,
    since: Instant,
}

impl Others {
    /// Whoever may have looked at the keys of a file (by its number; or of any) before they were as
    /// they are now, and acts on it.
    pub(crate) fn at(act: Act, file: Option<u32>) -> Others {
        let mut busy = Vec::new();
        fence(SeqCst);
        let slots = shmem::get().map_or(&[][..], |shared| shared.writers.slots());
        for (process, slot) in slots.iter().enumerate() {
            let turn = act.turn(slot);
            let number = turn.number.load(Acquire);
            // That of this number, or of a later one: then what this one was for is done.
            let its_file = turn.file.load(Relaxed);
            let another = file.is_some_and(|file| file != its_file);
            if number & 1 == 1 && !another {
                busy.push((process, number, processes::pid(process)));
            }
        }
        Others { act, busy, since: Instant::now() }
    }

    /// True once all of them are done.
    pub(crate) fn are_done(&mut self) -> bool {
        let act = self.act;
        self.busy.retain(|&(process, before, pid)| {
            let slot = shmem::get().and_then(|shared| shared.writers.slot(process));
            let goes_on = slot.is_some_and(|slot| act.turn(slot).number.load(Acquire) == before);
            goes_on && !processes::has_left_its_work(process, pid)
        });
        if self.busy.is_empty() {
            // What they have written is seen.
            fence(SeqCst);
        }
        self.busy.is_empty()
    }

    /// True when they have taken longer than `pagevault.writers_timeout`.
    pub(crate) fn take_too_long(&self) -> bool {
        guc::writers_timeout().is_some_and(|limit| self.since.elapsed() >= limit)
    }

    /// The number of the first of them.
    pub(crate) fn first(&self) -> Option<u32> {
        self.busy.first().map(|(_, _, pid)| *pid)
    }

    /// Says who it is. In a transaction.
    pub(crate) fn report(&self) -> Report {
        let pid = self.first().unwrap_or_default();
        let (message, danger) = match self.act {
            Act::Writing => (
                format!("process {pid} is still writing a page"),
                "It may write under the key that was replaced, so nothing can be proven before it is done. Nothing is lost: what was written before stays readable.",
            ),
            Act::Creating => (
                format!("process {pid} is still making a file"),
                "The file may have a key already, so it cannot be told from one that is gone. Nothing was destroyed.",
            ),
        };
        let who = processes::description(pid).unwrap_or_else(|| "It has just ended.".to_owned());
        Report::new(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, message)
        .detail(format!("{who} {danger}"))
        .hint("See what holds it up (pg_stat_activity, the disk), and try again; pagevault.writers_timeout says how long to wait for it.")
    }
}

/// Waits until whoever may have looked at the keys of a file, or of any, before they were as they
/// are now is done with what it saw.
///
/// # Errors
/// When somebody is not within `pagevault.writers_timeout`. Raises ERROR when this session is told
/// to stop.
pub(crate) fn await_others(act: Act, file: Option<u32>) -> Result<()> {
    let mut others = Others::at(act, file);
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
