//! What is noted while a command runs. Commands run within commands (by functions, event triggers),
//! and one that fails may be caught: its subtransaction is rolled back, and the command around it
//! goes on.
//!
//! An ERROR skips the frame that would clean up. So each note knows how deep in subtransactions it
//! was made, and goes with the (sub)transaction that is rolled back.

use pgrx::pg_sys;

/// Notes of commands, those of the innermost one last.
pub(crate) struct Notes<T> {
    list: Vec<(i32, T)>,
}

/// How many notes there were when a command began.
#[derive(Clone, Copy)]
pub(crate) struct Mark(usize);

impl Mark {
    /// Before every note of this transaction.
    pub(crate) const START: Mark = Mark(0);
}

/// How many subtransactions deep this process is; 1 in a transaction that has none.
fn depth() -> i32 {
    // SAFETY: looks at this process's transaction state only.
    unsafe { pg_sys::GetCurrentTransactionNestLevel() }
}

impl<T> Notes<T> {
    pub(crate) const fn new() -> Notes<T> {
        Notes { list: Vec::new() }
    }

    pub(crate) fn push(&mut self, note: T) {
        self.list.push((depth(), note));
    }

    /// The last note.
    pub(crate) fn last(&mut self) -> Option<&mut T> {
        self.list.last_mut().map(|(_, note)| note)
    }

    /// A command begins.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.list.len())
    }

    /// True if there are notes since then.
    pub(crate) fn any_since(&self, mark: Mark) -> bool {
        self.list.len() > mark.0
    }

    /// The notes since then, which are taken away.
    pub(crate) fn take_since(&mut self, mark: Mark) -> Vec<T> {
        let from = mark.0.min(self.list.len());
        self.list.drain(from..).map(|(_, note)| note).collect()
    }

    /// The current subtransaction commits: its notes are those of the one around it.
    pub(crate) fn subtransaction_commits(&mut self) {
        let around = depth() - 1;
        self.list.iter_mut().for_each(|(level, _)| *level = around.min(*level));
    }

    /// The current subtransaction is rolled back.
    pub(crate) fn subtransaction_aborts(&mut self) {
        let current = depth();
        self.list.retain(|(level, _)| *level < current);
    }

    /// The transaction is rolled back.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }
}
