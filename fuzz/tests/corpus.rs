//! Runs every target with golden files, with truncated and damaged ones, and with random bytes.
//! Inputs that once broke a target are kept in `corpus/<target>/`.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_fuzz::{TARGETS, Target};
use pagevault_keyring::providers::kmip::ttlv::{Tag, Value, Writer};
use pagevault_keystore::{CheckValue, KeyVersion, Record, Scope, escrow};
use proptest::prelude::*;
use serde_json::Value as Json;

/// Golden files of the formats. Each target gets all of them, although most are of another format.
fn seeds() -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seeds = vec![
        br#"{"path": "/etc/pagevault/keys"}"#.to_vec(),
        br#"{"address": "https://vault.example.com:8200", "mount": "transit", "ca_file": "/etc/pagevault/ca.pem",
             "auth": {"approle": {"role_id_file": "/r", "secret_id_file": "/s"}}}"#
            .to_vec(),
        br#"{"region": "eu-central-1", "endpoint": "https://127.0.0.1:4566"}"#.to_vec(),
        br#"{"vault": "https://db.vault.azure.net", "auth": {"client_secret":
             {"tenant": "t", "client_id": "c", "secret_file": "/s"}}}"#
            .to_vec(),
        br#"{"key_ring": "projects/p/locations/l/keyRings/r", "credentials_file": "/c"}"#.to_vec(),
        br#"{"wrap": ["/bin/true", "a"], "unwrap": ["/bin/true"]}"#.to_vec(),
        b"wrapped vault:v1:ab+/=\nkey_version 7\n".to_vec(),
        b"plaintext AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n".to_vec(),
        br#"{ "PostgreSQL-Backup-Manifest-Version": 1,
"Files": [
{ "Path": "PG_VERSION", "Size": 3, "Checksum-Algorithm": "CRC32C", "Checksum": "64440205" }
],
"WAL-Ranges": [
{ "Timeline": 1, "Start-LSN": "0/2000028", "End-LSN": "0/2000100" }
],
"Manifest-Checksum": "00"}
"#
        .to_vec(),
        b"encrypted aes-128-xts".to_vec(),
        b"plaintext".to_vec(),
    ];
    let check = CheckValue::from_bytes([9; 16]);
    let keys = [(Scope::CLUSTER, KeyVersion::FIRST), (Scope::database(5), KeyVersion::LAST)];
    let keys = keys.map(|key| (key, check));
    let mark = escrow::Mark { keystore: [7; 16], made: 1_800_000_000, keys: keys.into() };
    seeds.push(mark.encode().into_bytes());
    let records = vec![Record::DropProvider { name: "local".to_owned() }];
    let provider = Record::Provider {
        name: "restored".to_owned(),
        kind: "file".to_owned(),
        options: "{}".to_owned(),
        programs: false,
    };
    for records in [records, vec![provider]] {
        let restored = escrow::Restored { keystore: [7; 16], records };
        seeds.extend(restored.encode());
    }
    for folder in ["cipher/vectors", "keystore/vectors", "keystore/vectors/v1", "keyring/vectors"] {
        seeds.extend(files(&root.join(folder)).into_iter().filter(|seed| seed.len() <= 64 << 10));
    }
    // Wrapped keys are in base64 there.
    for file in files(&root.join("keyring/vectors")) {
        let vectors = serde_json::from_slice::<Vec<Json>>(&file).unwrap_or_default();
        let wrapped = vectors.iter().filter_map(|vector| vector["wrapped"].as_str());
        seeds.extend(wrapped.filter_map(|text| STANDARD.decode(text).ok()));
    }
    seeds.extend(kmip_replies());
    assert!(seeds.len() > 20, "the golden files are not where they were");
    seeds
}

/// Replies as a KMIP server writes them, in two versions, to Get Attributes, Locate and Encrypt.
fn kmip_replies() -> Vec<Vec<u8>> {
    let attribute = |payload: &mut Writer, fields: bool, tag, name, value| {
        if fields {
            return payload.put(tag, value);
        }
        payload.structure(Tag(0x42_0008), |attribute| {
            attribute.put(Tag(0x42_000A), Value::Text(name));
            attribute.put(Tag(0x42_000B), value);
        });
    };
    let attributes = |payload: &mut Writer, fields: bool| {
        attribute(payload, fields, Tag(0x42_0057), "Object Type", Value::Enumeration(2));
        attribute(payload, fields, Tag(0x42_002A), "Cryptographic Length", Value::Integer(256));
        attribute(payload, fields, Tag(0x42_008D), "State", Value::Enumeration(2));
        let made = Value::DateTime(1_800_000_000);
        attribute(payload, fields, Tag(0x42_0039), "Initial Date", made);
        attribute(payload, fields, Tag(0x42_0122), "Extractable", Value::Boolean(false));
    };
    let mut replies = Vec::new();
    for ((major, minor), operation) in [(1, 4), (2, 0)]
        .into_iter()
        .flat_map(|version| [0x0B, 0x08, 0x1F].map(|one| (version, one)))
    {
        let mut writer = Writer::default();
        writer.structure(Tag(0x42_007B), |message| {
            message.structure(Tag(0x42_007A), |header| {
                header.structure(Tag(0x42_0069), |version| {
                    version.put(Tag(0x42_006A), Value::Integer(major));
                    version.put(Tag(0x42_006B), Value::Integer(minor));
                });
                header.put(Tag(0x42_0092), Value::DateTime(1_800_000_000));
                header.put(Tag(0x42_000D), Value::Integer(1));
            });
            message.structure(Tag(0x42_000F), |item| {
                item.put(Tag(0x42_005C), Value::Enumeration(operation));
                item.put(Tag(0x42_007F), Value::Enumeration(0));
                item.structure(Tag(0x42_007C), |payload| {
                    payload.put(Tag(0x42_0094), Value::Text("1"));
                    match operation {
                        0x0B if major == 1 => attributes(payload, false),
                        0x0B => payload.structure(Tag(0x42_0125), |all| attributes(all, true)),
                        0x1F => {
                            payload.put(Tag(0x42_00C2), Value::Bytes(&[7; 32]));
                            payload.put(Tag(0x42_00FF), Value::Bytes(&[9; 16]));
                        }
                        _ => payload.put(Tag(0x42_0094), Value::Text("2")),
                    }
                });
            });
        });
        replies.push(writer.into_bytes().to_vec());
    }
    replies
}

fn files(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| std::fs::read(entry.ok()?.path()).ok()).collect()
}

/// The inputs for a target: golden files, and its corpus.
fn seeds_of(target: &Target) -> Vec<Vec<u8>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.0);
    [seeds(), files(&corpus)].concat()
}

#[test]
fn golden_files_whole_and_cut() {
    for target in TARGETS {
        for seed in seeds_of(target) {
            let step = seed.len() / 100 + 1;
            for length in (0..=seed.len()).rev().step_by(step) {
                target.1(&seed[..length]);
            }
        }
    }
}

#[test]
fn an_executable_whole_and_cut() {
    let Ok(program) = std::fs::read("/proc/self/exe") else { return };
    pagevault_fuzz::elf(&program);
    for part in 0..50 {
        pagevault_fuzz::elf(&program[..program.len() / 50 * part]);
    }
}

/// Text made of words that a parser knows, and others.
fn nearly_right(words: &'static [&'static str]) -> impl Strategy<Value = String> {
    let separator = prop::sample::select(&[" ", "", "\n", "\r\n", "\t", "  ", "\u{a0}"][..]);
    let word =
        prop_oneof![9 => prop::sample::select(words).prop_map(str::to_owned), 1 => any::<String>()];
    prop::collection::vec((word, separator), 0..8).prop_map(|parts| {
        parts.into_iter().flat_map(|(word, between)| [word, between.into()]).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn golden_files_damaged(
        which in any::<prop::sample::Index>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let seeds = seeds();
        let mut bytes = which.get(&seeds).clone();
        for (at, byte) in damage.iter().filter(|_| !bytes.is_empty()).collect::<Vec<_>>() {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        TARGETS.iter().for_each(|target| target.1(&bytes));
    }

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        TARGETS.iter().for_each(|target| target.1(&bytes));
    }
    #[test]
    fn labels_of_known_words(text in nearly_right(&["encrypted", "plaintext", "aes-256-xts", "aes-128-xts", "rot13"])) {
        pagevault_fuzz::label(text.as_bytes());
    }

    #[test]
    fn command_replies_of_known_words(text in nearly_right(&[
        "wrapped", "plaintext", "key_version", "vault:v1:ab+/=", "7", "0", "9223372036854775808",
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh==",
    ])) {
        pagevault_fuzz::command_reply(text.as_bytes());
    }
}
