//! Which relations are encrypted: labels, what follows what, and the default.
//!
//! The decision sits where storage is made. There are two moments:
//!
//! 1. `mdcreate` ([`storage_created`]): a file appears. For TRUNCATE, REINDEX, SET TABLESPACE and other
//!    replacements of an existing relation's storage nothing else will be heard of it, so the answer is
//!    looked for among the relations this backend has locked for rewriting. Undecided means encrypted.
//! 2. `object_access_hook` ([`relation_created`]): a new relation exists and its file is still
//!    empty. Its kind, name and table are known, and the first answer is put right if need be.

pub(crate) mod label;
pub(crate) mod labels;
pub(crate) mod owned_sequences;

use pagevault_cipher::CipherId;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use crate::keys::{data_keys, shared};
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::{Report, Result};
use crate::pg::{guc, locks, process};

/// True where there is nothing to decide: nothing is encrypted, and nothing is to be.
pub(crate) fn is_idle() -> bool {
    !shared::anything_sealed() && !guc::default_encryption()
}

/// A file for a permanent relation is about to be created.
pub(crate) fn storage_created(file: RelFile) -> Result<()> {
    match cipher_for_new_storage(file)? {
        Some(cipher) => data_keys::new_epoch(file, cipher).map(|_| ()),
        // A relfilenumber that was used before must not inherit the old file's key.
        None => data_keys::write_plaintext(file),
    }
}

fn cipher_for_new_storage(file: RelFile) -> Result<Option<CipherId>> {
    if file.database == 0 {
        return Ok(None); // shared catalogs, rewritten in place by VACUUM FULL
    }
    if file.database != process::my_database() {
        return Ok(shared::cipher_of_namesake(file));
    }
    let replaced: Vec<Facts> =
        locks::relations_locked_for_rewrite().into_iter().filter_map(relation::facts).collect();
    let encrypted = replaced.iter().filter(|r| r.is_stored());
    if let Some(cipher) = encrypted.filter_map(cipher_of_replaced).next() {
        return Ok(Some(cipher));
    }
    // What replaces the file of a plain relation stays plain; what is new, the hook will see.
    if guc::default_encryption() && replaced.is_empty() {
        return default_cipher().map(Some);
    }
    Ok(None)
}

/// The cipher of an existing relation whose storage may be about to be replaced.
fn cipher_of_replaced(relation: &Facts) -> Option<CipherId> {
    shared::current_cipher(relation.file).or_else(|| {
        // REINDEX (TABLESPACE) moves an index in the catalogs before it makes the new file: what they
        // say of its file is no longer true, what they say of its table is.
        let is_users_index = relation.user_made && relation.kind == Kind::Index;
        let table = is_users_index.then(|| relation::table_of_index(relation.oid)).flatten()?;
        shared::current_cipher(relation::facts(table)?.file)
    })
}

/// A relation was created by the current command and its file is still empty.
pub(crate) fn relation_created(oid: Oid) -> Result<()> {
    let Some(facts) = relation::facts(oid) else { return Ok(()) };
    if !facts.is_stored() {
        return Ok(());
    }
    let wanted = cipher_for_new_relation(&facts)?;
    if wanted == shared::current_cipher(facts.file) {
        return Ok(());
    }
    match wanted {
        Some(cipher) => data_keys::new_epoch(facts.file, cipher).map(|_| ()),
        None => data_keys::write_plaintext(facts.file),
    }
}

fn cipher_for_new_relation(facts: &Facts) -> Result<Option<CipherId>> {
    if let Some(leader) = leader_of(facts) {
        return Ok(match relation::facts(leader) {
            Some(leader) if leader.kind.has_storage() => shared::current_cipher(leader.file),
            _ => None,
        });
    }
    if facts.user_made && guc::default_encryption() {
        return default_cipher().map(Some);
    }
    if facts.kind == Kind::Sequence {
        // Made for a serial column, it is owned later than it is created; the table is locked, and
        // that has decided.
        return Ok(shared::current_cipher(facts.file));
    }
    Ok(None)
}

/// The relation whose choice a new relation follows.
fn leader_of(facts: &Facts) -> Option<Oid> {
    match facts.kind {
        Kind::Index => relation::table_of_index(facts.oid),
        Kind::Toast => oid_after(&facts.name, "pg_toast_"),
        // VACUUM FULL, CLUSTER, REFRESH and rewriting ALTER TABLE fill such a transient relation
        // while holding the original locked; anyone may use the name, so the lock is asked for.
        Kind::Table | Kind::MaterializedView => oid_after(&facts.name, "pg_temp_")
            .filter(|oid| locks::relations_locked_for_rewrite().contains(oid)),
        _ => None,
    }
}

fn oid_after(name: &str, prefix: &str) -> Option<Oid> {
    name.strip_prefix(prefix)?.parse::<u32>().ok().map(Oid::from)
}

/// The cipher of new data keys where none is named.
pub(crate) fn default_cipher() -> Result<CipherId> {
    guc::cipher().map_err(|name| {
        Report::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("pagevault.cipher is set to the unknown cipher \"{name}\""),
        )
        .hint(label::KNOWN_CIPHERS)
    })
}
