//! What a running server tells about itself: read-only queries, run by PostgreSQL's own `psql`, so
//! that this program needs no client of its own, and connections are made as everywhere else.

mod conninfo;
mod psql;

use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value, json};

use crate::failure::Failure;
pub(crate) use psql::{Psql, Setting};

const SERVER: &str = include_str!("server.sql");
const DATABASES: &str = include_str!("databases.sql");
const ENCRYPTED: &str = include_str!("encrypted.sql");
const DATABASE: &str = include_str!("database.sql");
const INSTALLED: &str = include_str!("installed.sql");

/// Reads what a server tells of itself, of pagevault, and of each database that admits connections:
/// `server`, `cluster` (null if no database has a loaded extension), `databases`. A database that
/// refuses the connection has an `error`.
///
/// With `check_files`, the server reads all files of relations.
///
/// Without its library a server may be unable to read what is encrypted, statistics included, on
/// which most queries depend. Then whatever fails is an `error` of its database.
///
/// # Errors
/// If the server cannot be reached; if it has the library, and cannot tell its databases, or none
/// of them tells about pagevault and one refuses.
pub(crate) fn look(psql: &Psql, check_files: bool) -> Result<Value, Failure> {
    let mut server = psql.ask(None, SERVER, &[])?;
    let lacks_library = runs_without_library(&json!({"server": server}));
    match (psql.ask(None, DATABASES, &[]), &mut server) {
        (Ok(Value::Object(more)), Value::Object(server)) => server.extend(more),
        (Err(failure), Value::Object(server)) if lacks_library => {
            let here = json!({"name": server["database"], "error": why(&failure)});
            server.insert("databases".into(), json!([here]));
        }
        (told, _) => drop(told?),
    }
    let check_files = Setting("check_files", if check_files { "true" } else { "false" });
    let mut cluster = Value::Null;
    let (mut databases, mut first_refusal) = (Vec::new(), None);
    for database in list(&server["databases"]) {
        let name = text(&database["name"]);
        let mut entry = Map::new();
        entry.insert("name".into(), database["name"].clone());
        for known in ["bytes", "open", "error"] {
            entry.insert(known.into(), database[known].clone());
        }
        if database["open"] == json!(true) {
            match psql.ask(Some(name), DATABASE, &[&check_files]) {
                Ok(mut told) => {
                    let mut part =
                        |name: &str| told.get_mut(name).map(Value::take).unwrap_or_default();
                    let of_cluster = part("cluster");
                    if cluster.is_null() && !of_cluster.is_null() {
                        cluster = of_cluster;
                        // An older extension does not know.
                        cluster["encrypted_databases"] =
                            psql.ask(Some(name), ENCRYPTED, &[]).unwrap_or_default();
                    }
                    if let Value::Object(of_database) = part("database") {
                        entry.extend(of_database);
                    }
                }
                Err(failure) => {
                    entry.insert("error".into(), why(&failure).into());
                    entry.insert("refused".into(), is_refusal(&failure).into());
                    if is_refusal(&failure) {
                        first_refusal.get_or_insert(failure);
                    }
                }
            }
        }
        databases.push(Value::Object(entry));
    }
    // Nobody has told about the cluster; that one might have, asked by another role.
    if let (Value::Null, Some(failure), false) = (&cluster, first_refusal, lacks_library) {
        return Err(failure);
    }
    if let Value::Object(server) = &mut server {
        server.remove("databases");
    }
    Ok(json!({"server": server, "cluster": cluster, "databases": databases}))
}

fn why(failure: &Failure) -> &str {
    failure.detail.as_ref().unwrap_or(&failure.message)
}

/// Whether another role might get an answer.
fn is_refusal(failure: &Failure) -> bool {
    matches!(failure.class, ErrorClass::Denied | ErrorClass::Unreachable)
}

/// SHA-256 of the installed `library` and `helper`, if the server may read them.
pub(crate) fn checksums(psql: &Psql) -> Value {
    psql.ask(None, INSTALLED, &[]).unwrap_or_default()
}

/// PostgreSQL's library names in a list, which may be quoted.
pub(crate) fn libraries(setting: &str) -> Vec<&str> {
    setting.split(',').map(|name| name.trim().trim_matches('"')).filter(|n| !n.is_empty()).collect()
}

/// Whether the server is known to run without pagevault.
pub(crate) fn runs_without_library(found: &Value) -> bool {
    let now = found["server"]["settings"]["shared_preload_libraries"].as_str();
    now.is_some_and(|now| !libraries(now).contains(&"pagevault"))
}

/// The text of a JSON string; empty for everything else.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The elements of a JSON array; none for everything else.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value without quotes; nothing for null.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
