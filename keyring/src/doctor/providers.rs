//! Key providers: outages, the age of what is known about them, key files.

use serde_json::Value;

use super::Finding;
use super::Severity::{Critical, Notice, Warning};
use crate::quoting::{literal, shell_word};
use crate::server::{list, text};

pub(super) fn outages(found: &Value, findings: &mut Vec<Finding>) {
    for provider in list(&found["cluster"]["providers"]) {
        let failures = provider["consecutive_failures"].as_u64().unwrap_or(0);
        if provider["in_use"] != true || failures == 0 {
            continue;
        }
        let name = text(&provider["provider"]);
        let error = text(&provider["last_error"]);
        let (severity, check, what) = if provider["reachable"] == false {
            (Critical, "provider-unreachable", "cannot be reached")
        } else {
            (Warning, "provider-refuses", "has refused the latest request")
        };
        let look = format!("look: SELECT * FROM pagevault.check_provider({})", literal(name));
        let (severity, why, cure) = if others_answer(found, name) {
            let why = "Other master keys would unlock the same keys after a restart";
            (Warning, why, format!("repair it, and {look}"))
        } else {
            let why = "After a restart its keys would stay locked";
            (severity, why, format!("repair it, do not restart the server meanwhile, and {look}"))
        };
        findings.push(
            Finding::new(severity, check, format!("provider \"{name}\" {what}"))
                .why(format!("{why}. Its last error: {error}"))
                .cure(cure),
        );
    }
}

/// Whether each key that a provider wraps is wrapped by another one as well, which has answered.
fn others_answer(found: &Value, name: &str) -> bool {
    let answers = |other: &Value| {
        let mut providers = list(&found["cluster"]["providers"]).iter();
        let known = providers.find(|known| known["provider"] == *other);
        known.is_some_and(|known| known["reachable"] == true && known["consecutive_failures"] == 0)
    };
    let keys = list(&found["cluster"]["database_keys"]);
    let mut own = keys.iter().filter(|key| key["provider"] == name).peekable();
    let place = ["scope", "database", "key_group", "version"];
    own.peek().is_some()
        && own.all(|key| {
            let mut same = keys.iter().filter(|other| place.iter().all(|of| other[of] == key[of]));
            same.any(|other| other["provider"] != name && answers(&other["provider"]))
        })
}

/// The worker that asks the providers.
pub(super) fn revalidation(found: &Value, findings: &mut Vec<Finding>) {
    let server = &found["server"];
    let state = text(&found["cluster"]["status"]["state"]);
    if !matches!(state, "unlocked" | "locked") {
        return;
    }
    let (Some(interval), Some(up)) =
        (server["revalidate_seconds"].as_i64(), server["up_seconds"].as_i64())
    else {
        return;
    };
    if interval == 0 {
        findings.push(
            Finding::new(Notice, "providers-not-asked", "pagevault.revalidate_interval is 0")
                .why("Nobody asks the providers, so that an outage, an expired token or a disabled key is noticed at the next restart only.")
                .cure("ALTER SYSTEM RESET pagevault.revalidate_interval; SELECT pg_reload_conf()"),
        );
        return;
    }
    let ago = found["cluster"]["status"]["last_revalidation_seconds_ago"].as_i64().unwrap_or(up);
    // One round may take its time.
    if ago > 3 * interval + 60 {
        findings.push(
            Finding::new(
                Warning,
                "revalidation-overdue",
                format!("the providers were last asked {} minutes ago", ago / 60),
            )
            .why("What the views say about providers is as old.")
            .cure("see the server's log for the worker \"pagevault revalidate\""),
        );
    }
}

/// Key files, as seen on this machine.
pub(super) fn key_files(found: &Value, findings: &mut Vec<Finding>) {
    for file in list(&found["host"]["key_files"]) {
        let path = text(&file["path"]);
        if file["in_data_directory"] == true {
            findings.push(
                Finding::new(Critical, "key-file-in-data-directory", format!("key file \"{path}\" is inside a data directory"))
                    .why("Whoever has a copy or a backup of the directory has data and key together.")
                    .cure("move the file to another directory, then: SELECT pagevault.alter_provider('PROVIDER', '{\"path\": \"/etc/pagevault/keys\"}'). Copies made before have the key: rotate it"),
            );
        }
        if let Some(mode) = file["mode"].as_u64().filter(|mode| mode & 0o077 != 0) {
            findings.push(
                Finding::new(Critical, "key-file-open", format!("key file \"{path}\" has the mode {mode:04o}"))
                    .why("Other users may read or change the master keys.")
                    .cure(format!("chmod 600 {}; if others may have read it, rotate: SELECT pagevault.rotate_cluster_master_key()", shell_word(path))),
            );
        }
    }
}
