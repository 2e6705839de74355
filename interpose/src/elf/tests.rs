use proptest::prelude::*;

use super::dynamic::*;
use super::*;

const BASE: u64 = 0x40_0000;
const DYNAMIC: usize = 0x200;
const STRINGS: usize = 0x400;
const SYMBOLS: usize = 0x500;
const HASH: usize = 0x600;
const RELOCATIONS: usize = 0x700;
const VERSIONS: usize = 0x800;
const NEEDED: usize = 0x820;
const SIZE: usize = 0x900;

const TEXT: &[u8] = b"\0pwrite\0mdread\0callbacks\0libc.so.6\0GLIBC_2.2.5\0local\0";

fn text(name: &str) -> u32 {
    let at = TEXT.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
    at as u32
}

/// A file of one segment that is loaded at `BASE`.
struct File(Vec<u8>);

impl File {
    fn put(&mut self, at: usize, bytes: &[u8]) -> usize {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        at + bytes.len()
    }

    fn words(&mut self, at: usize, words: &[u64]) -> usize {
        words.iter().fold(at, |at, word| self.put(at, &word.to_le_bytes()))
    }

    fn halves(&mut self, at: usize, halves: &[u32]) -> usize {
        halves.iter().fold(at, |at, half| self.put(at, &half.to_le_bytes()))
    }

    fn segment(&mut self, index: usize, kind: u32, flags: u32, at: usize, size: usize) {
        let (at, size) = (at as u64, size as u64);
        let header = self.halves(64 + index * PROGRAM_HEADER, &[kind, flags]);
        self.words(header, &[at, BASE + at, BASE + at, size, size, 8]);
    }

    fn symbol(&mut self, index: usize, name: &str, info: u8, section: u16, value: u64, size: u64) {
        let at = self.halves(SYMBOLS + index * 24, &[text(name)]);
        let at = self.put(at, &[info, 0]);
        let at = self.put(at, &section.to_le_bytes());
        self.words(at, &[value, size]);
    }

    /// One import, one exported function, one exported object, and one local symbol.
    fn new(machine: u16, jump_slot: u64, gnu_hash: bool) -> File {
        let mut file = File(vec![0; SIZE]);
        file.put(0, b"\x7fELF\x02\x01\x01");
        file.put(18, &machine.to_le_bytes());
        file.words(32, &[64]);
        file.put(54, &56_u16.to_le_bytes());
        file.put(56, &3_u16.to_le_bytes());
        file.segment(0, PT_LOAD, 4 | PF_X, 0, SIZE);
        file.segment(1, PT_DYNAMIC, 6, DYNAMIC, 0x180);
        file.segment(2, PT_GNU_RELRO, 4, DYNAMIC, 0x200);
        file.put(STRINGS, TEXT);
        file.symbol(1, "pwrite", 0x12, 0, 0, 0);
        file.symbol(2, "local", 0x02, 9, BASE + 0x10, 8);
        file.symbol(3, "mdread", 0x12, 9, BASE + 0x20, 8);
        file.symbol(4, "callbacks", 0x11, 9, BASE + 0x30, 24);
        if gnu_hash {
            // buckets, first symbol, bloom words, shift; bloom; bucket; chain of two
            file.halves(HASH, &[1, 3, 1, 6, 0, 0, 3, 0x10, 0x11]);
        } else {
            file.halves(HASH, &[1, 5]);
        }
        // R_*_RELATIVE-like entry first: no GOT slot
        let at = file.words(RELOCATIONS, &[BASE + 0x100, 8, BASE]);
        file.words(at, &[BASE + 0x110, 1 << 32 | jump_slot, 0]);
        file.put(VERSIONS + 2, &2_u16.to_le_bytes());
        // Elf64_Verneed: version 1, one entry; Elf64_Vernaux: index 2
        let need = file.put(NEEDED, &[1, 0, 1, 0]);
        let aux = file.halves(need, &[text("libc.so.6"), 16, 0]);
        let aux = file.halves(aux, &[0]);
        let aux = file.put(aux, &[0, 0, 2, 0]);
        file.halves(aux, &[text("GLIBC_2.2.5"), 0]);
        let address = |at: usize| BASE + at as u64;
        let hash = if gnu_hash { DT_GNU_HASH } else { DT_HASH };
        for (index, (tag, value)) in [
            (DT_STRTAB, address(STRINGS)),
            (DT_STRSZ, TEXT.len() as u64),
            (DT_SYMTAB, address(SYMBOLS)),
            (DT_SYMENT, SYMBOL),
            (hash, address(HASH)),
            // as some linkers do, DT_RELA includes DT_JMPREL
            (DT_RELA, address(RELOCATIONS)),
            (DT_RELASZ, 48),
            (DT_RELAENT, RELOCATION),
            (DT_JMPREL, address(RELOCATIONS) + 24),
            (DT_PLTRELSZ, 24),
            (DT_PLTREL, DT_RELA),
            (DT_VERSYM, address(VERSIONS)),
            (DT_VERNEED, address(NEEDED)),
            (DT_VERNEEDNUM, 1),
            (DT_NULL, 0),
        ]
        .into_iter()
        .enumerate()
        {
            file.words(DYNAMIC + index * 16, &[tag, value]);
        }
        file
    }
}

#[test]
fn reads_both_machines_and_both_hash_tables() {
    for (machine, jump_slot) in [(62, 7), (62, 6), (183, 1026), (183, 1025)] {
        for gnu_hash in [true, false] {
            let elf = Elf::parse_file(&File::new(machine, jump_slot, gnu_hash).0).unwrap();
            let import = elf.imports(b"pwrite").next().unwrap();
            assert_eq!((import.slot, elf.imports.len()), (BASE + 0x110, 1));
            let version = import.version.unwrap();
            assert_eq!(elf.name(version.name), b"GLIBC_2.2.5");
            assert_eq!(elf.name(version.library), b"libc.so.6");
            let function = elf.exports(b"mdread").next().unwrap();
            assert_eq!(function.kind, SymbolKind::Function);
            assert_eq!(function.address, BASE + 0x20);
            let object = elf.exports(b"callbacks").next().unwrap();
            assert_eq!((object.kind, object.size), (SymbolKind::Object, 24));
            assert_eq!(elf.exports(b"local").count() + elf.exports(b"pwrite").count(), 0);
            assert_eq!(elf.relro, Some(BASE + 0x200..BASE + 0x400));
            assert!(elf.segments[0].executable && !elf.segments[0].writable);
        }
    }
}

#[test]
fn words_of_the_program_itself_come_from_relocations_of_each_kind() {
    let mut file = File::new(62, 7, true);
    // R_X86_64_64 of "mdread" plus 4, instead of the relative one
    file.words(RELOCATIONS, &[BASE + 0x100, 3 << 32 | 1, 4]);
    // an even entry names a word, bits 0 and 2 of an odd one the first and third after it
    let table = 0x880;
    file.words(table, &[BASE + 0x120, 0b1011]);
    file.words(0x120, &[BASE + 1, BASE + 2, BASE + 3, BASE + 4]);
    let end = DYNAMIC + 14 * 16;
    file.words(end, &[DT_RELR, BASE + table as u64, DT_RELRSZ, 16, DT_NULL, 0]);
    let words = Elf::relocated_words(&file.0).unwrap();
    let expected = [(0x100, 0x24), (0x120, 1), (0x128, 2), (0x138, 4)];
    assert_eq!(words, expected.map(|(slot, value)| (BASE + slot, BASE + value)).into());
    let relative = Elf::relocated_words(&File::new(62, 7, true).0).unwrap();
    assert_eq!(relative, [(BASE + 0x100, BASE)].into());
}

#[test]
fn relocations_of_another_machine_are_ignored() {
    let elf = Elf::parse_file(&File::new(62, 1026, true).0).unwrap();
    assert_eq!(elf.imports, []);
}

/// The image of `File` after loading.
struct Loaded<'a>(&'a [u8]);

impl Image for Loaded<'_> {
    fn bytes(&self, address: u64, len: u64) -> Option<&[u8]> {
        slice(self.0, address.checked_sub(BASE)?, len)
    }
}

#[test]
fn dynamic_pointers_may_have_the_bias_added_or_not() {
    let bias = 0x5555_0000_0000;
    let plain = File::new(62, 7, true);
    let headers = &plain.0[64..64 + 3 * PROGRAM_HEADER];
    let unrelocated = Elf::parse(Machine::X86_64, headers, bias, &Loaded(&plain.0)).unwrap();
    let mut moved = File(plain.0.clone());
    for entry in 0..14 {
        let at = DYNAMIC + entry * 16;
        let (tag, value) = (u64_at(&moved.0, at), u64_at(&moved.0, at + 8));
        if value >= BASE {
            moved.words(at, &[tag, value + bias]);
        }
    }
    let relocated = Elf::parse(Machine::X86_64, headers, bias, &Loaded(&moved.0)).unwrap();
    assert_eq!(unrelocated, relocated);
}

#[test]
fn names_what_is_missing_or_out_of_bounds() {
    let refused = |tag: u64, new_tag: u64, value: u64| {
        let mut file = File::new(62, 7, true);
        let at = (DYNAMIC..).step_by(16).find(|&at| u64_at(&file.0, at) == tag).unwrap();
        file.words(at, &[new_tag, value]);
        Elf::parse_file(&file.0).unwrap_err().to_string()
    };
    assert!(refused(DT_GNU_HASH, 77, 0).contains("symbol hash table is missing"));
    assert!(refused(DT_SYMTAB, 77, 0).contains("symbol table is missing"));
    assert!(refused(DT_STRSZ, DT_STRSZ, u64::MAX).contains("string table lies outside"));
    assert!(refused(DT_RELASZ, DT_RELASZ, 1 << 40).contains("relocation table lies outside"));
    assert!(refused(DT_PLTREL, DT_PLTREL, 17).contains("relocation"));
    assert!(refused(DT_VERNEED, DT_VERNEED, 1).contains("version requirements lies outside"));
    assert_eq!(Elf::parse_file(b"#!/bin/sh"), Err(ElfError::NotElf));
    let other = File::new(40, 7, true);
    assert_eq!(Elf::parse_file(&other.0), Err(ElfError::NotElf));
}

#[test]
fn a_name_outside_the_table_is_empty() {
    let elf = Elf::parse_file(&File::new(62, 7, true).0).unwrap();
    assert_eq!(elf.name(Name(u32::MAX)), b"");
    assert_eq!(elf.name(Name(TEXT.len() as u32 + 1)), b"");
}

proptest! {
    #[test]
    fn hostile_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        let _ = Elf::parse_file(&bytes);
    }

    /// Valid except for a few words, so that each structure is parsed with wrong contents.
    #[test]
    fn hostile_words_do_not_panic(
        gnu_hash in any::<bool>(),
        damage in prop::collection::vec((16..SIZE / 4, prop_oneof![
            any::<u32>(), 0..4_u32, Just(u32::MAX), Just(BASE as u32), (0..SIZE as u32),
            (0..SIZE as u32).prop_map(|at| BASE as u32 + at),
        ]), 1..6),
        len in prop_oneof![Just(SIZE), 0..SIZE],
    ) {
        let mut file = File::new(62, 7, gnu_hash);
        for (word, value) in damage {
            file.halves(word * 4, &[value]);
        }
        let _ = (Facts::of_file(&file.0[..len]), Elf::relocated_words(&file.0[..len]));
        if let Ok(elf) = Elf::parse_file(&file.0[..len]) {
            let _ = (elf.exports(b"mdread").count(), elf.imports(b"pwrite").count());
        }
    }
}
