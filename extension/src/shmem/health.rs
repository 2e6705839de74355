//! How each key provider has answered since the server started, for the views. Written after each
//! request, see [`crate::keys::provider::operations`]; views never ask a provider.
//!
//! In a mapping of its own that survives a crash restart. Accessed under the keystore lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::text::Text;
use crate::pg::locks::KeystoreLock;
use crate::pg::mapping::shared_struct;

/// Maximum number of providers; nothing is stored about further ones.
const SLOTS: usize = 64;

/// A time in microseconds since 1970; 0 means never.
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
    /// Like [`Entry`].
    struct Slot {
        /// Empty if the slot is free.
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

/// The failure of an operation.
pub(crate) struct OperationFailure {
    /// The error class in one word.
    pub(crate) class: &'static str,
    /// The provider itself has answered, so it is reachable; see `refusal::is_answer`.
    pub(crate) answered: bool,
    /// What happened.
    pub(crate) text: String,
}

/// State of one provider.
pub(crate) struct Entry {
    /// Whether it answered the last request.
    pub(crate) reachable: bool,
    pub(crate) last_success: Moment,
    pub(crate) last_error_at: Moment,
    pub(crate) last_error_class: String,
    pub(crate) last_error: String,
    /// Latency of its last answer in microseconds.
    pub(crate) latency_us: u64,
    /// Number of failed operations since the last successful one.
    pub(crate) failures: u32,
}

impl Health {
    fn find(&self, provider: &str) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.name.load() == provider)
    }

    /// Stores the outcome of an operation.
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

    /// Removes a dropped provider.
    pub(crate) fn forget(&self, _lock: &KeystoreLock, provider: &str) {
        if let Some(slot) = self.find(provider) {
            slot.clear();
        }
    }

    /// State of a provider; `None` if it was not asked since the server started.
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

    /// Stores when keys were revalidated.
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
