//! `pagevault-keyring restore-unsettled`: restores records that failed starts of the server cut off
//! from key files, when the WAL with these records is permanently lost.
//!
//! Restored records count without WAL. So the command is refused while there is WAL to replay that
//! may contain them, or show that they never took effect. Standbys do not get the records; they
//! cannot follow across lost WAL anyway.

use std::io::Write;
use std::path::Path;

use pagevault_keystore::log::{self, Log, LogError, Trust, unsettled};
use pagevault_keystore::protocol::ErrorClass;
use pagevault_keystore::storage::{FileStorage, Storage};
use pagevault_keystore::{Record, Scope, batch};

use crate::access::Access;
use crate::failure::{Failure, refuse, unprintable, unreadable};
use crate::offline::{DIRECTORY, Keystore, require_no_server, require_stopped};
use crate::options::printable;
use crate::verify::Control;

/// Restores records that were cut off from the key files of a data directory, and prints them. If
/// it is killed, it can be run again.
///
/// # Errors
/// If the server is running or has WAL to replay, or if files cannot be read or written.
pub fn restore_unsettled(data_directory: &Path, out: &mut impl Write) -> Result<(), Failure> {
    let keystore = Keystore::read_to_write(data_directory, Access::default())?;
    require_stopped(data_directory)?;
    if !Control::ask(keystore.data_directory())?.ended {
        return Err(refuse("the server was not shut down cleanly, and has WAL to replay")
            .with_detail("WAL contains the keys, or they were never used. Nothing was changed.")
            .with_hint("Start the server. Only if its WAL is permanently lost, run pg_resetwal, and then this command again."));
    }
    let storage = FileStorage::new(&keystore.data_directory().join(DIRECTORY))
        .map_err(|error| unreadable(&keystore.data_directory().join(DIRECTORY), &error))?;
    let mut count = 0;
    for (scope, records) in keystore.unsettled()? {
        let missing = unsettled::missing(keystore.state(), records.clone());
        if !missing.is_empty() {
            require_whole(&storage, scope)?;
            let opened = Log::open(&storage, scope, Trust::All).map_err(failed)?;
            let (mut log, _) = opened.ok_or_else(|| {
                refuse(format!("there is no key file for \"{}\"", unsettled::name(scope)))
            })?;
            require_no_server(data_directory)?;
            log.append(&missing).map_err(failed)?;
            require_still_no_server(data_directory)?;
        }
        let now = unsettled::read(&storage, scope, &keystore.id()).map_err(failed)?;
        if now != records {
            let name = unsettled::name(scope);
            return Err(refuse(format!("file \"{name}\" was changed at the same time"))
                .with_detail("A server was started meanwhile. What was restored is not lost.")
                .with_hint("Stop the server, and run this command again."));
        }
        unsettled::forget(&storage, scope).map_err(failed)?;
        count += missing.iter().filter(|record| matches!(record, Record::DataKey { .. })).count();
        for record in &missing {
            writeln!(out, "{}", printable(&batch::describe(record))).map_err(unprintable)?;
        }
    }
    writeln!(out, "{count} data keys were restored.").map_err(unprintable)
}

/// A server reads the key files when it starts, and does not expect anybody else to write there.
fn require_still_no_server(data_directory: &Path) -> Result<(), Failure> {
    require_no_server(data_directory).map_err(|_| {
        refuse("a server was started at the same time")
            .with_detail("Keys were restored in a key file that it may have read before; then it makes no new keys for that database.")
            .with_hint("Stop the server, and run this command again.")
    })
}

/// Opening a key file for writing removes an unreadable end. After a shutdown an unreadable end
/// means damage.
fn require_whole(storage: &FileStorage, scope: Scope) -> Result<(), Failure> {
    let name = log::file_name(scope);
    let bytes = storage.read(&name, 0, log::MAX_LOG);
    let bytes = bytes.map_err(|error| unreadable(Path::new(&name), &error))?.unwrap_or_default();
    if log::replay(&bytes, scope).is_ok_and(|contents| contents.torn == 0) {
        return Ok(());
    }
    Err(refuse(format!("key file \"{name}\" is damaged"))
        .with_hint("Restore the directory pagevault/ of the data directory from a backup."))
}

fn failed(error: LogError) -> Failure {
    Failure::new(ErrorClass::Internal, error.to_string())
}
