//! Regions of shared memory: the extension's own sources, and what the models ask of them.

#[path = "../../extension/src/shmem/writers.rs"]
#[allow(dead_code, unreachable_pub, reason = "not all of it is modelled")]
mod writers;

#[path = "../../extension/src/shmem/written_over.rs"]
#[allow(dead_code, unreachable_pub, reason = "not all of it is modelled")]
mod written_over;

use pagevault_keystore::{DataKeyVersion, RelFile};

use self::writers::{Slot, Writers};
use self::written_over::WrittenOver;
use crate::pg::mapping::Region;

/// What two processes are at.
#[derive(Clone, Copy)]
pub struct WriterMarks(Writers);

impl Default for WriterMarks {
    fn default() -> Self {
        Self(Writers::new(Region::new(2)))
    }
}

impl WriterMarks {
    fn slot(self, process: usize) -> &'static Slot {
        &self.0.slots()[process]
    }

    /// `writers::begin`
    pub fn begin(self, process: usize, file: u32) {
        self.slot(process).writing.begin(file);
    }

    /// `writers::end`
    pub fn end(self, process: usize) {
        self.slot(process).writing.end();
    }

    /// `WriterMark::set_for`
    pub fn set_for(self, process: usize, file: u32) -> Option<u32> {
        self.slot(process).writing.set_for(Some(file))
    }

    /// `WriterMark::has`
    pub fn has(self, process: usize, number: u32) -> bool {
        self.slot(process).writing.has(number)
    }
}

/// Notes of pages that recovery would have written over.
#[derive(Clone, Copy)]
pub struct Notes(WrittenOver);

impl Default for Notes {
    fn default() -> Self {
        Self(WrittenOver::new(Region::new(2)))
    }
}

impl Notes {
    /// `written_over::note` of the extension: false if no WAL will bring the key any more.
    pub fn note(self, file: RelFile, version: DataKeyVersion, block: u32) -> bool {
        self.0.note(file, version, block);
        !self.0.is_settled()
    }

    /// `placeholders::require_none`: the notes that it finds.
    pub fn settle(self) -> Vec<(RelFile, DataKeyVersion, u32)> {
        self.0.settle();
        self.notes()
    }

    /// All notes.
    pub fn notes(self) -> Vec<(RelFile, DataKeyVersion, u32)> {
        self.0.notes().map(|note| (note.file, note.version, note.block)).collect()
    }
}
