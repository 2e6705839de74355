//! Thin functions that stand in for the server's: forward, test one flag, call on.
//!
//! Frame rule: the server's functions may `longjmp` over our frames. A function here therefore
//! either keeps nothing with a destructor alive across a raw call, or makes the call through a pgrx
//! guard. Above each one stands its contract: who calls it, under which locks, whether in a
//! critical section, and whether it may raise.

pub(crate) mod access;
pub(crate) mod aio;
pub(crate) mod audited;
pub(crate) mod authentication;
pub(crate) mod calls_seen;
pub(crate) mod ddl;
pub(crate) mod decoding;
pub(crate) mod files;
pub(crate) mod forward;
pub(crate) mod granted;
pub(crate) mod install;
pub(crate) mod naming;
pub(crate) mod proof;
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
