//! Writer marks of all processes; see [`crate::writers`].

use crate::pg::mapping::{Region, shared_struct};
use crate::sync::{AtomicU32, Ordering::*, fence};

/// The marks of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Writers {
    memory: Region<(), Slot>,
}

shared_struct! {
    /// The marks of one process, on a cache line that only this process writes.
    #[repr(align(64))]
    pub(crate) struct Slot {
        pub(crate) writing: WriterMark,
        pub(crate) creating: WriterMark,
        /// The PID of this process, if it has called `pg_backup_start()`; see [`crate::backups`].
        pub(crate) backup: AtomicU32,
    }
}

shared_struct! {
    /// A mark: set while a process is doing something with a file.
    pub(crate) struct WriterMark {
        /// Odd while set; incremented at each change.
        number: AtomicU32,
        /// The relfilenumber.
        file: AtomicU32,
    }
}

impl WriterMark {
    /// Sets the mark, before this process looks up the keys of a file.
    #[inline]
    pub(crate) fn begin(&self, file: u32) {
        let before = self.number.load(Relaxed);
        // Release: a process that sees this file also sees what was written to the one before.
        self.file.store(file, Release);
        // Release: a process that sees this number also sees the file, and no older state of this
        // process.
        self.number.store(before.wrapping_add(1 + (before & 1)), Release);
        fence(SeqCst);
    }

    /// Removes the mark.
    #[inline]
    pub(crate) fn end(&self) {
        // Only this process writes here.
        self.number.store(self.number.load(Relaxed).wrapping_add(1) & !1, Release);
    }

    /// The number, if the mark is set for this file, or for any. The caller has stored the file's
    /// key and called [`fence`] before.
    pub(crate) fn set_for(&self, file: Option<u32>) -> Option<u32> {
        let number = self.number.load(Acquire);
        // The file of this number or of a later one; in the latter case the action of this one
        // has ended.
        let its_file = self.file.load(Relaxed);
        let another = file.is_some_and(|file| file != its_file);
        (number & 1 == 1 && !another).then_some(number)
    }

    /// Whether the mark still has this number.
    pub(crate) fn has(&self, number: u32) -> bool {
        self.number.load(Acquire) == number
    }
}

impl Writers {
    /// Marks in this memory, which is zero at first.
    pub(crate) fn new(memory: Region<(), Slot>) -> Writers {
        Writers { memory }
    }

    /// After a crash: no process is writing.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.memory.clear()
    }

    /// The marks of one process.
    #[inline]
    pub(crate) fn slot(&self, process: usize) -> Option<&'static Slot> {
        self.slots().get(process)
    }

    /// The marks of all processes.
    pub(crate) fn slots(&self) -> &'static [Slot] {
        self.memory.entries
    }
}
