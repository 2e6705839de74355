//! Shared memory of all processes: regions that the postmaster maps once ([`crate::keys::load`]).
//! Each region is a structure of atomics; the code that gives it meaning is in other modules.

pub(crate) mod anchor;
pub(crate) mod control;
pub(crate) mod counters;
pub(crate) mod dropped;
pub(crate) mod health;
pub(crate) mod secrets;
mod text;
pub(crate) mod traffic;
pub(crate) mod trail;
pub(crate) mod wal;
pub(crate) mod writers;
pub(crate) mod written_over;

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

use pagevault_keystore::directory::Directory;
use pagevault_keystore::former;
use pagevault_keystore::job_table::JobTable;

use self::anchor::Anchor;
use self::control::Control;
use self::counters::Counters;
use self::dropped::Dropped;
use self::health::Health;
use self::secrets::Secrets;
use self::traffic::Traffic;
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
    /// Read and changed under the keystore lock.
    pub(crate) former: former::Table<'static>,
    pub(crate) dropped: Dropped,
    pub(crate) written_over: WrittenOver,
    pub(crate) trail: &'static Trail,
    pub(crate) traffic: &'static Traffic,
    pub(crate) anchor: &'static Anchor,
}

static SHARED: OnceLock<Shared> = OnceLock::new();

/// Publishes the handles; in the postmaster, before any process is forked.
pub(crate) fn publish(shared: Shared) -> &'static Shared {
    SHARED.get_or_init(|| shared)
}

/// The handles, once the postmaster has published them.
#[inline]
pub(crate) fn get() -> Option<&'static Shared> {
    SHARED.get()
}

/// The handles, which exist if the library was preloaded.
pub(crate) fn required() -> Result<&'static Shared> {
    get().ok_or_else(|| internal("pagevault's shared memory is missing".to_owned()))
}

/// The database keys.
pub(crate) fn secrets() -> Option<&'static Secrets> {
    get().map(|shared| &shared.secrets)
}

/// Whether any data key exists: the one flag that a cluster without encryption tests.
#[inline]
pub(crate) fn anything_sealed() -> bool {
    get().is_some_and(|shared| shared.control.sealed())
}

/// Whether any database key exists. Without one nothing can be encrypted.
pub(crate) fn any_database_key() -> bool {
    secrets().is_some_and(Secrets::any_known)
}

/// Whether keys of any file were destroyed: a cheap test before every read.
#[inline]
pub(crate) fn anything_destroyed() -> bool {
    destructions() != 0
}

/// How often keys were destroyed. Keys that a process expanded before the last time are outdated.
#[inline]
pub(crate) fn destructions() -> u32 {
    get().map_or(0, |shared| shared.control.destructions())
}

/// How often labels have changed since server start.
pub(crate) fn label_changes() -> u32 {
    get().map_or(0, |shared| shared.control.label_changes())
}

/// Counts a change of labels that all sessions can see.
pub(crate) fn count_label_change() {
    if let Some(shared) = get() {
        shared.control.count_label_change();
    }
}

/// Whether access under any database key is refused: a cheap test before every read.
#[inline]
pub(crate) fn any_key_refused() -> bool {
    get().is_some_and(|shared| shared.secrets.any_refused())
}

/// Whether any database key is locked: a cheap test, like [`any_key_refused`].
#[inline]
pub(crate) fn any_key_locked() -> bool {
    get().is_some_and(|shared| shared.secrets.any_locked())
}

/// Whether any database key is locked or refused. Two loads.
#[inline]
pub(crate) fn any_key_unusable() -> bool {
    get().is_some_and(|shared| shared.secrets.any_refused() || shared.secrets.any_locked())
}
