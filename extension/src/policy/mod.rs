//! Which relations are encrypted: labels, what follows what, and the default.
//!
//! What is wanted is found in [`decision`]. It takes effect where storage is made, at two moments:
//!
//! 1. `mdcreate` ([`storage_created`]): a file appears. For TRUNCATE, REINDEX, SET TABLESPACE and
//!    other replacements of an existing relation's storage nothing else will be heard of it, so the
//!    answer is looked for among the relations this backend has locked for rewriting. Undecided
//!    means encrypted.
//! 2. `object_access_hook` ([`relation_created`]): a new relation exists and its file is still
//!    empty. Its kind, name and table are known, and the first answer is put right if need be. Of a
//!    partition the partitioned table is known a moment later ([`altered`]).

pub(crate) mod altered;
pub(crate) mod catalogs;
pub(crate) mod databases;
pub(crate) mod decision;
pub(crate) mod drift;
pub(crate) mod enforce;
pub(crate) mod label;
pub(crate) mod labels;
mod memo;
pub(crate) mod removal;
pub(crate) mod repack;
mod shared_labels;

use pagevault_cipher::CipherId;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use crate::keys::store::directory;
use crate::keys::usage::data_keys::{self, Pages};
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::{Report, Result};
use crate::pg::{guc, locks, process};
use crate::shmem;
use decision::Decision;
use memo::Content;

/// True where there is nothing to decide: without a master key nothing is encrypted and no label
/// says that it should be ([`labels`] refuses them), and the setting asks for nothing.
pub(crate) fn is_idle() -> bool {
    !shmem::any_database_key() && !guc::default_encryption()
}

/// A file for a permanent relation is about to be created.
pub(crate) fn storage_created(file: RelFile) -> Result<()> {
    // Also where the file is known: a number that was used before must not inherit the old file's
    // key.
    begin(file, cipher_for_new_storage(file)?)
}

/// From now on, and with a key of its own, a file is written with this cipher, or in plaintext.
fn begin(file: RelFile, cipher: Option<CipherId>) -> Result<()> {
    match cipher {
        Some(cipher) => {
            memo::forget_content();
            if file.database == process::my_database() {
                catalogs::note_encryption();
            }
            data_keys::new_epoch(file, cipher).map(|_| ())
        }
        None => data_keys::write_plaintext(file, Pages::None),
    }
}

fn cipher_for_new_storage(file: RelFile) -> Result<Option<CipherId>> {
    if file.database != process::my_database() && file.database != catalogs::SHARED {
        return Ok(match databases::original_of(file) {
            Some(original) => directory::current_cipher(original),
            None => directory::cipher_of_namesake(file),
        });
    }
    if process::creates_us() {
        return Ok(None); // `relation_created` decides: there may be no key yet, and no label either
    }
    let tablespace = file.tablespace.into();
    let mut undecided = true;
    for oid in locks::relations_locked_for_rewrite() {
        let content = match memo::content_of(oid, tablespace) {
            Some(content) => content,
            None => {
                let moment = memo::moment();
                let Some(locked) = relation::facts(oid) else { continue };
                if locked.file == file {
                    continue; // it is being made, and is decided when it is known what it is
                }
                let candidate = locked.is_stored() && locked.file.database == file.database;
                if candidate && let Some(cipher) = cipher_for_replacement(&locked, file)? {
                    return Ok(Some(cipher));
                }
                let content = if candidate { Content::Plain } else { Content::WithoutStorage };
                memo::set_content(moment, oid, tablespace, content);
                content
            }
        };
        undecided &= content == Content::WithoutStorage;
    }
    match undecided {
        false => Ok(None),
        true if file.database == catalogs::SHARED => Ok(cipher_of(catalogs::wanted_of_shared())),
        true => Ok(cipher_of(decision::wanted_of_place(tablespace)?)),
    }
}

/// What a relation is now it stays, unless more is wanted of it, or its own label wants it plain.
fn cipher_for_replacement(replaced: &Facts, file: RelFile) -> Result<Option<CipherId>> {
    // The table may be moving to the file's tablespace. An index follows its table, wherever it is.
    let wanted = match replaced.kind {
        Kind::Index => decision::wanted(replaced)?,
        _ => decision::wanted_in(replaced, file.tablespace.into())?,
    };
    let current = directory::current_cipher(replaced.file);
    match wanted {
        Some(decision) if decision.is_encrypted() => Ok(Some(decision.cipher(current))),
        Some(decision) if decision.is_plain_by_own_label() => Ok(None),
        _ => Ok(current),
    }
}

/// A relation was created by the current command and its file is still empty.
pub(crate) fn relation_created(oid: Oid) -> Result<()> {
    let Some(facts) = relation::facts(oid) else { return Ok(()) };
    refuse_in_our_schema(&facts)?;
    if !facts.is_stored() {
        return Ok(());
    }
    altered::note_created(&facts);
    let wanted = match cipher_of(decision::wanted(&facts)?) {
        // Made for a serial column, it is owned later than it is created; the table is locked, and
        // that has decided.
        None if facts.kind == Kind::Sequence => directory::current_cipher(facts.file),
        wanted => wanted,
    };
    seal_empty_file(facts.file, wanted)
}

/// A role called pagevault has this schema first in its search path, and means another one.
fn refuse_in_our_schema(facts: &Facts) -> Result<()> {
    let leads = matches!(
        facts.kind,
        Kind::Table | Kind::MaterializedView | Kind::Sequence | Kind::PartitionedTable
    );
    let is_new = leads && facts.rewrites.is_none() && !facts.temporary;
    if !is_new || process::creates_us() || !relation::is_our_schema(facts.schema) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied to create {}", relation::quoted_name(facts)),
    )
    .detail("The schema pagevault is the extension's.")
    .hint(
        "Name another schema. Of a role called pagevault this one is the first in the search path.",
    ))
}

/// pg_upgrade has made a relation whose file it will bring, and after that perhaps statistics of
/// it.
pub(crate) fn relation_announced(oid: Oid) {
    if relation::facts(oid)
        .is_some_and(|facts| facts.is_stored() && directory::is_sealed(facts.file))
    {
        catalogs::note_encryption();
    }
}

/// Has a file that holds nothing yet written with this cipher, or in plaintext.
fn seal_empty_file(file: RelFile, wanted: Option<CipherId>) -> Result<()> {
    if wanted == directory::current_cipher(file) { Ok(()) } else { begin(file, wanted) }
}

/// The cipher for the file of a new relation.
fn cipher_of(wanted: Option<Decision>) -> Option<CipherId> {
    wanted.filter(Decision::is_encrypted).map(|decision| decision.cipher(None))
}

/// The cipher that a relation is to be sealed with where none is named: its label's, or the
/// default.
pub(crate) fn cipher_wanted_of(facts: &Facts) -> Result<CipherId> {
    Ok(cipher_of(decision::wanted(facts)?).unwrap_or_else(guc::cipher))
}
