//! The storage manager's functions that write, each between two marks: see [`crate::writers`].
//!
//! An ERROR passes over them and leaves the mark; nothing here has a destructor.

use std::ffi::c_void;

use pgrx::pg_sys::{BlockNumber, SMgrRelation};

use super::smgr;
use crate::fault;
use crate::pg::compat;
use crate::writers::{self, Act};

/// Stands still while the mark is set.
#[inline]
unsafe fn begin_writing(reln: SMgrRelation) {
    // SAFETY: the server calls with an object of the storage manager that it has open.
    let file = unsafe { compat::smgr_file(reln) }.file.relation;
    writers::begin(Act::Writing, file);
    fault::point_of("page.writing", file);
}

/// Contract: as [`smgr::mdwrite`].
pub(super) unsafe extern "C-unwind" fn mdwrite(
    reln: SMgrRelation,
    fork: i32,
    block: BlockNumber,
    buffer: *const c_void,
    skip_fsync: bool,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        begin_writing(reln);
        smgr::mdwrite(reln, fork, block, buffer, skip_fsync);
        writers::end(Act::Writing);
    }
}

/// Contract: as [`smgr::mdwritev`].
pub(super) unsafe extern "C-unwind" fn mdwritev(
    reln: SMgrRelation,
    fork: i32,
    block: BlockNumber,
    buffers: *const *const c_void,
    count: BlockNumber,
    skip_fsync: bool,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        begin_writing(reln);
        smgr::mdwritev(reln, fork, block, buffers, count, skip_fsync);
        writers::end(Act::Writing);
    }
}

/// Contract: as [`smgr::mdextend`].
pub(super) unsafe extern "C-unwind" fn mdextend(
    reln: SMgrRelation,
    fork: i32,
    block: BlockNumber,
    buffer: *const c_void,
    skip_fsync: bool,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        begin_writing(reln);
        smgr::mdextend(reln, fork, block, buffer, skip_fsync);
        writers::end(Act::Writing);
    }
}

/// Contract: as [`smgr::mdcreate`]. Deciding for the file may read catalogs, and so write pages.
pub(super) unsafe extern "C-unwind" fn mdcreate(reln: SMgrRelation, fork: i32, is_redo: bool) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        writers::begin(Act::Creating, compat::smgr_file(reln).file.relation);
        smgr::mdcreate(reln, fork, is_redo);
        writers::end(Act::Creating);
    }
}
