//! The memory map of this process, as in `/proc/self/maps` (proc_pid_maps(5)).

use std::io;
use std::ops::Range;

/// Rights of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protection {
    /// `r`
    pub read: bool,
    /// `w`
    pub write: bool,
    /// `x`
    pub execute: bool,
}

/// One line of the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses.
    pub range: Range<usize>,
    /// Rights.
    pub protection: Protection,
    /// Copy-on-write (`p`): a write stays in this process and does not reach the file.
    pub private: bool,
}

/// The mappings, in ascending order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Maps(Vec<Mapping>);

impl Maps {
    /// Reads `/proc/self/maps`.
    ///
    /// # Errors
    ///
    /// The I/O error; [`io::ErrorKind::InvalidData`] if a line cannot be parsed.
    pub fn of_this_process() -> io::Result<Maps> {
        Maps::parse(&std::fs::read("/proc/self/maps")?)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unexpected line"))
    }

    /// Parses the text of `/proc/self/maps`; `None` if a line cannot be parsed.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Maps> {
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        lines.map(mapping).collect::<Option<Vec<_>>>().map(Maps)
    }

    /// The mapping that holds `address`.
    #[must_use]
    pub fn at(&self, address: usize) -> Option<&Mapping> {
        self.0.iter().find(|mapping| mapping.range.contains(&address))
    }

    /// Whether every byte of `range` is mapped and may be read.
    #[must_use]
    pub fn readable(&self, range: Range<usize>) -> bool {
        let mut next = range.start;
        while next < range.end {
            match self.at(next) {
                Some(mapping) if mapping.protection.read => next = mapping.range.end,
                _ => return false,
            }
        }
        true
    }
}

/// `start-end rwxp offset device inode path`; the path may contain any byte.
fn mapping(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.split(|&byte| byte == b' ');
    let addresses = std::str::from_utf8(fields.next()?).ok()?;
    let (start, end) = addresses.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let &[read, write, execute, private] = fields.next()? else { return None };
    let protection =
        Protection { read: read == b'r', write: write == b'w', execute: execute == b'x' };
    (start < end).then_some(Mapping { range: start..end, protection, private: private == b'p' })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &[u8] = b"\
00400000-00401000 r--p 00000000 fe:00 12 /usr/bin/a program
00401000-00402000 r-xp 00001000 fe:00 12 /usr/bin/a program
00402000-00403000 ---p 00000000 00:00 0
00500000-00501000 rw-s 00000000 00:01 9 /dev/shm/\xff (deleted)
";

    #[test]
    fn reads_ranges_rights_and_sharing() {
        let maps = Maps::parse(TEXT).unwrap();
        let code = maps.at(0x401fff).unwrap();
        assert_eq!(code.range, 0x401000..0x402000);
        assert_eq!(code.protection, Protection { read: true, write: false, execute: true });
        assert!(code.private && !maps.at(0x500000).unwrap().private);
        assert_eq!(maps.at(0x403000), None);
    }

    #[test]
    fn readable_spans_mappings_but_no_hole_and_no_guard() {
        let maps = Maps::parse(TEXT).unwrap();
        assert!(maps.readable(0x400800..0x402000));
        assert!(!maps.readable(0x400800..0x402001));
        assert!(!maps.readable(0x3fffff..0x400001));
    }

    #[test]
    fn refuses_lines_it_does_not_understand() {
        for line in [&b"0-"[..], b"zz-1000 r--p", b"1000-2000", b"2000-1000 r--p", b"1-2 r-p"] {
            assert_eq!(Maps::parse(line), None, "{line:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri's functions have no addresses in the process")]
    fn own_map_holds_own_code() {
        let maps = Maps::of_this_process().unwrap();
        let here = own_map_holds_own_code as *const () as usize;
        assert!(maps.at(here).unwrap().protection.execute);
    }

    proptest! {
        #[test]
        fn hostile_text_does_not_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Maps::parse(&text);
        }
    }
}
