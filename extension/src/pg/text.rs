//! Text in the server's encoding.
//!
//! Names are bytes: in a database with the encoding LATIN1 or SQL_ASCII they need not be UTF-8, but
//! Rust's strings are. In SQL, look-ups and results we use the server's bytes unchanged
//! ([`ServerText`]). Only for messages, which pgrx takes as strings, are they made readable.

use std::ffi::{CStr, CString, c_char};
use std::fmt;

use pgrx::{AnyElement, PgSqlErrorCode, pg_sys};

use super::report::{Report, Result};

/// Text as the server stores it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct ServerText(CString);

impl ServerText {
    /// Copies a text of the server; `None` for a null pointer.
    ///
    /// # Safety
    /// `text` is null or NUL-terminated.
    pub(crate) unsafe fn copied(text: *const c_char) -> Option<ServerText> {
        // SAFETY: not null, and NUL-terminated, as the caller guarantees; copied at once.
        (!text.is_null()).then(|| ServerText(unsafe { CStr::from_ptr(text) }.to_owned()))
    }

    /// Copies a name. Of a longer text, which names nothing, it copies as much as cannot be a name
    /// either.
    ///
    /// # Safety
    /// `text` is null or NUL-terminated.
    pub(crate) unsafe fn copied_name(text: *const c_char) -> Option<ServerText> {
        const MOST: usize = pg_sys::NAMEDATALEN as usize;
        // SAFETY: not null, and NUL-terminated, as the caller guarantees; copied at once.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())?;
        Some(ServerText::from_bytes(&text[..text.len().min(MOST)]))
    }

    /// The bytes of an SQL value; the server's texts contain no NUL.
    pub(crate) fn from_bytes(bytes: &[u8]) -> ServerText {
        ServerText(CString::new(bytes).unwrap_or_default())
    }

    /// Concatenates these pieces.
    pub(crate) fn join(pieces: &[&[u8]]) -> ServerText {
        ServerText::from_bytes(&pieces.concat())
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        &self.0
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.to_bytes()
    }

    /// As the value of a `text` column, which is returned as bytes because their datum has the same
    /// form.
    pub(crate) fn into_column(self) -> Vec<u8> {
        self.0.into_bytes()
    }
}

/// Our constants are ASCII, which is the same in every server encoding.
impl From<&'static str> for ServerText {
    fn from(ascii: &'static str) -> ServerText {
        ServerText::from_bytes(ascii.as_bytes())
    }
}

/// For messages, never for SQL: bytes that are invalid in the encoding of this database become
/// `\xe9` and the like.
impl fmt::Display for ServerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !is_utf8_or_ascii() {
            return self.bytes().iter().try_for_each(|byte| show(*byte, f));
        }
        for chunk in self.bytes().utf8_chunks() {
            f.write_str(chunk.valid())?;
            chunk.invalid().iter().try_for_each(|byte| show(*byte, f))?;
        }
        Ok(())
    }
}

fn show(byte: u8, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match byte {
        0..=0x7f => write!(f, "{}", char::from(byte)),
        _ => write!(f, "\\x{byte:02x}"),
    }
}

/// The longest beginning of a text in an [`excerpt`], in bytes.
const LONGEST: usize = 512;

/// For messages and the audit trail: a text as [`ServerText`] shows it, or the beginning of a long
/// one and its length. Texts of any length come from ordinary users, who may also have limited the
/// memory that is left: an allocation of the server that fails is an ERROR, one of ours ends the
/// process, and with it all sessions.
pub(crate) fn excerpt(text: &[u8]) -> String {
    if text.len() <= LONGEST {
        return ServerText::from_bytes(text).to_string();
    }
    let is_boundary = |at: &usize| text[*at] & 0xc0 != 0x80;
    let end = (LONGEST - 3..=LONGEST).rev().find(is_boundary).unwrap_or(LONGEST);
    format!("{}... ({} bytes)", ServerText::from_bytes(&text[..end]), text.len())
}

/// An argument that is passed out of this database (to key providers, the keystore, standbys),
/// where it is read as UTF-8.
///
/// # Errors
/// CHARACTER_NOT_IN_REPERTOIRE if it is not UTF-8; `what` names the argument.
pub(crate) fn require_utf8<'a>(what: &str, argument: &'a [u8]) -> Result<&'a str> {
    let text =
        std::str::from_utf8(argument).ok().filter(|text| is_utf8_or_ascii() || text.is_ascii());
    text.ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
            format!("{what} has characters that are not UTF-8 in this database"),
        )
        .detail("Key providers, the keystore and other databases take it for UTF-8.")
        .hint("Use ASCII, or a database with the encoding UTF8.")
    })
}

/// A value of type jsonb. Errors as in [`require_utf8`], or if it cannot be parsed.
pub(crate) fn json(what: &str, value: AnyElement) -> Result<serde_json::Value> {
    // SAFETY: a function of the server, called with its own argument type; the result is a
    // NUL-terminated text.
    let text = unsafe {
        let shown = pgrx::direct_function_call_as_datum(pg_sys::jsonb_out, &[Some(value.datum())]);
        shown.and_then(|text| ServerText::copied(text.cast_mut_ptr::<c_char>()))
    };
    let text = text.unwrap_or_default();
    serde_json::from_str(require_utf8(what, text.bytes())?).map_err(|error| {
        let code = PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE;
        Report::new(code, format!("{what} cannot be read: {error}"))
    })
}

/// True if this database's encoding is UTF-8 or SQL_ASCII. With SQL_ASCII, clients get the bytes
/// unchanged.
fn is_utf8_or_ascii() -> bool {
    // SAFETY: reads the encoding this process has for its database; SQL_ASCII if it has none.
    let encoding = unsafe { pg_sys::GetDatabaseEncoding() };
    encoding == pg_sys::pg_enc::PG_UTF8 as i32 || encoding == pg_sys::pg_enc::PG_SQL_ASCII as i32
}
