//! Key files with which no server starts.

use pagevault_keystore::log::{self, Position};
use pagevault_keystore::presence;

use super::control::Control;
use crate::failure::{Failure, unreadable};
use crate::offline::{DIRECTORY, Keystore};
use crate::regular::read_if_there;

/// What is wrong with them. What they must have is not known in a base backup
/// (extension/src/keys/store/presence.rs).
pub(super) fn faults(keystore: &Keystore, control: Control) -> Result<Vec<String>, Failure> {
    let path = keystore.data_directory().join(presence::NAME);
    let text = read_if_there(&path, presence::LIMIT).map_err(|error| unreadable(&path, &error))?;
    let text = text.unwrap_or_default();
    let mut named = presence::parse(&String::from_utf8_lossy(&text));
    if keystore.data_directory().join("backup_label").exists() {
        named.clear();
    }
    let mut faults = Vec::new();
    for (end, torn) in keystore.ends()? {
        let required = presence::required(&named, control.redo, end.scope);
        if let Some(required) = required.filter(|required| end.logged < *required) {
            faults.push(older(end, required));
        }
        if control.ended && torn > 0 {
            faults.push(torn_end(end, torn));
        }
    }
    Ok(faults)
}

fn older(end: Position, required: pagevault_keystore::Lsn) -> String {
    let (name, files) = (log::file_name(end.scope), presence::NAME);
    format!(
        "{DIRECTORY}/{name}: of an earlier time than the data directory, and a server does not start with it: it has what WAL says of it up to {}, and had more, up to {required} ({files})",
        end.logged
    )
}

fn torn_end(end: Position, torn: u64) -> String {
    let name = log::file_name(end.scope);
    format!(
        "{DIRECTORY}/{name}: its last {torn} bytes are not readable, and a server that was shut down cleanly does not start with it"
    )
}
