//! Encrypting relations, and looking at what is on disk.

use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;

use crate::keys::shared;
use crate::pg::relation;
use crate::pg::report::OrRaise;
use crate::verify::{self, PageState};
use crate::{policy, preload, roles};

/// The security label as a function: `SECURITY LABEL FOR pagevault ON ... IS 'encrypted'`.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.encrypt(rel regclass, cipher text DEFAULT NULL) RETURNS void
    LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn encrypt(rel: Option<Oid>, cipher: Option<&str>) {
    preload::require_active().or_raise();
    let Some(rel) = rel else { return };
    let label = match cipher {
        None => "encrypted".to_owned(),
        Some(cipher) => format!("encrypted {cipher}"),
    };
    // Refused before the statement is built; the label provider checks again.
    policy::label::parse(&label).or_raise();
    let kind = relation::label_keyword(relation::require(rel).or_raise().kind);
    let name = relation::qualified_name(rel);
    let statement = format!("SECURITY LABEL FOR pagevault ON {kind} {name} IS '{label}'");
    if let Err(error) = Spi::run(&statement) {
        pgrx::error!("{error}");
    }
}

/// True only if every page of the relation, its indexes, TOAST table and owned sequences that is
/// not empty is sealed on disk, and new pages will be.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.is_encrypted(rel regclass) RETURNS boolean
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
fn is_encrypted(rel: Oid) -> bool {
    preload::require_active().and_then(|()| relation::require(rel)).or_raise();
    roles::require_select(rel, &relation::qualified_name(rel)).or_raise();
    let members = relation::family(rel, pg_sys::AccessShareLock as pg_sys::LOCKMODE);
    let stored = members.iter().filter(|m| m.is_stored());
    let mut any = false;
    for member in stored {
        any = true;
        let counts = verify::count_pages(member.file).or_raise();
        if !shared::is_sealed(member.file) || counts.iter().any(|c| c.state == PageState::Plaintext)
        {
            return false;
        }
    }
    any
}

/// What is really on disk: pages by relation, fork and epoch. Reads the files from end to end.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.verify(rel regclass)
    RETURNS TABLE (relation regclass, fork text, state text, epoch integer, pages bigint)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
    REVOKE ALL ON FUNCTION pagevault.verify(regclass) FROM PUBLIC;
    GRANT EXECUTE ON FUNCTION pagevault.verify(regclass) TO pagevault_admin, pg_monitor;
", requires = ["roles"])]
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
    for member in relation::family(rel, pg_sys::AccessShareLock as pg_sys::LOCKMODE) {
        if !member.is_stored() {
            continue;
        }
        for count in verify::count_pages(member.file).or_raise() {
            let (state, epoch) = match count.state {
                PageState::Empty => ("empty", None),
                PageState::Plaintext => ("plaintext", None),
                PageState::Sealed(epoch) => {
                    let destroyed = shared::destroyed_at(member.file, epoch.get()).is_some();
                    let state = if destroyed { "destroyed" } else { "sealed" };
                    (state, Some(i32::from(epoch.get())))
                }
            };
            rows.push((member.oid, count.fork, state, epoch, count.pages));
        }
    }
    TableIterator::new(rows)
}
