//! Closing a database to the sessions of a standby, while redo destroys keys there.

use pgrx::PgSqlErrorCode;

use crate::pg::buffers::{self, SessionsOut};
use crate::pg::process;
use crate::pg::report::Report;
use crate::shmem;

/// A database without sessions. Those that begin nevertheless can do nothing.
pub(crate) struct Closed {
    _sessions: SessionsOut,
}

impl Closed {
    /// In the startup process: ends the sessions of a database.
    pub(crate) fn new(database: u32) -> Closed {
        if let Some(shared) = shmem::get() {
            shared.control.close(database);
        }
        Closed { _sessions: buffers::keep_sessions_out_in_redo(database) }
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        if let Some(shared) = shmem::get() {
            shared.control.close(0);
        }
    }
}

/// Whether any database is closed. One load.
#[inline]
pub(crate) fn any() -> bool {
    shmem::get().is_some_and(|shared| shared.control.closed() != 0)
}

/// Ends a session of the closed database. To be called before a query.
#[cold]
pub(crate) fn refuse_session() {
    let closed = shmem::get().map_or(0, |shared| shared.control.closed());
    if closed != 0 && closed == process::my_database() && process::in_recovery() {
        Report::new(
            PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
            "this database accepts no connections while its keys are being destroyed",
        )
        .hint("Try again.")
        .fatal();
    }
}
