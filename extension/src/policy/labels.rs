//! The security label provider: `SECURITY LABEL FOR pagevault ON TABLE x IS 'encrypted'`.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use super::label::{self, Label};
use crate::hooks::utility;
use crate::keys::shared;
use crate::pg::relation::{self, Kind};
use crate::pg::report::{Report, Result};
use crate::{rewrite, roles};

/// A label is about to be set (`Some`) or removed (`None`) on a relation. The server has checked
/// that the caller owns it.
pub(crate) fn relation_relabelled(oid: Oid, column: i32, label: Option<&str>) -> Result<()> {
    if column != 0 {
        return Err(unsupported("a column", "Label the table: pages hold all columns of a row."));
    }
    let Some(text) = label else { return Ok(()) };
    let label = label::parse(text)?;
    let Some(facts) = relation::facts(oid) else { return Ok(()) };
    let name = relation::qualified_name(oid);
    match facts.kind {
        Kind::Table | Kind::MaterializedView | Kind::Sequence => {}
        Kind::Index | Kind::Toast => {
            return Err(unsupported("an index or TOAST table", "Label its table; it follows."));
        }
        Kind::WithoutStorage => {
            return Err(unsupported(
                "a relation without storage",
                "Label the partitions, or set pagevault.default_encryption.",
            ));
        }
    }
    if !facts.user_made {
        return Err(unsupported("a system catalog", "Label user tables."));
    }
    if facts.temporary {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
            format!("\"{name}\" is a temporary relation"),
        )
        .detail("Temporary relations are sealed under a key of this server start as soon as anything in the cluster is encrypted."));
    }
    match label {
        Label::Encrypted(cipher) => rewrite::encrypt(oid, cipher),
        Label::Plain => {
            roles::require_admin(&format!("remove the encryption of {name}"))?;
            if shared::is_sealed(facts.file) && utility::in_transaction_block() {
                return Err(cannot_be_rolled_back(&name));
            }
            rewrite::decrypt(oid)
        }
    }
}

/// A label on something that is not a relation.
pub(crate) fn other_object_relabelled(class: Oid) -> Result<()> {
    let what = match class {
        pg_sys::NamespaceRelationId => "a schema",
        pg_sys::TableSpaceRelationId => "a tablespace",
        pg_sys::DatabaseRelationId => "a database",
        _ => "this kind of object",
    };
    Err(unsupported(what, "Label tables, or set pagevault.default_encryption."))
}

/// A rollback would bring back the label, not the sealed pages.
fn cannot_be_rolled_back(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
        format!(
            "the encryption of {name} cannot be removed inside a transaction block or function"
        ),
    )
    .detail("The pages are rewritten in place; a rollback would leave them in plaintext.")
    .hint("Run SECURITY LABEL as a statement of its own.")
}

fn unsupported(what: &str, hint: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("pagevault labels cannot be put on {what}"),
    )
    .hint(hint)
}
