//! Encrypting relations, and looking at what is on disk.

use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;

use super::{audited, audited_on};
use crate::keys::store::directory;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{OrRaise, Result};
use crate::pg::text::ServerText;
use crate::policy::{self, labels};
use crate::rekey::requests;
use crate::verify::{self, PageCount, PageState};
use crate::{preload, roles};

/// The security label as a function: `SECURITY LABEL FOR pagevault ON ... IS 'encrypted'`.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt(rel regclass, cipher text DEFAULT NULL) RETURNS void
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt(rel: Option<Oid>, cipher: Option<&[u8]>) {
    preload::require_active().or_raise();
    let Some(rel) = rel else { return };
    audited_on("encrypt", rel, || encrypt_relation(rel, cipher)).or_raise();
}

fn encrypt_relation(rel: Oid, cipher: Option<&[u8]>) -> Result<()> {
    let label = match cipher {
        None => "encrypted".to_owned(),
        Some(cipher) => format!("encrypted {}", ServerText::from_bytes(cipher)),
    };
    // Refused before the statement is built; the label provider checks again.
    policy::label::parse(&label)?;
    relation::require(rel)?;
    lock_as_label(rel);
    let facts = relation::require(rel)?;
    if !facts.user_made {
        let cipher = match policy::label::parse(&label)? {
            policy::label::Label::Encrypted(cipher) => cipher,
            policy::label::Label::Plain => None,
        };
        roles::require_admin("encrypt a system catalog")?;
        return policy::catalogs::encrypt(&facts, cipher);
    }
    labels::set(Object::relation(rel), &format!("'{label}'"))
}

/// As the statement will lock it, so that nobody gives its name to another until then. Who may not
/// label it does not keep others waiting: the statement refuses that.
fn lock_as_label(rel: Oid) {
    if relation::is_owned_by_caller(rel) {
        relation::lock(rel, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
    }
}

/// The label 'plain' as a function; of system catalogs, which have no label, where nothing wants
/// them encrypted.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.decrypt(rel regclass) RETURNS void
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn decrypt(rel: Oid) {
    let decrypt = || {
        preload::require_active()?;
        roles::require_admin("take encryption away")?;
        relation::require(rel)?;
        lock_as_label(rel);
        let facts = relation::require(rel)?;
        if facts.user_made {
            labels::set(Object::relation(rel), "'plain'")
        } else {
            policy::catalogs::decrypt(&facts)
        }
    };
    audited_on("decrypt", rel, decrypt).or_raise();
}

/// Labels this database and has everything in it encrypted, by jobs where there is much. Returns
/// the number of relations that were not.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt_database() RETURNS bigint
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt_database() -> i64 {
    let encrypt = || {
        preload::require_active()?;
        roles::require_admin("encrypt a database")?;
        if !policy::labels::database_is_labelled_encrypted()? {
            labels::set(Object::my_database(), "'encrypted'")?;
        }
        requests::encrypt_all_wanted()
    };
    audited("encrypt_database", encrypt).or_raise()
}

/// This database and all that is in it, as far as it is labelled encrypted.
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

/// Takes away every label that wants encryption in this database, and the encryption, by jobs.
/// Returns their number.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.decrypt_database() RETURNS bigint
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn decrypt_database() -> i64 {
    let decrypt = || {
        preload::require_active()?;
        roles::require_admin("decrypt a database")?;
        for object in labelled_encrypted()? {
            labels::set(object, "NULL")?;
        }
        requests::decrypt_all()
    };
    audited("decrypt_database", decrypt).or_raise()
}

/// Encrypts every catalog of which a label or setting wants it. Returns their number.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt_catalogs() RETURNS bigint
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt_catalogs() -> i64 {
    audited("encrypt_catalogs", || {
        preload::require_active()?;
        roles::require_admin("encrypt system catalogs")?;
        policy::catalogs::encrypt_wanted()
    })
    .or_raise()
}

/// True only if every page of the relation, its indexes, TOAST table and owned sequences that is
/// not empty is sealed on disk, and new pages will be.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.is_encrypted(rel regclass) RETURNS boolean
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn is_encrypted(rel: Oid) -> bool {
    let facts = preload::require_active().and_then(|()| relation::require(rel)).or_raise();
    roles::require_select(rel, &relation::quoted_name(&facts)).or_raise();
    let pages = verify::pages_of(rel).or_raise();
    let is_sealed = |(member, counts): &(Facts, Vec<PageCount>)| {
        directory::is_sealed(member.file) && counts.iter().all(|c| c.state != PageState::Plaintext)
    };
    !pages.is_empty() && pages.iter().all(is_sealed)
}

/// What is really on disk: pages by relation, fork and epoch. Reads the files from end to end.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.verify(rel regclass)
    RETURNS TABLE (relation regclass, fork text, state text, epoch integer, pages bigint)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn verify(
    rel: Oid,
) -> TableIterator<
    'static,
    (
        name!(relation, Oid),
        name!(fork, &'static str),
        name!(state, &'static str),
        name!(epoch, Option<i32>),
        name!(pages, i64),
    ),
> {
    preload::require_active().and_then(|()| relation::require(rel)).or_raise();
    let mut rows = Vec::new();
    for (member, counts) in verify::pages_of(rel).or_raise() {
        for count in counts {
            let (state, epoch) = match count.state {
                PageState::Empty => ("empty", None),
                PageState::Plaintext => ("plaintext", None),
                PageState::Sealed(epoch) => {
                    let destroyed = directory::destroyed_at(member.file, epoch.get()).is_some();
                    let state = if destroyed { "destroyed" } else { "sealed" };
                    (state, Some(i32::from(epoch.get())))
                }
            };
            rows.push((member.oid, count.fork, state, epoch, count.pages));
        }
    }
    TableIterator::new(rows)
}
