//! What each process is writing at this moment; see [`crate::writers`].

use std::sync::atomic::AtomicU32;

use crate::pg::mapping::{Region, shared_struct};

/// What all processes are at.
#[derive(Clone, Copy)]
pub(crate) struct Writers {
    memory: Region<(), Slot>,
}

shared_struct! {
    /// What one process is at; a cache line, which it alone writes.
    #[repr(align(64))]
    pub(crate) struct Slot {
        pub(crate) writing: Turn,
        pub(crate) creating: Turn,
    }
}

shared_struct! {
    /// A process begins and ends to do something.
    pub(crate) struct Turn {
        /// Odd from the beginning to the end, each time another number.
        pub(crate) number: AtomicU32,
        /// The file that it does it with.
        pub(crate) file: AtomicU32,
    }
}

impl Writers {
    /// As many processes as there is room for in this memory, zero at first.
    pub(crate) fn new(memory: Region<(), Slot>) -> Writers {
        Writers { memory }
    }

    /// After a crash: nobody is writing.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.memory.clear()
    }

    /// What one process is at.
    #[inline]
    pub(crate) fn slot(&self, process: usize) -> Option<&'static Slot> {
        self.slots().get(process)
    }

    /// What each process is at.
    pub(crate) fn slots(&self) -> &'static [Slot] {
        self.memory.entries
    }
}
