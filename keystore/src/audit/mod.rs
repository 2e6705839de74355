//! A line of the audit trail: the fields around the facts, by which added, changed and missing
//! lines are detected.
//!
//! ```text
//! {"run":"<32 hex>","seq":<n>,"time":"<UTC>","prev":<"64 hex" or null>, <facts>,
//!  "mac_key":<version>,"mac":"<64 hex>"}
//! ```
//!
//! on one line, without spaces. `run` is a random number of this server start, `seq` numbers its
//! lines from 1. `mac_key` is the version of the cluster's database key from which the MAC's key is
//! derived:
//!
//! ```text
//! key  = HKDF-SHA256 (RFC 5869), no salt, 32 bytes: key = the database key,
//!        label = "pagevault audit trail v1", context = keystore id (16 bytes) | version u32,
//!        little-endian (label, context: pagevault_cipher::kdf)
//! mac  = HMAC-SHA-256 of the line up to `,"mac":` (without it)
//! prev = SHA-256 of the same part of the line before
//! ```
//!
//! A line that is written while there is no database key, or only locked ones, has `"mac_key":null`
//! and no `mac`, and ends there. The next line with a MAC authenticates it through `prev`, and so
//! on back. The first line of a run has the `prev` of the last line of the run before, and names
//! that run and line: `"previous_run"` and `"previous_seq"`.
//!
//! The text itself is verified; it is never generated again from parsed values.

mod state;
mod time;

use std::fmt::Write;

use pagevault_cipher::{KeyVersion, Secret32, mac};
use serde::Deserialize;

pub use crate::line::hex;
use crate::line::{BEFORE_MAC, mac_key, unhex};

pub use state::{Noted, SLOT, STATE, STATE_SIZE, WRITTEN, newest, offset, slot};
pub use time::utc;

/// Prefix of a line in the server's log.
pub const MARK: &str = "pagevault audit: ";
/// File of lines that `pagevault-keyring` itself writes, in the keystore's directory.
pub const TOOLS: &str = "audit.tools";
/// Longest line, in bytes.
pub const MAX_LINE: usize = 12 << 10;

const LABEL: &str = "pagevault audit trail v1";

/// Random number of 128 bits that identifies a server start.
pub type Run = [u8; 16];
/// The hash of a line, which the next line contains.
pub type Link = [u8; 32];

/// Key of the MACs, derived from one version of the cluster's database key.
pub struct AuditKey {
    version: KeyVersion,
    key: Secret32,
}

impl AuditKey {
    /// The key that belongs to this version of the database key.
    #[must_use]
    pub fn derive(database_key: &[u8; 32], keystore: &[u8; 16], version: KeyVersion) -> Self {
        let key = mac_key(database_key, LABEL, keystore, version);
        Self { version, key }
    }
}

/// The end of the trail: its last line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The run of the line.
    pub run: Run,
    /// Number of the line.
    pub seq: u64,
    /// Hash of the line.
    pub link: Link,
}

impl Place {
    /// Before the first line of a new run.
    #[must_use]
    pub fn before(run: Run) -> Self {
        Self { run, seq: 0, link: [0; 32] }
    }

    /// Of a line that was saved or read; `None` if it is not a line.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        let line = Line::parse(text)?;
        Some(Self { run: line.run, seq: line.seq, link: line.link })
    }
}

/// Makes the next line after `place`, and advances `place`. `facts` are members of a JSON object,
/// without braces. `previous` is the end of the previous run; it is used in the first line of a
/// run.
#[must_use]
pub fn next_line(
    place: &mut Place,
    previous: Option<&Place>,
    time_us: u64,
    facts: &str,
    key: Option<&AuditKey>,
) -> String {
    let is_first = place.seq == 0;
    let before = if is_first { previous.map(|previous| previous.link) } else { Some(place.link) };
    place.seq += 1;
    let mut text = format!(
        "{{\"run\":\"{}\",\"seq\":{},\"time\":\"{}\",\"prev\":",
        hex(&place.run),
        place.seq,
        utc(time_us)
    );
    match before {
        Some(link) => text.extend(["\"", &hex(&link), "\""]),
        None => text.push_str("null"),
    }
    if let Some(previous) = previous.filter(|_| is_first) {
        // Writing to a string does not fail.
        let _ = write!(
            text,
            ",\"previous_run\":\"{}\",\"previous_seq\":{}",
            hex(&previous.run),
            previous.seq
        );
    }
    let separator = if facts.is_empty() { "" } else { "," };
    let _ = write!(text, "{separator}{facts},\"mac_key\":");
    match key {
        Some(key) => {
            let _ = write!(text, "{}", key.version);
        }
        None => text.push_str("null"),
    }
    place.link = mac::hash(text.as_bytes());
    if let Some(key) = key {
        let mac = mac::authenticate(&key.key, text.as_bytes());
        text.extend([BEFORE_MAC, &hex(&mac), "\""]);
    }
    text.push('}');
    text
}

/// A parsed line. Parsing does not authenticate it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line<'a> {
    /// The run, as stated by the line.
    pub run: Run,
    /// Its number in the run, as stated.
    pub seq: u64,
    /// When it was written. Texts of this form sort by time.
    pub time: &'a str,
    /// The hash of the line before.
    pub prev: Option<Link>,
    /// In the first line of a run: the end of the previous run.
    pub previous: Option<(Run, u64)>,
    /// Version of the cluster's database key of the MAC, as stated: a forged line may contain any
    /// number.
    pub mac_key: Option<u32>,
    /// Its own hash.
    pub link: Link,
    body: &'a str,
    mac: Option<[u8; 32]>,
}

#[derive(Deserialize)]
struct Members<'a> {
    run: &'a str,
    seq: u64,
    time: &'a str,
    prev: Option<&'a str>,
    previous_run: Option<&'a str>,
    previous_seq: Option<u64>,
    mac_key: Option<u32>,
    mac: Option<&'a str>,
}

impl<'a> Line<'a> {
    /// Parses a line; `None` if it is not one. Does not authenticate it.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        if text.len() > MAX_LINE {
            return None;
        }
        let members: Members<'_> = serde_json::from_str(text).ok()?;
        let end = match members.mac {
            Some(mac) => format!("{BEFORE_MAC}{mac}\"}}"),
            None => "}".to_owned(),
        };
        if members.mac.is_some() != members.mac_key.is_some() || members.seq == 0 {
            return None;
        }
        let body = text.strip_suffix(&end)?;
        let previous = match (members.previous_run, members.previous_seq) {
            (Some(run), Some(seq)) => Some((unhex(run)?, seq)),
            (None, None) => None,
            _ => return None,
        };
        Some(Self {
            run: unhex(members.run)?,
            seq: members.seq,
            time: members.time,
            prev: present(members.prev)?,
            previous,
            mac_key: members.mac_key,
            link: mac::hash(body.as_bytes()),
            body,
            mac: present(members.mac)?,
        })
    }

    /// Whether its MAC was made with this key. False for a line without a MAC.
    #[must_use]
    pub fn is_authentic(&self, key: &AuditKey) -> bool {
        self.mac_key == Some(key.version.get())
            && self.mac.is_some_and(|mac| mac::is_authentic(&key.key, self.body.as_bytes(), &mac))
    }
}

/// The bytes, if there are any; `None` if the text is not hexadecimal of the right length.
fn present<const N: usize>(text: Option<&str>) -> Option<Option<[u8; N]>> {
    text.map_or(Some(None), |text| unhex(text).map(Some))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: &str = "\"action\":\"shred\",\"object\":\"public.\\\"a,\\\\\\\"mac\\\\\\\":\"";

    fn key(number: u32) -> AuditKey {
        let version = KeyVersion::new(number).unwrap();
        AuditKey::derive(&[7; 32], b"0123456789abcdef", version)
    }

    #[test]
    fn a_line_contains_what_it_was_made_from() {
        let mut place = Place::before([1; 16]);
        let end = Place { run: [2; 16], seq: 9, link: [3; 32] };
        let first = next_line(&mut place, Some(&end), 1_000_000, "\"action\":\"start\"", None);
        let line = Line::parse(&first).unwrap();
        assert_eq!((line.run, line.seq, line.prev), ([1; 16], 1, Some([3; 32])));
        assert_eq!((line.previous, line.mac_key), (Some(([2; 16], 9)), None));
        assert_eq!(line.link, place.link);
        assert!(!line.is_authentic(&key(1)));
        let second = next_line(&mut place, Some(&end), 2_000_000, FACTS, Some(&key(4)));
        let next = Line::parse(&second).unwrap();
        assert_eq!((next.seq, next.prev, next.previous), (2, Some(line.link), None));
        assert!(next.is_authentic(&key(4)));
        assert!(!next.is_authentic(&key(5)));
        assert_eq!(Place::of(&second), Some(place));
        let facts: serde_json::Value = serde_json::from_str(&second).unwrap();
        assert_eq!(facts["object"], "public.\"a,\\\"mac\\\":");
        assert_eq!(facts["time"], "1970-01-01T00:00:02.000000Z");
    }

    #[test]
    fn the_very_first_line_has_no_previous_hash() {
        let mut place = Place::before([1; 16]);
        let text = next_line(&mut place, None, 0, "\"action\":\"start\"", Some(&key(1)));
        let line = Line::parse(&text).unwrap();
        assert_eq!((line.prev, line.previous), (None, None));
    }

    #[test]
    fn any_changed_byte_is_detected() {
        let mut place = Place::before([1; 16]);
        let text = next_line(&mut place, None, 0, FACTS, Some(&key(1)));
        let link = place.link;
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] ^= 1;
            let Ok(changed) = String::from_utf8(changed) else { continue };
            let passes = Line::parse(&changed).is_some_and(|line| line.is_authentic(&key(1)));
            assert!(!passes, "{changed}");
        }
        // Removing the MAC changes the hash, which the next line contains.
        let body = text.rsplit_once(BEFORE_MAC).unwrap().0;
        let without = body.replace("\"mac_key\":1", "\"mac_key\":null") + "}";
        assert_ne!(Line::parse(&without).unwrap().link, link);
    }

    #[test]
    fn malformed_lines_are_refused() {
        let mut place = Place::before([1; 16]);
        let text = next_line(&mut place, None, 0, FACTS, Some(&key(1)));
        let twice = text.replacen("\"seq\":1", "\"seq\":1,\"seq\":2", 1);
        let short = text.replacen("\"run\":\"01", "\"run\":\"", 1);
        let upper = text.replacen("\"run\":\"01", "\"run\":\"0A", 1);
        let behind = format!("{text} ");
        let spaced = text.replacen(BEFORE_MAC, ", \"mac\":\"", 1);
        let zero = text.replacen("\"seq\":1", "\"seq\":0", 1);
        let deep = format!("{{\"run\":{}", "[".repeat(1000));
        let long = format!("{{\"run\":\"{}\"}}", "0".repeat(MAX_LINE));
        for wrong in ["", "{}", "null", &twice, &short, &behind, &spaced, &zero, &deep, &long] {
            assert_eq!(Line::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Line::parse(&upper), None, "{upper}");
    }

    /// From an independent implementation: vectors/audit.py.
    #[test]
    fn the_construction_is_fixed() {
        let mut place = Place::before(*b"abcdefghijklmnop");
        let text = next_line(
            &mut place,
            None,
            1_700_000_000_123_456,
            "\"action\":\"start\"",
            Some(&key(3)),
        );
        assert_eq!(text, include_str!("../../vectors/audit.line").trim_end());
    }
}
