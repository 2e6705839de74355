//! How each key provider has answered since the server started, for the views. Written by whoever
//! asked it, see [`crate::keys::provider::operations`]; views read it here and never ask a
//! provider.
//!
//! In a mapping of its own that outlives a crash restart. Read and written under the keystore lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::text::Text;
use crate::pg::locks::KeystoreLock;
use crate::pg::mapping::shared_struct;

/// Providers that are remembered; of further ones nothing is shown.
const SLOTS: usize = 64;

/// A moment: microseconds since 1970; 0 stands for never.
pub(crate) type Moment = u64;

shared_struct! {
    /// The table of providers.
    pub(crate) struct Health {
        /// When keys were last revalidated.
        last_revalidation: AtomicU64,
        slots: [Slot; SLOTS],
    }
}

shared_struct! {
    /// As [`Entry`].
    struct Slot {
        /// Empty where the slot is free.
        name: Text<64>,
        is_reachable: AtomicBool,
        failures: AtomicU32,
        last_success: AtomicU64,
        last_error_at: AtomicU64,
        latency_us: AtomicU64,
        last_error_class: Text<20>,
        last_error: Text<508>,
    }
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
    fn find(&self, provider: &str) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.name.load() == provider)
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
        let free = || self.slots.iter().find(|slot| slot.name.is_empty());
        let Some(slot) = self.find(provider).or_else(free) else { return };
        slot.name.store(provider);
        let answered = outcome.as_ref().err().is_none_or(|failure| failure.answered);
        slot.is_reachable.store(answered, Relaxed);
        if answered {
            slot.latency_us.store(elapsed_us, Relaxed);
        }
        match outcome {
            Ok(()) => {
                slot.last_success.store(now, Relaxed);
                slot.failures.store(0, Relaxed);
            }
            Err(failure) => {
                slot.last_error_at.store(now, Relaxed);
                slot.last_error_class.store(failure.class);
                slot.last_error.store(&failure.text);
                let failures = slot.failures.load(Relaxed).saturating_add(1);
                slot.failures.store(failures, Relaxed);
            }
        }
    }

    /// Forgets a provider that is dropped.
    pub(crate) fn forget(&self, _lock: &KeystoreLock, provider: &str) {
        if let Some(slot) = self.find(provider) {
            slot.clear();
        }
    }

    /// What is known of a provider; `None` if it was not asked since the server started.
    pub(crate) fn entry(&self, _lock: &KeystoreLock, provider: &str) -> Option<Entry> {
        let slot = self.find(provider)?;
        Some(Entry {
            reachable: slot.is_reachable.load(Relaxed),
            last_success: slot.last_success.load(Relaxed),
            last_error_at: slot.last_error_at.load(Relaxed),
            last_error_class: slot.last_error_class.load(),
            last_error: slot.last_error.load(),
            latency_us: slot.latency_us.load(Relaxed),
            failures: slot.failures.load(Relaxed),
        })
    }

    /// Notes that keys were revalidated.
    pub(crate) fn set_last_revalidation(&self, _lock: &KeystoreLock, now: Moment) {
        self.last_revalidation.store(now, Relaxed);
    }

    /// When keys were last revalidated.
    pub(crate) fn last_revalidation(&self, _lock: &KeystoreLock) -> Moment {
        self.last_revalidation.load(Relaxed)
    }
}

impl Slot {
    fn clear(&self) {
        let Slot {
            name,
            is_reachable,
            failures,
            last_success,
            last_error_at,
            latency_us,
            last_error_class,
            last_error,
        } = self;
        name.store("");
        is_reachable.store(false, Relaxed);
        failures.store(0, Relaxed);
        [last_success, last_error_at, latency_us]
            .iter()
            .for_each(|number| number.store(0, Relaxed));
        last_error_class.store("");
        last_error.store("");
    }
}
