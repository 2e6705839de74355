//! The audit trail: one line of JSON in the server log for each operation on a provider, at level
//! LOG.
//!
//! ```text
//! pagevault audit: {"action":"rewrap","by":"rotate_cluster_master_key","role":"postgres",
//!   "database":"app","scope":"cluster","provider":"vault","master_key":"main",
//!   "master_key_version":3,"outcome":"ok","duration_ms":3.2}
//! ```
//!
//! (In the log it is one line.) `by` is the SQL function or the worker; `role` and `database` are
//! null if there is none. `scope` is `cluster` or `database` with its OID; null if the operation
//! concerns no database key. `outcome` is `ok` or the error class. Lines never contain key material
//! or provider options. A line with the action `shred` names the object; the line `destroy_keys`
//! contains the numbers of files and keys.

mod operation;
pub(crate) mod settings;
mod sink;
pub(crate) mod statements;
mod trail;

use pagevault_keystore::Scope;
use serde::Serialize;

pub(crate) use self::operation::{Operation, audited, log as log_operation};
pub(crate) use self::trail::{begin, repeat_early_lines};
use crate::pg::session::{self, Identity};

/// An operation on a provider, and its outcome.
#[derive(Default)]
pub(crate) struct Event<'a> {
    /// `wrap`, `unwrap`, ..., `add_provider`.
    pub(crate) action: &'a str,
    /// The SQL function or the worker.
    pub(crate) by: &'a str,
    /// Scope of the database key, if any.
    pub(crate) scope: Option<Scope>,
    pub(crate) provider: &'a str,
    pub(crate) master_key: Option<&'a str>,
    /// The previous master key, if the key moves to another one.
    pub(crate) from_master_key: Option<&'a str>,
    /// The master key's version in the provider's answer.
    pub(crate) master_key_version: Option<u64>,
    pub(crate) outcome: &'a str,
    pub(crate) elapsed_us: Option<u64>,
}

/// Writes the line of an event. Reads no catalogs, so that it also works while a session is being
/// cancelled.
pub(crate) fn log(who: &Identity, event: &Event<'_>) {
    #[derive(Serialize)]
    struct Facts<'a> {
        scope: Option<String>,
        provider: &'a str,
        master_key: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        from_master_key: Option<&'a str>,
        master_key_version: Option<u64>,
        outcome: &'a str,
        duration_ms: Option<f64>,
    }
    let facts = Facts {
        scope: event.scope.map(|scope| match scope {
            Scope::CLUSTER => "cluster".to_owned(),
            database => database.name(),
        }),
        provider: event.provider,
        master_key: event.master_key.filter(|key| !key.is_empty()),
        from_master_key: event.from_master_key,
        master_key_version: event.master_key_version,
        outcome: event.outcome,
        duration_ms: event.elapsed_us.map(|us| us as f64 / 1000.0),
    };
    write(who, event.action, event.by, facts);
}

/// Appends a line with the identity and these facts to the trail. Lines of users' operations are
/// synced; those of periodic operations of the server are not.
fn write(who: &Identity, action: &str, by: &str, facts: impl Serialize) {
    #[derive(Serialize)]
    struct Line<'a, F> {
        action: &'a str,
        by: &'a str,
        role: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        login_role: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        current_role: Option<&'a str>,
        database: Option<&'a str>,
        #[serde(flatten)]
        facts: F,
    }
    let line = Line {
        action,
        by,
        role: who.role.as_deref(),
        login_role: who.login_role.as_deref(),
        current_role: who.current_role.as_deref(),
        database: who.database.as_deref(),
        facts,
    };
    // Text and numbers can always be represented in JSON.
    let json = serde_json::to_string(&line).unwrap_or_default();
    let members = json.strip_prefix('{').and_then(|json| json.strip_suffix('}'));
    trail::write(members.unwrap_or_default(), who.role.is_some());
}

/// Logs that database keys were unlocked; from here on lines can have a MAC.
pub(crate) fn unlocked(by: &str, database_keys: usize, locked: usize) {
    #[derive(Serialize)]
    struct Facts {
        database_keys: usize,
        locked: usize,
        outcome: &'static str,
    }
    let outcome = if locked == 0 { "ok" } else { "partial" };
    write(&session::identity(), "unlock", by, Facts { database_keys, locked, outcome });
}

/// Facts of the line about destroyed keys.
#[derive(Serialize)]
pub(crate) struct Destruction<'a> {
    pub(crate) object: &'a str,
    pub(crate) files: usize,
    pub(crate) data_keys: u64,
    /// `ok`, or the error message.
    pub(crate) outcome: &'a str,
}

/// Writes the line about keys that the SQL function `by` has destroyed.
pub(crate) fn log_destruction(who: &Identity, by: &str, destruction: &Destruction<'_>) {
    write(who, "destroy_keys", by, destruction);
}
