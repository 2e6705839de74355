//! DROP EXTENSION, also by CASCADE, DROP SCHEMA and DROP OWNED, is refused while anything in the
//! database is encrypted: after removing the library, too, nothing could read these relations, and
//! there would be no function to decrypt them.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use crate::audit::{Operation, statements};
use crate::pg::catalog;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::verify;

/// Number of relations named in the message.
const NAMED: usize = 5;

/// Called before an extension is dropped.
pub(crate) fn dropping(extension: Oid) -> Result<()> {
    if extension != catalog::our_extension() {
        return Ok(());
    }
    let operation =
        Operation { action: "drop_extension", by: "DROP EXTENSION", ..Operation::default() };
    let number = statements::begin(operation.on("pagevault"));
    let refused = refuse_if_anything_is_sealed();
    match &refused {
        Ok(()) => statements::done(number),
        Err(report) => statements::refuse(report.code()),
    }
    refused
}

fn refuse_if_anything_is_sealed() -> Result<()> {
    let sealed = sealed_relations()?;
    if sealed.is_empty() {
        return Ok(());
    }
    let mut names: Vec<_> =
        sealed.iter().take(NAMED).map(|facts| relation::qualified_name(facts.oid)).collect();
    if sealed.len() > NAMED {
        names.push(format!("and {} more", sealed.len() - NAMED));
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
        "cannot drop extension pagevault: this database has encrypted relations",
    )
    .detail(format!("Encrypted, or not wholly decrypted: {}.", names.join(", ")))
    .hint("Turn off pagevault.data_catalog_encryption, run pagevault.decrypt_database() and wait for its jobs, then pagevault.decrypt() of what pagevault.relations still shows as encrypted."))
}

/// Relations of this database that have encrypted pages on disk or will have. Relations that follow
/// others are left out, unless all of them do.
fn sealed_relations() -> Result<Vec<Facts>> {
    let mut found: Vec<Facts> = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if facts.is_stored() && !facts.is_shared() && verify::may_be_sealed(facts.file)? {
            found.push(facts);
        }
    }
    let leading = |facts: &Facts| relation::is_independent(facts);
    if found.iter().any(leading) {
        found.retain(leading);
    }
    Ok(found)
}
