//! The dynamic section and its tables: symbols, versions, relocations.

use std::collections::HashMap;
use std::ops::Range;

use super::{ElfError, Image, Import, Machine, Name, Symbol, SymbolKind, Version};
use super::{u16_at, u32_at, u64_at};

pub(super) const DT_NULL: u64 = 0;
pub(super) const DT_PLTRELSZ: u64 = 2;
pub(super) const DT_HASH: u64 = 4;
pub(super) const DT_STRTAB: u64 = 5;
pub(super) const DT_SYMTAB: u64 = 6;
pub(super) const DT_RELA: u64 = 7;
pub(super) const DT_RELASZ: u64 = 8;
pub(super) const DT_RELAENT: u64 = 9;
pub(super) const DT_STRSZ: u64 = 10;
pub(super) const DT_SYMENT: u64 = 11;
pub(super) const DT_PLTREL: u64 = 20;
pub(super) const DT_JMPREL: u64 = 23;
pub(super) const DT_BIND_NOW: u64 = 24;
pub(super) const DT_FLAGS: u64 = 30;
pub(super) const DT_RELRSZ: u64 = 35;
pub(super) const DT_RELR: u64 = 36;
pub(super) const DT_GNU_HASH: u64 = 0x6fff_fef5;
pub(super) const DT_VERSYM: u64 = 0x6fff_fff0;
pub(super) const DT_FLAGS_1: u64 = 0x6fff_fffb;
pub(super) const DT_VERNEED: u64 = 0x6fff_fffe;
pub(super) const DT_VERNEEDNUM: u64 = 0x6fff_ffff;

pub(super) const DF_BIND_NOW: u64 = 8;
pub(super) const DF_1_NOW: u64 = 1;

pub(super) const SYMBOL: u64 = 24;
pub(super) const RELOCATION: u64 = 24;

/// Version indices have 15 bits (`VERSYM_VERSION`); an image with more entries is malformed.
const MAX_VERSIONS: usize = 0x7fff;

/// The dynamic section and its tables.
pub(super) struct Reader<'a, I> {
    machine: Machine,
    image: &'a I,
    bias: u64,
    entries: HashMap<u64, u64>,
    pub(super) strings: &'a [u8],
    symbol_table: u64,
}

impl<'a, I: Image> Reader<'a, I> {
    pub(super) fn new(
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

    pub(super) fn has(&self, tag: u64) -> bool {
        self.entries.contains_key(&tag)
    }

    /// The value of an entry that is no pointer; zero if there is none.
    pub(super) fn number(&self, tag: u64) -> u64 {
        self.entries.get(&tag).copied().unwrap_or(0)
    }

    pub(super) fn string(&self, name: Name) -> &'a [u8] {
        let tail = self.strings.get(name.0 as usize..).unwrap_or_default();
        tail.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    fn pointer(&self, tag: u64) -> Option<u64> {
        let value = *self.entries.get(&tag)?;
        Some(value.checked_sub(self.bias).unwrap_or(value))
    }

    pub(super) fn exports(&self) -> Result<Vec<Symbol>, ElfError> {
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

    /// The number of symbols. The dynamic section does not give it; the hash table does.
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
        // The chain of the last bucket ends the table; bit 0 marks the end of a chain.
        loop {
            let at = buckets_at.checked_add((bucket_count + last - first) * 4);
            if word(at).ok_or(ElfError::OutOfBounds(WHAT))? & 1 == 1 {
                return Ok(last + 1);
            }
            last += 1;
        }
    }

    /// Every relocation: its slot, type, symbol and addend.
    fn relocations(&self) -> Result<impl Iterator<Item = Relocation> + use<'a, I>, ElfError> {
        // DT_PLTREL and DT_RELAENT: both machines use Rela only.
        if self.entries.get(&DT_PLTREL).is_some_and(|&kind| kind != DT_RELA)
            || self.entries.get(&DT_RELAENT).is_some_and(|&size| size != RELOCATION)
        {
            return Err(ElfError::OutOfBounds("a relocation"));
        }
        let mut tables = Vec::new();
        for (tag, size_tag) in [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)] {
            let Some(table) = self.pointer(tag) else { continue };
            let size = self.entries.get(&size_tag).copied().unwrap_or(0);
            let table = self.image.bytes(table, size);
            tables.push(table.ok_or(ElfError::OutOfBounds("the relocation table"))?);
        }
        let entries = tables.into_iter().flat_map(|t| t.chunks_exact(RELOCATION as usize));
        Ok(entries.map(Relocation::read))
    }

    /// The words that relocation gives an address of the program itself.
    pub(super) fn own_words(&self) -> Result<HashMap<u64, u64>, ElfError> {
        let mut words = HashMap::new();
        for relocation in self.relocations()? {
            let value = if self.machine.is_relative_relocation(relocation.kind) {
                relocation.addend
            } else if self.machine.is_address_relocation(relocation.kind) {
                let symbol = self.symbol(relocation.symbol)?;
                if !symbol.is_defined() {
                    continue;
                }
                symbol.value.wrapping_add(relocation.addend)
            } else {
                continue;
            };
            words.insert(relocation.slot, value);
        }
        for slot in self.compact_relocations()? {
            let word =
                self.image.bytes(slot, 8).ok_or(ElfError::OutOfBounds("a relocated word"))?;
            words.insert(slot, u64_at(word, 0));
        }
        Ok(words)
    }

    /// The slots of relative relocations in compact form (`DT_RELR`, generic ABI): an even entry is
    /// a slot; an odd one is a bitmap of the 63 words that follow what was named last.
    fn compact_relocations(&self) -> Result<Vec<u64>, ElfError> {
        const WHAT: &str = "the table of compact relocations";
        let Some(table) = self.pointer(DT_RELR) else { return Ok(Vec::new()) };
        let table =
            self.image.bytes(table, self.number(DT_RELRSZ)).ok_or(ElfError::OutOfBounds(WHAT))?;
        let (mut slots, mut next) = (Vec::new(), 0_u64);
        for entry in table.chunks_exact(8).map(|bytes| u64_at(bytes, 0)) {
            if entry & 1 == 0 {
                slots.push(entry);
                next = entry.wrapping_add(8);
            } else {
                let named = (0..63).filter(|bit| entry >> (bit + 1) & 1 == 1);
                slots.extend(named.map(|bit| next.wrapping_add(bit * 8)));
                next = next.wrapping_add(63 * 8);
            }
        }
        Ok(slots)
    }

    pub(super) fn imports(&self) -> Result<Vec<Import>, ElfError> {
        let versions = self.versions()?;
        let mut imports = Vec::new();
        for relocation in self.relocations()? {
            if self.machine.is_got_relocation(relocation.kind) {
                imports.extend(self.import(relocation.slot, relocation.symbol, &versions)?);
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
        let symbol = self.symbol(index)?;
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

    fn symbol(&self, index: u64) -> Result<RawSymbol, ElfError> {
        self.symbol_table
            .checked_add(index * SYMBOL)
            .and_then(|address| self.image.bytes(address, SYMBOL))
            .map(RawSymbol::read)
            .ok_or(ElfError::OutOfBounds("an imported symbol"))
    }

    /// The names of all symbol versions that the image requires.
    pub(super) fn required_versions(&self) -> Result<impl Iterator<Item = Name>, ElfError> {
        Ok(self.versions()?.into_values().map(|version| version.name))
    }

    /// The symbol versions that the image requires, by index (`Elf64_Verneed`, `Elf64_Vernaux`).
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

/// `Elf64_Rela`
struct Relocation {
    slot: u64,
    kind: u32,
    symbol: u64,
    addend: u64,
}

impl Relocation {
    fn read(bytes: &[u8]) -> Relocation {
        let info = u64_at(bytes, 8);
        let (slot, addend) = (u64_at(bytes, 0), u64_at(bytes, 16));
        Relocation { slot, kind: info as u32, symbol: info >> 32, addend }
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
