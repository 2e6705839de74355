//! Records that a start has cut off a log. They are kept beside the log until recovery has ended,
//! in `<database oid>.keys.unsettled`.
//!
//! Records that are cut off are in WAL, or their change has never happened. But the start may fail,
//! and WAL may then be lost for good (`pg_resetwal`), while pages on disk are encrypted under these
//! keys. So the records are first written to this file. It is a log of the same format that
//! contains only these batches, each with its WAL address. Several failed starts add to the same
//! file. The server does not read keys from it. It is removed when recovery has ended; if WAL is
//! lost, an administrator can restore the records ([`missing`]).

use std::collections::HashSet;

use pagevault_cipher::Lsn;

use super::replay::{self, Frame, parse_header};
use super::{LogError, MAX_LOG, file_name};
use crate::batch;
use crate::error::FormatError;
use crate::record::Record;
use crate::scope::Scope;
use crate::state::{File, State};
use crate::storage::Storage;

/// Suffix to the name of the log.
const SUFFIX: &str = ".unsettled";

/// Name of the file beside the log of a scope.
pub fn name(scope: Scope) -> String {
    format!("{}{SUFFIX}", file_name(scope))
}

/// The scope of the log beside which a file of this name is.
pub fn scope_of(name: &str) -> Option<Scope> {
    super::scope_of(name.strip_suffix(SUFFIX)?)
}

/// Scopes with such a file, ascending.
pub fn scopes(storage: &impl Storage) -> Result<Vec<Scope>, LogError> {
    let list = |source| LogError::Io { name: ".".to_owned(), action: "list", source };
    let names = storage.names().map_err(list)?;
    let mut scopes: Vec<Scope> = names.iter().filter_map(|name| scope_of(name)).collect();
    scopes.sort_unstable();
    Ok(scopes)
}

/// The records in the file beside the log of a scope. None if there is no such file, or if it
/// belongs to another keystore.
pub fn read(
    storage: &impl Storage,
    scope: Scope,
    keystore_id: &[u8; 16],
) -> Result<Vec<Record>, LogError> {
    let name = name(scope);
    let bytes = storage.read(&name, 0, MAX_LOG).map_err(|source| LogError::Io {
        name: name.clone(),
        action: "read",
        source,
    })?;
    let Some(bytes) = bytes else { return Ok(Vec::new()) };
    decode(&bytes, scope, keystore_id).map_err(|error| LogError::Format { name, error })
}

/// Like [`read`], from the bytes of the file.
pub fn decode(
    bytes: &[u8],
    scope: Scope,
    keystore_id: &[u8; 16],
) -> Result<Vec<Record>, FormatError> {
    let contents = replay::replay(bytes, scope)?;
    let is_ours = contents.position.keystore_id == *keystore_id;
    Ok(if is_ours { contents.records } else { Vec::new() })
}

/// Removes the file beside the log of a scope.
pub fn forget(storage: &impl Storage, scope: Scope) -> Result<(), LogError> {
    let name = name(scope);
    storage.remove(&name).map_err(|source| LogError::Io { name, action: "remove", source })
}

/// The records of such a file that the keystore lacks. `state` is the state of the log together
/// with the cluster's log. Left out are keys of versions that have one, whichever it is, and
/// records that concern only the lost WAL: switches of its keys, and rekey jobs, which may not have
/// been committed.
pub fn missing(state: &State, beside: Vec<Record>) -> Vec<Record> {
    let mut known = state.clone();
    let mut missing = Vec::new();
    for record in beside {
        let of = match &record {
            Record::DataKey { file, version, .. } => {
                let is_there = |known: &File| known.keys.contains_key(version);
                (!known.file(*file).is_some_and(is_there)).then_some(*file)
            }
            Record::Current { file, .. }
            | Record::Plaintext { file, .. }
            | Record::Rewriting { file, .. }
            | Record::Switched { file, .. }
            | Record::SealedOnly { file, .. }
            | Record::Destroyed { file, .. } => Some(*file),
            Record::KeyGroup { group, .. } | Record::EndedKeyGroup { group, .. } => {
                let before = (known.key_group(*group).cloned(), known.has_ended(group.scope()));
                let group = *group;
                if known.apply(record.clone()).is_ok()
                    && (known.key_group(group).cloned(), known.has_ended(group.scope())) != before
                {
                    missing.push(record);
                }
                continue;
            }
            Record::DatabaseKey { scope, version, .. } => {
                if known.database_key(*scope, *version).is_none() && !known.has_ended(*scope) {
                    missing.push(record);
                }
                continue;
            }
            Record::Provider { name, .. } => {
                if known.provider(name).is_none() {
                    missing.push(record);
                }
                continue;
            }
            Record::DropProvider { .. }
            | Record::WalSwitch(_)
            | Record::Job { .. }
            | Record::JobStep { .. }
            | Record::JobBegun { .. }
            | Record::JobsForgotten { .. }
            | Record::FormerFiles(_)
            | Record::KeysForgotten { .. } => None,
        };
        let Some(file) = of else { continue };
        let before = known.file(file).cloned();
        // Records about keys that are in neither place are left out.
        if known.apply(record.clone()).is_ok() && known.file(file) != before.as_ref() {
            missing.push(record);
        }
    }
    missing
}

/// Adds batches that are about to be cut off to the file beside the log. On return they are durable
/// there.
pub(super) fn keep(
    storage: &impl Storage,
    keystore_id: &[u8; 16],
    scope: Scope,
    cut: Vec<Frame>,
) -> Result<(), LogError> {
    let name = name(scope);
    let failed = |action| {
        let name = name.clone();
        move |source| LogError::Io { name, action, source }
    };
    let before = storage.read(&name, 0, MAX_LOG).map_err(failed("read"))?;
    // A file of another keystore, or a damaged one, is of no use.
    let before = before.and_then(|bytes| {
        let (id, _) = parse_header(&bytes, scope).ok()?;
        let frames = replay::frames(&bytes, scope).ok()?;
        (id == *keystore_id).then_some(frames)
    });
    let mut seen = HashSet::new();
    let mut bytes = replay::header(keystore_id, scope, 0);
    for frame in before.into_iter().flatten().chain(cut) {
        if frame.records.is_empty() {
            continue;
        }
        let batch = batch::encode(&frame.records).map_err(LogError::Record)?;
        // Redo of a failed start has staged the same batch again.
        if seen.insert(batch.clone()) {
            bytes.extend(batch::stamp(&batch, bytes.len() as u64, frame.logged));
        }
    }
    let settled = bytes.len() as u64;
    bytes.extend(batch::mark(settled, Lsn::INVALID));
    let new = format!("{name}.new");
    storage.create(&new, &bytes).map_err(failed("write"))?;
    storage.rename(&new, &name).map_err(|error| failed("replace")(error.into()))
}
