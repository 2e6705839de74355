//! pg_repack: the tables that it fills follow the table that it repacks.
//!
//! It fills `table_<oid>` in a schema of its own, and logs the changes of the original in
//! `log_<oid>`. In the end copy and original exchange their files without any command that hooks
//! could see. So the filled tables must have the state of the original from the start.
//! `pagevault_core::policy` decides which table follows which.

use super::server::{described, policy};
use crate::pg::catalog;
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::text::ServerText;

/// Tables of pg_repack that are copies of this table or logs of its changes, including those left
/// by an interrupted run.
pub(crate) fn copies_of(original: &Facts) -> Result<Vec<Facts>> {
    let mut copies = Vec::new();
    for prefix in ["log_", "table_"] {
        let name = format!("{prefix}{}", original.oid.to_u32());
        let name = ServerText::from_bytes(name.as_bytes());
        for schema in catalog::schemas() {
            let found = catalog::relation_in_schema(schema, name.as_c_str());
            let Some(copy) = found.and_then(relation::facts) else { continue };
            if policy().repacked_by(&described(&copy))? == Some(original.oid.to_u32()) {
                copies.push(copy);
            }
        }
    }
    Ok(copies)
}
