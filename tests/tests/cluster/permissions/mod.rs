//! Permissions: each operation needs the right role, in every context.
//!
//! [`table`] tries each function, view, label and setting as each role. [`users`] is about the
//! current user in functions and other contexts, [`names`] about misleading names, [`nested`] about
//! commands within commands, [`programs`] about programs that providers run, [`read_only`] about
//! read-only transactions, and [`installing`] about CREATE EXTENSION.

mod installing;
mod names;
mod nested;
mod programs;
mod read_only;
mod table;
mod users;

use anyhow::Result;
use pagevault_tests::{Cluster, KeyFile, Settings};

/// The roles that try the statements.
const WHO: [&str; 7] = ["owner", "member", "stranger", "keeper", "trustee", "watcher", "postgres"];

/// A cluster with these roles: the owner of the schema `app` and of all its objects, a member of
/// that role, a role without rights, a member of `pagevault_admin`, a member of both, and one of
/// `pg_monitor`. It has the tablespace `space`, and the database `theirs` of the owner.
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

/// The server's response to the statement: nothing, or an SQLSTATE.
fn response(client: &mut postgres::Client, statement: &str) -> Result<Option<String>> {
    match client.batch_execute(statement) {
        Ok(()) => Ok(None),
        Err(error) => match error.code() {
            Some(code) => Ok(Some(code.code().to_owned())),
            None => Err(error.into()),
        },
    }
}
