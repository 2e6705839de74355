//! pg_repack: the tables that it fills follow the table that it repacks.
//!
//! It fills `table_<oid>` anew in a schema of its own, and logs the changes of the original in
//! `log_<oid>`. In the end copy and original exchange their files, and no command tells that to
//! anyone; so what is filled must be as the original from the start.
//!
//! Names can be given by anyone. What counts is that the schema is a member of the extension
//! (CREATE SCHEMA in its script; only superusers install it), whatever it is called. And who may
//! run pg_repack without being superuser has CREATE on that schema: what they make there is in
//! plaintext like the original only if they own that as well, and so could write into it.

use pgrx::pg_sys::Oid;

use crate::pg::catalog;
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::text::ServerText;

/// The table that pg_repack copies to this one, or logs the changes of in it.
pub(super) fn original_of(facts: &Facts) -> Option<Oid> {
    let oid = oid_after(&facts.name, "table_").or_else(|| oid_after(&facts.name, "log_"))?;
    if !catalog::is_schema_of_extension(facts.schema, c"pg_repack") {
        return None;
    }
    let original = relation::facts(oid)?;
    let is_table = matches!(original.kind, Kind::Table | Kind::MaterializedView);
    (is_table && original.user_made).then_some(oid)
}

/// The tables that pg_repack copies this one to, or logs the changes of in, or that it has left.
pub(crate) fn copies_of(original: &Facts) -> Vec<Facts> {
    let mut copies = Vec::new();
    for prefix in ["log_", "table_"] {
        let name = format!("{prefix}{}", original.oid.to_u32());
        let name = ServerText::from_bytes(name.as_bytes());
        for schema in catalog::schemas() {
            let found = catalog::relation_in_schema(schema, name.as_c_str());
            let found = found.and_then(relation::facts);
            copies.extend(found.filter(|copy| original_of(copy) == Some(original.oid)));
        }
    }
    copies
}

/// True if a table may be in plaintext because the one that it follows is to be.
pub(super) fn may_be_plain_like(original: &Facts, facts: &Facts) -> bool {
    original.owner == facts.owner || catalog::is_superuser(facts.owner)
}

/// The OID at the end of a name that begins so.
pub(super) fn oid_after(name: &ServerText, prefix: &str) -> Option<Oid> {
    let digits = name.bytes().strip_prefix(prefix.as_bytes())?;
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse::<u32>().ok().map(Oid::from)
}
