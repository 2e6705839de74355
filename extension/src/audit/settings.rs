//! Settings that decide about protection: their values at server start, and their changes when the
//! configuration is reloaded.

use super::operation::{self, Operation};
use crate::pg::guc;
use crate::pg::process::ProcessLocal;

/// Settings in the trail.
const WATCHED: [&str; 26] = [
    "pagevault.anchor",
    "pagevault.anchor_interval",
    "pagevault.anchor_wait",
    "pagevault.audit_destination",
    "pagevault.audit_file",
    "pagevault.audit_syslog_socket",
    "pagevault.cipher",
    "pagevault.data_catalog_encryption",
    "pagevault.default_encryption",
    "pagevault.enforce_encryption",
    "pagevault.keyring_command",
    "pagevault.recovery_waits_for_keys",
    "pagevault.rekey_workers",
    "pagevault.require_fips",
    "pagevault.revalidate_interval",
    "pagevault.revoked_key_action",
    "pagevault.revoked_key_grace",
    "pagevault.rotate_data_key_after",
    "pagevault.rotate_database_key_after",
    "pagevault.rotate_master_key_after",
    "pagevault.rotate_wal_key_after",
    "pagevault.rotation_window",
    "pagevault.shared_catalog_encryption",
    "pagevault.temp_encryption",
    "pagevault.wal_encryption",
    "shared_preload_libraries",
];

/// The values logged last by this process, or by the server at its start.
static KNOWN: ProcessLocal<Vec<String>> = ProcessLocal::new(Vec::new());

fn values() -> Vec<String> {
    WATCHED.iter().map(|name| guc::shown(name)).collect()
}

/// All values as text, for the line of the server start.
pub(super) fn at_start() -> String {
    let values = values();
    let text: Vec<String> =
        WATCHED.iter().zip(&values).map(|(name, value)| format!("{name}='{value}'")).collect();
    KNOWN.set(values);
    text.join(" ")
}

/// Logs changed values. Called in one process only, after it has reloaded the configuration.
pub(crate) fn log_changes() {
    let now = values();
    let before = KNOWN.replace(now.clone());
    for ((name, from), to) in WATCHED.iter().zip(before).zip(now) {
        if from != to {
            let operation = Operation {
                action: "set",
                by: "reload",
                object: Some((*name).to_owned()),
                from: Some(from),
                to: Some(to),
                ..Operation::default()
            };
            operation::log(&operation, "ok");
        }
    }
}
