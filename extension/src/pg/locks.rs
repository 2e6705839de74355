//! Locks: LWLocks of keystore, audit trail and self-check; LWLocks of the server; heavyweight
//! locks, and which of them this backend holds.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pgrx::pg_sys;

use super::process::ProcessLocal;
use super::{compat, exit, externs};

/// Name of our LWLock tranche, as in `pg_stat_activity.wait_event`.
const TRANCHE: &CStr = c"pagevault";

static KEYSTORE_LOCK: AtomicPtr<pg_sys::LWLock> = AtomicPtr::new(std::ptr::null_mut());
static AUDIT_LOCK: AtomicPtr<pg_sys::LWLock> = AtomicPtr::new(std::ptr::null_mut());
static SELF_CHECK_LOCK: AtomicPtr<pg_sys::LWLock> = AtomicPtr::new(std::ptr::null_mut());

/// Requests the LWLocks; from `shmem_request_hook` only.
pub(crate) fn request() {
    // SAFETY: the server copies the name; called in the postmaster while requests are open.
    unsafe { pg_sys::RequestNamedLWLockTranche(TRANCHE.as_ptr(), 3) }
}

/// Finds the LWLocks that [`request`] requested; from `shmem_startup_hook` only.
pub(crate) fn attach() {
    // SAFETY: the tranche was requested under this name, with three locks.
    unsafe {
        let locks = pg_sys::GetNamedLWLockTranche(TRANCHE.as_ptr());
        KEYSTORE_LOCK.store(&raw mut (*locks).lock, Ordering::Release);
        AUDIT_LOCK.store(&raw mut (*locks.add(1)).lock, Ordering::Release);
        SELF_CHECK_LOCK.store(&raw mut (*locks.add(2)).lock, Ordering::Release);
    }
}

/// Exclusive right to write the keystore and the shared key directory.
///
/// Interrupts are held off while this value exists, as with every LWLock.
pub(crate) struct KeystoreLock(*mut pg_sys::LWLock);

impl KeystoreLock {
    /// Waits for the lock. There is no contention in the postmaster, nor while recovery has a
    /// single process.
    pub(crate) fn acquire() -> KeystoreLock {
        let lock = KEYSTORE_LOCK.load(Ordering::Acquire);
        // SAFETY: attach() ran before any process that gets here was forked.
        unsafe { pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) };
        KeystoreLock(lock)
    }
}

impl KeystoreLock {
    /// Whether this process holds the lock, so that it must not wait for it.
    pub(crate) fn is_held() -> bool {
        // SAFETY: reads this process's own list of locks.
        unsafe { pg_sys::LWLockHeldByMe(KEYSTORE_LOCK.load(Ordering::Acquire)) }
    }

    /// Like [`KeystoreLock::acquire`], for the checkpointer: the holder of the lock may be waiting
    /// for room in the queue of sync requests, which only the checkpointer empties.
    pub(crate) fn acquire_absorbing_requests() -> KeystoreLock {
        const PAUSE_US: std::ffi::c_long = 1000;
        let lock = KEYSTORE_LOCK.load(Ordering::Acquire);
        // SAFETY: as in acquire(); absorbing does nothing in processes other than the checkpointer,
        // and ProcessSyncRequests (sync.c) does the same between two files.
        unsafe {
            while !pg_sys::LWLockConditionalAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) {
                externs::AbsorbSyncRequests();
                pg_sys::pg_usleep(PAUSE_US);
            }
        }
        KeystoreLock(lock)
    }
}

/// Reading a catalog may wait for locks of transactions, while those wait for the keystore. With
/// the feature `fault_points`, such a read under the keystore lock is an error.
#[inline(always)]
pub(super) fn require_unlocked_keystore() {
    #[cfg(feature = "fault_points")]
    if KeystoreLock::is_held() {
        pgrx::error!("pagevault reads a catalog while it holds the keystore lock");
    }
}

impl Drop for KeystoreLock {
    fn drop(&mut self) {
        // SAFETY: this value exists because we took the lock, and no other code releases it.
        unsafe { release(self.0) }
    }
}

/// The right to append to the audit trail. May be taken while holding the keystore lock, but not
/// the other way round.
pub(crate) struct AuditLock(*mut pg_sys::LWLock);

impl AuditLock {
    /// Waits for the lock, which is held only while a line is written.
    pub(crate) fn acquire() -> AuditLock {
        let lock = AUDIT_LOCK.load(Ordering::Acquire);
        // SAFETY: as in KeystoreLock::acquire: attach() ran before any process that gets here was
        // forked.
        unsafe { pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) };
        AuditLock(lock)
    }
}

impl Drop for AuditLock {
    fn drop(&mut self) {
        // SAFETY: this value exists because we took the lock, and no other code releases it.
        unsafe { release(self.0) }
    }
}

/// The right to run the self-check.
pub(crate) struct SelfCheckLock(*mut pg_sys::LWLock);

impl SelfCheckLock {
    /// Waits for the lock, which is held only while a page is written.
    pub(crate) fn acquire() -> SelfCheckLock {
        let lock = SELF_CHECK_LOCK.load(Ordering::Acquire);
        // SAFETY: as in KeystoreLock::acquire: attach() ran before any process that gets here was
        // forked.
        unsafe { pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) };
        SelfCheckLock(lock)
    }
}

impl Drop for SelfCheckLock {
    fn drop(&mut self) {
        // SAFETY: this value exists because we took the lock, and no other code releases it.
        unsafe { release(self.0) }
    }
}

/// Releases a lock that this process holds, unless an ERROR is under way. The ERROR has already
/// reset the hold-off count, and its cleanup releases every LWLock (AbortTransaction,
/// LWLockReleaseAll); releasing here would corrupt the count.
///
/// # Safety
///
/// The lock is held by this process, or was when an ERROR was raised.
unsafe fn release(lock: *mut pg_sys::LWLock) {
    // SAFETY: the caller holds the lock; the counter belongs to this process.
    unsafe {
        if pg_sys::InterruptHoldoffCount > 0 {
            pg_sys::LWLockRelease(lock);
        }
    }
}

/// LWLocks of the server by number (lwlocklist.h; lwlocknames.txt before 17); the same numbers in
/// 15 to 18.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub(crate) enum ServerLock {
    /// Taken to change the status flags of a process, and to look at those of others
    /// (procarray.c).
    ProcArray = 4,
    /// The process that holds it writes WAL (XLogWrite, xlog.c).
    WalWrite = 8,
    /// While it is held, a checkpoint whose redo pointer was determined meanwhile cannot finish:
    /// CheckPointGuts (xlog.c) waits for it (CheckPointReplicationSlots, slot.c). Other takers only
    /// create or drop replication slots, or reserve WAL for one. The holder must not wait for the
    /// checkpointer. Others write and flush WAL while they hold it (ReplicationSlotReserveWal in
    /// 15.18), so a process that waits for it must not hold a lock that writing WAL needs.
    ReplicationSlotAllocation = 36,
}

impl ServerLock {
    /// Takes the lock exclusively. Hold it only briefly.
    pub(crate) fn acquire(self) -> HeldServerLock {
        // SAFETY: `check_layout` has verified the number before any code that gets here was
        // installed.
        unsafe {
            let lock = &raw mut (*pg_sys::MainLWLockArray.add(self as usize)).lock;
            pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
            HeldServerLock(lock)
        }
    }

    /// Whether this is the name of the lock. 17.0 to 17.2 end it with `Lock`
    /// (generate-lwlocknames.pl).
    fn has_name(self, name: &CStr) -> bool {
        let own = match self {
            ServerLock::ProcArray => "ProcArray",
            ServerLock::WalWrite => "WALWrite",
            ServerLock::ReplicationSlotAllocation => "ReplicationSlotAllocation",
        };
        let name = name.to_bytes();
        name.strip_suffix(b"Lock").unwrap_or(name) == own.as_bytes()
    }
}

/// Releases the lock when dropped. Interrupts are held off while it is held.
pub(crate) struct HeldServerLock(*mut pg_sys::LWLock);

impl Drop for HeldServerLock {
    fn drop(&mut self) {
        // SAFETY: this value exists because we took the lock, and no other code releases it.
        unsafe { release(self.0) }
    }
}

/// Whether the server's LWLocks acquired the numbers in [`ServerLock`].
pub(super) fn check_layout() -> Result<(), String> {
    let all = [ServerLock::ProcArray, ServerLock::WalWrite, ServerLock::ReplicationSlotAllocation];
    for lock in all {
        // SAFETY: a table look-up; the name is a static string of the server.
        let is_there = unsafe {
            let name = pg_sys::GetLWLockIdentifier(pg_sys::PG_WAIT_LWLOCK, lock as u16);
            !name.is_null() && lock.has_name(CStr::from_ptr(name))
        };
        if !is_there {
            return Err(format!("the lock {lock:?} is not where it should be"));
        }
    }
    Ok(())
}

/// Waits until no other session changes providers or master keys. Held until the transaction ends.
///
/// A heavyweight lock, because a provider may take seconds: waiting can be cancelled, and the lock
/// is visible in `pg_locks` as a lock on an object of class `pg_extension`.
pub(crate) fn lock_key_management() {
    // SAFETY: takes a lock on an object ID of ours; the server releases it at the end of the
    // transaction.
    unsafe {
        pg_sys::LockSharedObject(
            pg_sys::ExtensionRelationId,
            KEY_MANAGEMENT.into(),
            0,
            pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
        );
    }
}

/// Whether this transaction holds the lock of [`lock_key_management`].
pub(crate) fn holds_key_management() -> bool {
    compat::holds_lock(&tag_of(KEY_MANAGEMENT), pg_sys::ExclusiveLock as pg_sys::LOCKMODE)
}

const KEY_MANAGEMENT: u32 = u32::from_be_bytes(*b"pvkm");

/// Tag of the lock on labels, which are in all databases.
fn labels_tag() -> pg_sys::LOCKTAG {
    tag_of(u32::from_be_bytes(*b"pvlb"))
}

/// Tag of a lock on a shared object of ours, as LockSharedObject makes it.
fn tag_of(object: u32) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        locktag_field1: SHARED,
        locktag_field2: pg_sys::ExtensionRelationId.to_u32(),
        locktag_field3: object,
        locktag_field4: 0,
        locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
    }
}

/// Before a label is changed: waits while [`keep_labels`] holds for another transaction.
pub(crate) fn change_labels() {
    // SAFETY: a lock on an object ID of ours, released at the end of the transaction. Waiting may
    // raise an error, and no value here has a destructor.
    unsafe { pg_sys::LockAcquire(&labels_tag(), pg_sys::ShareLock as i32, false, false) };
}

/// Keeps labels as they are until the transaction ends. False, without waiting, if another
/// transaction has changed some and has not ended.
pub(crate) fn keep_labels() -> bool {
    // SAFETY: a lock on an object ID of ours, released at the end of the transaction. It does not
    // wait.
    let outcome =
        unsafe { pg_sys::LockAcquire(&labels_tag(), pg_sys::ExclusiveLock as i32, false, true) };
    outcome != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// Keeps all sessions out of a database until the transaction ends, as DROP DATABASE does. Waits a
/// few seconds for those in it to end; returns the numbers of sessions and prepared transactions
/// that are left.
pub(crate) fn lock_database(database: pg_sys::Oid) -> (i32, i32) {
    let (mut sessions, mut prepared) = (0, 0);
    // SAFETY: a lock on a shared object, released at the end of the transaction; both numbers are
    // written.
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

/// Tag of the lock that permits rewriting the pages of a relation: only one command or job at a
/// time, whatever other locks are held on the relation. A lock on an object of class
/// `pg_extension`.
fn rewriting_tag(relation: pg_sys::Oid, is_shared: bool) -> pg_sys::LOCKTAG {
    const REWRITING: u16 = u16::from_be_bytes(*b"pr");
    pg_sys::LOCKTAG {
        locktag_field1: if is_shared { SHARED } else { super::process::my_database() },
        locktag_field2: pg_sys::ExtensionRelationId.to_u32(),
        locktag_field3: relation.to_u32(),
        locktag_field4: REWRITING,
        locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
    }
}

/// The right to rewrite a relation in place, until this value is dropped or an ERROR ends the
/// transaction and releases all locks.
pub(crate) struct Rewriting {
    tag: pg_sys::LOCKTAG,
    of_session: bool,
}

impl Rewriting {
    /// Held by the session, across transactions; `None` if it is taken.
    pub(crate) fn try_for_session(relation: pg_sys::Oid, is_shared: bool) -> Option<Rewriting> {
        release_at_exit();
        Rewriting::acquire(rewriting_tag(relation, is_shared), true, true)
    }

    /// Held by the transaction; `None` if it is taken.
    pub(crate) fn try_for_transaction(relation: pg_sys::Oid, is_shared: bool) -> Option<Rewriting> {
        Rewriting::acquire(rewriting_tag(relation, is_shared), false, true)
    }

    /// Held by the transaction. Waits as for any lock.
    pub(crate) fn wait_in_transaction(relation: pg_sys::Oid, is_shared: bool) -> Rewriting {
        let tag = rewriting_tag(relation, is_shared);
        // Without NOWAIT, LockAcquire returns with the lock or raises an error.
        Rewriting::acquire(tag, false, false)
            .unwrap_or_else(|| Rewriting { tag, of_session: false })
    }

    fn acquire(tag: pg_sys::LOCKTAG, of_session: bool, no_wait: bool) -> Option<Rewriting> {
        // SAFETY: a lock on an object ID of ours; waiting may raise an error, and no value here has
        // a destructor then.
        let outcome = unsafe {
            let mode = pg_sys::ExclusiveLock as pg_sys::LOCKMODE;
            pg_sys::LockAcquire(&tag, mode, of_session, no_wait)
        };
        let acquired = outcome != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL;
        // No value without the lock: dropping the value would release it.
        acquired.then(|| Rewriting { tag, of_session })
    }
}

impl Drop for Rewriting {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // an ERROR is under way; its abort releases all locks
        }
        let mode = pg_sys::ExclusiveLock as pg_sys::LOCKMODE;
        // SAFETY: a lock that this process holds.
        unsafe { pg_sys::LockRelease(&self.tag, mode, self.of_session) };
    }
}

/// Releases all locks of the session.
pub(crate) fn release_session_locks() {
    // SAFETY: reads this process's own table of locks.
    unsafe { pg_sys::LockReleaseSession(pg_sys::DEFAULT_LOCKMETHOD as pg_sys::LOCKMETHODID) }
}

/// Makes this process release its session locks at exit. The server does that only if the process
/// exits within a transaction (`AbortTransaction`; `ShutdownPostgres` in postinit.c releases
/// advisory locks). Otherwise the locks would be held until the server restarts.
fn release_at_exit() {
    static REGISTERED: ProcessLocal<bool> = ProcessLocal::new(false);
    if !REGISTERED.replace(true) {
        exit::at_exit(release_session_locks);
    }
}

/// `dlist_node` and, before 16, `SHM_QUEUE`: both consist of these two pointers.
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

/// The database number in lock tags of shared catalogs.
const SHARED: u32 = 0;

/// OIDs of the relations of the current database and of the cluster on which this backend holds a
/// lock strong enough to replace their storage.
pub(crate) fn relations_locked_for_rewrite() -> Vec<pg_sys::Oid> {
    relations_locked(REPLACING_MODES)
}

/// Like [`relations_locked_for_rewrite`], for all locks that exclude ShareUpdateExclusiveLock.
pub(crate) fn relations_locked_against_maintenance() -> Vec<pg_sys::Oid> {
    const MODES: i32 = (1 << pg_sys::ShareUpdateExclusiveLock) | (1 << pg_sys::ShareLock);
    relations_locked(MODES | REPLACING_MODES)
}

/// Like [`relations_locked_for_rewrite`], for AccessExclusiveLock only.
pub(crate) fn relations_locked_against_all() -> Vec<pg_sys::Oid> {
    relations_locked(1 << pg_sys::AccessExclusiveLock)
}

/// Walks this backend's lists under the partition locks, like `PostPrepare_Locks` in lock.c: the
/// cost depends on the number of locks held, not on the number of relations.
fn relations_locked(modes: i32) -> Vec<pg_sys::Oid> {
    let mut found = Vec::new();
    // SAFETY: globals of this process; MyProc may be null while a process starts or exits.
    let (proc, database) = unsafe { (pg_sys::MyProc, pg_sys::MyDatabaseId) };
    if proc.is_null() {
        return found;
    }
    for partition in 0..PARTITIONS {
        // SAFETY: a list of this backend changes only under its partition lock, which we hold
        // shared meanwhile; every link is in a PROCLOCK at `procLink`; Link has the layout of both
        // list types. `found` grows by Rust's allocator, which cannot raise a server ERROR.
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
                    && (*proclock).holdMask & modes != 0
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
