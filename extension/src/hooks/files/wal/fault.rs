//! Errors of WAL pages that cannot be opened or sealed.

use libc::ssize_t;
use pagevault_keystore::KeyVersion;
use pagevault_keystore::wal_pages::Cause;
use pgrx::{PgSqlErrorCode, pg_sys};

use crate::keys::usage::fips;
use crate::keys::usage::key_error::KeyError;
use crate::pg::process;
use crate::pg::report::Report;

/// Why a page cannot be opened or sealed.
pub(super) type Fault = pagevault_keystore::wal_pages::Fault<KeyError>;

/// Result and `errno` of the failed system call.
pub(super) fn errno() -> ssize_t {
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = libc::ENOKEY };
    -1
}

/// Raises the fault as FATAL, which ends recovery, or the WAL receiver, which is started again.
///
/// # Safety
/// In the startup process or the WAL receiver, outside critical sections; no frame between here and
/// the server's call has values with destructors.
#[cold]
pub(super) unsafe fn raise(fault: Fault) -> ! {
    // SAFETY: the server may longjmp over our callers' frames, as they guarantee.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| report(fault).fatal()) }
}

/// PostgreSQL's own check of the header (`XLogReaderValidatePageHeader`, xlogreader.c) would end
/// recovery without an error.
fn other_key(version: KeyVersion, page: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("wrong WAL key of version {version} for {page}"),
    )
    .detail("The page is encrypted under another key with the same version, or it is damaged. There are several if a failover or a restore has lost a rotation: whatever writes WAL with a copy of the keystore from before, such as pg_receivewal run by pagevault-keyring exec, goes on with the other key.")
    .hint("Take this WAL from elsewhere: from another archive, or from pg_wal of the server that wrote it. A copy of the keystore with the other key can read it. Do not reset WAL, and give such programs a new copy of the keystore.")
}

fn report(fault: Fault) -> Report {
    let Fault { address, version, cause } = fault;
    let page = format!("the WAL page at {address}");
    let cause = match cause {
        Cause::Key(error) => error,
        Cause::OtherKey => return other_key(version, &page),
    };
    match cause {
        KeyError::Locked { .. } | KeyError::Refused { .. } if process::is_wal_receiver() => {
            Report::new(
                PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
                format!("cannot encrypt {page}: the key of the cluster is locked"),
            )
            .detail("Its key provider has not answered or refuses. WAL is not received meanwhile.")
            .hint("Make the key provider reachable from this server. The WAL receiver tries again by itself.")
        }
        KeyError::Locked { .. } | KeyError::Refused { .. } => Report::new(
            PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
            format!("cannot open {page}: the key of the cluster is locked"),
        )
        .detail("Its key provider did not answer or refused when the server started.")
        .hint("Make the key provider reachable and start the server again. No data was changed."),
        KeyError::Unapproved { cipher } => fips::refused(&page, "", cipher),
        // WAL keys are never destroyed, and do not belong to a file.
        KeyError::NoKey { .. }
        | KeyError::Destroyed
        | KeyError::NotMarked
        | KeyError::TooManyMissing => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("no WAL key of version {version} for {page}"),
        )
        .detail("The page is encrypted, but the keystore under pagevault/ in the data directory does not hold its key, and WAL has not brought it so far.")
        .hint("Restore the keystore together with the data directory, or copy it from the primary. Do not reset WAL: it is intact."),
        KeyError::Damaged { .. } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("WAL key version {version} for {page} cannot be unwrapped"),
        )
        .detail("Its record in the keystore does not authenticate under the database key.")
        .hint("Restore the keystore from a backup taken together with this data directory."),
    }
}
