//! Operations for the self-check: a relation file without a relation, on which the server performs
//! every file operation, and a WAL record without effect.

use std::io;

use pagevault_keystore::RelFile;
use pgrx::pg_sys::{self, ForkNumber};

use super::buffers::AlignedPage;
use super::compat::{self, SHARED_BACKEND, SmgrFile};
use super::critical;

/// In `global`, which every cluster has. The relfilenumber is one of those that PostgreSQL reserves
/// for extensions and patches in development (transam.h), so neither catalogs nor users get it.
pub(crate) const FILE: SmgrFile = SmgrFile {
    file: RelFile { tablespace: 1664, database: 0, relation: 9161 },
    backend: SHARED_BACKEND,
};

const BLOCKS: usize = 2;
const MAIN: ForkNumber::Type = ForkNumber::MAIN_FORKNUM;

/// Creates the file in the size that [`exercise`] needs, so that a full disk or an unusable
/// directory is detected without an error in the server. One process at a time.
pub(crate) fn make_room() -> io::Result<()> {
    std::fs::write(path(), [0; BLOCKS * pg_sys::BLCKSZ as usize])
}

/// The file, relative to the data directory.
pub(crate) fn path() -> String {
    format!("global/{}", FILE.file.relation)
}

/// Creates the file, extends it, reads and writes it with and without shared buffers, and removes
/// it. Raises an error if an operation fails.
///
/// In a transaction, or in the startup process. One process at a time, after [`make_room`]: the
/// server does not check whether a block that it adds exists (`mdextend`, `mdzeroextend`, md.c).
///
/// With shared buffers: `ReadBufferWithoutRelcache`, `FlushOneBuffer` (bufmgr.c).
pub(crate) fn exercise() {
    let mut page = Box::new(AlignedPage([0; pg_sys::BLCKSZ as usize]));
    let bytes = page.0.as_mut_ptr();
    // SAFETY: not in a critical section; the object is looked up again after each call that may
    // process invalidations; the memory has the size of a page; the buffer is pinned until it is
    // released, and changed under its lock.
    unsafe {
        pg_sys::smgrcreate(compat::open_smgr_of(FILE), MAIN, true);
        // Zeros: a page with contents would need a checksum, if the file is left by a crash.
        compat::smgr_extend(compat::open_smgr_of(FILE), 0, bytes);
        compat::smgr_zero_extend(compat::open_smgr_of(FILE), 1);
        let buffer = compat::read_buffer(FILE.file, 1);
        compat::lock_exclusively(buffer);
        critical::section(|| {
            pg_sys::PageInit(compat::buffer_page(buffer).cast(), pg_sys::BLCKSZ as usize, 0);
            pg_sys::MarkBufferDirty(buffer);
        });
        pg_sys::FlushOneBuffer(buffer);
        pg_sys::UnlockReleaseBuffer(buffer);
        compat::smgr_read(compat::open_smgr_of(FILE), 1, bytes);
    }
    remove();
}

/// Removes the file at once, with its buffers, as redo does; does nothing if there is none.
pub(crate) fn remove() {
    // SAFETY: not in a critical section; no other process uses this file.
    unsafe {
        let mut object = compat::open_smgr_of(FILE);
        pg_sys::smgrdounlinkall(&raw mut object, 1, true);
        pg_sys::smgrclose(compat::open_smgr_of(FILE));
    }
}

/// Writes and flushes a WAL record without effect (`XLOG_NOOP`, xlog.c). It does not count as
/// activity for checkpoints and `archive_timeout`. Not in recovery.
pub(crate) fn write_wal() {
    // SAFETY: not in a critical section, and no record is under construction.
    unsafe {
        pg_sys::XLogBeginInsert();
        // Records have data (ReserveXLogInsertLocation, xlog.c, asserts it).
        compat::xlog_register_data(&[0]);
        pg_sys::XLogSetRecordFlags(pg_sys::XLOG_MARK_UNIMPORTANT as u8);
        let end = pg_sys::XLogInsert(pg_sys::RmgrIds::RM_XLOG_ID as u8, pg_sys::XLOG_NOOP as u8);
        pg_sys::XLogFlush(end);
    }
}
