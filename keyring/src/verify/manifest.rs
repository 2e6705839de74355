//! The manifest that PostgreSQL writes with a base backup (`backup_manifest.c`), as
//! `json_parse_manifest` (parse_manifest.c) reads it. Anybody may have written it.

use std::collections::BTreeMap;
use std::path::Path;

use pagevault_cipher::{Lsn, mac};
use pagevault_keystore::anchor::parse_lsn;
use serde::{Deserialize, Serialize, Serializer};

use super::complete::is_ignored;
use crate::failure::{Failure, unreadable};
use crate::regular::read_if_there;
use crate::visible::visible;

/// Its name in a backup.
pub(crate) const NAME: &str = "backup_manifest";
/// Longest manifest that is read, in bytes. A file takes some 170.
const LONGEST: u64 = 512 << 20;
/// Most ranges of WAL. There is one for each timeline of the backup (`AddWALInfoToBackupManifest`).
const RANGES: usize = 1000;

/// What a backup consists of.
#[derive(Debug)]
pub struct Manifest {
    /// PostgreSQL's system identifier; not in version 1 (before 17).
    pub(crate) system: Option<u64>,
    /// Files by their paths, which are relative and stay within the backup.
    pub(crate) files: BTreeMap<Vec<u8>, Listed>,
    pub(crate) ranges: Vec<Range>,
}

/// A file.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) size: u64,
    /// `None` for a backup without checksums.
    pub(crate) checksum: Option<Checksum>,
}

#[derive(Debug)]
pub(crate) struct Checksum {
    pub(crate) algorithm: Algorithm,
    pub(crate) value: Vec<u8>,
}

/// `pg_checksum_parse_type` (checksum_helper.c).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Crc32c,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
}

/// WAL that recovery of the backup needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Range {
    pub(crate) timeline: u32,
    #[serde(serialize_with = "as_text")]
    pub(crate) start: Lsn,
    #[serde(serialize_with = "as_text")]
    pub(crate) end: Lsn,
}

fn as_text<S: Serializer>(lsn: &Lsn, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(lsn)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(rename = "PostgreSQL-Backup-Manifest-Version")]
    version: u32,
    #[serde(rename = "System-Identifier")]
    system: Option<u64>,
    #[serde(rename = "Files")]
    files: Vec<WrittenFile>,
    #[serde(rename = "WAL-Ranges")]
    ranges: Vec<WrittenRange>,
    #[serde(rename = "Manifest-Checksum")]
    checksum: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFile {
    #[serde(rename = "Path")]
    path: Option<String>,
    #[serde(rename = "Encoded-Path")]
    encoded: Option<String>,
    #[serde(rename = "Size")]
    size: u64,
    #[serde(rename = "Last-Modified")]
    _modified: Option<String>,
    #[serde(rename = "Checksum-Algorithm")]
    algorithm: Option<String>,
    #[serde(rename = "Checksum")]
    checksum: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRange {
    #[serde(rename = "Timeline")]
    timeline: u32,
    #[serde(rename = "Start-LSN")]
    start: String,
    #[serde(rename = "End-LSN")]
    end: String,
}

/// The text of a directory's manifest, if there is one.
pub(crate) fn read(root: &Path) -> Result<Option<Vec<u8>>, Failure> {
    let path = root.join(NAME);
    read_if_there(&path, LONGEST).map_err(|error| unreadable(&path, &error))
}

impl Manifest {
    /// Whether nobody can change a file that is compared so that its checksum stays the same.
    /// `pg_combinebackup` lists WAL, without checksums (pg_combinebackup.c,
    /// `process_directory_recursively`).
    pub(crate) fn is_cryptographic(&self) -> bool {
        let algorithm = |file: &Listed| file.checksum.as_ref().map(|sum| sum.algorithm);
        let mut compared = self.files.iter().filter(|(path, _)| !is_ignored(path));
        compared.all(|(_, file)| algorithm(file).is_some_and(|it| it != Algorithm::Crc32c))
    }

    /// Parses a manifest whose own checksum is right.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Manifest, String> {
        let written: Written = serde_json::from_slice(text).map_err(|error| {
            // It quotes names of fields.
            format!("not readable: {}", visible(&error.to_string()))
        })?;
        // The last line contains the checksum of all lines before it (`verify_manifest_checksum`).
        let body = text.strip_suffix(b"\n").and_then(|text| {
            let last = text.iter().rposition(|byte| *byte == b'\n')?;
            text.get(..=last)
        });
        let body = body.ok_or("the last line is not complete")?;
        if hexadecimal(&written.checksum).as_deref() != Some(&mac::hash(body)[..]) {
            return Err("its own checksum is wrong".to_owned());
        }
        if !(1..=2).contains(&written.version) {
            return Err(format!("version {} is not supported", written.version));
        }
        let mut files = BTreeMap::new();
        for file in written.files {
            let (path, listed) = file.checked()?;
            let shown = visible(&String::from_utf8_lossy(&path));
            if files.insert(path, listed).is_some() {
                return Err(format!("file \"{shown}\" is in it more than once"));
            }
        }
        if written.ranges.len() > RANGES {
            return Err(format!("it names more than {RANGES} ranges of WAL"));
        }
        let ranges = written.ranges.iter().map(|range| {
            let lsn = |text| parse_lsn(text).ok_or_else(|| "an invalid LSN".to_owned());
            let (start, end) = (lsn(&range.start)?, lsn(&range.end)?);
            Ok(Range { timeline: range.timeline, start, end })
        });
        let ranges: Vec<Range> = ranges.collect::<Result<_, String>>()?;
        if ranges.is_empty() {
            return Err("it names no WAL".to_owned());
        }
        Ok(Manifest { system: written.system, files, ranges })
    }
}

#[cfg(test)]
impl Manifest {
    /// A manifest that lists these files.
    pub(crate) fn of_files(paths: &[&str]) -> Manifest {
        let file = |path: &&str| (path.as_bytes().to_vec(), Listed { size: 0, checksum: None });
        Manifest { system: None, files: paths.iter().map(file).collect(), ranges: Vec::new() }
    }
}

impl WrittenFile {
    fn checked(self) -> Result<(Vec<u8>, Listed), String> {
        let path = match (self.path, self.encoded) {
            (Some(path), None) => path.into_bytes(),
            (None, Some(encoded)) => hexadecimal(&encoded).ok_or("an invalid encoded path")?,
            _ => return Err("a file without path, or with two".to_owned()),
        };
        let shown = || visible(&String::from_utf8_lossy(&path));
        let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
        if !path.split(|byte| *byte == b'/').all(is_name) {
            return Err(format!("path \"{}\" is not within the backup", shown()));
        }
        let invalid = || format!("file \"{}\" has an invalid checksum", shown());
        let checksum = match (self.algorithm.as_deref(), self.checksum.as_deref()) {
            (None, None) => None,
            (Some(name), None) if name.eq_ignore_ascii_case("none") => None,
            (Some(name), Some(value)) => {
                let algorithm = Algorithm::named(name).ok_or_else(invalid)?;
                let value = hexadecimal(value).ok_or_else(invalid)?;
                Some(Checksum { algorithm, value })
            }
            _ => return Err(invalid()),
        };
        Ok((path, Listed { size: self.size, checksum }))
    }
}

impl Algorithm {
    fn named(name: &str) -> Option<Algorithm> {
        Some(match name.to_ascii_uppercase().as_str() {
            "CRC32C" => Algorithm::Crc32c,
            "SHA224" => Algorithm::Sha224,
            "SHA256" => Algorithm::Sha256,
            "SHA384" => Algorithm::Sha384,
            "SHA512" => Algorithm::Sha512,
            _ => return None,
        })
    }
}

fn hexadecimal(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| Some(u8::try_from(char::from(byte).to_digit(16)?).unwrap_or(0));
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    if rest.is_empty() { bytes.collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: &str = r#"{ "Timeline": 1, "Start-LSN": "0/2000028", "End-LSN": "0/2000100" }"#;

    fn manifest(files: &[&str], ranges: &str) -> Vec<u8> {
        let files = files.join(",\n");
        let body = format!(
            "{{ \"PostgreSQL-Backup-Manifest-Version\": 2,\n\"System-Identifier\": 7,\n\
             \"Files\": [\n{files}\n],\n\"WAL-Ranges\": [\n{ranges}\n],\n"
        );
        let sum: String =
            mac::hash(body.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{body}\"Manifest-Checksum\": \"{sum}\"}}\n").into_bytes()
    }

    #[test]
    fn a_manifest_says_what_a_backup_consists_of() {
        let label = r#"{ "Path": "backup_label", "Size": 224, "Last-Modified": "2026-01-01 00:00:00 GMT", "Checksum-Algorithm": "CRC32C", "Checksum": "137eb249" }"#;
        let encoded = r#"{ "Encoded-Path": "62ff2f61", "Size": 0, "Last-Modified": "x" }"#;
        let read = Manifest::parse(&manifest(&[label, encoded], RANGE)).unwrap();
        assert_eq!(read.system, Some(7));
        let range = Range { timeline: 1, start: Lsn(0x200_0028), end: Lsn(0x200_0100) };
        assert_eq!(read.ranges, [range]);
        let label = &read.files[&b"backup_label"[..]];
        let checksum = label.checksum.as_ref().unwrap();
        assert_eq!((label.size, checksum.algorithm), (224, Algorithm::Crc32c));
        assert_eq!(checksum.value, [0x13, 0x7e, 0xb2, 0x49]);
        assert!(read.files[&b"b\xff/a"[..]].checksum.is_none());
    }

    #[test]
    fn each_file_that_is_compared_needs_a_cryptographic_checksum() {
        let is_sealable = |files: &[(&str, &str)]| {
            let file =
                |(path, sum): &(&str, &str)| format!(r#"{{ "Path": "{path}", "Size": 3{sum} }}"#);
            let files: Vec<String> = files.iter().map(file).collect();
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            Manifest::parse(&manifest(&files, RANGE)).unwrap().is_cryptographic()
        };
        let sha = r#", "Checksum-Algorithm": "SHA256", "Checksum": "00""#;
        let crc = r#", "Checksum-Algorithm": "CRC32C", "Checksum": "00""#;
        assert!(is_sealable(&[("a", sha)]) && !is_sealable(&[("a", sha), ("b", crc)]));
        assert!(is_sealable(&[("a", sha), ("pg_wal/000000010000000000000007", "")]));
        assert!(!is_sealable(&[("a", sha), ("pg_walk", "")]) && !is_sealable(&[("a", "")]));
    }

    #[test]
    fn whatever_is_changed_is_noticed() {
        let file = r#"{ "Path": "PG_VERSION", "Size": 3 }"#;
        let whole = manifest(&[file], RANGE);
        assert!(Manifest::parse(&whole).is_ok());
        for length in 0..whole.len() {
            assert!(Manifest::parse(&whole[..length]).is_err(), "{length}");
        }
        // Of the digits of the checksum and the brackets after it, case and space do not matter.
        let body = whole.len() - 70;
        for at in 0..body {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(Manifest::parse(&changed).is_err(), "{at}");
        }
    }

    #[test]
    fn hostile_manifests_are_refused() {
        let path = |path: &str| format!(r#"{{ "Path": "{path}", "Size": 3 }}"#);
        for name in ["/etc/passwd", "../a", "a/../../b", "a//b", "a/", ".", "", "a\\u0000b"] {
            let error = Manifest::parse(&manifest(&[&path(name)], RANGE)).unwrap_err();
            assert!(error.contains("not within the backup"), "{name}: {error}");
        }
        let hex = r#"{ "Encoded-Path": "2e2e2f61", "Size": 3 }"#;
        assert!(Manifest::parse(&manifest(&[hex], RANGE)).unwrap_err().contains("not within"));
        let same = r#"{ "Encoded-Path": "61", "Size": 3 }"#;
        let error = Manifest::parse(&manifest(&[&path("a"), same], RANGE)).unwrap_err();
        assert!(error.contains("more than once"), "{error}");
        for file in [
            r#"{ "Path": "a", "Size": -1 }"#,
            r#"{ "Path": "a" }"#,
            r#"{ "Size": 1 }"#,
            r#"{ "Path": "a", "Encoded-Path": "61", "Size": 1 }"#,
            r#"{ "Encoded-Path": "6", "Size": 1 }"#,
            r#"{ "Path": "a", "Size": 1, "Size": 1 }"#,
            r#"{ "Path": "a", "Size": 1, "Checksum": "00" }"#,
            r#"{ "Path": "a", "Size": 1, "Checksum-Algorithm": "MD5", "Checksum": "00" }"#,
            r#"{ "Path": "a", "Size": 1, "Checksum-Algorithm": "SHA256" }"#,
        ] {
            assert!(Manifest::parse(&manifest(&[file], RANGE)).is_err(), "{file}");
        }
        assert!(Manifest::parse(&manifest(&[], "")).unwrap_err().contains("no WAL"));
        let ranges =
            |count: usize| Manifest::parse(&manifest(&[], &[RANGE].repeat(count).join(",")));
        assert!(ranges(RANGES).is_ok() && ranges(RANGES + 1).is_err());
        let deep = "[".repeat(1 << 20);
        assert!(Manifest::parse(deep.as_bytes()).is_err());
    }
}
