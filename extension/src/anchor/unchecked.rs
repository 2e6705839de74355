//! What the data directory contained when it was first started without a comparison. Kept in a
//! file until a comparison succeeds: otherwise an old data directory would only have to be started
//! twice, once while the store is down, and run in between until it has overtaken the note.

use std::io;

use pagevault_keystore::anchor::{Position, decode_unchecked, encode_unchecked};
use pagevault_keystore::storage::{FileStorage, Storage};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::replace_file;
use crate::keystore_dir;
use crate::pg::report::Report;

const NAME: &str = "anchor.unchecked";
const LIMIT: u64 = 4096;

/// The position, if there is one.
pub(super) fn read() -> Option<Position> {
    let storage = FileStorage::new(&keystore_dir::path()).ok()?;
    let bytes = storage.read(NAME, 0, LIMIT).ok()??;
    decode_unchecked(&bytes)
}

/// Keeps a position, and an earlier one if there is one already. An outage is no refusal, so the
/// server also starts if that fails.
pub(super) fn keep(position: Position) {
    if read().is_some() {
        return;
    }
    if let Err(error) = replace_file(NAME, &encode_unchecked(position)) {
        complain("write", &error);
    }
}

/// A comparison was successful, or does not concern this server.
pub(super) fn forget() {
    // There may be no keystore yet.
    if !keystore_dir::path().join(NAME).exists() {
        return;
    }
    let removed = FileStorage::new(&keystore_dir::path()).and_then(|storage| storage.remove(NAME));
    if let Err(error) = removed {
        complain("remove", &error);
    }
}

fn complain(what: &str, error: &io::Error) {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not {what} the file pagevault/{NAME}: {error}"),
    )
    .detail("It says what the data directory contained when it was started without a comparison with its anchor.")
    .send(PgLogLevel::WARNING);
}
