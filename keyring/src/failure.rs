//! Why this program did not do something ([`Failure`]), and failures that many of its parts have in
//! common.

use std::io;
use std::path::Path;

use pagevault_keystore::protocol::ErrorClass;
pub use pagevault_keystore::protocol::Failure;

/// What was asked for is refused as it stands.
pub(crate) fn refuse(message: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::BadOptions, message)
}

/// A file or directory that the system does not let us read.
pub(crate) fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(ErrorClass::Unreachable, format!("could not read \"{}\": {error}", path.display()))
}
