//! Stream format version 1 against a file that another program sealed (vectors/stream.py).

use pagevault_cipher::{Backend, CipherId, DataKey, PageKey, stream};

const SEALED: &[u8] = include_bytes!("../vectors/sealed-v1.stream");

fn plain() -> Vec<u8> {
    let words = (0_u32..).step_by(4).flat_map(u32::to_le_bytes);
    words.take(SEALED.len()).collect()
}

#[allow(clippy::unwrap_used, reason = "a helper of tests: a key that cannot be had is a failure")]
fn keys() -> Vec<PageKey> {
    let bytes: [u8; 64] = std::array::from_fn(|i| i as u8);
    let key = DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap();
    Backend::ALL.into_iter().filter_map(|backend| PageKey::with_backend(&key, backend)).collect()
}

#[test]
fn version_1_seals_to_the_golden_file() {
    for key in keys() {
        let mut bytes = plain();
        stream::seal(&key, 0, &mut bytes);
        assert!(bytes == SEALED, "{}", key.backend());
    }
}

#[test]
fn version_1_opens_the_golden_file() {
    for key in keys() {
        let mut bytes = SEALED.to_vec();
        stream::open(&key, 0, &mut bytes);
        assert!(bytes == plain(), "{}", key.backend());
    }
}
