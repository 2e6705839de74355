//! Giving up key groups in recovery, because their keys are away for good.
//!
//! Redo needs the key of a group whose relations were changed, and so does the checkpoint that ends
//! recovery. If the owner of the key has destroyed it, no server would start again, and no standby
//! could be promoted. An administrator can name such groups in `pagevault.give_up_key_groups`.
//!
//! What redo cannot change is lost. So a group that is given up ends, as if it had been shredded:
//! tombstones take the place of its data keys, in the key files of this server at once, before any
//! page is skipped or written under a key that is not kept ([`super::destruction`]). When the
//! server can write WAL, it logs them, so that standbys follow ([`announce`]).

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion};
use pagevault_keystore::directory::FileInfo;
use pagevault_keystore::wrappings::AFTER_ALL_WAL;
use pagevault_keystore::{KeyGroup, Record, RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use crate::audit::{self, Operation};
use crate::keys::store::{compact, key_groups, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{Report, Result};
use crate::pg::{buffers, guc, process, wal};
use crate::shmem;

/// Files of which pages may be in shared buffers.
static FILES: ProcessLocal<Vec<RelFile>> = ProcessLocal::new(Vec::new());

/// Before or in recovery: gives up those groups of these locked keys that the setting names.
pub(crate) fn give_up(by: &'static str, locked: &[(Scope, KeyVersion)]) -> Result<()> {
    let named = guc::give_up_key_groups();
    let groups: BTreeSet<_> = locked.iter().filter_map(|(scope, _)| scope.key_group()).collect();
    for group in groups {
        if let Some(name) = key_groups::name_of(group).filter(|name| named.contains(name)) {
            let files = end(group)?;
            let operation = Operation { action: "give_up_key_group", by, ..Operation::default() };
            audit::log_operation(&operation.on(&name), "ok");
            given_up(&name, files.len()).send(PgLogLevel::WARNING);
            FILES.with(|all| all.extend(files));
        }
    }
    Ok(())
}

/// Whether any of these keys is of a group that the setting names.
pub(crate) fn is_any_named(locked: &[(Scope, KeyVersion)]) -> bool {
    let named = guc::give_up_key_groups();
    let names = locked.iter().filter_map(|(scope, _)| key_groups::name_of(scope.key_group()?));
    !named.is_empty() && names.into_iter().any(|name| named.contains(&name))
}

/// Drops pages of files of groups that were given up. Between two records, when redo uses none.
pub(crate) fn drop_pages() {
    let files = FILES.replace(Vec::new());
    buffers::drop_files(&files);
}

/// Warns of groups that the setting names and that exist.
pub(crate) fn warn_of_named() {
    for name in guc::give_up_key_groups() {
        if matches!(key_groups::named(&name), Ok(Some(_))) {
            still_named(&name).send(PgLogLevel::WARNING);
        }
    }
}

/// Ends a group on this server, the group itself last. Returns its files.
fn end(group: KeyGroup) -> Result<Vec<RelFile>> {
    let lock = KeystoreLock::acquire();
    let mut files = Vec::new();
    for (database, tombstones) in tombstones_of(group)? {
        persist::append_unlogged(&lock, Scope::database(database), &tombstones)?;
        files.extend(tombstones.iter().filter_map(|record| match record {
            Record::Destroyed { file, .. } => Some(*file),
            _ => None,
        }));
    }
    let ended = Record::EndedKeyGroup { group, at: process::now() };
    persist::append_unlogged(&lock, Scope::CLUSTER, &[ended])?;
    Ok(files)
}

/// The tombstones of the files that have keys under that of a group. A file that has left the group
/// keeps its later keys.
fn tombstones_of(group: KeyGroup) -> Result<Tombstones> {
    let directory = &shmem::required()?.directory;
    tombstones(|info| {
        let mut last = None;
        for key in directory.keys(info.slot)? {
            let key = key?;
            if key.scope == group.scope() {
                last = last.max(Some((key.version, key.cipher)));
            }
        }
        Ok(last)
    })
}

/// Those that only this server may have.
fn unlogged() -> Result<Tombstones> {
    let directory = &shmem::required()?.directory;
    tombstones(|info| {
        let cipher = info.current.map_or(0, |(_, cipher)| cipher);
        Ok(match directory.destroyed(info.slot)? {
            (Some(through), AFTER_ALL_WAL) => Some((through, cipher)),
            _ => None,
        })
    })
}

/// Tombstones by database.
type Tombstones = BTreeMap<u32, Vec<Record>>;

/// Tombstones of the files of which `through` gives the last destroyed version and the cipher.
fn tombstones(
    through: impl Fn(&FileInfo) -> Result<Option<(DataKeyVersion, u8)>>,
) -> Result<Tombstones> {
    let at = process::now();
    let mut all = Tombstones::new();
    for info in shmem::required()?.directory.files()? {
        let info = info?;
        let Some((through, cipher)) = through(&info)? else { continue };
        let (file, lsn) = (info.file, AFTER_ALL_WAL);
        let record = Record::Destroyed { file, through, cipher, whole: false, lsn, at };
        all.entry(file.database).or_default().push(record);
    }
    Ok(all)
}

/// When the server can write WAL, after recovery: logs what [`give_up`] has recorded on this server
/// only. Standbys skip what they know, so all of it after every recovery.
pub(crate) fn announce() -> Result<()> {
    if !shmem::required()?.control.was_consistent() {
        return Ok(());
    }
    let lock = KeystoreLock::acquire();
    let unlogged = unlogged()?;
    if unlogged.is_empty() && guc::give_up_key_groups().is_empty() {
        return Ok(());
    }
    for (database, tombstones) in unlogged {
        let scope = Scope::database(database);
        persist::append_durably(&lock, scope, &tombstones, None)?;
        compact::compact(&lock, scope)?;
    }
    let state = persist::cluster_state(&lock)?;
    let ended = state.ended_key_groups().filter_map(|(scope, at)| {
        scope.key_group().map(|group| Record::EndedKeyGroup { group, at })
    });
    let ended: Vec<_> = ended.collect();
    if !ended.is_empty() {
        wal::flush(persist::append_durably(&lock, Scope::CLUSTER, &ended, None)?);
    }
    Ok(())
}

fn given_up(name: &str, files: usize) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("key group \"{name}\" is given up: {files} relation files are destroyed"),
    )
    .detail("No provider unwraps its key, and pagevault.give_up_key_groups names it. Changes of its relations that are in WAL cannot be repeated.")
    .hint("Remove it from the setting, here and on standbys that have given it up. DROP its relations; or TRUNCATE them, to use them again.")
}

fn still_named(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("pagevault.give_up_key_groups names key group \"{name}\""),
    )
    .detail("It is destroyed in the next recovery that begins while its provider does not answer.")
    .hint("Remove it from the setting.")
}

/// The report if a group is to be made that would be destroyed in recovery.
pub(super) fn named_already(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("key group \"{name}\" is to be given up"),
    )
    .detail("pagevault.give_up_key_groups names it: recovery would destroy what is in it.")
    .hint("Remove it from the setting.")
}
