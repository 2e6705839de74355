//! Files beside the key files that count as long as the server has not logged what they say.

use std::path::Path;
use std::{fs, io};

use pagevault_keystore::Record;
use pagevault_keystore::escrow::{self, Restored};
use pagevault_keystore::given_up::{self, GivenUp};
use pagevault_keystore::protocol::ErrorClass;

use crate::access::read_trusted;
use crate::failure::Failure;
use crate::trust::FileKind;

/// Key groups that were given up, and that the server has not logged yet.
pub(super) fn given_up(directory: &Path, kind: FileKind, id: [u8; 16]) -> Result<GivenUp, Failure> {
    let path = directory.join(given_up::NAME);
    if fs::symlink_metadata(&path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(GivenUp::default());
    }
    let given_up = GivenUp::decode(&read_trusted(kind, &path)?).map_err(|error| {
        Failure::new(
            ErrorClass::Internal,
            format!("key file \"{}\" is not readable: {error}", path.display()),
        )
        .with_hint("Make this server anew. Do not take the file away, nor an older keystore: pages that recovery has passed over would be served.")
    })?;
    Ok(if given_up.keystore == id { given_up } else { GivenUp::default() })
}

/// Records of a restored escrow that the server has not applied yet.
pub(super) fn restored(
    directory: &Path,
    kind: FileKind,
    id: [u8; 16],
) -> Result<Vec<Record>, Failure> {
    let path = directory.join(escrow::RESTORED);
    if fs::symlink_metadata(&path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(Vec::new());
    }
    let bytes = read_trusted(kind, &path)?;
    let restored = Restored::decode(&bytes).map_err(|error| {
        Failure::new(
            ErrorClass::Internal,
            format!("key file \"{}\" is not readable: {error}", path.display()),
        )
        .with_hint("Remove the file, and run \"pagevault-keyring escrow restore\" again.")
    })?;
    Ok(if restored.keystore == id { restored.records } else { Vec::new() })
}
