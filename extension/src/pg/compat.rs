//! Every difference between PostgreSQL 15, 16, 17 and 18 that the crate meets.
//!
//! The newest spelling wins; older majors are translated to it here and nowhere else.

use pagevault_keystore::RelFile;
use pgrx::pg_sys;

/// The major version this library is built for; the server refuses to load it into another.
pub(crate) const MAJOR: u32 = pg_sys::PG_VERSION_NUM / 10_000;

/// `INVALID_PROC_NUMBER` (17+), `InvalidBackendId` before: a relation that all backends share.
pub(crate) const SHARED_BACKEND: i32 = -1;

/// A relation file as the storage manager addresses it: the file and the backend that owns it when
/// it belongs to a temporary relation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SmgrFile {
    /// Tablespace, database and relfilenumber.
    pub(crate) file: RelFile,
    /// For the file of a temporary relation, the backend it belongs to, which alone reads and
    /// writes it; [`SHARED_BACKEND`] for all others.
    pub(crate) backend: i32,
}

impl SmgrFile {
    /// A file that only one backend uses.
    #[inline]
    pub(crate) fn is_temporary(self) -> bool {
        self.backend != SHARED_BACKEND
    }
}

/// `RelFileLocator` of a keystore log: no relation is in tablespace 0. The scope stands in place of
/// the file number, not of the database: what is asked for in the name of a database is cancelled
/// when the database is dropped or moved to another tablespace, by a standby as well
/// (`ForgetDatabaseSyncRequests`, md.c), and its keys live on.
fn keystore_locator(scope: u32) -> Locator {
    locator(RelFile { tablespace: 0, database: 0, relation: scope })
}

/// The sync request that stands for the keystore log of `scope`.
pub(crate) fn keystore_tag(scope: u32) -> pg_sys::FileTag {
    pg_sys::FileTag {
        handler: pg_sys::SyncRequestHandler::SYNC_HANDLER_MD as i16,
        forknum: pg_sys::ForkNumber::MAIN_FORKNUM as i16,
        #[cfg(feature = "pg15")]
        rnode: keystore_locator(scope),
        #[cfg(not(feature = "pg15"))]
        rlocator: keystore_locator(scope),
        segno: 0,
    }
}

/// The scope whose keystore log a sync request stands for, if it is one of ours.
pub(crate) fn keystore_of_tag(tag: &pg_sys::FileTag) -> Option<u32> {
    #[cfg(feature = "pg15")]
    let file = rel_file(tag.rnode);
    #[cfg(not(feature = "pg15"))]
    let file = rel_file(tag.rlocator);
    (file.tablespace == 0 && file.database == 0).then_some(file.relation)
}

#[cfg(feature = "pg15")]
pub(crate) type Locator = pg_sys::RelFileNode;
#[cfg(not(feature = "pg15"))]
pub(crate) type Locator = pg_sys::RelFileLocator;

/// `RelFileLocator` of the server as ours.
#[cfg(feature = "pg15")]
pub(crate) fn rel_file(locator: Locator) -> RelFile {
    RelFile {
        tablespace: locator.spcNode.to_u32(),
        database: locator.dbNode.to_u32(),
        relation: locator.relNode.to_u32(),
    }
}

/// `RelFileLocator` of the server as ours.
#[cfg(not(feature = "pg15"))]
pub(crate) fn rel_file(locator: Locator) -> RelFile {
    RelFile {
        tablespace: locator.spcOid.to_u32(),
        database: locator.dbOid.to_u32(),
        relation: locator.relNumber.to_u32(),
    }
}

/// Ours as the server's `RelFileLocator`.
fn locator(file: RelFile) -> Locator {
    #[cfg(feature = "pg15")]
    return Locator {
        spcNode: file.tablespace.into(),
        dbNode: file.database.into(),
        relNode: file.relation.into(),
    };
    #[cfg(not(feature = "pg15"))]
    return Locator {
        spcOid: file.tablespace.into(),
        dbOid: file.database.into(),
        relNumber: file.relation.into(),
    };
}

/// The file behind an open `SMgrRelation`.
///
/// # Safety
/// `reln` is a live `SMgrRelation` of this process.
#[inline]
pub(crate) unsafe fn smgr_file(reln: pg_sys::SMgrRelation) -> SmgrFile {
    // SAFETY: live by contract; the locator is immutable for the life of the object.
    #[cfg(feature = "pg15")]
    let (locator, backend) = unsafe { ((*reln).smgr_rnode.node, (*reln).smgr_rnode.backend) };
    // SAFETY: as above.
    #[cfg(not(feature = "pg15"))]
    let (locator, backend) =
        unsafe { ((*reln).smgr_rlocator.locator, (*reln).smgr_rlocator.backend) };
    SmgrFile { file: rel_file(locator), backend }
}

/// The file of an open relation (`rd_locator`; `rd_node` before 16).
///
/// # Safety
/// `relation` is an open relation.
pub(crate) unsafe fn relation_locator(relation: pg_sys::Relation) -> Locator {
    #[cfg(feature = "pg15")]
    // SAFETY: open by contract.
    return unsafe { (*relation).rd_node };
    #[cfg(not(feature = "pg15"))]
    // SAFETY: open by contract.
    return unsafe { (*relation).rd_locator };
}

/// The file number of a relation whose row in pg_class has none (`RelationMapOidToFilenumber`,
/// `RelationMapOidToFilenode` in 15).
pub(crate) fn mapped_file(oid: pg_sys::Oid, is_shared: bool) -> u32 {
    unsafe extern "C-unwind" {
        /// relmapper.c: looks into the maps that a session loads when it connects; cannot raise.
        #[cfg_attr(feature = "pg15", link_name = "RelationMapOidToFilenode")]
        fn RelationMapOidToFilenumber(oid: pg_sys::Oid, is_shared: bool) -> u32;
    }
    // SAFETY: as it says.
    unsafe { RelationMapOidToFilenumber(oid, is_shared) }
}

/// Path of one fork of a permanent relation, relative to the data directory (`relpathperm`).
pub(crate) fn relation_path(file: RelFile, fork: pg_sys::ForkNumber::Type) -> String {
    // SAFETY: GetRelationPath only formats its arguments; the result is palloc'd (or by value on
    // 18).
    unsafe {
        let path = pg_sys::GetRelationPath(
            file.database.into(),
            file.tablespace.into(),
            file.relation.into(),
            SHARED_BACKEND,
            fork,
        );
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return std::ffi::CStr::from_ptr(path.str_.as_ptr()).to_string_lossy().into_owned();
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        return std::ffi::CStr::from_ptr(path).to_string_lossy().into_owned();
    }
}

/// Directory of a database in a tablespace, relative to the data directory (`GetDatabasePath`).
pub(crate) fn database_path(database: u32, tablespace: u32) -> String {
    // SAFETY: only formats its arguments; the result is palloc'd.
    unsafe {
        let path = pg_sys::GetDatabasePath(database.into(), tablespace.into());
        std::ffi::CStr::from_ptr(path).to_string_lossy().into_owned()
    }
}

/// Adds bytes to the WAL record under construction (`XLogRegisterData`).
///
/// # Safety
/// Between `XLogBeginInsert` and `XLogInsert`; `bytes` lives until then.
pub(crate) unsafe fn xlog_register_data(bytes: &[u8]) {
    // SAFETY: by contract; the server only reads the bytes. Length limits are checked by the
    // caller.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast_mut().cast(), bytes.len() as i32);
        #[cfg(any(feature = "pg16", feature = "pg17"))]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast_mut().cast(), bytes.len() as u32);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        pg_sys::XLogRegisterData(bytes.as_ptr().cast(), bytes.len() as u32);
    }
}

/// Address of the page in a shared or local buffer (`BufferGetBlock`).
///
/// # Safety
/// `buffer` is a valid buffer number of this server.
#[inline]
pub(crate) unsafe fn buffer_page(buffer: pg_sys::Buffer) -> *mut u8 {
    // SAFETY: BufferBlocks and LocalBufferBlockPointers are the bases that the macro uses.
    unsafe {
        if buffer < 0 {
            (*pg_sys::LocalBufferBlockPointers.offset((-buffer - 1) as isize)).cast()
        } else {
            pg_sys::BufferBlocks.cast::<u8>().add((buffer - 1) as usize * pg_sys::BLCKSZ as usize)
        }
    }
}

/// The storage manager's object of an open relation (`RelationGetSmgr`).
///
/// # Safety
/// `relation` is open and has storage.
pub(crate) unsafe fn open_smgr(relation: pg_sys::Relation) -> pg_sys::SMgrRelation {
    // SAFETY: by contract.
    unsafe { pg_sys::smgropen(relation_locator(relation), (*relation).rd_backend) }
}

/// The storage manager's object of a file, made if there is none (`smgropen`).
///
/// # Safety
/// Not in a critical section: the object is allocated.
pub(crate) unsafe fn open_smgr_of(file: SmgrFile) -> pg_sys::SMgrRelation {
    // SAFETY: by contract.
    unsafe { pg_sys::smgropen(locator(file.file), file.backend) }
}

/// Drops all shared buffers of these files (`DropRelationsAllBuffers`, `DropRelFileNodesAllBuffers`
/// before 16).
///
/// # Safety
/// Live objects of the storage manager; nobody else uses their files; not in a critical section.
pub(crate) unsafe fn drop_buffers(files: &mut [pg_sys::SMgrRelation]) {
    let count = files.len() as i32;
    // SAFETY: by contract.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::DropRelFileNodesAllBuffers(files.as_mut_ptr(), count);
        #[cfg(not(feature = "pg15"))]
        pg_sys::DropRelationsAllBuffers(files.as_mut_ptr(), count);
    }
}

/// Whether changes of the relation go to WAL (the macro `RelationNeedsWAL` in rel.h).
///
/// # Safety
/// `relation` is open.
pub(crate) unsafe fn relation_needs_wal(relation: pg_sys::Relation) -> bool {
    // SAFETY: by contract; wal_level is a plain global.
    unsafe {
        let permanent = (*(*relation).rd_rel).relpersistence as u8 == b'p';
        let logs_new = pg_sys::wal_level >= pg_sys::WalLevel::WAL_LEVEL_REPLICA as i32;
        permanent && (logs_new || !is_file_of_this_transaction(relation))
    }
}

/// Whether the relation got its file in the current transaction, so that others do not see it yet.
///
/// # Safety
/// `relation` is open.
pub(crate) unsafe fn is_file_of_this_transaction(relation: pg_sys::Relation) -> bool {
    // SAFETY: by contract.
    unsafe {
        #[cfg(feature = "pg15")]
        let new_file = (*relation).rd_firstRelfilenodeSubid;
        #[cfg(not(feature = "pg15"))]
        let new_file = (*relation).rd_firstRelfilelocatorSubid;
        (*relation).rd_createSubid != 0 || new_file != 0 // InvalidSubTransactionId
    }
}

/// The backend number in the names of this session's temporary files
/// (`ProcNumberForTempRelations`, `BackendIdForTempRelations` before 17).
pub(crate) fn temporary_backend() -> i32 {
    // SAFETY: plain globals of this process.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let (own, leader) = (pg_sys::MyBackendId, pg_sys::ParallelLeaderBackendId);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let (own, leader) = (pg_sys::MyProcNumber, pg_sys::ParallelLeaderProcNumber);
        if leader == SHARED_BACKEND { own } else { leader }
    }
}

/// Reads one block of the main fork into `page` (`smgrread`, `smgrreadv` from 17 on).
///
/// # Safety
/// `reln` is live, the block exists, and `page` has room for it.
pub(crate) unsafe fn smgr_read(reln: pg_sys::SMgrRelation, block: u32, page: *mut u8) {
    let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
    // SAFETY: by contract.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        pg_sys::smgrread(reln, fork, block, page.cast());
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        pg_sys::smgrreadv(reln, fork, block, &mut page.cast(), 1);
    }
}

/// How many blocks a fork has (`smgrnblocks`). Raises what the server raises, past our frames.
///
/// # Safety
/// `reln` is live, and the fork exists; no frame between here and the server's call holds anything
/// with a destructor.
pub(crate) unsafe fn smgr_blocks(reln: pg_sys::SMgrRelation, fork: i32) -> u32 {
    unsafe extern "C-unwind" {
        fn smgrnblocks(reln: pg_sys::SMgrRelation, fork: i32) -> u32;
    }
    // SAFETY: by contract.
    unsafe { smgrnblocks(reln, fork) }
}

/// Which page a shared buffer holds, if the buffer is in all of these states (`BM_VALID` and the
/// like). What a moment later may be otherwise: no lock is taken.
///
/// # Safety
/// `index` is less than `NBuffers`.
pub(crate) unsafe fn page_in_buffer(index: usize, states: u32) -> Option<(RelFile, i32, u32)> {
    // SAFETY: by contract; plain fields in shared memory, which others may change meanwhile.
    unsafe {
        let descriptor = &raw const (*pg_sys::BufferDescriptors.add(index)).bufferdesc;
        let state = || (&raw const (*descriptor).state.value).read_volatile();
        if state() & states != states {
            return None;
        }
        let tag = (&raw const (*descriptor).tag).read_volatile();
        // A buffer that gets another page loses all of them in between.
        if state() & states != states {
            return None;
        }
        Some((rel_file(locator_of_tag(&tag)), tag.forkNum, tag.blockNum))
    }
}

/// The file of a page in shared buffers (`BufTagGetRelFileLocator`; a field before 16).
fn locator_of_tag(tag: &pg_sys::BufferTag) -> Locator {
    #[cfg(feature = "pg15")]
    return tag.rnode;
    #[cfg(not(feature = "pg15"))]
    return Locator { spcOid: tag.spcOid, dbOid: tag.dbOid, relNumber: tag.relNumber };
}

/// What [`super::buffers::evict`] does, but for errors (`EvictUnpinnedBuffer`, 17+).
///
/// # Safety
/// `index` is less than `NBuffers`; there is a resource owner; no lock of a buffer is held.
pub(crate) unsafe fn evict_buffer(index: usize) -> bool {
    let buffer = index as pg_sys::Buffer + 1;
    // SAFETY: by contract.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return super::eviction::evict(buffer, locator_of_tag);
        #[cfg(feature = "pg17")]
        return pg_sys::EvictUnpinnedBuffer(buffer);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return pg_sys::EvictUnpinnedBuffer(buffer, &mut false);
    }
}

#[cfg(feature = "pg15")] // from 16 on the resource owner does it
pub(crate) const ABORT_BUFFER_IO: Option<unsafe fn()> = Some(pg_sys::AbortBufferIO);
#[cfg(not(feature = "pg15"))]
pub(crate) const ABORT_BUFFER_IO: Option<unsafe fn()> = None;

/// Forgets what the storage manager has open (`smgrdestroyall`; `smgrcloseall` before 17).
///
/// # Safety
/// In a process that keeps no object of the storage manager: one without a relation cache.
pub(crate) unsafe fn close_all_files() {
    // SAFETY: by contract.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        pg_sys::smgrcloseall();
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        pg_sys::smgrdestroyall();
    }
}

/// The process that copies replication slots from a primary (`B_SLOTSYNC_WORKER`, 17+).
#[inline]
pub(crate) fn is_slot_sync_worker(kind: pg_sys::BackendType::Type) -> bool {
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    return kind == pg_sys::BackendType::B_SLOTSYNC_WORKER;
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    return kind == pg_sys::BackendType::Type::MAX; // which none has
}

/// A block that no file has (`MaxBlockNumber`).
const MISSING_BLOCK: pg_sys::BlockNumber = pg_sys::InvalidBlockNumber - 1;

/// In redo, before the data directory is consistent: as if a record had named a page of this file,
/// which exists, that does not.
pub(crate) fn refer_to_missing_page(file: RelFile) {
    let (fork, mode) = (pg_sys::ForkNumber::MAIN_FORKNUM, pg_sys::ReadBufferMode::RBM_NORMAL);
    let no_buffer = pg_sys::InvalidBuffer as pg_sys::Buffer;
    // SAFETY: in the startup process; of a page beyond the end nothing is read (xlogutils.c), and
    // no buffer is pinned.
    unsafe {
        pg_sys::XLogReadBufferExtended(locator(file), fork, MISSING_BLOCK, mode, no_buffer);
    }
}

/// Takes [`refer_to_missing_page`] back.
pub(crate) fn forget_missing_page(file: RelFile) {
    // SAFETY: in the startup process; forgets references to this block and later ones, of which
    // there are none.
    unsafe {
        pg_sys::XLogTruncateRelation(
            locator(file),
            pg_sys::ForkNumber::MAIN_FORKNUM,
            MISSING_BLOCK,
        );
    }
}

/// Sets a signal handler (`pqsignal`, which 18 names `pqsignal_be` in the server).
///
/// # Safety
/// `handler` only does what a signal handler may.
pub(crate) unsafe fn set_signal_handler(
    signal: i32,
    handler: unsafe extern "C-unwind" fn(std::ffi::c_int),
) {
    // SAFETY: by contract.
    unsafe {
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        pg_sys::pqsignal_be(signal, Some(handler));
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        pg_sys::pqsignal(signal, Some(handler));
    }
}

/// The range table that ExecutorCheckPerms_hook gets to see, in 16 and later beside a list of
/// permissions.
#[cfg(feature = "pg15")]
pub(crate) type CheckPerms = unsafe extern "C-unwind" fn(*mut pg_sys::List, bool) -> bool;
/// The range table that ExecutorCheckPerms_hook gets to see, in 16 and later beside a list of
/// permissions.
#[cfg(not(feature = "pg15"))]
pub(crate) type CheckPerms =
    unsafe extern "C-unwind" fn(*mut pg_sys::List, *mut pg_sys::List, bool) -> bool;

/// Defines a function of type [`CheckPerms`] that calls `$check` with the range table, then the
/// hook that `$previous` holds.
macro_rules! check_perms_hook {
    ($name:ident, $check:path, $previous:path) => {
        #[cfg(feature = "pg15")]
        unsafe extern "C-unwind" fn $name(range_table: *mut pg_sys::List, raise: bool) -> bool {
            // SAFETY: the server's own arguments, passed on.
            unsafe {
                $check(range_table);
                $previous.get().is_none_or(|next| next(range_table, raise))
            }
        }
        #[cfg(not(feature = "pg15"))]
        unsafe extern "C-unwind" fn $name(
            range_table: *mut pg_sys::List,
            permissions: *mut pg_sys::List,
            raise: bool,
        ) -> bool {
            // SAFETY: the server's own arguments, passed on.
            unsafe {
                $check(range_table);
                let previous = $previous.get();
                previous.is_none_or(|next| next(range_table, permissions, raise))
            }
        }
    };
}
pub(crate) use check_perms_hook;

/// Whether the current user owns a relation (`object_ownercheck`; `pg_class_ownercheck` before 16).
pub(crate) fn owns_relation(oid: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up in a transaction; raises if there is no such relation.
    unsafe {
        let user = pg_sys::GetUserId();
        #[cfg(feature = "pg15")]
        return pg_sys::pg_class_ownercheck(oid, user);
        #[cfg(not(feature = "pg15"))]
        return pg_sys::object_ownercheck(pg_sys::RelationRelationId, oid, user);
    }
}

/// The local number of this process's transaction (`MyProc->vxid.lxid`; `MyProc->lxid` before 17).
pub(crate) fn local_transaction() -> u32 {
    // SAFETY: MyProc is set in every process that runs transactions; only this process writes the
    // field.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return (*pg_sys::MyProc).lxid;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return (*pg_sys::MyProc).vxid.lxid;
    }
}

/// The number of this process among those of the server, auxiliary ones included (`MyProcNumber`;
/// `MyProc->pgprocno` before 17). `None` in the postmaster, and in a process that has none yet or
/// no more.
#[inline]
pub(crate) fn process_number() -> Option<usize> {
    // SAFETY: plain globals of this process; before 17, an entry of its own.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let number = pg_sys::MyProc.as_ref().map_or(-1, |process| process.pgprocno);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let number = pg_sys::MyProcNumber;
        usize::try_from(number).ok()
    }
}

/// More than the highest [`process_number`]; once shared memory is being set up.
pub(crate) fn most_processes() -> usize {
    // SAFETY: a plain global, computed before libraries ask for shared memory.
    let backends = unsafe { pg_sys::MaxBackends };
    usize::try_from(backends).unwrap_or(0) + pg_sys::NUM_AUXILIARY_PROCS as usize
}

/// `ProcessStartupProcInterrupts` (18+), `HandleStartupProcInterrupts` before.
///
/// # Safety
/// In the startup process, where it may exit.
pub(crate) unsafe fn process_startup_interrupts() {
    unsafe extern "C-unwind" {
        #[cfg_attr(
            any(feature = "pg15", feature = "pg16", feature = "pg17"),
            link_name = "HandleStartupProcInterrupts"
        )]
        fn ProcessStartupProcInterrupts();
    }
    // SAFETY: by contract.
    unsafe { ProcessStartupProcInterrupts() }
}
