//! The storage manager: pages are opened after `mdread` and sealed before `mdwrite`.
//!
//! The functions have the signatures of md.c. [`super::install`] decides which of them are
//! installed, depending on the major.

use std::ffi::c_void;

use pagevault_cipher::{DataKeyVersion, Page};
use pgrx::pg_sys::{self, BlockNumber, SMgrRelation};
use pgrx::prelude::PgLogLevel;

use super::calls_seen::{self, Call};
use super::forward::Forward;
use super::{aio, ddl, locked, reading_again, sealing};
use crate::page::io::{PageFault, SealTarget, Writing};
use crate::pg::compat::{self, SmgrFile};
use crate::pg::process;
use crate::{fault, page};

type ForkNumber = i32;

/// `mdread` (15, 16)
pub(super) type Read =
    unsafe extern "C-unwind" fn(SMgrRelation, ForkNumber, BlockNumber, *mut c_void);
/// `mdreadv` (17+)
pub(super) type ReadV = unsafe extern "C-unwind" fn(
    SMgrRelation,
    ForkNumber,
    BlockNumber,
    *mut *mut c_void,
    BlockNumber,
);
/// `mdwrite` (15, 16) and `mdextend`
pub(super) type Write =
    unsafe extern "C-unwind" fn(SMgrRelation, ForkNumber, BlockNumber, *const c_void, bool);
/// `mdwritev` (17+)
pub(super) type WriteV = unsafe extern "C-unwind" fn(
    SMgrRelation,
    ForkNumber,
    BlockNumber,
    *const *const c_void,
    BlockNumber,
    bool,
);
/// `mdzeroextend` (16+)
pub(super) type ZeroExtend =
    unsafe extern "C-unwind" fn(SMgrRelation, ForkNumber, BlockNumber, i32, bool);
/// `mdcreate`
pub(super) type Create = unsafe extern "C-unwind" fn(SMgrRelation, ForkNumber, bool);
/// `mdstartreadv` (18+)
pub(super) type StartReadV = unsafe extern "C-unwind" fn(
    *mut c_void,
    SMgrRelation,
    ForkNumber,
    BlockNumber,
    *mut *mut c_void,
    BlockNumber,
);

pub(super) static MDREAD: Forward<Read> = Forward::unresolved();
pub(super) static MDREADV: Forward<ReadV> = Forward::unresolved();
pub(super) static MDWRITE: Forward<Write> = Forward::unresolved();
pub(super) static MDWRITEV: Forward<WriteV> = Forward::unresolved();
pub(super) static MDEXTEND: Forward<Write> = Forward::unresolved();
pub(super) static MDZEROEXTEND: Forward<ZeroExtend> = Forward::unresolved();
pub(super) static MDCREATE: Forward<Create> = Forward::unresolved();
pub(super) static MDSTARTREADV: Forward<StartReadV> = Forward::unresolved();

/// Raises the fault as ERROR. Not inlined, to keep the hot path small.
///
/// # Safety
/// No frame between here and the server's call has values with destructors.
#[cold]
#[inline(never)]
unsafe fn raise(fault: PageFault, block: BlockNumber) -> ! {
    // SAFETY: the server may longjmp over our callers, which have no values with destructors.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| page::errors::report(fault, block).raise()) }
}

/// [`raise`] for a read that is refused before it starts.
///
/// # Safety
/// As [`raise`]: the server may longjmp over our callers.
#[cold]
#[inline(never)]
unsafe fn refuse_read(fault: PageFault, block: BlockNumber) -> ! {
    page::io::count_refusal(fault.file);
    // SAFETY: our caller has no values with destructors, as `raise` requires.
    unsafe { raise(fault, block) }
}

/// Contract: called by bufmgr.c and by raw copies (RelationCopyStorage) with I/O in progress on the
/// buffer, which no other process accesses; not in a critical section; may raise errors.
pub(super) unsafe extern "C-unwind" fn mdread(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *mut c_void,
) {
    // SAFETY: the server's own arguments; after a return the buffer contains one page, which no
    // other process accesses.
    unsafe {
        calls_seen::note(Call::Read);
        let file = compat::smgr_file(reln);
        locked::empty_map(file, fork, block..block + 1);
        let checked = page::access::check_access(file)
            .and_then(|()| locked::check_pages_of_redo(reln, file, fork, block..block + 1));
        if let Err(fault) = checked {
            refuse_read(fault, block);
        }
        MDREAD.get()(reln, fork, block, buffer);
        if let Err(fault) = reading_again::open(reln, file, fork, block, buffer) {
            raise(fault, block);
        }
    }
}

/// Contract: like [`mdread`], for a run of blocks.
pub(super) unsafe extern "C-unwind" fn mdreadv(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    buffers: *mut *mut c_void,
    count: BlockNumber,
) {
    // SAFETY: as in mdread, for each of the `count` buffers.
    unsafe {
        calls_seen::note(Call::Read);
        let file = compat::smgr_file(reln);
        locked::empty_map(file, fork, block..block + count);
        let checked = page::access::check_access(file)
            .and_then(|()| locked::check_pages_of_redo(reln, file, fork, block..block + count));
        if let Err(fault) = checked {
            refuse_read(fault, block);
        }
        MDREADV.get()(reln, fork, block, buffers, count);
        for i in 0..count {
            let buffer = *buffers.add(i as usize);
            if let Err(fault) = reading_again::open(reln, file, fork, block + i, buffer) {
                raise(fault, block + i);
            }
        }
    }
}

/// Contract: called by bufmgr.c to start an asynchronous read; not in a critical section; may raise
/// errors. The completion ([`super::aio`]) must not raise errors, and runs in any process, so a
/// read of a file whose key is locked or refused is refused here.
pub(super) unsafe extern "C-unwind" fn mdstartreadv(
    handle: *mut c_void,
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    buffers: *mut *mut c_void,
    count: BlockNumber,
) {
    // SAFETY: the server's own arguments, passed on; leaving a batch is allowed at any time; the
    // handle is handed out until a read is started with it (pgaio_io_start_readv, aio_io.c).
    unsafe {
        calls_seen::note(Call::StartRead);
        let file = compat::smgr_file(reln);
        locked::empty_map(file, fork, block..block + count);
        let checked = page::access::check_access(file)
            .and_then(|()| page::access::check_usable(file))
            .and_then(|()| locked::check_pages(reln, file, fork, block..block + count));
        if let Err(fault) = checked {
            // The end of the transaction would release the handle, and close the batch of reads
            // that may be open (read_stream.c). Before that, CREATE DATABASE cleans up:
            // remove_dbtablespaces (dbcommands.c) reads a catalog, and would fail instead, as a
            // process has one handle and one batch at a time.
            aio::RELEASE.get()(handle);
            aio::LEAVE_BATCH.get()();
            refuse_read(fault, block);
        }
        MDSTARTREADV.get()(handle, reln, fork, block, buffers, count);
    }
}

/// Contract: called by bufmgr.c with the buffer pinned and share-locked (hint bits may change
/// meanwhile), in the checkpointer, background writer, backends and the startup process; may raise
/// errors.
pub(super) unsafe extern "C-unwind" fn mdwrite(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *const c_void,
    skip_fsync: bool,
) {
    // SAFETY: the server's own arguments; there is one page at `buffer`.
    unsafe {
        calls_seen::note(Call::Write);
        let file = compat::smgr_file(reln);
        if page::io::is_placeholder(sealing::lsn(buffer)) {
            return;
        }
        let writing = page::io::writing(file);
        fault::point_of("page.looked_up", file.file.relation);
        if let Some(target) = target_over(reln, writing, fork, block, buffer) {
            let sealed = seal_one(target, fork, block, buffer);
            MDWRITE.get()(reln, fork, block, sealed, skip_fsync);
        }
    }
}

/// Contract: like [`mdwrite`]; the block is new, and the relation extension lock or the I/O flag of
/// the buffer excludes other processes.
pub(super) unsafe extern "C-unwind" fn mdextend(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *const c_void,
    skip_fsync: bool,
) {
    // SAFETY: as in mdwrite: the arguments are the server's own, and there is one page at `buffer`,
    // which no other process can access yet.
    unsafe {
        calls_seen::note(Call::Extend);
        let file = compat::smgr_file(reln);
        if let Err(fault) = page::access::check_access(file) {
            raise(fault, block);
        }
        let target = page::io::seal_target(file);
        let buffer = if target.is_some() { sealing::as_added(buffer) } else { buffer };
        let sealed = seal_one(target, fork, block, buffer);
        fault::point_of("page.extend", file.file.relation);
        MDEXTEND.get()(reln, fork, block, sealed, skip_fsync);
    }
}

/// Contract: like [`mdwrite`], for a run of blocks.
pub(super) unsafe extern "C-unwind" fn mdwritev(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    buffers: *const *const c_void,
    count: BlockNumber,
    skip_fsync: bool,
) {
    // SAFETY: the server's own arguments: `count` pointers to pages. The run uses static scratch
    // memory, which is not borrowed during the forwarded call, so a longjmp out of it leaves
    // nothing to clean up.
    unsafe {
        calls_seen::note(Call::Write);
        let file = compat::smgr_file(reln);
        let writing = page::io::writing(file);
        fault::point_of("page.looked_up", file.file.relation);
        if writing.must_compare
            || writing.must_check_key
            || (0..count).any(|i| page::io::is_placeholder(sealing::lsn(*buffers.add(i as usize))))
        {
            for i in 0..count {
                let page = *buffers.add(i as usize);
                if page::io::is_placeholder(sealing::lsn(page)) {
                    continue;
                }
                if let Some(target) = target_over(reln, writing, fork, block + i, page) {
                    let sealed = seal_one(target, fork, block + i, page);
                    MDWRITEV.get()(reln, fork, block + i, &raw const sealed, 1, skip_fsync);
                }
            }
            return;
        }
        let Some(target) = writing.target else {
            return MDWRITEV.get()(reln, fork, block, buffers, count, skip_fsync);
        };
        let mut done = 0;
        while done < count {
            let run = (count - done).min(sealing::RUN_MAX);
            match sealing::seal(target, fork, block + done, buffers.add(done as usize), run) {
                Ok(sealed) => MDWRITEV.get()(reln, fork, block + done, sealed, run, skip_fsync),
                Err(fault) => raise(fault, block + done),
            }
            done += run;
        }
    }
}

/// Contract: called by bufmgr.c (16+) to add zero blocks. May raise errors. Zero blocks are not
/// sealed, but a file whose pages could not be sealed later must not grow.
pub(super) unsafe extern "C-unwind" fn mdzeroextend(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
    count: i32,
    skip_fsync: bool,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        calls_seen::note(Call::ZeroExtend);
        let file = compat::smgr_file(reln);
        if let Err(fault) =
            page::access::check_access(file).and_then(|()| page::access::check_usable(file))
        {
            raise(fault, block);
        }
        MDZEROEXTEND.get()(reln, fork, block, count, skip_fsync);
    }
}

/// Contract: called by RelationCreateStorage and others, in a transaction, before any block exists;
/// catalogs may be read; may raise errors. In recovery (`is_redo`) the decision comes from WAL.
pub(super) unsafe extern "C-unwind" fn mdcreate(
    reln: SMgrRelation,
    fork: ForkNumber,
    is_redo: bool,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        calls_seen::note(Call::Create);
        if !is_redo && fork == pg_sys::ForkNumber::MAIN_FORKNUM {
            let file: SmgrFile = compat::smgr_file(reln);
            if !file.is_temporary() && ddl::decides() {
                creating_storage(file);
                check_still_open(reln, file);
            }
        }
        // Between the two marks that `writing::mdcreate` sets: shred::former_files relies on it.
        fault::point_of("storage.decided", 0);
        MDCREATE.get()(reln, fork, is_redo);
    }
}

/// Decides the encryption of a new file, in a guard, because this reads catalogs and writes keys.
///
/// # Safety
/// As for [`raise`]: the guard turns a panic into an ERROR that skips our callers' frames.
#[cold]
unsafe fn creating_storage(file: SmgrFile) {
    // SAFETY: our callers have no values with destructors, so an ERROR may skip their frames.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| ddl::creating_storage(file.file)) }
}

/// Raises an error if `reln` was freed. Reading catalogs may process invalidations; if their queue
/// has overflowed, 15 and 16 free every `SMgrRelation`, including this one, which our caller uses.
///
/// # Safety
/// `file` was read from `reln` while it was live; otherwise as for [`raise`].
unsafe fn check_still_open(reln: SMgrRelation, file: SmgrFile) {
    if !compat::FREES_SMGR_OBJECTS {
        return;
    }
    // SAFETY: smgropen finds or creates an entry by value; `reln` is compared, not dereferenced.
    unsafe {
        pg_sys::panic::pgrx_extern_c_guard(|| {
            if compat::open_smgr_of(file) != reln {
                page::errors::invalidated().raise();
            }
        });
    }
}

/// How to write one page; `None` if the page on disk must stay.
///
/// # Safety
/// The arguments are those of [`mdwrite`].
#[inline]
unsafe fn target_over(
    reln: SMgrRelation,
    writing: Writing,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *const c_void,
) -> Option<Option<SealTarget>> {
    if writing.must_compare || writing.must_check_key {
        // SAFETY: the arguments are those of mdwrite, passed on.
        unsafe { target_by_disk(reln, writing, fork, block, buffer) }
    } else {
        Some(writing.target)
    }
}

/// How to write one page of a file that is being rewritten, or that may be sealed under keys not
/// yet replayed, depending on the page on disk; `None` if that must stay.
///
/// # Safety
/// The arguments are those of [`mdwrite`], passed on.
#[cold]
unsafe fn target_by_disk(
    reln: SMgrRelation,
    writing: Writing,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *const c_void,
) -> Option<Option<SealTarget>> {
    // SAFETY: the server's own arguments; the memory has the size of a page and is not reused until
    // the next call.
    unsafe {
        // mdread raises an error for a page beyond the end of the file, except in the startup
        // process.
        if block >= compat::smgr_blocks(reln, fork) {
            return Some(writing.target);
        }
        let file = compat::smgr_file(reln);
        let on_disk = read_sealed(reln, fork, block);
        if writing.must_check_key {
            match page::io::may_write_over(file, writing, fork, block, &*on_disk) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(fault) if !process::ignores_invalid_pages() => raise(fault, block),
                Err(fault) => {
                    // Never in plaintext over a page that is sealed as far as anybody knows.
                    let is_kept = writing.target.is_none();
                    pg_sys::panic::pgrx_extern_c_guard(|| {
                        page::errors::ignored(fault, block, is_kept).send(PgLogLevel::WARNING);
                    });
                    if is_kept {
                        return None;
                    }
                }
            }
        }
        Some(if writing.must_compare {
            let init = pg_sys::ForkNumber::INIT_FORKNUM;
            let is_unlogged = || fork != init && pg_sys::smgrexists(reln, init);
            page::io::target_over(file, writing, sealing::lsn(buffer), &*on_disk, is_unlogged)
        } else {
            writing.target
        })
    }
}

/// Reads a page as it is on disk, without decrypting it.
///
/// # Safety
/// As for [`mdread`], of a block that exists. The result is valid until the next call.
pub(super) unsafe fn read_sealed(
    reln: SMgrRelation,
    fork: ForkNumber,
    block: BlockNumber,
) -> *mut Page {
    let on_disk = sealing::page_from_disk();
    // SAFETY: the block exists, as the caller guarantees, and the memory has the size of a page.
    unsafe { reading_again::read(reln, fork, block, on_disk.cast()) };
    on_disk
}

/// The unknown key that a page on disk is under. In the startup process.
pub(crate) fn unknown_version_on_disk(
    file: SmgrFile,
    fork: ForkNumber,
    block: BlockNumber,
) -> Option<DataKeyVersion> {
    // SAFETY: not in a critical section; the object stays live, and the block exists when it is
    // read.
    unsafe {
        let reln = compat::open_smgr_of(file);
        if block >= compat::smgr_blocks(reln, fork) {
            return None;
        }
        let on_disk = read_sealed(reln, fork, block);
        page::io::unknown_version_of(file, fork, block, &*on_disk)
    }
}

/// Whether a page can be opened as it is on disk; true if there is none. In the startup process.
pub(crate) fn is_authentic_on_disk(file: SmgrFile, fork: ForkNumber, block: BlockNumber) -> bool {
    // SAFETY: as in `unknown_version_on_disk`; the memory is this process's until the next read.
    unsafe {
        let reln = compat::open_smgr_of(file);
        if block >= compat::smgr_blocks(reln, fork) {
            return true;
        }
        page::io::is_authentic(file, fork, block, &mut *read_sealed(reln, fork, block))
    }
}

/// The bytes to write for one page: the page itself, or its sealed form in scratch memory.
///
/// # Safety
/// `buffer` points to a page of PostgreSQL.
#[inline]
unsafe fn seal_one(
    target: Option<SealTarget>,
    fork: ForkNumber,
    block: BlockNumber,
    buffer: *const c_void,
) -> *const c_void {
    // SAFETY: the caller's page, as a run of one; an ERROR may skip our callers' frames, which have
    // no values with destructors.
    unsafe {
        let Some(target) = target else { return buffer };
        match sealing::seal(target, fork, block, &raw const buffer, 1) {
            Ok(sealed) => *sealed,
            Err(fault) => raise(fault, block),
        }
    }
}
