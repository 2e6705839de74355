//! Data keys, expanded for use.

use crate::key::{CipherId, DataKey};
use crate::tag::Tagging;
use crate::xts::{Backend, Schedule};

/// A data key with its expanded round keys.
///
/// Has a fixed size, uses no heap, and is wiped when dropped.
pub struct PageKey {
    cipher: CipherId,
    pub(crate) schedule: Schedule,
    /// Of ciphers that authenticate pages.
    pub(crate) tagging: Option<Tagging>,
}

impl PageKey {
    /// Expands `key` for the fastest kernel of this CPU.
    #[must_use]
    pub fn new(key: &DataKey) -> Self {
        Self {
            cipher: key.cipher(),
            schedule: Schedule::detect(key.cipher().key_size(), key.bytes()),
            tagging: Tagging::new(key, true),
        }
    }

    /// Expands `key` for the given kernel; `None` if this CPU cannot run it. For tests and
    /// benchmarks.
    #[must_use]
    pub fn with_backend(key: &DataKey, backend: Backend) -> Option<Self> {
        Self::in_passes(key, backend, true)
    }

    /// Likewise, but pages are encrypted and hashed one after the other, even where this CPU has a
    /// kernel for both at once.
    #[must_use]
    pub fn in_two_passes(key: &DataKey, backend: Backend) -> Option<Self> {
        Self::in_passes(key, backend, false)
    }

    fn in_passes(key: &DataKey, backend: Backend, fused: bool) -> Option<Self> {
        let schedule = Schedule::new(key.cipher().key_size(), key.bytes(), backend)?;
        Some(Self { cipher: key.cipher(), schedule, tagging: Tagging::new(key, fused) })
    }

    /// The kernel this key was expanded for.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.schedule.backend()
    }

    /// The cipher this key is for.
    #[must_use]
    pub fn cipher(&self) -> CipherId {
        self.cipher
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_key_can_be_stored_in_a_static() {
        static CACHE: std::sync::Mutex<[Option<PageKey>; 4]> =
            std::sync::Mutex::new([const { None }; 4]);
        CACHE.lock().unwrap()[0] =
            Some(PageKey::new(&DataKey::random(CipherId::Aes128Xts).unwrap()));
    }
}
