//! Shared buffers: flushing, dropping and evicting pages; page-sized memory outside shared buffers.

use std::collections::HashSet;
use std::ffi::c_void;

use pagevault_keystore::RelFile;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::PgLogLevel;
use pgrx::{PgSqlErrorCode, PgTryBuilder};

use super::compat::{self, SHARED_BACKEND, SmgrFile};
use super::processes;
use super::report::{Report, Result};

/// A page that is read or written without shared buffers, aligned like the server's buffers
/// (`PG_IO_ALIGN_SIZE`, pg_config_manual.h; 16+). With `debug_io_direct = data` the kernel requires
/// this alignment, and mdreadv, mdwritev and mdextend assert it.
#[repr(C, align(4096))]
pub(crate) struct AlignedPage(pub(crate) [u8; pg_sys::BLCKSZ as usize]);

const _: () = assert!(align_of::<AlignedPage>().is_multiple_of(compat::IO_ALIGNMENT));

/// Whether this is a page in shared buffers.
pub(crate) fn is_shared(page: *const c_void) -> bool {
    // SAFETY: globals that are set at the start of the server.
    let (first, size) = unsafe {
        (pg_sys::BufferBlocks.addr(), pg_sys::NBuffers as usize * pg_sys::BLCKSZ as usize)
    };
    page.addr().wrapping_sub(first) < size
}

/// Writes the dirty pages of a relation, which the caller has locked against changes.
pub(crate) fn flush_relation(oid: Oid) {
    let no_lock = pg_sys::NoLock as pg_sys::LOCKMODE;
    // SAFETY: locked by the caller; closed again, at the latest by the abort of the transaction.
    unsafe {
        let relation = pg_sys::relation_open(oid, no_lock);
        pg_sys::FlushRelationBuffers(relation);
        pg_sys::relation_close(relation, no_lock);
    }
}

/// Writes the dirty pages of a database and drops all its buffers, as DROP DATABASE does. No
/// session is connected to the database.
pub(crate) fn flush_and_drop_database(database: Oid) {
    // SAFETY: no session is connected to it, so no buffer of it is pinned.
    unsafe {
        pg_sys::FlushDatabaseBuffers(database);
        pg_sys::DropDatabaseBuffers(database);
    }
}

/// The `SMgrRelation`s of these files. Not in a critical section.
fn open(files: &[RelFile]) -> Vec<pg_sys::SMgrRelation> {
    // SAFETY: our callers are not in a critical section; the objects live until the end of the
    // transaction, in recovery longer.
    let open = |&file: &RelFile| unsafe {
        compat::open_smgr_of(SmgrFile { file, backend: SHARED_BACKEND })
    };
    files.iter().map(open).collect()
}

/// Drops all buffers of these files without writing them. No other process uses the files.
pub(crate) fn drop_files(files: &[RelFile]) {
    if files.is_empty() {
        return;
    }
    let mut open = open(files);
    // SAFETY: the array contains as many storage manager objects as its length says.
    unsafe { compat::drop_buffers(&mut open) };
}

/// Writes the dirty pages of these files.
pub(crate) fn flush_files(files: &[RelFile]) {
    if files.is_empty() {
        return;
    }
    let mut open = open(files);
    // SAFETY: the array contains as many storage manager objects as its length says.
    unsafe { pg_sys::FlushRelationsAllBuffers(open.as_mut_ptr(), open.len() as i32) };
}

/// Writes the dirty pages of these files, and syncs what exists of them. Not in a critical section.
pub(crate) fn flush_and_sync_files(files: &[RelFile]) {
    flush_files(files);
    sync_files(files);
}

/// Syncs what exists of these files. Not in a critical section.
pub(crate) fn sync_files(files: &[RelFile]) {
    for smgr in open(files) {
        for fork in 0..=pg_sys::ForkNumber::INIT_FORKNUM {
            // SAFETY: an open storage manager object, and a fork that exists (`mdimmedsync`, md.c,
            // opens all segments).
            unsafe {
                if pg_sys::smgrexists(smgr, fork) {
                    pg_sys::smgrimmedsync(smgr, fork);
                }
            }
        }
    }
}

/// Writes the dirty pages of these files and drops all their buffers. No other process uses the
/// files.
pub(crate) fn flush_and_drop_files(files: &[RelFile]) {
    flush_files(files);
    drop_files(files);
}

/// In recovery, while no session uses the database: writes its dirty pages, as the primary has
/// done, and drops all its buffers.
pub(crate) fn flush_and_drop_database_in_redo(database: u32) {
    let oid = Oid::from(database);
    // SAFETY: what dbase_redo (dbcommands.c) does before it drops a database.
    unsafe {
        pg_sys::FlushDatabaseBuffers(oid);
        pg_sys::DropDatabaseBuffers(oid);
    }
}

/// In the startup process: whether there may be hot standby sessions.
pub(crate) fn may_have_sessions_in_redo() -> bool {
    // SAFETY: a plain global of this process.
    unsafe { pg_sys::standbyState >= pg_sys::HotStandbyState::STANDBY_SNAPSHOT_PENDING }
}

/// In the startup process: writes the dirty pages of these files, and evicts their pages. Returns
/// the files of which a page stays, because a session has pinned it: nobody is waited for.
pub(crate) fn flush_and_evict_files(files: &[RelFile]) -> HashSet<RelFile> {
    flush_files(files);
    let files: HashSet<_> = files.iter().copied().collect();
    let mut left = HashSet::new();
    for index in 0..count() {
        if let Some(file) = file_at(index).filter(|file| files.contains(file)) {
            // SAFETY: an index of a buffer; the startup process has a resource owner.
            let is_gone = unsafe { compat::evict_buffer(index) };
            if !is_gone {
                left.insert(file);
            }
        }
    }
    left
}

/// In the startup process: marks a page of a map dirty, so that it is written again. One that is
/// unreadable becomes empty; without its key (`has_key`) it is not even read.
pub(crate) fn rewrite_map_in_redo(
    file: RelFile,
    fork: pg_sys::ForkNumber::Type,
    block: u32,
    has_key: bool,
) {
    let mode = match has_key {
        true => pg_sys::ReadBufferMode::RBM_ZERO_ON_ERROR,
        false => pg_sys::ReadBufferMode::RBM_ZERO_AND_LOCK,
    };
    // SAFETY: as `XLogRecordPageWithFreeSpace` (freespace.c) does; the block is in the file, which
    // nobody but redo truncates or removes. In the second mode the buffer is locked already.
    unsafe {
        let buffer = pg_sys::XLogReadBufferExtended(compat::locator(file), fork, block, mode, 0);
        if buffer != 0 {
            if has_key {
                compat::lock_exclusively(buffer);
            }
            pg_sys::MarkBufferDirty(buffer);
            pg_sys::UnlockReleaseBuffer(buffer);
        }
    }
}

/// Keeps hot standby sessions out of a database.
pub(crate) struct SessionsOut {
    /// Nobody, if there are no such sessions.
    database: Option<Oid>,
}

/// In recovery: ends the hot standby sessions of a database, and keeps new ones out. Buffers that a
/// session has pinned cannot be dropped: `InvalidateBuffer` (bufmgr.c) tries for ever.
///
/// A session may wait for another connection of its own to the database, and not be interruptible
/// meanwhile (dblink up to 16). That one waits for the lock, where `CountDBBackends` (procarray.c)
/// does not see it yet. So the lock is given away from time to time.
pub(crate) fn keep_sessions_out_in_redo(database: u32) -> SessionsOut {
    let database = Oid::from(database);
    if !may_have_sessions_in_redo() {
        return SessionsOut { database: None };
    }
    let mut is_told = false;
    loop {
        let lock = pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE;
        // SAFETY: as dbase_redo (dbcommands.c) does before it drops a database.
        unsafe { pg_sys::LockSharedObjectForSession(pg_sys::DatabaseRelationId, database, 0, lock) }
        let locked = SessionsOut { database: Some(database) };
        if end_sessions_in_redo(database) {
            return locked;
        }
        drop(locked);
        if !is_told {
            is_told = true;
            Report::new(
                PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
                format!("pagevault: recovery waits for sessions of database {database} to end"),
            )
            .detail("They were told to, because keys of the database are being destroyed.")
            .hint("Find them in pg_stat_activity. What they wait for may not be interruptible.")
            .send(PgLogLevel::LOG);
        }
        // From 18 on, one that sends to its client hears of no conflict
        // (`ProcessClientWriteInterrupt`, postgres.c).
        processes::terminate_in(database);
        end_sessions_in_redo(database);
    }
}

/// Ends the hot standby sessions of a database. False if there still are some after a second.
fn end_sessions_in_redo(database: Oid) -> bool {
    for _ in 0..100 {
        // SAFETY: reads under a lock of the server.
        if unsafe { pg_sys::CountDBBackends(database) } == 0 {
            return true;
        }
        compat::end_sessions_in_redo(database);
        // SAFETY: sleeps for as long as ResolveRecoveryConflictWithDatabase (standby.c). In the
        // startup process, which may exit: nothing of the record has been done.
        unsafe {
            pg_sys::pg_usleep(10_000);
            compat::process_startup_interrupts();
        }
    }
    false
}

impl Drop for SessionsOut {
    fn drop(&mut self) {
        let lock = pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE;
        if let Some(database) = self.database {
            // SAFETY: this process has the lock, since it made this.
            unsafe {
                pg_sys::UnlockSharedObjectForSession(pg_sys::DatabaseRelationId, database, 0, lock);
            }
        }
    }
}

/// In recovery: a server that restarts is not consistent before it has replayed the record that is
/// being replayed now.
pub(crate) fn set_recovery_minimum() {
    // SAFETY: in recovery XLogFlush updates pg_control instead, to the end of the record under
    // replay.
    unsafe {
        let mut timeline = 0;
        pg_sys::XLogFlush(pg_sys::GetCurrentReplayRecPtr(&raw mut timeline));
    }
}

/// The number of shared buffers.
pub(crate) fn count() -> usize {
    // SAFETY: a plain global, set when the server starts.
    usize::try_from(unsafe { pg_sys::NBuffers }).unwrap_or(0)
}

/// File, fork and block of the page in a shared buffer, if the page is dirty.
pub(crate) fn dirty(index: usize) -> Option<(RelFile, i32, u32)> {
    in_states(index, compat::BM_VALID | compat::BM_DIRTY)
}

/// The file of the page in a shared buffer.
pub(crate) fn file_at(index: usize) -> Option<RelFile> {
    in_states(index, compat::BM_VALID | compat::BM_TAG_VALID).map(|(file, _, _)| file)
}

fn in_states(index: usize, states: compat::BufferState) -> Option<(RelFile, i32, u32)> {
    if index >= count() {
        return None;
    }
    // SAFETY: `index` was compared with the number of buffers just now.
    unsafe { compat::page_in_buffer(index, states) }
}

/// Prepares a process without transactions for [`evict`]; once.
pub(crate) fn prepare_to_evict() {
    // SAFETY: in a background worker that is not connected to a database, which has no resource
    // owner.
    unsafe { pg_sys::CreateAuxProcessResourceOwner() };
}

/// Evicts the page in a shared buffer, after writing it if it is dirty. False if the page is still
/// in use; an error if it cannot be written.
pub(crate) fn evict(index: usize) -> Result<bool> {
    // SAFETY: the index is checked, and the caller has called `prepare_to_evict`.
    let evict = || Ok(index < count() && unsafe { compat::evict_buffer(index) });
    PgTryBuilder::new(evict)
        .catch_others(|error| {
            // SAFETY: in a worker without transactions, whose resource owner owns nothing else.
            unsafe { release_after_error() };
            let CaughtError::PostgresError(report) = error else { error.rethrow() };
            Err(Report::new(PgSqlErrorCode::ERRCODE_IO_ERROR, report.message()))
        })
        .execute()
}

/// Releases everything that an ERROR in [`evict`] left, like the background writer after an error
/// (`BackgroundWriterMain`, bgwriter.c).
///
/// # Safety
/// In a process without transactions, whose own resource owner owns nothing that is still needed.
unsafe fn release_after_error() {
    // SAFETY: each call releases resources of this process, which the caller no longer needs.
    unsafe {
        pg_sys::InterruptHoldoffCount += 1;
        pg_sys::LWLockReleaseAll();
        pg_sys::ConditionVariableCancelSleep();
        if let Some(abort) = compat::ABORT_BUFFER_IO {
            abort();
        }
        pg_sys::UnlockBuffers();
        pg_sys::ReleaseAuxProcessResources(false);
        pg_sys::AtEOXact_Buffers(false);
        pg_sys::AtEOXact_SMgr();
        pg_sys::AtEOXact_Files(false);
        pg_sys::AtEOXact_HashTables(false);
        pg_sys::InterruptHoldoffCount -= 1;
    }
}

/// Closes the files that [`evict`] opened, as the checkpointer does after each checkpoint.
pub(crate) fn close_files() {
    // SAFETY: the process has no relation cache.
    unsafe { compat::close_all_files() };
}

/// Whether a fork of a file exists.
pub(crate) fn is_there(file: RelFile, fork: i32) -> bool {
    std::path::Path::new(&compat::relation_path(file, fork)).exists()
}
