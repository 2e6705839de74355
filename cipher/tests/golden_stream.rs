//! Stream format version 1, compared with files that another program sealed (vectors/stream.py).

use pagevault_cipher::{Backend, CipherId, DataKey, PageKey, stream};

/// Sealed files: the first ends within a unit, the second just after one.
const SEALED: [&[u8]; 2] = [
    include_bytes!("../vectors/sealed-v1.stream"),
    include_bytes!("../vectors/sealed-v1-unit.stream"),
];

/// Files of 1 to 15 bytes, one after the other.
const SHORT: &[u8] = include_bytes!("../vectors/sealed-v1-short.stream");

fn files() -> Vec<&'static [u8]> {
    let mut files = SEALED.to_vec();
    let mut rest = SHORT;
    for length in 1..stream::BLOCK {
        let (file, next) = rest.split_at(length);
        files.push(file);
        rest = next;
    }
    assert!(rest.is_empty());
    files
}

fn plain(length: usize) -> Vec<u8> {
    (0_u32..).step_by(4).flat_map(u32::to_le_bytes).take(length).collect()
}

#[allow(clippy::unwrap_used, reason = "a helper of tests: a key that cannot be had is a failure")]
fn keys() -> Vec<PageKey> {
    let bytes: [u8; 64] = std::array::from_fn(|i| i as u8);
    let key = DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap();
    Backend::ALL.into_iter().filter_map(|backend| PageKey::with_backend(&key, backend)).collect()
}

#[test]
fn version_1_seals_to_the_golden_files() {
    for key in keys() {
        for sealed in files() {
            let mut bytes = plain(sealed.len());
            stream::seal(&key, 0, &mut bytes);
            assert!(bytes == sealed, "{}, {} bytes", key.backend(), sealed.len());
        }
    }
}

#[test]
fn version_1_opens_the_golden_files() {
    for key in keys() {
        for sealed in files() {
            let mut bytes = sealed.to_vec();
            stream::open(&key, 0, &mut bytes);
            assert!(bytes == plain(sealed.len()), "{}, {} bytes", key.backend(), sealed.len());
        }
    }
}
