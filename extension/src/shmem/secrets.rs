//! Unwrapped database keys, in memory that is locked, excluded from core dumps and shared by all
//! processes of the server.
//!
//! Writers hold the keystore lock; readers take no lock. A slot is published by its state.
//!
//! A key that its provider no longer unwraps (see [`crate::keys::provider::revalidate`]) is not
//! wiped, neither when that is detected nor when access is refused: it stays here until the server
//! stops. Dirty pages must still be sealed, or no checkpoint could finish.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};
use std::time::Duration;

use pagevault_cipher::KeyVersion;
use pagevault_cipher::residue::without_trace;
use pagevault_cipher::secret::Secret32;
use pagevault_keystore::Scope;
use pagevault_keystore::protocol::ErrorClass;

use crate::pg::mapping::{Region, shared_struct};

shared_struct! {
    /// Precedes the slots.
    pub(crate) struct Head {
        /// The number of refused keys, and of locked keys.
        refused_keys: AtomicU32,
        locked_keys: AtomicU32,
        /// The key of temporary data, which is in no keystore.
        temporary: Slot,
    }
}

shared_struct! {
    /// A database key.
    pub(crate) struct Slot {
        /// [`FREE`] or another of these states. Written last.
        state: AtomicU32,
        scope: AtomicU32,
        version: AtomicU32,
        /// Cause of a revocation: index into [`CAUSES`].
        cause: AtomicU32,
        since: AtomicU64,
        begun: AtomicU64,
        key: [AtomicU32; 8],
    }
}

/// Minimum number of slots: with the head at most 64 kB, which any process may lock in memory.
const SLOTS: usize = 1022;
const _: () = assert!(size_of::<Head>() + SLOTS * size_of::<Slot>() <= 64 << 10);
/// Number of free slots at server start, at least.
const GROWTH: usize = 256;
/// Slots of these that are reserved for recovery.
const RESERVED: usize = 64;

/// Number of slots that [`Secrets`] needs if there are this many database keys: versions of all
/// scopes. There may be twice as many before the next start.
pub(crate) fn slots_needed(existing: usize) -> usize {
    SLOTS.max(existing + existing.max(GROWTH))
}

/// States of a slot; in states from [`READY`] on the key is unwrapped. All slots after the first
/// free one are free; one that was used and is `GONE` may be used again.
const FREE: u32 = 0;
const GONE: u32 = 1;
const LOCKED: u32 = 2;
const READY: u32 = 3;
const REVOKED: u32 = 4;
const REFUSED: u32 = 5;

/// Causes of a revocation, by the number in a slot.
const CAUSES: [ErrorClass; 5] = [
    ErrorClass::WrongCiphertext,
    ErrorClass::Denied,
    ErrorClass::KeyMissing,
    ErrorClass::KeyDisabled,
    ErrorClass::WrongKey,
];

/// No free slot for another database key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// State of a database key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// In the keystore, but not unwrapped.
    Locked,
    /// Unwrapped.
    Ready,
    /// Unwrapped and usable, although the provider would not unwrap it now.
    Revoked,
    /// Like `Revoked`, but refused to users: used only for sealing pages and in recovery.
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

/// When and why a key was revoked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Revocation {
    /// Microseconds since 1970, for people: the system's clock may be set.
    pub(crate) since: u64,
    /// The same moment on the clock that is never set (`clock::since_boot`).
    pub(crate) begun: Duration,
    pub(crate) cause: ErrorClass,
}

/// The table of database keys.
#[derive(Clone, Copy)]
pub(crate) struct Secrets {
    memory: Region<Head, Slot>,
}

impl Secrets {
    /// The table in this memory, which is zero at first.
    pub(crate) fn new(memory: Region<Head, Slot>) -> Secrets {
        Secrets { memory }
    }

    fn slots(&self) -> impl Iterator<Item = &'static Slot> + use<> {
        let used = self.places().take_while(|slot| slot.state.load(Acquire) != FREE);
        used.filter(|slot| slot.state.load(Acquire) != GONE)
    }

    /// A slot for another key.
    fn vacant(&self) -> Option<&'static Slot> {
        self.places().find(|slot| slot.state.load(Acquire) < LOCKED)
    }

    /// All slots, used or free.
    fn places(&self) -> impl ExactSizeIterator<Item = &'static Slot> + use<> {
        self.memory.entries.iter()
    }

    /// Maximum number of database keys, except in recovery.
    pub(crate) fn limit(&self) -> usize {
        self.places().len().saturating_sub(RESERVED)
    }

    /// Whether another database key may be created.
    pub(crate) fn has_room(&self) -> bool {
        self.slots().count() < self.limit()
    }

    fn find(&self, scope: Scope, version: KeyVersion) -> Option<&'static Slot> {
        self.slots().find(|slot| identity(slot) == Some((scope, version)))
    }

    /// Whether [`Secrets::announce`] would succeed.
    pub(crate) fn could_announce(&self, scope: Scope, version: KeyVersion) -> bool {
        self.find(scope, version).is_some() || self.vacant().is_some()
    }

    /// Adds a database key, locked until [`Secrets::unlock`].
    pub(crate) fn announce(&self, scope: Scope, version: KeyVersion) -> Result<(), Full> {
        if self.find(scope, version).is_some() {
            return Ok(());
        }
        let slot = self.vacant().ok_or(Full)?;
        slot.scope.store(scope.number(), Relaxed);
        slot.version.store(version.get(), Release);
        slot.state.store(LOCKED, Release);
        self.count();
        Ok(())
    }

    /// Publishes an unwrapped database key. No effect if it is unlocked already.
    pub(crate) fn unlock(
        &self,
        scope: Scope,
        version: KeyVersion,
        key: &Secret32,
    ) -> Result<(), Full> {
        self.announce(scope, version)?;
        let locked = self.find(scope, version).filter(|s| s.state.load(Relaxed) == LOCKED);
        if let Some(slot) = locked {
            write_key(slot, key);
            self.count();
        }
        Ok(())
    }

    /// Wipes a key that nothing needs any more. No process looks for it: it wraps nothing.
    pub(crate) fn forget(&self, scope: Scope, version: KeyVersion) {
        if let Some(slot) = self.find(scope, version) {
            slot.state.store(GONE, Release);
            slot.version.store(0, Relaxed);
            // A reader that sees anything of what follows, or of a later key in this slot, also
            // sees that the version has changed (`identity`).
            fence(Release);
            slot.key.iter().for_each(|word| word.store(0, Relaxed));
            self.count();
        }
    }

    /// Wipes all versions of a scope's key: they are destroyed.
    pub(crate) fn forget_scope(&self, scope: Scope) {
        for (_, version, _) in self.list().into_iter().filter(|(of, ..)| *of == scope) {
            self.forget(scope, version);
        }
    }

    /// The state of a key; `None` if it is unknown.
    pub(crate) fn state(&self, scope: Scope, version: KeyVersion) -> Option<State> {
        self.find(scope, version).map(|slot| State::of(slot.state.load(Acquire)))
    }

    /// True if no key is known, locked ones included.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots().next().is_none()
    }

    /// The newest version of a scope's key.
    pub(crate) fn newest(&self, scope: Scope) -> Option<KeyVersion> {
        let places = self.slots().filter_map(identity).filter(|(of, _)| *of == scope);
        places.map(|(_, version)| version).max()
    }

    /// The newest version of each scope's key, in one pass.
    pub(crate) fn newest_of_each(&self) -> HashMap<Scope, KeyVersion> {
        let mut newest = HashMap::new();
        for (scope, version) in self.slots().filter_map(identity) {
            let newest = newest.entry(scope).or_insert(version);
            *newest = version.max(*newest);
        }
        newest
    }

    /// Copies an unwrapped key to the heap, even if it is refused: the caller must check what it
    /// may be used for.
    pub(crate) fn get(&self, scope: Scope, version: KeyVersion) -> Option<Secret32> {
        let slot = self.find(scope, version).filter(|slot| is_unwrapped(slot))?;
        let key = Secret32::filled(|key| read_key(slot, key));
        is_still(slot, scope, version).then_some(key)
    }

    /// Calls `f`, which is pure and returns no secret, with an unwrapped key, even if it is
    /// refused. Allocates nothing, and leaves no copy on the stack.
    pub(crate) fn with<R>(
        &self,
        scope: Scope,
        version: KeyVersion,
        f: impl FnOnce(&[u8; 32]) -> R,
    ) -> Option<R> {
        let slot = self.find(scope, version)?;
        with_key(slot, |key| is_still(slot, scope, version).then(|| f(key)))?
    }

    /// Whether an unwrapped key equals `key`; `None` if there is no such key.
    pub(crate) fn is(&self, scope: Scope, version: KeyVersion, key: &Secret32) -> Option<bool> {
        self.with(scope, version, |known| key.matches(known))
    }

    /// Whether any key is known, even if locked. One load.
    #[inline]
    pub(crate) fn any_known(&self) -> bool {
        self.slots().next().is_some()
    }

    /// (scope, version, state) of every known key.
    pub(crate) fn list(&self) -> Vec<(Scope, KeyVersion, State)> {
        let key = |slot: &Slot| {
            let (scope, version) = identity(slot)?;
            Some((scope, version, State::of(slot.state.load(Acquire))))
        };
        self.slots().filter_map(key).collect()
    }

    /// The unwrapped keys of a scope, in all versions, which are revoked and restored together.
    fn unwrapped(&self, scope: Scope) -> impl Iterator<Item = &'static Slot> + use<> {
        self.slots()
            .filter(move |slot| scope_of(slot) == scope && slot.state.load(Relaxed) >= READY)
    }

    /// Marks a scope's keys as revoked, and as refused if `refuse`.
    pub(crate) fn revoke(&self, scope: Scope, revocation: Revocation, refuse: bool) {
        let cause = CAUSES.iter().position(|cause| *cause == revocation.cause).unwrap_or_default();
        for slot in self.unwrapped(scope) {
            slot.cause.store(cause as u32, Relaxed);
            slot.since.store(revocation.since, Relaxed);
            slot.begun.store(revocation.begun.as_micros() as u64, Relaxed);
            slot.state.store(if refuse { REFUSED } else { REVOKED }, Release);
        }
        self.count();
    }

    /// Removes the mark. True if any key had it.
    pub(crate) fn restore(&self, scope: Scope) -> bool {
        let marked = self.unwrapped(scope).filter(|s| s.state.load(Relaxed) != READY);
        let restored = marked.map(|slot| slot.state.store(READY, Release)).count();
        self.count();
        restored > 0
    }

    fn count(&self) {
        let Head { refused_keys, locked_keys, .. } = self.memory.head;
        for (count, state) in [(refused_keys, REFUSED), (locked_keys, LOCKED)] {
            let keys = self.slots().filter(|s| s.state.load(Relaxed) == state).count();
            count.store(keys as u32, Release);
        }
    }

    /// When and why a scope's keys were revoked, if they are; under the keystore lock.
    pub(crate) fn revocation(&self, scope: Scope) -> Option<Revocation> {
        let slot = self.unwrapped(scope).find(|s| s.state.load(Relaxed) != READY)?;
        let cause = slot.cause.load(Relaxed) as usize;
        Some(Revocation {
            since: slot.since.load(Relaxed),
            begun: Duration::from_micros(slot.begun.load(Relaxed)),
            cause: CAUSES.get(cause).copied().unwrap_or(ErrorClass::Internal),
        })
    }

    /// Whether any key is refused. One relaxed load.
    #[inline]
    pub(crate) fn any_refused(&self) -> bool {
        self.memory.head.refused_keys.load(Relaxed) != 0
    }

    /// Whether any key is locked. One relaxed load.
    #[inline]
    pub(crate) fn any_locked(&self) -> bool {
        self.memory.head.locked_keys.load(Relaxed) != 0
    }

    /// Whether a scope's keys are refused.
    pub(crate) fn is_refused(&self, scope: Scope) -> bool {
        self.unwrapped(scope).any(|s| s.state.load(Relaxed) == REFUSED)
    }

    /// Sets the key of temporary data, once for each server start.
    pub(crate) fn set_temporary(&self, key: &Secret32) {
        write_key(&self.memory.head.temporary, key);
    }

    /// Like [`Secrets::with`], for the key of temporary data.
    pub(crate) fn with_temporary<R>(&self, f: impl FnOnce(&[u8; 32]) -> R) -> Option<R> {
        with_key(&self.memory.head.temporary, f)
    }
}

fn scope_of(slot: &Slot) -> Scope {
    Scope::from_number(slot.scope.load(Relaxed))
}

/// Scope and version of the key in a slot.
fn identity(slot: &Slot) -> Option<(Scope, KeyVersion)> {
    let version = slot.version.load(Acquire);
    let scope = Scope::from_number(slot.scope.load(Acquire));
    // Between two keys of a slot the version is 0.
    let is_same = slot.version.load(Relaxed) == version;
    KeyVersion::new(version).filter(|_| is_same).map(|version| (scope, version))
}

/// Whether what was read of a slot's key is of this key.
fn is_still(slot: &Slot, scope: Scope, version: KeyVersion) -> bool {
    fence(Acquire);
    identity(slot) == Some((scope, version))
}

fn write_key(slot: &Slot, key: &Secret32) {
    for (word, bytes) in slot.key.iter().zip(key.expose().as_chunks::<4>().0) {
        word.store(u32::from_ne_bytes(*bytes), Relaxed);
    }
    slot.state.store(READY, Release);
}

fn is_unwrapped(slot: &Slot) -> bool {
    slot.state.load(Acquire) >= READY
}

fn read_key(slot: &Slot, key: &mut [u8; 32]) {
    for (word, out) in slot.key.iter().zip(key.as_chunks_mut::<4>().0) {
        *out = word.load(Relaxed).to_ne_bytes();
    }
}

fn with_key<R>(slot: &Slot, f: impl FnOnce(&[u8; 32]) -> R) -> Option<R> {
    is_unwrapped(slot).then(|| {
        without_trace(|| {
            let mut key = [0; 32];
            read_key(slot, &mut key);
            f(&key)
        })
    })
}
