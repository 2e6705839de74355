//! The text of a security label: `encrypted`, `encrypted CIPHER` or `plain`.

use pagevault_cipher::CipherId;
use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};

/// A HINT that names the ciphers.
pub(crate) const KNOWN_CIPHERS: &str = "Known ciphers are aes-256-xts and aes-128-xts.";

/// What a label asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Label {
    /// Sealed, with this cipher or the default one.
    Encrypted(Option<CipherId>),
    /// Not sealed.
    Plain,
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Encrypted(Some(cipher)) => write!(f, "encrypted {cipher}"),
            Label::Encrypted(None) => f.write_str("encrypted"),
            Label::Plain => f.write_str("plain"),
        }
    }
}

/// Reads a label.
///
/// # Errors
/// INVALID_PARAMETER_VALUE for anything but the three forms.
pub(crate) fn parse(text: &str) -> Result<Label> {
    let mut words = text.split_ascii_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some("plain"), None, None) => Ok(Label::Plain),
        (Some("encrypted"), None, None) => Ok(Label::Encrypted(None)),
        (Some("encrypted"), Some(cipher), None) => {
            cipher.parse().map(|c| Label::Encrypted(Some(c))).map_err(|_| {
                Report::new(
                    PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
                    format!("unknown cipher \"{cipher}\" in pagevault label"),
                )
                .hint(KNOWN_CIPHERS)
            })
        }
        _ => Err(Report::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("invalid pagevault label \"{text}\""),
        )
        .hint("Labels are 'encrypted', 'encrypted aes-128-xts' and 'plain'.")),
    }
}
