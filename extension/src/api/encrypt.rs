//! SQL functions that encrypt and decrypt relations, and that inspect what is on disk.

use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;

use super::{audited, audited_on, require_primary};
use crate::commands::catalogs::Keys;
use crate::commands::{catalogs, labels, requests};
use crate::keys::store::directory;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{OrRaise, Result};
use crate::pg::text::ServerText;
use crate::verify::{self, PageCount, PageState};
use crate::{policy, preload, roles};

/// Sets the security label: `SECURITY LABEL FOR pagevault ON ... IS 'encrypted'`. Returns the
/// number of the rekey job, or NULL if none is needed.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt(relation regclass, cipher text DEFAULT NULL) RETURNS bigint
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt(relation: Option<Oid>, cipher: Option<&[u8]>) -> Option<i64> {
    preload::require_active().or_raise();
    let oid = relation?;
    audited_on("encrypt", oid, || encrypt_relation(oid, cipher)).or_raise()
}

fn encrypt_relation(oid: Oid, cipher: Option<&[u8]>) -> Result<Option<i64>> {
    let label = match cipher {
        None => "encrypted".to_owned(),
        Some(cipher) => {
            policy::label::require_short("encrypted ".len() + cipher.len())?;
            format!("encrypted {}", ServerText::from_bytes(cipher))
        }
    };
    // Checked before the statement is built; the label provider checks again.
    policy::label::parse(&label)?;
    relation::require(oid)?;
    lock_as_label(oid);
    let facts = relation::require(oid)?;
    if !facts.user_made {
        let cipher = match policy::label::parse(&label)? {
            policy::label::Label::Encrypted(cipher) => cipher,
            policy::label::Label::Plaintext => None,
        };
        roles::require_admin("encrypt a system catalog")?;
        require_primary("encrypt a system catalog")?;
        return catalogs::encrypt(&facts, cipher).map(|()| None);
    }
    labels::set(Object::relation(oid), &format!("'{label}'"))
}

/// Locks the relation as the statement will, so that its name cannot pass to another relation
/// before that. Callers that may not label it take no lock and block nobody; the statement refuses
/// them.
fn lock_as_label(oid: Oid) {
    if relation::is_owned_by_caller(oid) {
        relation::lock(oid, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
    }
}

/// Sets the label 'plaintext'. System catalogs have no label: they are decrypted unless the policy
/// requires encryption.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.decrypt(relation regclass) RETURNS bigint
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn decrypt(oid: Oid) -> Option<i64> {
    let decrypt = || {
        preload::require_active()?;
        roles::require_admin("take encryption away")?;
        require_primary("take encryption away")?;
        relation::require(oid)?;
        lock_as_label(oid);
        let facts = relation::require(oid)?;
        if facts.user_made {
            labels::set(Object::relation(oid), "'plaintext'")
        } else {
            catalogs::decrypt(&facts)
        }
    };
    audited_on("decrypt", oid, decrypt).or_raise()
}

/// Labels this database and encrypts everything in it; large relations by jobs.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt_database() RETURNS TABLE (relation regclass, job bigint)
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt_database() -> TableIterator<'static, (name!(relation, Oid), name!(job, Option<i64>))> {
    let encrypt = || {
        preload::require_active()?;
        roles::require_admin("encrypt a database")?;
        require_primary("encrypt a database")?;
        let keys = Keys::current();
        if !labels::database_is_labelled_encrypted()? {
            labels::set(Object::my_database(), "'encrypted'")?;
        }
        let mut changed = requests::encrypt_all_wanted()?;
        changed.extend(keys.changed().map(|catalog| (catalog, None)));
        Ok(changed)
    };
    TableIterator::new(audited("encrypt_database", encrypt).or_raise())
}

/// This database and the objects in it that are labelled encrypted.
fn labelled_encrypted() -> Result<Vec<Object>> {
    let mut found = crate::pg::labels::labelled();
    found.push(Object::my_database());
    let mut wanted = Vec::new();
    for object in found {
        let label = object.label().as_ref().map(policy::label::of_text).transpose()?;
        if matches!(label, Some(policy::label::Label::Encrypted(_))) {
            wanted.push(object);
        }
    }
    Ok(wanted)
}

/// Removes all labels that require encryption in this database, and decrypts by jobs.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.decrypt_database() RETURNS TABLE (relation regclass, job bigint)
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn decrypt_database() -> TableIterator<'static, (name!(relation, Oid), name!(job, i64))> {
    let decrypt = || {
        preload::require_active()?;
        roles::require_admin("decrypt a database")?;
        require_primary("decrypt a database")?;
        roles::require_database_owner()?;
        for object in labelled_encrypted()? {
            labels::set(object, "NULL")?;
        }
        requests::decrypt_all()
    };
    TableIterator::new(audited("decrypt_database", decrypt).or_raise())
}

/// Encrypts, at once, all catalogs for which a label or setting requires it. The result has a
/// column for jobs like that of `encrypt_database`; it is always NULL.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt_catalogs() RETURNS TABLE (relation regclass, job bigint)
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt_catalogs() -> TableIterator<'static, (name!(relation, Oid), name!(job, Option<i64>))> {
    let encrypt = || {
        preload::require_active()?;
        roles::require_admin("encrypt system catalogs")?;
        require_primary("encrypt system catalogs")?;
        let keys = Keys::current();
        catalogs::encrypt_wanted()?;
        Ok(keys.changed().map(|catalog| (catalog, None)).collect::<Vec<_>>())
    };
    TableIterator::new(audited("encrypt_catalogs", encrypt).or_raise())
}

/// True only if all pages on disk of the relation, its indexes, TOAST table and owned sequences are
/// encrypted or empty, and new pages will be encrypted.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.is_encrypted(relation regclass) RETURNS boolean
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn is_encrypted(oid: Oid) -> bool {
    let facts = preload::require_active().and_then(|()| relation::require(oid)).or_raise();
    roles::require_select(oid, &relation::quoted_name(&facts)).or_raise();
    if !facts.kind.has_storage() {
        return false;
    }
    let pages = verify::pages_of(oid).or_raise();
    let is_sealed = |(member, counts): &(Facts, Vec<PageCount>)| {
        directory::is_sealed(member.file) && counts.iter().all(|c| c.state != PageState::Plaintext)
    };
    !pages.is_empty() && pages.iter().all(is_sealed)
}

/// Counts the pages on disk by relation, fork and data key. Reads the files completely.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.verify(relation regclass)
    RETURNS TABLE (relation regclass, fork text, state text, data_key_version integer, pages bigint)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn verify(
    oid: Oid,
) -> TableIterator<
    'static,
    (
        name!(relation, Oid),
        name!(fork, &'static str),
        name!(state, &'static str),
        name!(data_key_version, Option<i32>),
        name!(pages, i64),
    ),
> {
    preload::require_active().and_then(|()| relation::require(oid)).or_raise();
    let mut rows = Vec::new();
    for (member, counts) in verify::pages_of(oid).or_raise() {
        for count in counts {
            let is_refused = count.is_refused;
            let (state, version) = match count.state {
                PageState::Empty => ("empty", None),
                PageState::Plaintext if is_refused => ("refused", None),
                PageState::Plaintext => ("plaintext", None),
                PageState::Sealed(version) => {
                    let destroyed = directory::destroyed_at(member.file, version).is_some();
                    let state = match destroyed {
                        true => "destroyed",
                        false if is_refused => "refused",
                        false => "encrypted",
                    };
                    (state, Some(i32::from(version.get())))
                }
            };
            rows.push((member.oid, count.fork, state, version, count.pages));
        }
    }
    TableIterator::new(rows)
}
