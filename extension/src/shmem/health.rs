//! How each key provider has answered since the server started, for the views. Written by whoever
//! asked it, see [`crate::keys::provider::operations`]; views read it here and never ask a
//! provider.
//!
//! In a mapping of its own that outlives a crash restart. Read and written under the keystore lock.

use std::sync::atomic::{AtomicU32, Ordering::*};

use super::words::{load_text, load_u64, store_text, store_u64};
use crate::pg::locks::KeystoreLock;

/// Providers that are remembered; of further ones nothing is shown.
const SLOTS: usize = 64;

// Words of a slot.
const NAME: std::ops::Range<usize> = 0..17;
const REACHABLE: usize = 17;
const FAILURES: usize = 18;
const LAST_SUCCESS: std::ops::Range<usize> = 20..22;
const LAST_ERROR_AT: std::ops::Range<usize> = 22..24;
const LATENCY: std::ops::Range<usize> = 24..26;
const ERROR_CLASS: std::ops::Range<usize> = 26..32;
const ERROR: std::ops::Range<usize> = 32..160;
const STRIDE: usize = ERROR.end;

/// Before the slots: when keys were last revalidated.
const LAST_REVALIDATION: std::ops::Range<usize> = 0..2;
const HEADER: usize = LAST_REVALIDATION.end;

/// Words of memory that [`Health`] needs.
pub(crate) const WORDS: usize = HEADER + SLOTS * STRIDE;

/// A moment: microseconds since 1970; 0 stands for never.
pub(crate) type Moment = u64;

/// The table of providers.
#[derive(Clone, Copy)]
pub(crate) struct Health {
    words: &'static [AtomicU32],
}

/// How an operation ended that did not succeed.
pub(crate) struct OperationFailure {
    /// The error class in one word.
    pub(crate) class: &'static str,
    /// The provider itself has answered, so it can be reached; see `refusal::is_answer`.
    pub(crate) answered: bool,
    /// What happened.
    pub(crate) text: String,
}

/// What is known of one provider.
pub(crate) struct Entry {
    /// Whether it answered when it was last asked.
    pub(crate) reachable: bool,
    pub(crate) last_success: Moment,
    pub(crate) last_error_at: Moment,
    pub(crate) last_error_class: String,
    pub(crate) last_error: String,
    /// Microseconds that its last answer took.
    pub(crate) latency_us: u64,
    /// Operations that have failed since the last one that succeeded.
    pub(crate) failures: u32,
}

impl Health {
    /// The table in `words`, zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Health {
        assert!(words.len() >= WORDS);
        Health { words }
    }

    fn slots(&self) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        self.words[HEADER..WORDS].chunks_exact(STRIDE)
    }

    fn find(&self, provider: &str) -> Option<&'static [AtomicU32]> {
        self.slots().find(|slot| load_text(&slot[NAME]) == provider)
    }

    /// Notes how an operation ended.
    pub(crate) fn record(
        &self,
        _lock: &KeystoreLock,
        provider: &str,
        now: Moment,
        elapsed_us: u64,
        outcome: Result<(), &OperationFailure>,
    ) {
        let free = || self.slots().find(|slot| slot[NAME.start].load(Relaxed) == 0);
        let Some(slot) = self.find(provider).or_else(free) else { return };
        store_text(&slot[NAME], provider);
        let answered = outcome.as_ref().err().is_none_or(|trouble| trouble.answered);
        slot[REACHABLE].store(u32::from(answered), Relaxed);
        if answered {
            store_u64(&slot[LATENCY], elapsed_us);
        }
        match outcome {
            Ok(()) => {
                store_u64(&slot[LAST_SUCCESS], now);
                slot[FAILURES].store(0, Relaxed);
            }
            Err(trouble) => {
                store_u64(&slot[LAST_ERROR_AT], now);
                store_text(&slot[ERROR_CLASS], trouble.class);
                store_text(&slot[ERROR], &trouble.text);
                let failures = slot[FAILURES].load(Relaxed).saturating_add(1);
                slot[FAILURES].store(failures, Relaxed);
            }
        }
    }

    /// Forgets a provider that is dropped.
    pub(crate) fn forget(&self, _lock: &KeystoreLock, provider: &str) {
        if let Some(slot) = self.find(provider) {
            slot.iter().for_each(|word| word.store(0, Relaxed));
        }
    }

    /// What is known of a provider; `None` if it was not asked since the server started.
    pub(crate) fn entry(&self, _lock: &KeystoreLock, provider: &str) -> Option<Entry> {
        let slot = self.find(provider)?;
        Some(Entry {
            reachable: slot[REACHABLE].load(Relaxed) != 0,
            last_success: load_u64(&slot[LAST_SUCCESS]),
            last_error_at: load_u64(&slot[LAST_ERROR_AT]),
            last_error_class: load_text(&slot[ERROR_CLASS]),
            last_error: load_text(&slot[ERROR]),
            latency_us: load_u64(&slot[LATENCY]),
            failures: slot[FAILURES].load(Relaxed),
        })
    }

    /// Notes that keys were revalidated.
    pub(crate) fn set_last_revalidation(&self, _lock: &KeystoreLock, now: Moment) {
        store_u64(&self.words[LAST_REVALIDATION], now);
    }

    /// When keys were last revalidated.
    pub(crate) fn last_revalidation(&self, _lock: &KeystoreLock) -> Moment {
        load_u64(&self.words[LAST_REVALIDATION])
    }
}
