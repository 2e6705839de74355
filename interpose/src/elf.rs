//! Reads a 64-bit little-endian ELF image: segments, exported symbols, GOT relocations.
//!
//! Pure: it sees an image only through [`Image`], never trusts an offset, a size or a count in it,
//! and allocates nothing that the image does not back. Names and numbers as in the System V ABI
//! (generic and processor supplements) and `elf.h`.

use std::collections::HashMap;
use std::ops::Range;

use thiserror::Error;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_RELRO: u32 = 0x6474_e552;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

const DT_NULL: u64 = 0;
const DT_PLTRELSZ: u64 = 2;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_RELAENT: u64 = 9;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_PLTREL: u64 = 20;
const DT_JMPREL: u64 = 23;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DT_VERSYM: u64 = 0x6fff_fff0;
const DT_VERNEED: u64 = 0x6fff_fffe;
const DT_VERNEEDNUM: u64 = 0x6fff_ffff;

const FILE_HEADER: u64 = 64;
const PROGRAM_HEADER: usize = 56;
const SYMBOL: u64 = 24;
const RELOCATION: u64 = 24;

/// Version indices have 15 bits (`VERSYM_VERSION`); an image with more entries is malformed.
const MAX_VERSIONS: usize = 0x7fff;

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
}

/// Bytes by the addresses they are linked at (before the load bias is added).
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
    /// Mapped writable (RELRO takes the right away from a part later).
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

/// The version of a symbol that an import asks for, and the library that is to provide it.
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
    /// Version asked for, if the image has version information.
    pub version: Option<Version>,
}

/// What this crate needs to know of an executable.
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
    /// Reads the program headers, then what they lead to in `image`.
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
        let reader = Reader::new(machine, dynamic, bias, image)?;
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
        let header = slice(file, 0, FILE_HEADER).ok_or(ElfError::NotElf)?;
        // EI_CLASS 2: 64-bit; EI_DATA 1: little-endian
        if !header.starts_with(b"\x7fELF\x02\x01")
            || usize::from(u16_at(header, 54)) != PROGRAM_HEADER
        {
            return Err(ElfError::NotElf);
        }
        let machine = Machine::from_number(u16_at(header, 18)).ok_or(ElfError::NotElf)?;
        let size = u64::from(u16_at(header, 56)) * PROGRAM_HEADER as u64;
        let program_headers = slice(file, u64_at(header, 32), size)
            .ok_or(ElfError::OutOfBounds("the program header table"))?;
        let segments = Headers::parse(program_headers)?.segments;
        Elf::parse(machine, program_headers, 0, &FileImage { file, segments })
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
                PT_DYNAMIC => headers.dynamic = Some(address..end),
                PT_GNU_RELRO => headers.relro = Some(address..end),
                _ => {}
            }
        }
        Ok(headers)
    }
}

/// The dynamic section, and the tables it leads to.
struct Reader<'a, I> {
    machine: Machine,
    image: &'a I,
    bias: u64,
    entries: HashMap<u64, u64>,
    strings: &'a [u8],
    symbol_table: u64,
}

impl<'a, I: Image> Reader<'a, I> {
    fn new(
        machine: Machine,
        dynamic: Range<u64>,
        bias: u64,
        image: &'a I,
    ) -> Result<Self, ElfError> {
        let section = image
            .bytes(dynamic.start, dynamic.end - dynamic.start)
            .ok_or(ElfError::OutOfBounds("the dynamic section"))?;
        let entries = section
            .chunks_exact(16)
            .map(|entry| (u64_at(entry, 0), u64_at(entry, 8)))
            .take_while(|&(tag, _)| tag != DT_NULL)
            .collect();
        let mut reader = Reader { machine, image, bias, entries, strings: &[], symbol_table: 0 };
        if reader.entries.get(&DT_SYMENT).is_some_and(|&size| size != SYMBOL) {
            return Err(ElfError::OutOfBounds("a dynamic symbol"));
        }
        reader.symbol_table =
            reader.pointer(DT_SYMTAB).ok_or(ElfError::Missing("the dynamic symbol table"))?;
        let table =
            reader.pointer(DT_STRTAB).ok_or(ElfError::Missing("the dynamic string table"))?;
        let size = reader.entries.get(&DT_STRSZ).copied().unwrap_or(0);
        reader.strings =
            image.bytes(table, size).ok_or(ElfError::OutOfBounds("the dynamic string table"))?;
        Ok(reader)
    }

    fn pointer(&self, tag: u64) -> Option<u64> {
        let value = *self.entries.get(&tag)?;
        Some(value.checked_sub(self.bias).unwrap_or(value))
    }

    fn exports(&self) -> Result<Vec<Symbol>, ElfError> {
        let count = self.symbol_count()?;
        let table = self
            .image
            .bytes(self.symbol_table, count * SYMBOL)
            .ok_or(ElfError::OutOfBounds("the dynamic symbol table"))?;
        Ok(table
            .chunks_exact(SYMBOL as usize)
            .map(RawSymbol::read)
            .filter(|symbol| symbol.is_defined() && symbol.is_visible())
            .map(|symbol| Symbol {
                name: Name(symbol.name),
                kind: match symbol.info & 0xf {
                    1 => SymbolKind::Object,
                    2 => SymbolKind::Function,
                    _ => SymbolKind::Other,
                },
                address: symbol.value,
                size: symbol.size,
            })
            .collect())
    }

    /// The dynamic section does not say how long its symbol table is; the hash table does.
    fn symbol_count(&self) -> Result<u64, ElfError> {
        const WHAT: &str = "the symbol hash table";
        let word = |address: Option<u64>| {
            let bytes = self.image.bytes(address?, 4)?;
            Some(u32_at(bytes, 0))
        };
        if let Some(table) = self.pointer(DT_HASH) {
            let chains = word(table.checked_add(4)).ok_or(ElfError::OutOfBounds(WHAT))?;
            return Ok(u64::from(chains));
        }
        let table = self.pointer(DT_GNU_HASH).ok_or(ElfError::Missing(WHAT))?;
        let header = self.image.bytes(table, 16).ok_or(ElfError::OutOfBounds(WHAT))?;
        let (bucket_count, first) = (u64::from(u32_at(header, 0)), u64::from(u32_at(header, 4)));
        let bloom_words = u64::from(u32_at(header, 8));
        let buckets_at =
            table.checked_add(16 + bloom_words * 8).ok_or(ElfError::OutOfBounds(WHAT))?;
        let buckets =
            self.image.bytes(buckets_at, bucket_count * 4).ok_or(ElfError::OutOfBounds(WHAT))?;
        let last_bucket = buckets.chunks_exact(4).map(|b| u64::from(u32_at(b, 0))).max();
        let Some(mut last) = last_bucket.filter(|&last| last >= first) else {
            return Ok(first);
        };
        // The chain of the last bucket ends the table; bit 0 marks its end.
        loop {
            let at = buckets_at.checked_add((bucket_count + last - first) * 4);
            if word(at).ok_or(ElfError::OutOfBounds(WHAT))? & 1 == 1 {
                return Ok(last + 1);
            }
            last += 1;
        }
    }

    fn imports(&self) -> Result<Vec<Import>, ElfError> {
        const WHAT: &str = "the relocation table";
        // DT_PLTREL and DT_RELAENT: both machines use Rela only.
        if self.entries.get(&DT_PLTREL).is_some_and(|&kind| kind != DT_RELA)
            || self.entries.get(&DT_RELAENT).is_some_and(|&size| size != RELOCATION)
        {
            return Err(ElfError::OutOfBounds("a relocation"));
        }
        let versions = self.versions()?;
        let mut imports = Vec::new();
        for (tag, size_tag) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let Some(table) = self.pointer(tag) else { continue };
            let size = self.entries.get(&size_tag).copied().unwrap_or(0);
            let table = self.image.bytes(table, size).ok_or(ElfError::OutOfBounds(WHAT))?;
            for relocation in table.chunks_exact(RELOCATION as usize) {
                let info = u64_at(relocation, 8);
                if self.machine.is_got_relocation(info as u32) {
                    let slot = u64_at(relocation, 0);
                    imports.extend(self.import(slot, info >> 32, &versions)?);
                }
            }
        }
        // Some linkers let DT_RELA include the range of DT_JMPREL.
        imports.sort_by_key(|import| import.slot);
        imports.dedup_by_key(|import| import.slot);
        Ok(imports)
    }

    fn import(
        &self,
        slot: u64,
        index: u64,
        versions: &HashMap<u16, Version>,
    ) -> Result<Option<Import>, ElfError> {
        let symbol = self
            .symbol_table
            .checked_add(index * SYMBOL)
            .and_then(|address| self.image.bytes(address, SYMBOL))
            .map(RawSymbol::read)
            .ok_or(ElfError::OutOfBounds("an imported symbol"))?;
        if symbol.is_defined() {
            return Ok(None);
        }
        let version = self
            .pointer(DT_VERSYM)
            .and_then(|table| self.image.bytes(table.checked_add(index * 2)?, 2))
            .and_then(|version| versions.get(&(u16_at(version, 0) & 0x7fff)))
            .copied();
        Ok(Some(Import { name: Name(symbol.name), slot, version }))
    }

    /// The versions that the image asks for, by index (`Elf64_Verneed`, `Elf64_Vernaux`).
    fn versions(&self) -> Result<HashMap<u16, Version>, ElfError> {
        const WHAT: &str = "the version requirements";
        let mut versions = HashMap::new();
        let Some(mut need_at) = self.pointer(DT_VERNEED) else { return Ok(versions) };
        let count = self.entries.get(&DT_VERNEEDNUM).copied().unwrap_or(0);
        let mut seen = 0;
        for _ in 0..count {
            let need = self.image.bytes(need_at, 16).ok_or(ElfError::OutOfBounds(WHAT))?;
            let library = Name(u32_at(need, 4));
            let mut aux_at = need_at.checked_add(u64::from(u32_at(need, 8)));
            for _ in 0..u16_at(need, 2) {
                seen += 1;
                let aux = aux_at
                    .and_then(|address| self.image.bytes(address, 16))
                    .filter(|_| seen <= MAX_VERSIONS)
                    .ok_or(ElfError::OutOfBounds(WHAT))?;
                let version = Version { name: Name(u32_at(aux, 8)), library };
                versions.insert(u16_at(aux, 6) & 0x7fff, version);
                aux_at = aux_at.and_then(|at| at.checked_add(u64::from(u32_at(aux, 12))));
            }
            let next = u64::from(u32_at(need, 12));
            if next == 0 {
                break;
            }
            need_at = need_at.checked_add(next).ok_or(ElfError::OutOfBounds(WHAT))?;
        }
        Ok(versions)
    }
}

/// `Elf64_Sym`
struct RawSymbol {
    name: u32,
    info: u8,
    section: u16,
    value: u64,
    size: u64,
}

impl RawSymbol {
    fn read(bytes: &[u8]) -> RawSymbol {
        RawSymbol {
            name: u32_at(bytes, 0),
            info: bytes[4],
            section: u16_at(bytes, 6),
            value: u64_at(bytes, 8),
            size: u64_at(bytes, 16),
        }
    }

    /// Not `SHN_UNDEF`.
    fn is_defined(&self) -> bool {
        self.section != 0
    }

    /// `STB_GLOBAL` or `STB_WEAK`.
    fn is_visible(&self) -> bool {
        matches!(self.info >> 4, 1 | 2)
    }
}

fn holds(start: u64, size: u64, address: u64, len: u64) -> bool {
    address.checked_sub(start).and_then(|offset| offset.checked_add(len)).is_some_and(|e| e <= size)
}

fn slice(bytes: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?)
}

// Callers hand in slices whose length they have checked.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
