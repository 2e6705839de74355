//! pg_repack: the tables that it fills follow the table that it repacks.
//!
//! It fills `table_<oid>` anew in a schema of its own, and logs the changes of the original in
//! `log_<oid>`. In the end copy and original exchange their files, and no command tells that to
//! anyone; so what is filled must be as the original from the start. Which table follows which is
//! decided in `pagevault_core::policy`.

use super::server::{described, policy};
use crate::pg::catalog;
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::text::ServerText;

/// The tables that pg_repack copies this one to, or logs the changes of in, or that it has left.
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
