//! Security labels, and what to say of a text that is none.

use pagevault_core::policy::label::LabelError;
use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;

pub(crate) use pagevault_core::policy::label::Label;

/// A HINT that names the ciphers.
const KNOWN_CIPHERS: &str = "Known ciphers are aes-256-xts and aes-128-xts.";

/// Reads a label as the server holds it. All of them are ASCII.
pub(crate) fn of_text(text: &ServerText) -> Result<Label> {
    parse(&text.to_string())
}

/// Reads a label.
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
