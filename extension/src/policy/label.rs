//! Security labels, and errors for texts that are not labels.

use pagevault_core::policy::label::LabelError;
use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;

pub(crate) use pagevault_core::policy::label::Label;

/// A HINT that names the ciphers.
const KNOWN_CIPHERS: &str =
    "Known ciphers are aes-256-xts, aes-128-xts, aes-256-xts-auth and aes-256-xts-hmac.";

/// Parses a label in the server's encoding. All labels are ASCII.
pub(crate) fn of_text(text: &ServerText) -> Result<Label> {
    parse(&text.to_string())
}

/// Parses a label.
///
/// # Errors
/// INVALID_PARAMETER_VALUE for anything but the three forms.
pub(crate) fn parse(text: &str) -> Result<Label> {
    text.parse().map_err(|error: LabelError| {
        Report::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, error.to_string()).hint(
            match error {
                LabelError::UnknownCipher(_) => KNOWN_CIPHERS,
                LabelError::Malformed(_) => {
                    "Labels are 'encrypted', 'encrypted aes-128-xts' and 'plaintext'."
                }
            },
        )
    })
}
