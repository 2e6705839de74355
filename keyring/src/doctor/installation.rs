//! Library, extension, their versions, and settings of the server that pagevault needs.

use serde_json::Value;

use super::Severity::{Critical, Notice, Warning};
use super::{Finding, are, count, is_loaded};
use crate::quoting::{identifier, literal, shell_word};
use crate::server::{libraries, list, text};

/// The statement that adds pagevault to a list of libraries.
pub(crate) fn preload(setting: &str) -> String {
    let mut names = libraries(setting);
    names.push("pagevault");
    let names: Vec<_> = names.into_iter().map(literal).collect();
    format!("ALTER SYSTEM SET shared_preload_libraries = {}", names.join(", "))
}

pub(super) fn library(found: &Value, findings: &mut Vec<Finding>) {
    let server = &found["server"];
    // Null for those who may not see it.
    let Some(now) = server["settings"]["shared_preload_libraries"].as_str() else { return };
    let next = server["at_next_start"]["shared_preload_libraries"].as_str().unwrap_or(now);
    let [now_named, next_named] = [now, next].map(|list| libraries(list).contains(&"pagevault"));
    match (now_named, next_named) {
        (false, false) => findings.push(
            Finding::new(Critical, "library-not-loaded", "the server runs without pagevault")
                .why("shared_preload_libraries does not name it: nothing is encrypted, and encrypted relations cannot be read.")
                .cure(format!("{}; then restart the server", preload(next))),
        ),
        (false, true) => findings.push(
            Finding::new(Critical, "library-not-loaded", "the server was not restarted since pagevault was added")
                .why("shared_preload_libraries is read at the start only.")
                .cure("restart the server"),
        ),
        (true, false) => findings.push(
            Finding::new(Critical, "library-removed", "at its next start the server will run without pagevault")
                .why("shared_preload_libraries in the configuration does not name it any more.")
                .cure(preload(next)),
        ),
        (true, true) => {}
    }
}

pub(super) fn extension(found: &Value, findings: &mut Vec<Finding>) {
    let databases = list(&found["databases"]);
    let has_extension = |database: &&Value| !database["extension_version"].is_null();
    let is_seen = |database: &Value| database["error"].is_null();
    if !databases.iter().any(|database| has_extension(&database)) {
        if !databases.iter().all(is_seen) {
            return;
        }
        findings.push(
            Finding::new(Warning, "extension-missing", "no database has the extension pagevault")
                .why("Its functions and views are needed to set a master key, to encrypt and to look.")
                .cure("CREATE EXTENSION pagevault"),
        );
        return;
    }
    for database in databases.iter().filter(|database| !has_extension(database)) {
        let name = text(&database["name"]);
        let number = |part: &str| database[part].as_u64().unwrap_or(0);
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let what = match (encrypted_files(found, name), number("labels"), number("reached")) {
            (0, 0, 0) => continue,
            (0, 0, reached) => format!(
                "{} to be encrypted by a setting or the label of a tablespace, in a database without the extension",
                are(size(reached), "relation")
            ),
            (0, ..) => "labels of pagevault in a database without the extension".to_owned(),
            (files, ..) => {
                format!("{} in a database without the extension", count(files, "encrypted file"))
            }
        };
        let cure = if database["open"] == false {
            format!(
                "ALTER DATABASE {} ALLOW_CONNECTIONS true; then in it: CREATE EXTENSION pagevault",
                identifier(name)
            )
        } else {
            "CREATE EXTENSION pagevault".to_owned()
        };
        findings.push(
            Finding::new(Warning, "extension-missing", what)
                .in_database(name)
                .why("Without it nobody sees what is encrypted there, nor what should be; nor is DROP EXTENSION refused for it.")
                .cure(cure),
        );
    }
}

/// The encrypted files of a database, as the whole cluster knows them.
fn encrypted_files(found: &Value, database: &str) -> usize {
    let mut databases = list(&found["cluster"]["encrypted_databases"]).iter();
    let known = databases.find(|known| known["database"] == database);
    let files = known.and_then(|known| known["encrypted_files"].as_u64()).unwrap_or(0);
    usize::try_from(files).unwrap_or(usize::MAX)
}

pub(super) fn versions(found: &Value, findings: &mut Vec<Finding>) {
    let loaded = text(&found["cluster"]["status"]["version"]);
    if loaded.is_empty() {
        return;
    }
    let installed = text(&found["server"]["installed_version"]);
    if !installed.is_empty() && installed != loaded {
        findings.push(
            Finding::new(
                Warning,
                "library-outdated",
                format!("the server runs pagevault {loaded}, but {installed} is installed"),
            )
            .why("A server keeps the library with which it was started.")
            .cure("restart the server"),
        );
    }
    for database in list(&found["databases"]) {
        let version = text(&database["extension_version"]);
        if !version.is_empty() && version != loaded {
            findings.push(
                Finding::new(
                    Warning,
                    "extension-outdated",
                    format!("the extension has version {version}, the library {loaded}"),
                )
                .in_database(text(&database["name"]))
                .cure("ALTER EXTENSION pagevault UPDATE"),
            );
        }
    }
    let program = text(&found["host"]["version"]);
    if !program.is_empty() && program != loaded {
        findings.push(
            Finding::new(
                Warning,
                "program-differs",
                format!("this pagevault-keyring has version {program}, the library {loaded}"),
            )
            .why("Library and program are made for one another.")
            .cure("run the pagevault-keyring that was installed with the library"),
        );
    }
}

/// Workers that pagevault has at the same time, besides those that rekey.
const WORKERS: i64 = 6;

fn number(found: &Value, setting: &str) -> Option<i64> {
    text(&found["server"]["settings"][setting]).parse().ok()
}

/// The most workers that pagevault starts.
fn own_workers(found: &Value) -> i64 {
    WORKERS + number(found, "pagevault.rekey_workers").unwrap_or(2)
}

/// The value of `max_worker_processes` that leaves parallel queries theirs.
pub(crate) fn workers_wanted(found: &Value) -> i64 {
    number(found, "max_parallel_workers").unwrap_or(8) + own_workers(found)
}

pub(super) fn workers(found: &Value, findings: &mut Vec<Finding>) {
    let (ours, wanted) = (own_workers(found), workers_wanted(found));
    let Some(most) = number(found, "max_worker_processes").filter(|_| is_loaded(found)) else {
        return;
    };
    if most >= wanted {
        return;
    }
    let severity = if most < ours { Warning } else { Notice };
    findings.push(
        Finding::new(severity, "few-workers", format!("max_worker_processes is {most}"))
            .why(format!("pagevault has up to {ours} background workers, and parallel queries use the same pool. Jobs wait, and shredding is refused, while it is exhausted."))
            .cure(format!("ALTER SYSTEM SET max_worker_processes = {wanted}; then restart the server")),
    );
}

pub(super) fn damage(found: &Value, findings: &mut Vec<Finding>) {
    let settings = &found["server"]["settings"];
    if settings["data_checksums"] == "off" {
        let directory = text(&settings["data_directory"]);
        let directory = shell_word(if directory.is_empty() { "DATADIR" } else { directory });
        findings.push(
            Finding::new(Warning, "checksums-off", "the cluster has no data checksums")
                .why("Without them pages are not authenticated: a page that somebody changes or moves on disk is not refused.")
                .cure(format!("stop the server, and run: pg_checksums --enable -D {directory}")),
        );
    }
    if settings["full_page_writes"] == "off" {
        findings.push(
            Finding::new(Warning, "full-page-writes-off", "full_page_writes is off")
                .why("A page torn by a crash is lost, and new data keys do not authenticate pages.")
                .cure("ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf()"),
        );
    }
}
