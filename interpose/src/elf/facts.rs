//! What the file of a program says about how it was built.

use std::collections::BTreeSet;
use std::ops::Range;

use super::dynamic::{self, Reader};
use super::{ElfError, FILE_HEADER, FileImage, Headers, Machine};
use super::{slice, u16_at, u32_at, u64_at};

const ET_DYN: u16 = 3;
const SECTION_HEADER: u64 = 64;

/// How a program was compiled and linked. Only for people: nothing is decided by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// For which instruction set.
    pub machine: Machine,
    /// Whether it can be loaded at any address (PIE).
    pub position_independent: bool,
    /// Whether all imported functions are bound at its start (`BIND_NOW`), not at their first call.
    pub bound_at_start: bool,
    /// The dynamic linker that it asks for (`PT_INTERP`), which tells the C library.
    pub interpreter: Option<String>,
    /// The symbol versions that it requires of its libraries, such as `GLIBC_2.17`.
    pub versions: BTreeSet<String>,
    /// The compilers of its parts (`.comment`), without the linker's and duplicates.
    pub compilers: BTreeSet<String>,
}

impl Facts {
    /// Reads them from the bytes of the file.
    ///
    /// # Errors
    ///
    /// As [`super::Elf::parse_file`].
    pub fn of_file(file: &[u8]) -> Result<Facts, ElfError> {
        let (machine, program_headers) = super::file_headers(file)?;
        let headers = Headers::parse(program_headers)?;
        let interpreter = headers.interpreter.clone().and_then(|range| {
            let image = FileImage { file, segments: headers.segments.clone() };
            let path = super::Image::bytes(&image, range.start, range.end - range.start)?;
            Some(text(path.split(|&byte| byte == 0).next()?))
        });
        let dynamic = headers.dynamic.clone().ok_or(ElfError::Missing("the dynamic segment"))?;
        let image = FileImage { file, segments: headers.segments };
        let reader = Reader::new(machine, dynamic, 0, &image)?;
        let mut versions = BTreeSet::new();
        for version in reader.required_versions()? {
            versions.insert(text(reader.string(version)));
        }
        Ok(Facts {
            machine,
            position_independent: u16_at(file, 16) == ET_DYN,
            bound_at_start: reader.has(dynamic::DT_BIND_NOW)
                || reader.number(dynamic::DT_FLAGS) & dynamic::DF_BIND_NOW != 0
                || reader.number(dynamic::DT_FLAGS_1) & dynamic::DF_1_NOW != 0,
            interpreter,
            versions,
            compilers: section(file, b".comment").map(compilers).unwrap_or_default(),
        })
    }
}

/// What is not printable is escaped: the file may be anybody's, and the text goes to a terminal.
fn text(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// The lines of `.comment`: one for each compiler, and one of the linker.
fn compilers(comment: &[u8]) -> BTreeSet<String> {
    comment
        .split(|&byte| byte == 0)
        .filter(|line| !line.is_empty() && !line.starts_with(b"Linker:"))
        .map(text)
        .collect()
}

/// The content of a section. A stripped or damaged file has none, and lacks nothing by it.
fn section<'a>(file: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let header = slice(file, 0, FILE_HEADER)?;
    let (table, count) = (u64_at(header, 40), u64::from(u16_at(header, 60)));
    let range = |index: u64| -> Option<(u32, Range<u64>)> {
        let at = table.checked_add(index * SECTION_HEADER)?;
        let section = slice(file, at, SECTION_HEADER)?;
        let (offset, size) = (u64_at(section, 24), u64_at(section, 32));
        Some((u32_at(section, 0), offset..offset.checked_add(size)?))
    };
    let (_, names) = range(u64::from(u16_at(header, 62)))?;
    let names = slice(file, names.start, names.end - names.start)?;
    let (_, found) = (0..count).filter_map(range).find(|&(at, _)| {
        let rest = names.get(at as usize..).unwrap_or_default();
        rest.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0))
    })?;
    slice(file, found.start, found.end - found.start)
}

#[cfg(test)]
mod tests {
    use super::compilers;

    #[test]
    fn compilers_are_printable() {
        let found = compilers(b"GCC: (Debian 12.2.0-14) 12.2.0\0Linker: LLD\0\x1b]0;title\x07\0");
        let found: Vec<_> = found.iter().map(String::as_str).collect();
        assert_eq!(found, ["GCC: (Debian 12.2.0-14) 12.2.0", "\\x1b]0;title\\x07"]);
    }
}
