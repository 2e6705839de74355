//! Fuzz targets: a function for each kind of input from disk, from a provider or from SQL. It gets
//! arbitrary bytes, and must return without a panic and satisfy its assertions.
//!
//! `tools/fuzz` runs them with cargo-fuzz. `tests/corpus.rs` runs them on stable Rust with golden
//! files, truncated and damaged ones, and random bytes.

#![forbid(unsafe_code)]

use std::sync::LazyLock;
use std::sync::atomic::AtomicU32;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_cipher::page::Strength;
use pagevault_cipher::wal::Mark;
use pagevault_cipher::{
    CipherId, DataKey, DataKeyVersion, Fork, KeyVersion, PAGE_SIZE, PageKey, Secret32, page,
    stream, wal,
};
use pagevault_core::policy::label::Label;
use pagevault_interpose::elf::Elf;
use pagevault_keyring::envelope::{self, Parts};
use pagevault_keyring::keyfile::format::KeyFile;
use pagevault_keyring::provider::Environment;
use pagevault_keyring::providers;
use pagevault_keyring::providers::command::reply::{self, Reply};
use pagevault_keyring::providers::gcp_kms::wrapping::Wrapping;
use pagevault_keyring::providers::kmip::{operations, ttlv};
use pagevault_keyring::verify::manifest::Manifest;
use pagevault_keystore::audit::{self, AuditKey};
use pagevault_keystore::directory::Directory;
use pagevault_keystore::given_up::GivenUp;
use pagevault_keystore::manifest_seal::Seal;
use pagevault_keystore::protocol::{self, Request};
use pagevault_keystore::state::State;
use pagevault_keystore::{Record, Scope, batch, escrow, log};
use serde_json::{Map, Value};

/// A target: its name, which is also that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("page", page),
    ("authenticated_page", authenticated_page),
    ("wal_page", wal_page),
    ("stream", stream),
    ("key_log", key_log),
    ("batch", batch),
    ("escrow_files", escrow_files),
    ("request", request),
    ("reply", reply),
    ("key_file", key_file),
    ("wrapped_key", wrapped_key),
    ("options", options),
    ("command_reply", command_reply),
    ("kmip_reply", kmip_reply),
    ("audit_line", audit_line),
    ("manifest", manifest),
    ("label", label),
    ("elf", elf),
];

static KEY: LazyLock<PageKey> = LazyLock::new(|| {
    let bytes: [u8; 64] = std::array::from_fn(|index| index as u8);
    match DataKey::from_bytes(CipherId::Aes256Xts, &bytes) {
        Ok(key) => PageKey::new(&key),
        Err(error) => panic!("{error}"),
    }
});

/// A page from disk. If it can be opened, sealing it again gives the same bytes, unless the
/// checksum shows damage.
pub fn page(bytes: &[u8]) {
    let mut disk = [0; PAGE_SIZE];
    let length = bytes.len().min(PAGE_SIZE);
    disk[..length].copy_from_slice(&bytes[..length]);
    let _ = page::version_of(bytes);
    for checksums in [false, true] {
        let mut opened = disk;
        let told = page::open(&mut opened, &KEY, 3, Fork::Main, checksums);
        assert!(told.is_ok(), "format 1 cannot tell what was changed");
        let Some(version) = page::version_of(&disk) else {
            assert!(opened == disk, "a page that is not sealed was changed");
            continue;
        };
        assert_eq!(page::version_of(&opened), None, "an opened page still says that it is sealed");
        if !checksums && !page::is_zero(&opened) {
            page::seal(&mut opened, &KEY, version, 3, Fork::Main, checksums);
            // Opening corrects the page size in it, and removes its checksum.
            let body = 32..PAGE_SIZE;
            assert!(opened[body.clone()] == disk[body], "sealed again it is another page");
        }
    }
}

static AUTHENTICATED: LazyLock<[PageKey; 2]> = LazyLock::new(|| {
    let bytes: [u8; 64] = std::array::from_fn(|index| index as u8);
    [CipherId::Aes256XtsAuth, CipherId::Aes256XtsHmac].map(|cipher| {
        match DataKey::from_bytes(cipher, &bytes) {
            Ok(key) => PageKey::new(&key),
            Err(error) => panic!("{error}"),
        }
    })
});

/// A page for the format that authenticates pages. As a page from disk it is refused: only the
/// golden pages were sealed with this key, and they are opened as another block. As plaintext it
/// can be sealed; opening gives the same page, and after any change nothing.
pub fn authenticated_page(bytes: &[u8]) {
    const BLOCK: u32 = 9;
    let mut given = [0; PAGE_SIZE];
    let length = bytes.len().min(PAGE_SIZE);
    given[..length].copy_from_slice(&bytes[..length]);
    // Where the change is.
    let at = usize::from(bytes.last().copied().unwrap_or(0)) * 32 + 10;
    for key in AUTHENTICATED.iter() {
        for (number, checksums) in [(0, false), (1, true), (2, false)] {
            let Some(fork) = Fork::from_number(number) else { continue };
            let mut opened = given;
            let told = page::open(&mut opened, key, BLOCK, fork, checksums);
            // A short tag can be guessed.
            assert_ne!(told, Ok(Some(Strength::Full)), "a page that nobody has sealed was opened");

            let mut there = given;
            if !page::seal(&mut there, key, DataKeyVersion::LAST, BLOCK, fork, checksums) {
                continue;
            }
            let mut back = there;
            let Ok(Some(strength)) = page::open(&mut back, key, BLOCK, fork, checksums) else {
                let mut plain = given;
                (plain[10], plain[11]) = (plain[10] & 7, 0);
                assert!(!page::is_plaintext(&plain), "a page that can be read does not open");
                continue;
            };
            let same = |range: std::ops::Range<usize>| back[range.clone()] == given[range];
            // The flags, the checksum and the page size are as PostgreSQL has them.
            assert!(same(0..8) && same(12..18) && back[18..20] == [4, 0x20], "another header");
            assert!(same(20..PAGE_SIZE), "it opens to another page");
            there[at] ^= 1;
            let changed = page::open(&mut there, key, BLOCK, fork, false);
            assert!(changed.is_err() || strength == Strength::Short, "a change was not noticed");
        }
    }
}

/// A WAL page from disk. If it has a mark, it opens, and sealing it again gives the same bytes.
pub fn wal_page(bytes: &[u8]) {
    let _ = wal::address_of(bytes);
    let whole = bytes.len() / 16 * 16;
    let mut opened = bytes[..whole].to_vec();
    wal::open(&mut opened, &KEY);
    match wal::mark_of(&bytes[..whole]) {
        None => assert!(opened == bytes[..whole], "a page that is not sealed was changed"),
        Some(mark) => {
            let near = mark.version_near(KeyVersion::new(u32::from(bytes[0]) << 12));
            assert_eq!(Mark::of_version(near), mark);
            if !wal::is_zero(&opened) {
                wal::seal(&mut opened, &KEY, mark);
                assert!(opened == bytes[..whole], "sealed again it is another page");
            }
        }
    }
}

/// The end of a temporary file from a block on: sealing and opening gives the same bytes.
pub fn stream(bytes: &[u8]) {
    let is_whole_file = bytes.len() < stream::BLOCK;
    let block = bytes.first().copied().filter(|_| !is_whole_file).unwrap_or(0);
    let offset = u64::from(block) * stream::BLOCK as u64;
    let mut there = bytes.to_vec();
    stream::seal(&KEY, offset, &mut there);
    stream::open(&KEY, offset, &mut there);
    assert!(there == bytes);
    stream::open(&KEY, offset, &mut there);
}

/// A key log, of the cluster and of a database. Encoding decoded records gives the same.
pub fn key_log(bytes: &[u8]) {
    for scope in [Scope::CLUSTER, Scope::database(5)] {
        if let Ok(contents) = log::replay(bytes, scope) {
            assert_eq!(contents.position.end + contents.torn, bytes.len() as u64);
            fold(contents.records);
        }
    }
}

/// Files beside the key files: the mark of an export to escrow, restored records, and key groups
/// that were given up.
pub fn escrow_files(bytes: &[u8]) {
    if let Some(mark) = escrow::Mark::decode(bytes) {
        assert_eq!(escrow::Mark::decode(mark.encode().as_bytes()), Some(mark));
    }
    if let Ok(restored) = escrow::Restored::decode(bytes)
        && let Ok(written) = restored.encode()
    {
        assert_eq!(escrow::Restored::decode(&written), Ok(restored));
    }
    if let Ok(given_up) = GivenUp::decode(bytes)
        && let Ok(written) = given_up.encode()
    {
        assert_eq!(GivenUp::decode(&written), Ok(given_up));
    }
}

/// A batch of records, as in a WAL record.
pub fn batch(bytes: &[u8]) {
    if let Ok(records) = batch::decode(bytes) {
        let _ = batch::describe_all(&records);
        if let Ok(written) = batch::encode(&records) {
            assert_eq!(batch::decode(&written).as_ref(), Ok(&records));
        }
        fold(records);
    }
}

/// Applies records as the server does: to a state, and to the directory in shared memory.
fn fold(records: Vec<Record>) {
    const CAPACITY: u32 = 64;
    let words: Vec<AtomicU32> =
        (0..Directory::words_needed(CAPACITY)).map(|_| AtomicU32::new(0)).collect();
    if let Ok(directory) = Directory::init(&words, CAPACITY) {
        for record in &records {
            let _ = directory.apply(record);
        }
        assert!(directory.counts().is_ok(), "records have damaged the directory");
    }
    if let Ok(state) = State::from_records(records) {
        for home in [Scope::CLUSTER, Scope::database(5)] {
            let _ = state.records(home);
        }
    }
}

/// A request to `pagevault-keyring`.
pub fn request(bytes: &[u8]) {
    if let Ok(request) = Request::from_json(bytes) {
        let text = request.to_json();
        let again = text.as_ref().is_ok_and(|text| Request::from_json(text).is_ok());
        assert!(again, "a request that was read cannot be written");
    }
}

/// A reply of `pagevault-keyring`.
pub fn reply(bytes: &[u8]) {
    for operations in 0..8 {
        if let Ok(reply) = protocol::Reply::from_json(bytes, operations) {
            let text = reply.to_json();
            let again = text
                .as_ref()
                .is_ok_and(|text| protocol::Reply::from_json(text, operations).is_ok());
            assert!(again, "a reply that was read cannot be written");
        }
    }
}

/// A key file.
pub fn key_file(bytes: &[u8]) {
    if let Ok(keys) = KeyFile::decode(bytes) {
        let text = keys.encode();
        let again = text.as_ref().is_ok_and(|text| KeyFile::decode(text).is_ok());
        assert!(again, "a key file that was read cannot be written");
    }
}

/// A wrapped key of a provider with a format of its own. Writing what was read gives the same
/// bytes.
pub fn wrapped_key(bytes: &[u8]) {
    if let Ok(wrapping) = Wrapping::parse(bytes) {
        assert_eq!(wrapping.to_bytes().as_deref(), Some(bytes));
    }
    if let Some(parts) = Parts::of(bytes) {
        let head = envelope::head(parts.key_version, parts.method, parts.id, parts.once);
        assert_eq!(head.as_deref(), Some(parts.head));
        assert_eq!([parts.head, parts.body].concat(), bytes);
        assert!(envelope::open(&[7; 32], parts.head, parts.body).is_none());
    }
}

/// Options of a provider as in SQL, for each kind.
pub fn options(bytes: &[u8]) {
    let Ok(options) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return };
    let environment = Environment {
        data_directory: Some("/nonexistent".into()),
        deadline: None,
        programs: true,
        repeats_programs: false,
    };
    for kind in
        ["file", "vault", "aws_kms", "gcp_kms", "azure_key_vault", "pkcs11", "kmip", "command"]
    {
        let _ = providers::build(kind, &options, &environment);
    }
}

/// A reply of a KMIP server. What is well formed is written again with the same values. Whatever it
/// is, it can be read as the answer to each operation in each version.
pub fn kmip_reply(bytes: &[u8]) {
    operations::read_anything(bytes);
    let Ok(message) = ttlv::parse(bytes) else { return };
    let write = |item: ttlv::Item<'_>| {
        let mut writer = ttlv::Writer::default();
        writer.put(item.tag, item.value);
        writer.into_bytes()
    };
    // The padding of what was received may be anything.
    let written = write(message);
    assert_eq!(written.len(), bytes.len(), "written again it has another length");
    let again = ttlv::parse(&written).map(write);
    assert!(again.is_ok_and(|again| *again == *written), "written again it is another message");
}

/// The output of a program of the `command` provider. Parsed values have the promised forms, and
/// writing them gives an output with the same values. Errors repeat nothing of the output, which
/// may contain a key.
pub fn command_reply(bytes: &[u8]) {
    for known in [&["wrapped", "key_version"][..], &["plaintext"], &["key_version"]] {
        match Reply::read(bytes, known) {
            Ok(read) => {
                assert!(read.wrapped.as_deref().is_none_or(reply::is_opaque));
                assert!(
                    read.key_version.is_none_or(|version| (1..=i64::MAX as u64).contains(&version))
                );
                let mut text = String::new();
                text.extend(read.wrapped.iter().map(|wrapped| format!("wrapped {wrapped}\n")));
                text.extend(
                    read.plaintext
                        .iter()
                        .map(|key| format!("plaintext {}\n", STANDARD.encode(**key))),
                );
                text.extend(
                    read.key_version.iter().map(|version| format!("key_version {version}\n")),
                );
                let again = Reply::read(text.as_bytes(), known);
                let same = again.is_ok_and(|again| {
                    again.wrapped == read.wrapped
                        && again.plaintext == read.plaintext
                        && again.key_version == read.key_version
                });
                assert!(same, "an answer of its values is another");
            }
            // 32 bytes in base64 end with `=`, and none of the messages contains one.
            Err(wrong) => assert!(!wrong.contains('='), "the message repeats the answer"),
        }
    }
}

/// A line of the audit trail, and the state file with its newest line. A parsed line has a number
/// and is not authentic.
pub fn audit_line(bytes: &[u8]) {
    let key = AuditKey::derive(&[1; 32], &[2; 16], KeyVersion::FIRST);
    let text = String::from_utf8_lossy(bytes);
    if let Some(line) = audit::Line::parse(&text) {
        assert!(line.seq > 0 && !line.is_authentic(&key));
    }
    if let Some(noted) = audit::newest(bytes) {
        assert!(noted.text.len() <= audit::MAX_LINE);
    }
}

/// The manifest of a base backup, and its seal. A parsed seal is not authentic.
pub fn manifest(bytes: &[u8]) {
    let _ = Manifest::parse(bytes);
    if let Ok(seal) = Seal::parse(bytes) {
        assert!(!seal.is_authentic(&Secret32::from_bytes(&[1; 32])));
    }
}

/// The text of a security label. Parsed labels can be written and parsed again, with any white
/// space.
pub fn label(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(label) = text.parse::<Label>() {
        let words = label.to_string();
        assert_eq!(words.parse(), Ok(label));
        assert_eq!(words.replace(' ', "\t\n ").parse(), Ok(label));
        assert!(text.split_ascii_whitespace().eq(words.split(' ')), "a word was ignored");
    }
}

/// An executable.
pub fn elf(bytes: &[u8]) {
    let _ = pagevault_targets::check("postgres", bytes.to_vec());
    if let Ok(elf) = Elf::parse_file(bytes) {
        for name in [&b"mdread"[..], b"open", b""] {
            let _ = elf.exports(name).count() + elf.imports(name).count();
        }
    }
}
