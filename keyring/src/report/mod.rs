//! Reports for people who have to judge a cluster, and do not know PostgreSQL: one document as
//! JSON, and one page of HTML without scripts that is made of it.

mod compare;
mod data;
mod html;
mod keys;
mod page;
mod plots;
mod signature;
mod trail;

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

pub(crate) use signature::Signer;
pub(crate) use trail::read as read_trail;

use crate::doctor;
use crate::failure::{Failure, refuse, unreadable};
use crate::regular::read_regular;
use crate::server::{self, Psql};

/// The version of the document.
const FORMAT: u64 = 1;
/// Maximum size of an earlier document.
const LARGEST: u64 = 1 << 30;

/// Reads everything that a report contains from a running server.
///
/// # Errors
/// Those of [`server::look`].
pub(crate) fn make(psql: &Psql, check_files: bool) -> Result<Value, Failure> {
    let mut report = server::look(psql, check_files)?;
    report["format"] = FORMAT.into();
    report["made_at"] = report["server"]["made_at"].clone();
    report["host"] = doctor::look_at_host(&report);
    report["installed"] = server::checksums(psql);
    report["findings"] = json!(doctor::examine(&report));
    report["program"] = json!({"version": env!("CARGO_PKG_VERSION"), "sha256": own_checksum()});
    // Options name files and accounts, which the reader of a report has no need to know.
    let providers = report.pointer_mut("/cluster/providers").and_then(Value::as_array_mut);
    for provider in providers.into_iter().flatten() {
        if let Value::Object(provider) = provider {
            provider.remove("options");
        }
    }
    if let Value::Object(host) = &mut report["host"] {
        host.remove("key_files");
    }
    Ok(report)
}

fn own_checksum() -> Option<String> {
    let program = fs::read(std::env::current_exe().ok()?).ok()?;
    Some(Sha256::digest(program).iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The document of an earlier report.
///
/// # Errors
/// If the file is not one.
pub(crate) fn read(path: &Path) -> Result<Value, Failure> {
    let bytes = read_regular(path, LARGEST).map_err(|error| unreadable(path, &error))?;
    let report: Option<Value> = serde_json::from_slice(&bytes).ok();
    report.filter(|report| report["format"] == FORMAT).ok_or_else(|| {
        refuse(format!("\"{}\" is not a report of this version", path.display()))
            .with_hint("Specify a file that \"pagevault-keyring report --json\" has written.")
    })
}

/// The page for a report, and for what has changed since an earlier one.
pub(crate) fn page(report: &Value, earlier: Option<&Value>) -> String {
    page::make(report, earlier)
}

/// Writes a file for the current user only, or replaces it.
///
/// # Errors
/// If the directory does not permit that.
pub(crate) fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let failed =
        |error: io::Error| refuse(format!("could not write \"{}\": {error}", path.display()));
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    let mut file = NamedTempFile::new_in(directory).map_err(failed)?;
    file.write_all(content).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
