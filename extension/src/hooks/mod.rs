//! Functions that replace the server's, and hooks. They are thin: test one flag, call the rest of
//! the crate, forward to the server.
//!
//! Frame rule: the server's functions may `longjmp` over our frames. So a function here either has
//! no value with a destructor alive during a raw call, or calls through a pgrx guard. Each has its
//! contract above it: who calls it, under which locks, whether in a critical section, and whether
//! it may raise errors.

pub(crate) mod access;
pub(crate) mod aio;
pub(crate) mod audited;
pub(crate) mod authentication;
pub(crate) mod calls_seen;
mod commit_times;
pub(crate) mod ddl;
pub(crate) mod decoding;
pub(crate) mod files;
pub(crate) mod forward;
pub(crate) mod granted;
pub(crate) mod install;
mod left_out;
mod locked;
pub(crate) mod naming;
pub(crate) mod proof;
mod reading_again;
pub(crate) mod restart_points;
pub(crate) mod rmgr;
mod sealing;
pub(crate) mod shared_memory;
pub(crate) mod smgr;
pub(crate) mod statistics;
pub(crate) mod sync;
pub(crate) mod transaction;
pub(crate) mod utility;
pub(crate) mod writing;
