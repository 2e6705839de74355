//! The storage manager's writing functions, each between two marks: see [`crate::writers`].
//!
//! An ERROR skips their frames and leaves the mark set; there are no values with destructors here.

use std::ffi::c_void;

use pgrx::pg_sys::{BlockNumber, SMgrRelation};

use super::smgr;
use crate::fault;
use crate::pg::compat;
use crate::writers::{self, Activity};

/// Sets the mark. Has a fault point while the mark is set.
#[inline]
unsafe fn begin_writing(reln: SMgrRelation) {
    // SAFETY: the server calls with a storage manager object that it has open.
    let file = unsafe { compat::smgr_file(reln) }.file.relation;
    writers::begin(Activity::Writing, file);
    fault::point_of("page.writing", file);
}

/// Contract: like [`smgr::mdwrite`].
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
        writers::end(Activity::Writing);
    }
}

/// Contract: like [`smgr::mdwritev`].
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
        writers::end(Activity::Writing);
    }
}

/// Contract: like [`smgr::mdextend`].
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
        writers::end(Activity::Writing);
    }
}

/// Contract: like [`smgr::mdcreate`]. The decision for the file may read catalogs, and so write
/// pages.
pub(super) unsafe extern "C-unwind" fn mdcreate(reln: SMgrRelation, fork: i32, is_redo: bool) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        writers::begin(Activity::Creating, compat::smgr_file(reln).file.relation);
        smgr::mdcreate(reln, fork, is_redo);
        writers::end(Activity::Creating);
    }
}
