//! Names of keys and of their versions. They become paths of requests.

use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;
use crate::options::{bad, printable};

/// Maximum length of a name: four parts, the longest of 63 characters, and a project.
pub(super) const NAME_LIMIT: usize = 512;

const PARTS: [&str; 4] = ["projects", "locations", "keyRings", "cryptoKeys"];

/// Accepts `projects/<project>/locations/<location>/keyRings/<key ring>`.
pub(super) fn check_key_ring(name: &str) -> Result<&str, Failure> {
    if has_parts(name, &PARTS[..3]) {
        return Ok(name);
    }
    Err(bad(format!("\"{}\" is not the name of a key ring", printable(name)))
        .with_detail("A key ring is named projects/<project>/locations/<location>/keyRings/<key ring>.")
        .with_hint("Copy the name from: gcloud kms keyrings list --location <location> --format 'value(name)'."))
}

/// Whether `name` is the complete name of a key.
pub(super) fn is_key(name: &str) -> bool {
    has_parts(name, &PARTS)
}

/// The complete name of `key`, which may be the name of a key in `key_ring`.
pub(super) fn complete(key: &str, key_ring: Option<&str>) -> Result<String, Failure> {
    if is_key(key) {
        return Ok(key.to_owned());
    }
    let error = Failure::new(
        ErrorClass::BadOptions,
        format!("\"{}\" is not a valid name of a Cloud KMS key", printable(key)),
    );
    match key_ring {
        Some(key_ring) if is_id(key) => Ok(format!("{key_ring}/cryptoKeys/{key}")),
        Some(_) => Err(error
            .with_detail("A name consists of at most 63 letters, digits, \"_\" and \"-\".")
            .with_hint("Specify the key's name in the key ring, or its complete name.")),
        None => Err(error
            .with_detail(
                "A key is named projects/<project>/locations/<location>/keyRings/<key ring>/cryptoKeys/<key>.",
            )
            .with_hint("Specify this name, or the option \"key_ring\".")),
    }
}

/// The number of a version of `key`, from the version's name.
pub(super) fn version_of(key: &str, version: &str) -> Option<u64> {
    let number = version.strip_prefix(key)?.strip_prefix("/cryptoKeyVersions/")?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
    number.parse().ok().filter(|_| is_number)
}

fn has_parts(name: &str, kinds: &[&str]) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    name.len() <= NAME_LIMIT
        && parts.len() == 2 * kinds.len()
        && parts.chunks(2).zip(kinds).all(|(part, kind)| match (part, *kind) {
            // Projects of an organization may be called example.com:project.
            ([found, id], "projects") => {
                found == kind && id.split(['.', ':']).all(|label| !label.is_empty() && is_id(label))
            }
            ([found, id], _) => found == kind && is_id(id),
            _ => false,
        })
}

fn is_id(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=63).contains(&id.len()) && id.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: &str = "projects/p-1/locations/europe-west3/keyRings/db";

    #[test]
    fn names_cannot_escape_from_their_path() {
        let key = format!("{RING}/cryptoKeys/kek");
        assert!(is_key(&key));
        assert!(is_key("projects/example.com:p/locations/global/keyRings/r_1/cryptoKeys/k"));
        assert_eq!(complete("kek", Some(RING)).unwrap(), key);
        assert_eq!(complete(&key, None).unwrap(), key);
        assert_eq!(complete(&key, Some("projects/x/locations/y/keyRings/z")).unwrap(), key);
        for wrong in [
            "",
            "kek",
            ".",
            "a/b",
            "a?b",
            "a:encrypt",
            "a%2fb",
            "\u{e4}",
            "projects/../locations/l/keyRings/r/cryptoKeys/k",
            "projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1",
            "projects/p/locations/l/keyRings/r/cryptoKeys/",
            "projects/p/locations/l/keyRings/r/cryptoKeys/k:decrypt",
            "projects/p/locations/l/keyRings/r/k/cryptoKeys",
            "/projects/p/locations/l/keyRings/r/cryptoKeys/k",
        ] {
            assert!(complete(wrong, None).is_err(), "{wrong:?}");
            assert_eq!(complete(wrong, Some(RING)).is_ok(), wrong == "kek", "{wrong:?}");
        }
        assert!(complete(&"k".repeat(64), Some(RING)).is_err());
        assert!(check_key_ring(RING).is_ok());
        for wrong in ["db", &key, "projects/p/locations/l", ""] {
            assert!(check_key_ring(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn versions_are_those_of_the_key() {
        let version = |text: &str| version_of("k", &format!("k/cryptoKeyVersions/{text}"));
        assert_eq!(version("17"), Some(17));
        for wrong in ["", "0", "01", "+1", "1/x", "-1", "18446744073709551616"] {
            assert_eq!(version(wrong), None, "{wrong}");
        }
        assert_eq!(version_of("k", "other/cryptoKeyVersions/1"), None);
        assert_eq!(version_of("k", "k"), None);
    }
}
