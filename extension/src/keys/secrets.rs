//! Unwrapped database keys, in memory that is locked, left out of core dumps and shared by all
//! processes of the server.
//!
//! Writers hold the keystore lock; readers take none. A slot is published by its state word.

use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_cipher::secret::Secret32;

/// Scopes (databases with a master key of their own, and the cluster) times live versions.
const SLOTS: usize = 1024;
/// Words in a slot: state, scope, version, one spare, then eight of key.
const STRIDE: usize = 16;
const KEY: usize = 4;
const KEY_WORDS: usize = 8;

/// Words of memory that [`Secrets`] needs.
pub(crate) const WORDS: usize = SLOTS * STRIDE;

/// Slot 0 holds the key of temporary data, which no keystore knows.
const TEMPORARY: usize = 0;

const FREE: u32 = 0;
const LOCKED: u32 = 1;
const READY: u32 = 2;

/// No room for another database key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// Whether a database key is usable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Known from the keystore, not unwrapped.
    Locked,
    /// Unwrapped.
    Ready,
}

/// The table of database keys.
#[derive(Clone, Copy)]
pub(crate) struct Secrets {
    words: &'static [AtomicU32],
}

impl Secrets {
    /// The table in `words`, which are zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Secrets {
        assert!(words.len() >= WORDS);
        Secrets { words }
    }

    fn slot(&self, index: usize) -> &'static [AtomicU32] {
        &self.words[index * STRIDE..(index + 1) * STRIDE]
    }

    fn slots(&self) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        self.words[STRIDE..WORDS].chunks_exact(STRIDE).take_while(|s| s[0].load(Acquire) != FREE)
    }

    fn find(&self, scope: u32, version: u32) -> Option<&'static [AtomicU32]> {
        self.slots().find(|s| s[1].load(Relaxed) == scope && s[2].load(Relaxed) == version)
    }

    /// Makes a database key known, locked until [`Secrets::unlock`].
    pub(crate) fn announce(&self, scope: u32, version: u32) -> Result<(), Full> {
        if self.find(scope, version).is_some() {
            return Ok(());
        }
        let free = (1..SLOTS).map(|i| self.slot(i)).find(|s| s[0].load(Acquire) == FREE);
        let slot = free.ok_or(Full)?;
        slot[1].store(scope, Relaxed);
        slot[2].store(version, Relaxed);
        slot[0].store(LOCKED, Release);
        Ok(())
    }

    /// Publishes an unwrapped database key.
    pub(crate) fn unlock(&self, scope: u32, version: u32, key: &Secret32) -> Result<(), Full> {
        self.announce(scope, version)?;
        if let Some(slot) = self.find(scope, version) {
            write_key(slot, key);
        }
        Ok(())
    }

    /// Whether the key is known, and if so usable.
    pub(crate) fn state(&self, scope: u32, version: u32) -> Option<State> {
        self.find(scope, version).map(|slot| match slot[0].load(Acquire) {
            READY => State::Ready,
            _ => State::Locked,
        })
    }

    /// The newest version of a scope's key.
    pub(crate) fn newest(&self, scope: u32) -> Option<u32> {
        self.slots().filter(|s| s[1].load(Relaxed) == scope).map(|s| s[2].load(Relaxed)).max()
    }

    /// Copies an unwrapped key out.
    pub(crate) fn get(&self, scope: u32, version: u32) -> Option<Secret32> {
        self.find(scope, version).and_then(read_key)
    }

    /// (scope, version, state) of every known key.
    pub(crate) fn list(&self) -> Vec<(u32, u32, State)> {
        self.slots()
            .map(|s| {
                let state = if s[0].load(Acquire) == READY { State::Ready } else { State::Locked };
                (s[1].load(Relaxed), s[2].load(Relaxed), state)
            })
            .collect()
    }

    /// Sets the key of temporary data, once per server start.
    pub(crate) fn set_temporary(&self, key: &Secret32) {
        write_key(self.slot(TEMPORARY), key);
    }

    /// The key of temporary data.
    pub(crate) fn temporary(&self) -> Option<Secret32> {
        read_key(self.slot(TEMPORARY))
    }
}

fn write_key(slot: &[AtomicU32], key: &Secret32) {
    for (word, bytes) in slot[KEY..KEY + KEY_WORDS].iter().zip(key.expose().as_chunks::<4>().0) {
        word.store(u32::from_ne_bytes(*bytes), Relaxed);
    }
    slot[0].store(READY, Release);
}

fn read_key(slot: &[AtomicU32]) -> Option<Secret32> {
    if slot[0].load(Acquire) != READY {
        return None;
    }
    let mut bytes = zeroize::Zeroizing::new([0u8; 32]);
    for (word, out) in slot[KEY..KEY + KEY_WORDS].iter().zip(bytes.as_chunks_mut::<4>().0) {
        *out = word.load(Relaxed).to_ne_bytes();
    }
    Some(Secret32::from_bytes(&bytes))
}
