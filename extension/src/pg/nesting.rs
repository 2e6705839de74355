//! Notes taken while a command runs. Commands can run within commands (through functions, event
//! triggers), and the error of an inner one can be caught: its subtransaction is rolled back, and
//! the outer command continues.
//!
//! An ERROR skips the frame that would clean up. So each note has the nesting level of its
//! subtransaction, and is removed when that (sub)transaction is rolled back.

use pgrx::pg_sys;

/// Notes of commands; those of the innermost command are last.
pub(crate) struct Notes<T> {
    list: Vec<(i32, T)>,
}

/// The number of notes when a command began.
#[derive(Clone, Copy)]
pub(crate) struct Mark(usize);

impl Mark {
    /// Before all notes of the transaction.
    pub(crate) const START: Mark = Mark(0);
}

/// Nesting level of subtransactions; 1 in a transaction without any.
fn depth() -> i32 {
    // SAFETY: reads this process's transaction state only.
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

    /// Marks the beginning of a command.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.list.len())
    }

    /// True if there are notes after `mark`.
    pub(crate) fn any_since(&self, mark: Mark) -> bool {
        self.list.len() > mark.0
    }

    /// True if one of the notes satisfies `wanted`.
    pub(crate) fn any(&self, wanted: impl Fn(&T) -> bool) -> bool {
        self.list.iter().any(|(_, note)| wanted(note))
    }

    /// The last note that satisfies `wanted`.
    pub(crate) fn find_last(&self, wanted: impl Fn(&T) -> bool) -> Option<&T> {
        self.list.iter().rev().map(|(_, note)| note).find(|note| wanted(note))
    }

    /// Removes and returns the notes after `mark`.
    pub(crate) fn drain_since(&mut self, mark: Mark) -> Vec<T> {
        let from = mark.0.min(self.list.len());
        self.list.drain(from..).map(|(_, note)| note).collect()
    }

    /// The current subtransaction commits: its notes now belong to its parent.
    pub(crate) fn subtransaction_commits(&mut self) {
        let parent = depth() - 1;
        self.list.iter_mut().for_each(|(level, _)| *level = parent.min(*level));
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
