//! Error reports for page faults. Not on the page path, which only returns the faults.

use pagevault_cipher::DataKeyVersion;
use pagevault_core::policy::catalogs;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::ForkNumber;

use super::io::{Cause, PageFault};
use super::names::{self, Name};
use super::placeholders;
use crate::keys::store::{directory, key_groups, unsettled};
use crate::keys::usage::key_error::KeyError;
use crate::keys::usage::{fips, refused, withheld};
use crate::pg::compat;
use crate::pg::process::{in_recovery, is_startup_process};
use crate::pg::report::Report;

/// The database number of files of shared catalogs.
const SHARED_CATALOGS: u32 = 0;

/// The object of an error, as far as it is known.
struct Subject {
    /// `relation "orders"`, or `relation file base/5/16489`.
    what: String,
    /// For DETAIL: where the page is, unless `what` contains that. A sentence after a space, or
    /// empty.
    place: String,
    /// For HINT or DETAIL: how to find the relation, unless `what` names it. A sentence after a
    /// space, or empty.
    search: String,
}

impl Subject {
    /// Reads no catalog.
    fn of(file: RelFile) -> Subject {
        let path = path(file);
        match names::of(file) {
            Some(Name { relation, part }) => {
                let place = match part {
                    None => format!(" Its file is {path}."),
                    Some(part) => format!(" The file is {path}, of its {part}."),
                };
                Subject { what: format!("relation \"{relation}\""), place, search: String::new() }
            }
            None => {
                let what = format!("relation file {path}");
                Subject { what, place: String::new(), search: search(file) }
            }
        }
    }
}

/// The path of a relation file below the data directory, as from `pg_relation_filepath()`.
pub(super) fn path(file: RelFile) -> String {
    compat::relation_path(file, ForkNumber::MAIN_FORKNUM)
}

fn search(RelFile { tablespace, database, relation }: RelFile) -> String {
    let place = match database {
        SHARED_CATALOGS => "any database".to_owned(),
        database => format!("the database with OID {database}"),
    };
    let query = format!("SELECT pg_filenode_relation({tablespace}, {relation})");
    format!(" \"{query}\" in {place} tells which relation it is.")
}

/// The report of a fault.
pub(crate) fn report(fault: PageFault, block: u32) -> Report {
    let file = fault.file.file;
    let Subject { what, place, search } = Subject::of(file);
    let error = match fault.cause {
        Cause::Key(error) => error,
        Cause::Plaintext | Cause::Former => {
            let (refused, detail) = match fault.cause {
                Cause::Plaintext => (
                    "is in plaintext, which is not accepted there",
                    "The file contains encrypted pages only. This server did not write the page, or did so without pagevault.",
                ),
                _ => (
                    "is under a former key, which is not accepted there",
                    "All pages of the file were rewritten under a later key. This one is older: it was put back, or the data directory is older than its keystore.",
                ),
            };
            return Report::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("block {block} of {what} {refused}"),
            )
            .detail(format!("{detail}{}", place + &search))
            .hint(match is_startup_process() {
                false => "Find out who can write to the data directory. Restore the relation from a backup, or fail over to a standby. If data directory and keystore are from different backups, restore both from one. To accept such pages as they are, decrypt the relation with pagevault.decrypt(). Neither ignore_checksum_failure nor zero_damaged_pages helps.",
                true => "Find out who can write to the data directory. Fail over to a standby; or put the right file back, or the keystore that belongs to the data directory, and start the server again: nothing is lost. To accept such pages as they are, start it with ignore_invalid_pages = on.",
            });
        }
        Cause::NotAuthentic => {
            return Report::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("block {block} of {what} is not as it was encrypted"),
            )
            .detail(format!(
                "It was changed on disk, or stands in the place of another page.{}",
                place + &search
            ))
            .hint("Restore the relation from a backup, or fail over to a standby. The key is right; neither ignore_checksum_failure nor zero_damaged_pages helps.");
        }
    };
    match error {
        KeyError::Locked { scope } => {
            let whose = key_groups::describe(scope);
            withheld::note();
            Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("{what} is locked"),
            )
            .detail(format!("The key of {whose} has not been unwrapped: its key provider did not answer or refused.{}{place}", match scope.key_group() {
                Some(_) if is_startup_process() => " Recovery would go on, but WAL has no image of this page, without data checksums, wal_log_hints or full_page_writes.",
                _ => "",
            }))
            .hint(match file.database {
                _ if is_startup_process() => {
                    format!("Make the key provider reachable and start the server again: replay goes on from here, and nothing is lost.{}", scope.key_group().map_or("", |_| key_groups::LAST_RESORT))
                }
                SHARED_CATALOGS => "Nobody can log in until then; the server keeps trying. Its log tells the cause.".to_owned(),
                _ => format!("See pagevault.status for the cause. The server keeps trying; pagevault.unlock() tries again now.{search}"),
            })
        }
        KeyError::Refused { scope } => refused::refuses(&what, &(place + &search), scope),
        KeyError::NoKey { version } => no_key(version, block, &what)
            .detail(format!("The page is encrypted, but the keystore under pagevault/ in the data directory does not hold its key.{place}"))
            .hint(format!("First make sure that the keystore is the one that belongs to this data directory; if not, restore that: then the page is intact, so do not zero it before.{search}{} If it is the right one, the page is damaged: {}", unsettled::hint().unwrap_or_default(), match in_recovery() {
                true => WITHOUT_THE_PAGE.to_owned(),
                false => without_relation(file),
            })),
        KeyError::Destroyed => match directory::is_destroyed(file) {
            false => lost(block, &what, &(place + &search)),
            true => destroyed(&what, &(place + &search)),
        },
        KeyError::NotMarked => Report::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not write block {block} of {what}: the folder pagevault/interim cannot be written"),
        )
        .detail(format!("Its key group is locked, and the block is written under an interim key. The file must be marked before.{place}"))
        .hint("Give the server room and permissions in its data directory. Nothing is lost."),
        KeyError::Unapproved { cipher } => fips::refused(&what, &(place + &search), cipher),
        KeyError::TooManyMissing => placeholders::too_many(&path(file)),
        KeyError::Damaged { version } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("data key version {version} of {what} cannot be unwrapped"),
        )
        .detail(format!("Its record in the keystore does not authenticate under the database key.{place}"))
        .hint(format!("Restore the keystore from a backup taken together with this data directory.{search}")),
    }
}

/// What to do in recovery about a page that is damaged, and looks encrypted. A sentence precedes.
pub(super) const WITHOUT_THE_PAGE: &str = "fail over to a standby, or make this one anew; or keep a copy of the file and start the server with ignore_invalid_pages = on, which writes over the page if WAL restores it, and otherwise leaves it as it is.";

/// What to do about a page that is lost. A sentence precedes. DROP, TRUNCATE and most queries read
/// the catalogs with values of tables, so these cannot be left as they are.
fn without_relation(file: RelFile) -> String {
    const RESTORE: &str = "restore the relation from a backup, or fail over to a standby.";
    let Some(catalog) = catalogs::with_values_by_first_file(file.relation) else {
        return RESTORE.to_owned();
    };
    let loss = match catalog {
        "pg_largeobject" => "All large objects of the database are lost then.",
        _ => "ANALYZE fills it again.",
    };
    format!(
        "{RESTORE} If the right keystore is lost for ever, make the catalog empty: SET pagevault.data_catalog_encryption = off; SET allow_system_table_mods = on; TRUNCATE pg_catalog.{catalog}. {loss}"
    )
}

fn no_key(version: DataKeyVersion, block: u32, what: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("no data key of version {version} for block {block} of {what}"),
    )
}

/// The warning about a page whose key is missing, with `ignore_invalid_pages`. `is_kept`: whether
/// it stays on disk.
pub(crate) fn ignored(fault: PageFault, block: u32, is_kept: bool) -> Report {
    let Cause::Key(KeyError::NoKey { version }) = fault.cause else { return report(fault, block) };
    let Subject { what, place, .. } = Subject::of(fault.file.file);
    no_key(version, block, &what).detail(match is_kept {
        true => format!("It stays as it is, and its changes in WAL are lost: the file is not encrypted as far as the keystore knows, and plaintext must not take the place of an encrypted page.{place}"),
        false => format!("It is written over, because ignore_invalid_pages is on.{place}"),
    })
}

/// The report for a page that was still under the key of a key group when that was given up.
fn lost(block: u32, what: &str, place: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("block {block} of {what} is lost"),
    )
    .detail(format!("Its relation has left a key group that was given up on this server, or on its primary. The page was still under the key of the group, which was destroyed.{place}"))
    .hint("Restore the relation from another server or from a dump; or DROP or TRUNCATE it. Neither ignore_checksum_failure nor zero_damaged_pages helps.")
}

/// The report for a relation or file whose keys were destroyed. `place` is a further sentence of
/// DETAIL, after a space, or empty.
pub(crate) fn destroyed(what: &str, place: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the data keys of {what} were destroyed"),
    )
    .detail(format!("It was shredded: what it held can never be read again.{place}"))
    .hint("DROP it; or TRUNCATE it, to use it again.")
}

/// The report if the storage manager freed its object of a file while the encryption of the file
/// was being decided.
pub(crate) fn invalidated() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
        "relation cache was reset while new storage was being created",
    )
    .hint("Try the command again.")
}
