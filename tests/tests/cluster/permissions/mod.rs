//! Who may do what, as the right user, whatever stands in the way.
//!
//! [`table`] is the whole of it: each function, view, label and setting, and what becomes of it in
//! whose hands. [`users`] is about whose hands those are, [`names`] about names that are not what
//! they seem, [`nested`] about commands within commands, [`programs`] about programs that providers
//! come to, [`read_only`] about transactions that write nothing,
//! and [`installing`] about what CREATE EXTENSION finds and leaves.

mod installing;
mod names;
mod nested;
mod programs;
mod read_only;
mod table;
mod users;

use anyhow::Result;
use pagevault_tests::{Cluster, KeyFile, Settings};

/// Whoever the statements are tried as.
const WHO: [&str; 7] = ["owner", "member", "stranger", "keeper", "trustee", "watcher", "postgres"];

/// A cluster with these roles: the owner of the schema `app` and of all in it, a member of that
/// role, a stranger, a member of `pagevault_admin`, one of both, one who monitors; and with the
/// tablespace `space` and the database `theirs` of the owner.
fn cluster() -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let space = cluster.directory().join("space");
    std::fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql(
        "CREATE ROLE owner; CREATE ROLE member; CREATE ROLE stranger; CREATE ROLE keeper;
         CREATE ROLE trustee; CREATE ROLE watcher;
         GRANT owner TO member, trustee; GRANT pagevault_admin TO keeper, trustee;
         GRANT pg_monitor TO watcher;
         CREATE SCHEMA app AUTHORIZATION owner; GRANT USAGE ON SCHEMA app TO PUBLIC",
    )?;
    cluster.sql(&format!("CREATE TABLESPACE space OWNER owner LOCATION '{}'", space.display()))?;
    cluster.sql("CREATE DATABASE theirs OWNER owner")?;
    Ok((cluster, keys))
}

/// What the server says to the statement: nothing, or an SQLSTATE.
fn said(client: &mut postgres::Client, statement: &str) -> Result<Option<String>> {
    match client.batch_execute(statement) {
        Ok(()) => Ok(None),
        Err(error) => match error.code() {
            Some(code) => Ok(Some(code.code().to_owned())),
            None => Err(error.into()),
        },
    }
}
