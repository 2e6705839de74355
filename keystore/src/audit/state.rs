//! The file `audit.state` with the last line of the trail. The next run continues from it, and
//! `verify` knows from it which line must be the last.
//!
//! ```text
//! two slots of 16 kB, of which lines use one and the other in turns:
//!  0  magic     "pvaudit1"
//!  8  count     u64: lines ever noted; the greater of two slots is the newer
//! 16  written   u8: 1 once the line is where lines go
//! 17  zero      3 bytes
//! 20  length    u32
//! 24  checksum  u32: CRC-32C of magic, count, length and text
//! 28  zero      4 bytes
//! 32  text      the line
//! ```
//!
//! Numbers are little-endian. A line is saved here before it is written; if the server is killed in
//! between, it finds the line here at the next start and writes it. If saving a line is
//! interrupted, the other slot remains valid; the interrupted line was not written anywhere.

/// Name of the file.
pub const STATE: &str = "audit.state";
/// Bytes of a slot.
pub const SLOT: usize = 16 << 10;
/// Bytes of the file.
pub const STATE_SIZE: usize = 2 * SLOT;
/// Offset in a slot of the byte that states that the line was written.
pub const WRITTEN: u64 = 16;

const MAGIC: [u8; 8] = *b"pvaudit1";
const HEADER: usize = 32;
const _: () = assert!(super::MAX_LINE <= SLOT - HEADER);

/// The last line that was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Noted {
    /// Number of lines saved so far, including this one.
    pub count: u64,
    /// Whether it was written to its destination.
    pub written: bool,
    /// The line.
    pub text: String,
}

/// Offset in the file of this line's slot.
#[must_use]
pub const fn offset(count: u64) -> u64 {
    (count % 2) * SLOT as u64
}

/// The contents of a slot for a line that is not written yet. `None` if it is longer than
/// [`MAX_LINE`](super::MAX_LINE).
#[must_use]
pub fn slot(count: u64, text: &str) -> Option<Vec<u8>> {
    if text.len() > super::MAX_LINE {
        return None;
    }
    let mut bytes = Vec::with_capacity(HEADER + text.len());
    let length = u32::try_from(text.len()).ok()?.to_le_bytes();
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&length);
    bytes.extend_from_slice(&checksum(count, text.as_bytes()).to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(text.as_bytes());
    Some(bytes)
}

fn checksum(count: u64, text: &[u8]) -> u32 {
    let length = text.len() as u64;
    let mut sum = crc32c::crc32c(&MAGIC);
    for part in [&count.to_le_bytes()[..], &length.to_le_bytes()[..4], text] {
        sum = crc32c::crc32c_append(sum, part);
    }
    sum
}

/// The newest line in the file; `None` if there is no intact one.
#[must_use]
pub fn newest(file: &[u8]) -> Option<Noted> {
    let slots = [file.get(..SLOT.min(file.len()))?, file.get(SLOT..).unwrap_or_default()];
    slots.into_iter().filter_map(read).max_by_key(|noted| noted.count)
}

fn read(slot: &[u8]) -> Option<Noted> {
    let (header, text) = slot.split_at_checked(HEADER)?;
    let number = |at: usize| Some(u32::from_le_bytes(header.get(at..at + 4)?.try_into().ok()?));
    if header.get(..8)? != MAGIC {
        return None;
    }
    let count = u64::from_le_bytes(header.get(8..16)?.try_into().ok()?);
    let text = text.get(..usize::try_from(number(20)?).ok()?)?;
    if text.len() > super::MAX_LINE || number(24)? != checksum(count, text) {
        return None;
    }
    let text = String::from_utf8(text.to_vec()).ok()?;
    Some(Noted { count, written: *header.get(16)? == 1, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(file: &mut [u8], count: u64, text: &str) {
        let (at, bytes) = (offset(count) as usize, slot(count, text).unwrap());
        file[at..at + bytes.len()].copy_from_slice(&bytes);
    }

    #[test]
    fn the_newest_line_is_found() {
        let mut file = vec![0; STATE_SIZE];
        assert_eq!(newest(&file), None);
        for count in 1..10 {
            let text = format!("line {}", "x".repeat(20 - count as usize));
            put(&mut file, count, &text);
            assert_eq!(newest(&file), Some(Noted { count, written: false, text }));
        }
        file[(offset(9) + WRITTEN) as usize] = 1;
        assert!(newest(&file).unwrap().written);
    }

    #[test]
    fn an_unfinished_or_damaged_slot_leaves_the_line_before() {
        let mut file = vec![0; STATE_SIZE];
        put(&mut file, 1, "one");
        let before = file.clone();
        put(&mut file, 2, "two");
        let second = offset(2) as usize;
        for bytes in 0..35 {
            let mut torn = before.clone();
            torn[second..second + bytes].copy_from_slice(&file[second..second + bytes]);
            let text = newest(&torn).unwrap().text;
            assert_eq!(text, if bytes == 35 { "two" } else { "one" });
        }
        for at in (0..8).chain(8..16).chain(20..28).chain(32..35) {
            let mut damaged = file.clone();
            damaged[second + at] ^= 1;
            assert_eq!(newest(&damaged).unwrap().text, "one", "byte {at}");
        }
        for length in [0, 1, 31, SLOT - 1, SLOT, SLOT + 40] {
            let _ = newest(&file[..length]);
        }
        assert_eq!(slot(1, &"x".repeat(super::super::MAX_LINE + 1)), None);
    }
}
