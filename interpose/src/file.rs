//! A program in a file, which is examined without being started.

use std::collections::HashMap;

use crate::calls;
use crate::elf::{Elf, Facts, Segment};
use crate::error::Error;
use crate::find::Region;
use crate::program::Program;

const WORD: usize = size_of::<usize>();

/// Where a position independent program is assumed to be loaded. Not where it was linked: there the
/// addends of its relocations, which are read-only data too, would look like tables.
const BIAS: u64 = 0x5555_5555_4000;

/// What the dynamic linker would make of the file of a program. Tells
/// whether a [`crate::Plan`] would find its parts in it.
#[derive(Debug)]
pub struct ProgramFile {
    path: String,
    elf: Elf,
    facts: Facts,
    file: Vec<u8>,
    bias: u64,
    /// Words that get an address of the program, by linked address; without the bias.
    relocated: HashMap<u64, u64>,
}

impl ProgramFile {
    /// Parses the bytes of a file; the path is for messages.
    ///
    /// # Errors
    ///
    /// [`Error::Elf`]
    pub fn new(path: &str, file: Vec<u8>) -> Result<ProgramFile, Error> {
        let parts =
            || Ok((Elf::parse_file(&file)?, Facts::of_file(&file)?, Elf::relocated_words(&file)?));
        let (elf, facts, relocated) =
            parts().map_err(|cause| Error::Elf { executable: path.to_owned(), cause })?;
        let bias = if facts.position_independent { BIAS } else { 0 };
        Ok(ProgramFile { path: path.to_owned(), elf, facts, file, bias, relocated })
    }

    /// How it was built.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.file
    }

    /// Whether [`crate::Plan::table`] would find this table.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn has_table(&self, table: &str, members: &[&str]) -> Result<(), Error> {
        self.table(table, members).map(drop)
    }

    /// Whether it exports this function.
    ///
    /// # Errors
    ///
    /// As [`crate::Executable::function`].
    pub fn has_function(&self, symbol: &str) -> Result<(), Error> {
        self.function_address(symbol).map(drop)
    }

    /// Whether the pointer at `offset` bytes into an exported object holds a function of the
    /// program.
    ///
    /// # Errors
    ///
    /// As [`crate::Plan::pointer`].
    pub fn has_own_function(&self, object: &str, offset: usize) -> Result<(), Error> {
        self.own_function(object, offset).map(drop)
    }

    /// Whether the pointer at `offset` bytes into an exported object is null.
    ///
    /// # Errors
    ///
    /// As [`crate::Plan::require_null`].
    pub fn has_null(&self, object: &str, offset: usize) -> Result<(), Error> {
        self.null(object, offset)
    }

    /// Whether it imports this function of another library, through the GOT.
    #[must_use]
    pub fn imports(&self, symbol: &str) -> bool {
        self.elf.imports(symbol.as_bytes()).next().is_some()
    }

    /// The number of direct calls of an exported function in the program's code, which no
    /// replacement of pointers changes.
    ///
    /// # Errors
    ///
    /// As [`crate::Executable::function`].
    pub fn direct_calls(&self, symbol: &str) -> Result<usize, Error> {
        let function = (self.function_address(symbol)? as u64).wrapping_sub(self.bias);
        let code = self.elf.segments.iter().filter(|segment| segment.executable);
        let calls = code.map(|segment| {
            let bytes = self.bytes_of(segment);
            calls::direct(self.facts.machine, bytes, segment.address, function)
        });
        Ok(calls.sum())
    }

    fn bytes_of(&self, segment: &Segment) -> &[u8] {
        let start = usize::try_from(segment.file_offset).ok();
        let size = usize::try_from(segment.file_size).ok();
        let range = start.zip(size).and_then(|(start, size)| Some(start..start.checked_add(size)?));
        range.and_then(|range| self.file.get(range)).unwrap_or_default()
    }

    /// A word of the image, by linked address; zero where the file has none.
    fn loaded(&self, address: u64) -> Option<usize> {
        if let Some(&value) = self.relocated.get(&address) {
            return usize::try_from(value.wrapping_add(self.bias)).ok();
        }
        let segment = self.elf.segments.iter().find(|s| s.holds(address, WORD as u64))?;
        let at = usize::try_from(address - segment.address).ok()?;
        let word = self.bytes_of(segment).get(at..at + WORD).and_then(|bytes| bytes.first_chunk());
        Some(word.map_or(0, |bytes| usize::from_le_bytes(*bytes)))
    }
}

impl Program for ProgramFile {
    fn path(&self) -> &str {
        &self.path
    }

    fn elf(&self) -> &Elf {
        &self.elf
    }

    fn bias(&self) -> usize {
        self.bias as usize
    }

    fn word(&self, address: usize) -> Result<Option<usize>, Error> {
        let linked = (address as u64).wrapping_sub(self.bias);
        let aligned = Some(linked).filter(|at| at.is_multiple_of(WORD as u64));
        Ok(aligned.and_then(|at| self.loaded(at)))
    }

    fn search_read_only<R>(&self, search: impl FnOnce(&[Region<'_>]) -> R) -> Result<R, Error> {
        let constant = self.elf.segments.iter().filter(|segment| !segment.writable);
        // What the file has not is zero, and no member of a table.
        let constant = constant.map(|segment| (segment.address, segment.file_size));
        let relro = self.elf.relro.iter().map(|range| (range.start, range.end - range.start));
        let mut copies = Vec::new();
        for (start, size) in constant.chain(relro) {
            let start = start.next_multiple_of(WORD as u64);
            let size = size.min(self.file.len() as u64);
            let words =
                (start..start.saturating_add(size)).step_by(WORD).map_while(|at| self.loaded(at));
            copies.push((start.wrapping_add(self.bias) as usize, words.collect::<Vec<usize>>()));
        }
        let regions: Vec<Region<'_>> =
            copies.iter().map(|(address, words)| Region { address: *address, words }).collect();
        Ok(search(&regions))
    }
}
