//! Writer marks of all processes; see [`crate::writers`].

use std::sync::atomic::AtomicU32;

use crate::pg::mapping::{Region, shared_struct};

/// The marks of all processes.
#[derive(Clone, Copy)]
pub(crate) struct Writers {
    memory: Region<(), Slot>,
}

shared_struct! {
    /// The marks of one process, on a cache line that only this process writes.
    #[repr(align(64))]
    pub(crate) struct Slot {
        pub(crate) writing: Turn,
        pub(crate) creating: Turn,
    }
}

shared_struct! {
    /// A mark: set while a process is doing something with a file.
    pub(crate) struct Turn {
        /// Odd while set; incremented at each change.
        pub(crate) number: AtomicU32,
        /// The relfilenumber.
        pub(crate) file: AtomicU32,
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
