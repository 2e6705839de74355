//! Security labels, and errors for texts that are not labels.

use pagevault_core::policy::label::LabelError;
use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;

pub(crate) use pagevault_core::policy::label::Label;

/// A HINT that names the ciphers.
const KNOWN_CIPHERS: &str =
    "Known ciphers are aes-256-xts, aes-128-xts, aes-256-xts-auth and aes-256-xts-hmac.";

/// A HINT about names of key groups.
pub(crate) const KEY_GROUP_NAMES: &str = "A name has 1 to 63 lower-case letters, digits, \"_\" and \"-\", and begins with a letter or digit.";

/// The longest text that may be a label, in bytes. The longest cipher and key group need 100.
const LONGEST: usize = 128;

const FORMS: &str =
    "Labels are 'encrypted', 'encrypted aes-128-xts', 'encrypted key_group=NAME' and 'plaintext'.";

/// Refuses a text of so many bytes that it cannot be a label, before it is copied
/// ([`crate::pg::text::excerpt`] has the reason).
pub(crate) fn require_short(bytes: usize) -> Result<()> {
    if bytes <= LONGEST {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
        "text is too long for a pagevault label",
    )
    .detail(format!("It has {bytes} bytes; a label has at most {LONGEST}."))
    .hint(FORMS))
}

/// Parses a label in the server's encoding. All labels are ASCII.
pub(crate) fn of_text(text: &ServerText) -> Result<Label> {
    parse(&text.to_string())
}

/// The name of the key group in a label.
pub(crate) fn key_group_in(text: &ServerText) -> Result<Option<String>> {
    let text = text.to_string();
    let (_, name) = Label::parse(&text).map_err(invalid)?;
    Ok(name.map(str::to_owned))
}

/// Parses a label.
///
/// # Errors
/// INVALID_PARAMETER_VALUE for anything but the three forms.
pub(crate) fn parse(text: &str) -> Result<Label> {
    text.parse().map_err(invalid)
}

fn invalid(error: LabelError) -> Report {
    let hint = match error {
        LabelError::UnknownCipher(_) => KNOWN_CIPHERS,
        LabelError::KeyGroupName(_) => KEY_GROUP_NAMES,
        LabelError::Malformed(_) => FORMS,
    };
    Report::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, error.to_string()).hint(hint)
}
