//! Faults of pages, in words for the user. Apart from the page path, which only returns them.

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;

use super::io::{Cause, PageFault};
use super::stand_ins;
use crate::keys::scope;
use crate::keys::store::unsettled;
use crate::keys::usage::key_error::KeyError;
use crate::keys::usage::refused;
use crate::pg::process::is_startup_process;
use crate::pg::report::Report;

/// The database in the name of a file of a shared catalog.
const SHARED_CATALOGS: u32 = 0;

/// Words a fault for the user.
pub(crate) fn report(fault: PageFault, block: u32) -> Report {
    let RelFile { tablespace, database, relation } = fault.file.file;
    let file = format!("{tablespace}/{database}/{relation}");
    let error = match fault.cause {
        Cause::Key(error) => error,
        Cause::NotAuthentic => {
            return Report::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("block {block} of relation file {file} is not as it was encrypted"),
            )
            .detail("It was changed on disk, or stands in the place of another page.")
            .hint("Restore the relation from a backup, or fail over to a standby. The key is right; neither ignore_checksum_failure nor zero_damaged_pages helps.");
        }
    };
    match error {
        KeyError::Locked { scope } => {
            let whose = scope::name(scope);
            Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("encrypted relation file {file} is locked"),
            )
            .detail(format!("The key of {whose} has not been unwrapped: its key provider did not answer or refused."))
            .hint(match database {
                _ if is_startup_process() => {
                    "Make the key provider reachable and start the server again: replay goes on from here, and nothing is lost."
                }
                SHARED_CATALOGS => "Nobody can log in until then; the server keeps trying. Its log tells the cause.",
                _ => "See pagevault.status for the cause. The server keeps trying; pagevault.unlock() tries again now.",
            })
        }
        KeyError::Refused { scope } => refused::file_refused(&file, scope),
        KeyError::NoKey { epoch } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("no data key of epoch {epoch} for block {block} of relation file {file}"),
        )
        .detail("The page is sealed, but the keystore under pagevault/ in the data directory does not hold its key.")
        .hint(format!("Restore the keystore from a backup taken together with this data directory. Do not zero or reset the page: it is intact.{}", unsettled::hint().unwrap_or_default())),
        KeyError::Destroyed => destroyed(&format!("relation file {file}")),
        KeyError::TooManyMissing => stand_ins::too_many(&file),
        KeyError::Damaged { epoch } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("data key of epoch {epoch} of relation file {file} cannot be unwrapped"),
        )
        .detail("Its record in the keystore does not authenticate under the database key.")
        .hint("Restore the keystore from a backup taken together with this data directory."),
    }
}

/// The report for a relation or file whose keys were destroyed.
pub(crate) fn destroyed(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the data keys of {name} were destroyed"),
    )
    .detail("Somebody has shredded it: what it held can never be read again.")
    .hint("DROP it; or TRUNCATE it, to use it again.")
}

/// The storage manager forgot a file while its encryption was being decided.
pub(crate) fn invalidated() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
        "relation cache was reset while new storage was being created",
    )
    .hint("Try the command again.")
}
