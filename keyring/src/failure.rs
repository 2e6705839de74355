//! Errors of this program ([`Failure`]), and constructors for common ones.

use std::io;
use std::path::Path;

use pagevault_keystore::protocol::ErrorClass;
pub use pagevault_keystore::protocol::Failure;

use crate::visible::visible;

/// The request is refused as it is.
pub(crate) fn refuse(message: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::BadOptions, message)
}

/// Standard output cannot be written.
pub(crate) fn unprintable(error: io::Error) -> Failure {
    Failure::new(ErrorClass::Internal, "could not write to standard output")
        .with_detail(format!("{error}."))
}

/// The operating system refuses to read a file or directory.
pub(crate) fn unreadable(path: &Path, error: &io::Error) -> Failure {
    let path = visible(&path.display().to_string());
    Failure::new(ErrorClass::Unreachable, format!("could not read \"{path}\": {error}"))
}

/// The failure of a command. The server has a setting for time limits, a command has an option.
pub(crate) fn of_command(failure: Failure) -> Failure {
    let hint = failure.hint.map(|hint| hint.replace("pagevault.keyring_timeout", "--timeout"));
    Failure { hint, ..failure }
}
