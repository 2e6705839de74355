//! What all processes of the server share: regions of shared memory, mapped once in the postmaster
//! ([`crate::keys::load`]). A region is a structure of atomics
//! with names; whoever uses it lies above.

pub(crate) mod control;
pub(crate) mod counters;
pub(crate) mod health;
pub(crate) mod secrets;
mod text;
pub(crate) mod trail;
pub(crate) mod wal;
pub(crate) mod writers;
pub(crate) mod written_over;

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

use pagevault_keystore::directory::Directory;
use pagevault_keystore::job_table::JobTable;

use self::control::Control;
use self::counters::Counters;
use self::health::Health;
use self::secrets::Secrets;
use self::trail::Trail;
use self::wal::Wal;
use self::writers::Writers;
use self::written_over::WrittenOver;
use crate::pg::mapping::Region;
use crate::pg::report::{Result, internal};

/// Handles to the shared memory; the same in every process.
pub(crate) struct Shared {
    pub(crate) directory: Directory<'static>,
    /// The directory's memory, for a crash restart.
    pub(crate) directory_memory: Region<(), AtomicU32>,
    pub(crate) secrets: Secrets,
    pub(crate) control: Control,
    pub(crate) health: &'static Health,
    pub(crate) wal: Wal,
    pub(crate) counters: Counters,
    pub(crate) writers: Writers,
    pub(crate) jobs: JobTable<'static>,
    pub(crate) written_over: WrittenOver,
    pub(crate) trail: &'static Trail,
}

static SHARED: OnceLock<Shared> = OnceLock::new();

/// Publishes the handles; in the postmaster, before anything is forked.
pub(crate) fn publish(shared: Shared) -> &'static Shared {
    SHARED.get_or_init(|| shared)
}

/// The handles, once the postmaster has published them.
#[inline]
pub(crate) fn get() -> Option<&'static Shared> {
    SHARED.get()
}

/// The handles, which exist wherever the library was preloaded.
pub(crate) fn required() -> Result<&'static Shared> {
    get().ok_or_else(|| internal("pagevault's shared memory is missing".to_owned()))
}

/// The database keys.
pub(crate) fn secrets() -> Option<&'static Secrets> {
    get().map(|shared| &shared.secrets)
}

/// The one flag that a cluster without encryption pays for: does any data key exist?
#[inline]
pub(crate) fn anything_sealed() -> bool {
    get().is_some_and(|shared| shared.control.sealed())
}

/// Does any database key exist? Without one nothing can be encrypted.
pub(crate) fn any_database_key() -> bool {
    secrets().is_some_and(Secrets::any_known)
}

/// The cheap question before every read: were the keys of any file destroyed?
#[inline]
pub(crate) fn anything_destroyed() -> bool {
    destructions() != 0
}

/// How many times keys were destroyed: what a process has expanded before the last time is out of
/// date.
#[inline]
pub(crate) fn destructions() -> u32 {
    get().map_or(0, |shared| shared.control.destructions())
}

/// How many times labels were changed since the server was started.
pub(crate) fn label_changes() -> u32 {
    get().map_or(0, |shared| shared.control.label_changes())
}

/// Labels were changed, and everybody sees them.
pub(crate) fn count_label_change() {
    if let Some(shared) = get() {
        shared.control.count_label_change();
    }
}

/// The cheap question before every read: is access to any database key's data refused?
#[inline]
pub(crate) fn anything_refused() -> bool {
    get().is_some_and(|shared| shared.secrets.any_refused())
}

/// Is any database key locked or refused? Two loads.
#[inline]
pub(crate) fn anything_withheld() -> bool {
    get().is_some_and(|shared| shared.secrets.any_refused() || shared.secrets.any_locked())
}
