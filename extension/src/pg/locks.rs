//! Locks: the one that serialises keystore writers, and a look at the heavyweight locks we hold.

use std::sync::atomic::{AtomicPtr, Ordering};

use pgrx::pg_sys;

/// Name of our lock tranche, as `pg_stat_activity.wait_event` shows it.
const TRANCHE: &std::ffi::CStr = c"pagevault";

static KEYSTORE_LOCK: AtomicPtr<pg_sys::LWLock> = AtomicPtr::new(std::ptr::null_mut());

/// Asks for the lock; from `shmem_request_hook` only.
pub(crate) fn request() {
    // SAFETY: the server copies the name; called in the postmaster while requests are open.
    unsafe { pg_sys::RequestNamedLWLockTranche(TRANCHE.as_ptr(), 1) }
}

/// Finds the lock that [`request`] asked for; from `shmem_startup_hook` only.
pub(crate) fn attach() {
    // SAFETY: the tranche was requested under this name, with one lock.
    let lock = unsafe { &raw mut (*pg_sys::GetNamedLWLockTranche(TRANCHE.as_ptr())).lock };
    KEYSTORE_LOCK.store(lock, Ordering::Release);
}

/// Exclusive right to write the keystore and the shared key directory.
///
/// Interrupts are held off while it lives, as with every LWLock.
pub(crate) struct KeystoreLock(*mut pg_sys::LWLock);

impl KeystoreLock {
    /// Waits for the lock. In the postmaster and while recovery has a single process this is
    /// uncontended.
    pub(crate) fn acquire() -> KeystoreLock {
        let lock = KEYSTORE_LOCK.load(Ordering::Acquire);
        // SAFETY: attach() ran before any process that gets here was forked.
        unsafe { pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) };
        KeystoreLock(lock)
    }
}

impl KeystoreLock {
    /// As [`KeystoreLock::acquire`], for the checkpointer: a process that holds the lock may be waiting
    /// for room in the queue of sync requests, which only the checkpointer empties.
    pub(crate) fn acquire_absorbing_requests() -> KeystoreLock {
        const PAUSE_US: std::ffi::c_long = 1000;
        let lock = KEYSTORE_LOCK.load(Ordering::Acquire);
        // SAFETY: as acquire(); absorbing does nothing in processes that are not the checkpointer, and
        // is what ProcessSyncRequests (sync.c) itself does between two files.
        unsafe {
            while !pg_sys::LWLockConditionalAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) {
                raw::AbsorbSyncRequests();
                pg_sys::pg_usleep(PAUSE_US);
            }
        }
        KeystoreLock(lock)
    }
}

/// Not among pgrx's bindings.
mod raw {
    unsafe extern "C-unwind" {
        /// checkpointer.c
        pub(super) fn AbsorbSyncRequests();
    }
}

impl Drop for KeystoreLock {
    fn drop(&mut self) {
        // An ERROR has already reset the hold-off count and will release every LWLock itself
        // (AbortTransaction, LWLockReleaseAll); releasing here would corrupt the count.
        // SAFETY: we hold the lock; the counter is this process's own.
        unsafe {
            if pg_sys::InterruptHoldoffCount > 0 {
                pg_sys::LWLockRelease(self.0);
            }
        }
    }
}

/// Waits until no other session changes providers or master keys; held until the transaction ends.
///
/// A heavyweight lock, because a provider may take seconds: waiting can be cancelled, and it shows in
/// `pg_locks` as a lock on an object of class `pg_extension`.
pub(crate) fn lock_key_management() {
    const OBJECT: u32 = u32::from_be_bytes(*b"pvkm");
    // SAFETY: takes a lock on a name of ours; released by the server at the end of the transaction.
    unsafe {
        pg_sys::LockSharedObject(
            pg_sys::ExtensionRelationId,
            OBJECT.into(),
            0,
            pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
        );
    }
}

/// Keeps everybody out of a database, as DROP DATABASE does, until the transaction ends. Returns how many
/// sessions and prepared transactions are in it nevertheless, after waiting a few seconds for them to end.
pub(crate) fn lock_database(database: pg_sys::Oid) -> (i32, i32) {
    let (mut sessions, mut prepared) = (0, 0);
    // SAFETY: a lock on a shared object, released at the end of the transaction; both numbers are written.
    unsafe {
        pg_sys::LockSharedObject(
            pg_sys::DatabaseRelationId,
            database,
            0,
            pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE,
        );
        pg_sys::CountOtherDBBackends(database, &raw mut sessions, &raw mut prepared);
    }
    (sessions, prepared)
}

/// Rekey jobs are locked as objects of this class (`pg_extension`), so that it shows in `pg_locks`.
fn job_tag(id: i64) -> pg_sys::LOCKTAG {
    const JOB: u16 = u16::from_be_bytes(*b"pv");
    pg_sys::LOCKTAG {
        locktag_field1: super::process::my_database(),
        locktag_field2: pg_sys::ExtensionRelationId.to_u32(),
        locktag_field3: id as u32,
        locktag_field4: JOB,
        locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
    }
}

/// Makes a rekey job this process's own, until it gives it back or ends; false if another's it is.
pub(crate) fn try_lock_job(id: i64) -> bool {
    // SAFETY: a lock of the session on a name of ours, without waiting.
    let outcome = unsafe {
        let mode = pg_sys::ExclusiveLock as pg_sys::LOCKMODE;
        pg_sys::LockAcquire(&job_tag(id), mode, true, true)
    };
    outcome != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// Gives a job back.
pub(crate) fn unlock_job(id: i64) {
    // SAFETY: a lock that this session holds.
    unsafe { pg_sys::LockRelease(&job_tag(id), pg_sys::ExclusiveLock as pg_sys::LOCKMODE, true) };
}

/// `dlist_node` and, before 16, `SHM_QUEUE`: the same two words.
#[repr(C)]
struct Link {
    prev: *mut Link,
    next: *mut Link,
}

/// Number of lists in `PGPROC.myProcLocks` (`NUM_LOCK_PARTITIONS`).
const PARTITIONS: usize = 1 << pg_sys::LOG2_NUM_LOCK_PARTITIONS;

/// Modes that PostgreSQL takes on a relation whose storage it replaces: ShareRowExclusiveLock
/// (ALTER SEQUENCE), ExclusiveLock, AccessExclusiveLock. None of them uses the fast path.
const REPLACING_MODES: i32 = (1 << pg_sys::ShareRowExclusiveLock)
    | (1 << pg_sys::ExclusiveLock)
    | (1 << pg_sys::AccessExclusiveLock);

/// The database in the lock of a shared catalog.
const SHARED: u32 = 0;

/// OIDs of the relations of the current database and of the cluster on which this backend holds a lock strong enough
/// to replace their storage.
///
/// Walks our own lists under the partition locks, as `PostPrepare_Locks` in lock.c does: the cost
/// depends on the locks we hold, not on the number of relations.
pub(crate) fn relations_locked_for_rewrite() -> Vec<pg_sys::Oid> {
    let mut found = Vec::new();
    // SAFETY: backend globals of this process; MyProc may be null in a few auxiliary moments.
    let (proc, database) = unsafe { (pg_sys::MyProc, pg_sys::MyDatabaseId) };
    if proc.is_null() {
        return found;
    }
    for partition in 0..PARTITIONS {
        // SAFETY: a list of ours changes only under its partition lock, which we hold shared while
        // walking; every link stands inside a PROCLOCK at `procLink`; Link has the layout of both
        // list types. `found` grows by plain allocation, which cannot raise a server ERROR.
        unsafe {
            let lock = &raw mut (*pg_sys::MainLWLockArray
                .add(pg_sys::LOCK_MANAGER_LWLOCK_OFFSET as usize + partition))
            .lock;
            pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_SHARED);
            let head = (&raw mut (*proc).myProcLocks).cast::<Link>().add(partition);
            let mut link = (*head).next;
            while !link.is_null() && link != head {
                let proclock = link
                    .byte_sub(std::mem::offset_of!(pg_sys::PROCLOCK, procLink))
                    .cast::<pg_sys::PROCLOCK>();
                let tag = &(*(*proclock).tag.myLock).tag;
                if tag.locktag_type == pg_sys::LockTagType::LOCKTAG_RELATION as u8
                    && (tag.locktag_field1 == database.to_u32() || tag.locktag_field1 == SHARED)
                    && (*proclock).holdMask & REPLACING_MODES != 0
                {
                    found.push(pg_sys::Oid::from(tag.locktag_field2));
                }
                link = (*link).next;
            }
            pg_sys::LWLockRelease(lock);
        }
    }
    found
}
