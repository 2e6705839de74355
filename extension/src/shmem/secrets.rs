//! Unwrapped database keys, in memory that is locked, left out of core dumps and shared by all
//! processes of the server.
//!
//! Writers hold the keystore lock; readers take none. A slot is published by its state word.
//!
//! A key that its provider does not unwrap any more (see [`crate::keys::provider::revalidate`]) is
//! not wiped, neither when that is noticed nor when access to what it protects is refused: it stays
//! here until the server stops. Dirty pages must still be sealed, or no checkpoint would ever end
//! again.

use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::secret::Secret32;
use pagevault_keystore::protocol::ErrorClass;

use super::words::{load_u64, store_u64};

/// Database keys for which there is always room: 64 kB are what may be locked in memory everywhere.
const SLOTS: usize = 1024;
/// More than there are when the server starts.
const GROWTH: usize = 256;
/// Those of them that only recovery uses.
const RESERVED: usize = 64;
/// Words in a slot: state, scope, version, cause of revocation, then eight of key and two of time.
const STRIDE: usize = 16;
const CAUSE: usize = 3;
const KEY: usize = 4;
const KEY_WORDS: usize = 8;
const SINCE: std::ops::Range<usize> = 12..14;

/// Words of memory that [`Secrets`] needs where there are this many database keys: versions of all
/// scopes.
pub(crate) fn words_needed(existing: usize) -> usize {
    SLOTS.max(existing + GROWTH) * STRIDE
}

/// Slot 0 holds the key of temporary data, which no keystore knows.
const TEMPORARY: usize = 0;
/// Words of slot 0: how many keys are refused, and how many locked.
const REFUSED_KEYS: usize = 1;
const LOCKED_KEYS: usize = 2;

const FREE: u32 = 0;
const LOCKED: u32 = 1;
const READY: u32 = 2;
const REVOKED: u32 = 3;
const REFUSED: u32 = 4;

/// Causes of a revocation, by the number that a slot holds.
const CAUSES: [ErrorClass; 5] = [
    ErrorClass::WrongCiphertext,
    ErrorClass::Denied,
    ErrorClass::KeyMissing,
    ErrorClass::KeyDisabled,
    ErrorClass::WrongKey,
];

/// No room for another database key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// Whether a database key is usable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Known from the keystore, not unwrapped.
    Locked,
    /// Unwrapped.
    Ready,
    /// Unwrapped and usable, though the provider would not unwrap it now.
    Revoked,
    /// As `Revoked`, and users are refused: pages are sealed and recovery goes on, nothing else.
    Refused,
}

impl State {
    fn of(word: u32) -> State {
        match word {
            READY => State::Ready,
            REVOKED => State::Revoked,
            REFUSED => State::Refused,
            _ => State::Locked,
        }
    }
}

/// Since when and why a key is revoked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Revocation {
    /// Microseconds since 1970.
    pub(crate) since: u64,
    pub(crate) cause: ErrorClass,
}

/// The table of database keys.
#[derive(Clone, Copy)]
pub(crate) struct Secrets {
    words: &'static [AtomicU32],
}

impl Secrets {
    /// The table in `words`, which are zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Secrets {
        assert!(words.len() >= words_needed(0));
        Secrets { words }
    }

    fn slot(&self, index: usize) -> &'static [AtomicU32] {
        &self.words[index * STRIDE..(index + 1) * STRIDE]
    }

    fn slots(&self) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        self.places().take_while(|s| s[0].load(Acquire) != FREE)
    }

    /// Used or free.
    fn places(&self) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        self.words[STRIDE..].chunks_exact(STRIDE)
    }

    /// How many database keys may be made.
    pub(crate) fn limit(&self) -> usize {
        self.places().count().saturating_sub(RESERVED)
    }

    /// Whether another database key may be made.
    pub(crate) fn has_room(&self) -> bool {
        self.slots().count() < self.limit()
    }

    fn find(&self, scope: u32, version: u32) -> Option<&'static [AtomicU32]> {
        self.slots().find(|s| s[1].load(Relaxed) == scope && s[2].load(Relaxed) == version)
    }

    /// Whether [`Secrets::announce`] would find room.
    pub(crate) fn could_announce(&self, scope: u32, version: u32) -> bool {
        self.find(scope, version).is_some()
            || self.places().any(|slot| slot[0].load(Acquire) == FREE)
    }

    /// Makes a database key known, locked until [`Secrets::unlock`].
    pub(crate) fn announce(&self, scope: u32, version: u32) -> Result<(), Full> {
        if self.find(scope, version).is_some() {
            return Ok(());
        }
        let slot = self.places().find(|s| s[0].load(Acquire) == FREE).ok_or(Full)?;
        slot[1].store(scope, Relaxed);
        slot[2].store(version, Relaxed);
        slot[0].store(LOCKED, Release);
        self.count();
        Ok(())
    }

    /// Publishes an unwrapped database key. One that is there already stays as it is.
    pub(crate) fn unlock(&self, scope: u32, version: u32, key: &Secret32) -> Result<(), Full> {
        self.announce(scope, version)?;
        let locked = self.find(scope, version).filter(|s| s[0].load(Relaxed) == LOCKED);
        if let Some(slot) = locked {
            write_key(slot, key);
            self.count();
        }
        Ok(())
    }

    /// Whether the key is known, and if so usable.
    pub(crate) fn state(&self, scope: u32, version: u32) -> Option<State> {
        self.find(scope, version).map(|slot| State::of(slot[0].load(Acquire)))
    }

    /// The newest version of a scope's key.
    pub(crate) fn newest(&self, scope: u32) -> Option<u32> {
        self.slots().filter(|s| s[1].load(Relaxed) == scope).map(|s| s[2].load(Relaxed)).max()
    }

    /// Copies an unwrapped key out, to the heap, also one that is refused: what may be done with it
    /// is for the caller
    /// to ask.
    pub(crate) fn get(&self, scope: u32, version: u32) -> Option<Secret32> {
        let slot = self.find(scope, version).filter(|slot| is_unwrapped(slot))?;
        Some(Secret32::filled(|key| read_key(slot, key)))
    }

    /// Runs `f`, which is pure and returns no secret, with an unwrapped key, also one that is
    /// refused. Allocates nothing, and leaves nothing on the stack.
    pub(crate) fn with<R>(
        &self,
        scope: u32,
        version: u32,
        f: impl FnOnce(&[u8; 32]) -> R,
    ) -> Option<R> {
        self.find(scope, version).and_then(|slot| with_key(slot, f))
    }

    /// Whether an unwrapped key is this one; `None` if there is no such key.
    pub(crate) fn is(&self, scope: u32, version: u32, key: &Secret32) -> Option<bool> {
        self.with(scope, version, |known| key.matches(known))
    }

    /// Whether any key is known, be it locked. One load.
    #[inline]
    pub(crate) fn any_known(&self) -> bool {
        self.words[STRIDE].load(Acquire) != FREE
    }

    /// (scope, version, state) of every known key.
    pub(crate) fn list(&self) -> Vec<(u32, u32, State)> {
        self.slots()
            .map(|s| (s[1].load(Relaxed), s[2].load(Relaxed), State::of(s[0].load(Acquire))))
            .collect()
    }

    /// The unwrapped keys of a scope, in all versions: they stand and fall together.
    fn unwrapped(&self, scope: u32) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        self.slots().filter(move |s| s[1].load(Relaxed) == scope && s[0].load(Relaxed) >= READY)
    }

    /// Marks a scope's keys as revoked, and as refused if `refuse`.
    pub(crate) fn revoke(&self, scope: u32, revocation: Revocation, refuse: bool) {
        let cause = CAUSES.iter().position(|cause| *cause == revocation.cause).unwrap_or_default();
        for slot in self.unwrapped(scope) {
            slot[CAUSE].store(cause as u32, Relaxed);
            store_u64(&slot[SINCE], revocation.since);
            slot[0].store(if refuse { REFUSED } else { REVOKED }, Release);
        }
        self.count();
    }

    /// Takes the mark away. True if there was one.
    pub(crate) fn restore(&self, scope: u32) -> bool {
        let marked = self.unwrapped(scope).filter(|s| s[0].load(Relaxed) != READY);
        let restored = marked.map(|slot| slot[0].store(READY, Release)).count();
        self.count();
        restored > 0
    }

    fn count(&self) {
        for (word, state) in [(REFUSED_KEYS, REFUSED), (LOCKED_KEYS, LOCKED)] {
            let keys = self.slots().filter(|s| s[0].load(Relaxed) == state).count();
            self.words[word].store(keys as u32, Release);
        }
    }

    /// Since when and why a scope's keys are revoked, if they are; under the keystore lock.
    pub(crate) fn revocation(&self, scope: u32) -> Option<Revocation> {
        let slot = self.unwrapped(scope).find(|s| s[0].load(Relaxed) != READY)?;
        let cause = slot[CAUSE].load(Relaxed) as usize;
        Some(Revocation {
            since: load_u64(&slot[SINCE]),
            cause: CAUSES.get(cause).copied().unwrap_or(ErrorClass::Internal),
        })
    }

    /// Whether any key is refused. One relaxed load.
    #[inline]
    pub(crate) fn any_refused(&self) -> bool {
        self.words[REFUSED_KEYS].load(Relaxed) != 0
    }

    /// Whether any key is locked. One relaxed load.
    #[inline]
    pub(crate) fn any_locked(&self) -> bool {
        self.words[LOCKED_KEYS].load(Relaxed) != 0
    }

    /// Whether a scope's keys are refused.
    pub(crate) fn is_refused(&self, scope: u32) -> bool {
        self.unwrapped(scope).any(|s| s[0].load(Relaxed) == REFUSED)
    }

    /// Sets the key of temporary data, once per server start.
    pub(crate) fn set_temporary(&self, key: &Secret32) {
        write_key(self.slot(TEMPORARY), key);
    }

    /// As [`Secrets::with`], with the key of temporary data.
    pub(crate) fn with_temporary<R>(&self, f: impl FnOnce(&[u8; 32]) -> R) -> Option<R> {
        with_key(self.slot(TEMPORARY), f)
    }
}

fn write_key(slot: &[AtomicU32], key: &Secret32) {
    for (word, bytes) in slot[KEY..KEY + KEY_WORDS].iter().zip(key.expose().as_chunks::<4>().0) {
        word.store(u32::from_ne_bytes(*bytes), Relaxed);
    }
    slot[0].store(READY, Release);
}

fn is_unwrapped(slot: &[AtomicU32]) -> bool {
    slot[0].load(Acquire) >= READY
}

fn read_key(slot: &[AtomicU32], key: &mut [u8; 32]) {
    for (word, out) in slot[KEY..KEY + KEY_WORDS].iter().zip(key.as_chunks_mut::<4>().0) {
        *out = word.load(Relaxed).to_ne_bytes();
    }
}

fn with_key<R>(slot: &[AtomicU32], f: impl FnOnce(&[u8; 32]) -> R) -> Option<R> {
    is_unwrapped(slot).then(|| {
        without_trace(|| {
            let mut key = [0; 32];
            read_key(slot, &mut key);
            f(&key)
        })
    })
}
