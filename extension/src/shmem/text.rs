//! Texts and other bytes in shared memory. Readers and writers hold a lock, which the containing
//! region documents.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::*};

use crate::pg::mapping::shared_struct;

shared_struct! {
    /// A text of at most `N` bytes.
    pub(crate) struct Text<const N: usize> {
        length: AtomicU32,
        bytes: [AtomicU8; N],
    }
}

impl<const N: usize> Text<N> {
    pub(crate) fn load(&self) -> String {
        let length = self.length.load(Relaxed) as usize;
        let bytes = self.bytes.iter().take(length).map(|byte| byte.load(Relaxed));
        String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
    }

    /// Stores a text, truncated to `N` bytes.
    pub(crate) fn store(&self, text: &str) {
        let text = &text[..text.floor_char_boundary(N)];
        store_bytes(&self.bytes, text.as_bytes());
        self.length.store(text.len() as u32, Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.length.load(Relaxed) == 0
    }
}

pub(super) fn load_bytes<const N: usize>(from: &[AtomicU8; N]) -> [u8; N] {
    std::array::from_fn(|at| from[at].load(Relaxed))
}

pub(super) fn store_bytes(to: &[AtomicU8], bytes: &[u8]) {
    for (to, byte) in to.iter().zip(bytes) {
        to.store(*byte, Relaxed);
    }
}
