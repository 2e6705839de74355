//! Reads a 64-bit little-endian ELF image: segments, exported symbols, GOT relocations.
//!
//! Pure: the image is accessed only through [`Image`]. No offset, size or count in it is trusted,
//! and nothing is allocated that the image does not back. Names and numbers are those of the System
//! V ABI (generic and processor supplements) and `elf.h`.

use std::collections::HashMap;
use std::ops::Range;

use thiserror::Error;

pub use facts::Facts;

mod dynamic;
mod facts;
#[cfg(test)]
mod tests;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_GNU_RELRO: u32 = 0x6474_e552;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

const FILE_HEADER: u64 = 64;
const PROGRAM_HEADER: usize = 56;

/// What is wrong with an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ElfError {
    /// Not an ELF file, or not a 64-bit little-endian one for x86-64 or aarch64.
    #[error("not a 64-bit little-endian ELF image for x86-64 or aarch64")]
    NotElf,
    /// A structure lies outside the image or has an impossible size.
    #[error("{0} lies outside the image or has an impossible size")]
    OutOfBounds(&'static str),
    /// A structure that a dynamically linked program has is absent.
    #[error("{0} is missing")]
    Missing(&'static str),
}

/// The instruction set, which decides the relocation types of the GOT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// x86-64 (`EM_X86_64`).
    X86_64,
    /// 64-bit Arm (`EM_AARCH64`).
    Aarch64,
}

impl Machine {
    /// The machine this program was compiled for.
    pub const HOST: Machine =
        if cfg!(target_arch = "aarch64") { Machine::Aarch64 } else { Machine::X86_64 };

    fn from_number(number: u16) -> Option<Machine> {
        match number {
            62 => Some(Machine::X86_64),
            183 => Some(Machine::Aarch64),
            _ => None,
        }
    }

    fn is_got_relocation(self, kind: u32) -> bool {
        // R_*_GLOB_DAT and R_*_JUMP_SLOT
        match self {
            Machine::X86_64 => matches!(kind, 6 | 7),
            Machine::Aarch64 => matches!(kind, 1025 | 1026),
        }
    }

    fn is_relative_relocation(self, kind: u32) -> bool {
        // R_*_RELATIVE
        kind == match self {
            Machine::X86_64 => 8,
            Machine::Aarch64 => 1027,
        }
    }

    fn is_address_relocation(self, kind: u32) -> bool {
        // R_X86_64_64, R_AARCH64_ABS64
        kind == match self {
            Machine::X86_64 => 1,
            Machine::Aarch64 => 257,
        }
    }
}

/// The bytes of an image, by linked address (before the load bias is added).
pub trait Image {
    /// The bytes from `address` on, or `None` if not all `len` of them lie in the image.
    fn bytes(&self, address: u64, len: u64) -> Option<&[u8]>;
}

/// A `PT_LOAD` segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address as linked.
    pub address: u64,
    /// Bytes in memory.
    pub size: u64,
    /// Offset in the file.
    pub file_offset: u64,
    /// Bytes in the file; the rest is zero.
    pub file_size: u64,
    /// Mapped writable. RELRO later removes this right from a part.
    pub writable: bool,
    /// Mapped executable.
    pub executable: bool,
}

impl Segment {
    /// Whether all of `address .. address + len` lies inside.
    #[must_use]
    pub fn holds(&self, address: u64, len: u64) -> bool {
        holds(self.address, self.size, address, len)
    }
}

/// What a symbol names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SymbolKind {
    /// `STT_FUNC`
    Function,
    /// `STT_OBJECT`
    Object,
    /// Anything else (thread-local, indirect function, no type).
    Other,
}

/// A name in the dynamic string table; [`Elf::name`] reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name(u32);

/// A symbol that the image defines and exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol {
    /// Its name.
    pub name: Name,
    /// What it names.
    pub kind: SymbolKind,
    /// Address as linked.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}

/// The symbol version that an import requires, and the library that provides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Version name, such as `GLIBC_2.2.5`.
    pub name: Name,
    /// `DT_NEEDED` name of the library, such as `libc.so.6`.
    pub library: Name,
}

/// A GOT slot that is bound to a symbol of another library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Import {
    /// Symbol name.
    pub name: Name,
    /// Address of the slot as linked.
    pub slot: u64,
    /// Required version, if the image has version information.
    pub version: Option<Version>,
}

/// The parts of an executable that this crate uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// The `PT_LOAD` segments.
    pub segments: Vec<Segment>,
    /// The `PT_GNU_RELRO` range: read-only after relocation.
    pub relro: Option<Range<u64>>,
    imports: Vec<Import>,
    symbols: Vec<Symbol>,
    strings: Vec<u8>,
}

impl Elf {
    /// Parses the program headers and the tables that they lead to in `image`.
    ///
    /// `bias` is the difference between run-time and linked addresses. glibc adds it to the
    /// pointers of the dynamic section in memory, musl does not: both are understood.
    ///
    /// # Errors
    ///
    /// [`ElfError`] if a structure is missing or does not lie wholly inside the image.
    pub fn parse(
        machine: Machine,
        program_headers: &[u8],
        bias: u64,
        image: &impl Image,
    ) -> Result<Elf, ElfError> {
        let headers = Headers::parse(program_headers)?;
        let dynamic = headers.dynamic.ok_or(ElfError::Missing("the dynamic segment"))?;
        let reader = dynamic::Reader::new(machine, dynamic, bias, image)?;
        Ok(Elf {
            imports: reader.imports()?,
            symbols: reader.exports()?,
            strings: reader.strings.to_vec(),
            segments: headers.segments,
            relro: headers.relro,
        })
    }

    /// Reads an executable from the bytes of its file.
    ///
    /// # Errors
    ///
    /// As [`Elf::parse`], and [`ElfError::NotElf`] for other files.
    pub fn parse_file(file: &[u8]) -> Result<Elf, ElfError> {
        let (machine, program_headers) = file_headers(file)?;
        let segments = Headers::parse(program_headers)?.segments;
        Elf::parse(machine, program_headers, 0, &FileImage { file, segments })
    }

    /// The words to which the dynamic linker gives an address of the program itself: the linked
    /// addresses of the word and of what it points to.
    pub(crate) fn relocated_words(file: &[u8]) -> Result<HashMap<u64, u64>, ElfError> {
        let (machine, program_headers) = file_headers(file)?;
        let headers = Headers::parse(program_headers)?;
        let dynamic = headers.dynamic.ok_or(ElfError::Missing("the dynamic segment"))?;
        let image = FileImage { file, segments: headers.segments };
        dynamic::Reader::new(machine, dynamic, 0, &image)?.own_words()
    }

    /// The exported definitions of `name` (several if it has several versions).
    pub fn exports<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = &'a Symbol> {
        self.symbols.iter().filter(move |symbol| self.name(symbol.name) == name)
    }

    /// The GOT slots of the imported symbol `name`.
    pub fn imports<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = &'a Import> {
        self.imports.iter().filter(move |import| self.name(import.name) == name)
    }

    /// Reads a name; empty if it lies outside the string table.
    #[must_use]
    pub fn name(&self, name: Name) -> &[u8] {
        let tail = self.strings.get(name.0 as usize..).unwrap_or_default();
        let len = tail.iter().position(|&byte| byte == 0);
        &tail[..len.unwrap_or(0)]
    }
}

/// Checks the header of a file; returns its instruction set and its program header table.
fn file_headers(file: &[u8]) -> Result<(Machine, &[u8]), ElfError> {
    let header = slice(file, 0, FILE_HEADER).ok_or(ElfError::NotElf)?;
    // EI_CLASS 2: 64-bit; EI_DATA 1: little-endian
    if !header.starts_with(b"\x7fELF\x02\x01") || usize::from(u16_at(header, 54)) != PROGRAM_HEADER
    {
        return Err(ElfError::NotElf);
    }
    let machine = Machine::from_number(u16_at(header, 18)).ok_or(ElfError::NotElf)?;
    let size = u64::from(u16_at(header, 56)) * PROGRAM_HEADER as u64;
    let program_headers = slice(file, u64_at(header, 32), size)
        .ok_or(ElfError::OutOfBounds("the program header table"))?;
    Ok((machine, program_headers))
}

struct FileImage<'a> {
    file: &'a [u8],
    segments: Vec<Segment>,
}

impl Image for FileImage<'_> {
    fn bytes(&self, address: u64, len: u64) -> Option<&[u8]> {
        let segment = self.segments.iter().find(|s| holds(s.address, s.file_size, address, len))?;
        slice(self.file, segment.file_offset.checked_add(address - segment.address)?, len)
    }
}

#[derive(Default)]
struct Headers {
    segments: Vec<Segment>,
    relro: Option<Range<u64>>,
    dynamic: Option<Range<u64>>,
    interpreter: Option<Range<u64>>,
}

impl Headers {
    fn parse(bytes: &[u8]) -> Result<Headers, ElfError> {
        let mut headers = Headers::default();
        for header in bytes.chunks_exact(PROGRAM_HEADER) {
            let (kind, flags) = (u32_at(header, 0), u32_at(header, 4));
            let (address, size) = (u64_at(header, 16), u64_at(header, 40));
            let end = address.checked_add(size).ok_or(ElfError::OutOfBounds("a segment"))?;
            match kind {
                PT_LOAD => headers.segments.push(Segment {
                    address,
                    size,
                    file_offset: u64_at(header, 8),
                    file_size: u64_at(header, 32).min(size),
                    writable: flags & PF_W != 0,
                    executable: flags & PF_X != 0,
                }),
                PT_INTERP => headers.interpreter = Some(address..end),
                PT_DYNAMIC => headers.dynamic = Some(address..end),
                PT_GNU_RELRO => headers.relro = Some(address..end),
                _ => {}
            }
        }
        Ok(headers)
    }
}

fn holds(start: u64, size: u64, address: u64, len: u64) -> bool {
    address.checked_sub(start).and_then(|offset| offset.checked_add(len)).is_some_and(|e| e <= size)
}

fn slice(bytes: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?)
}

// Callers pass slices whose length they have checked.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
