//! Running SQL statements of pagevault, as bytes in the server's encoding.

use std::ffi::CStr;

use pgrx::{PgSqlErrorCode, Spi, pg_sys};

use super::report::{Report, Result};
use super::text::ServerText;

/// Runs one statement as the current user.
pub(crate) fn run(statement: &CStr) -> Result<()> {
    // SAFETY: within an SPI connection, which connect_mut() opens and closes; the text outlives the
    // call.
    let done = Spi::connect_mut(|_| unsafe {
        const ALL_ROWS: std::ffi::c_long = 0;
        pg_sys::SPI_execute(statement.as_ptr(), false, ALL_ROWS)
    });
    // Errors of the statement itself have been raised.
    let failed = |error| {
        let code = PgSqlErrorCode::ERRCODE_INTERNAL_ERROR;
        Report::new(code, format!("a statement could not be run: {error}"))
    };
    Spi::check_status(done).map(|_| ()).map_err(failed)
}

/// An identifier, quoted if SQL requires it.
pub(crate) fn quoted_identifier(name: &ServerText) -> ServerText {
    // SAFETY: returns its argument or a palloc'd copy; both are copied while the argument lives.
    unsafe { ServerText::copied(pg_sys::quote_identifier(name.as_c_str().as_ptr())) }
        .unwrap_or_default()
}

/// A text as an SQL literal, valid with any `standard_conforming_strings`.
pub(crate) fn quoted_literal(text: &ServerText) -> ServerText {
    // SAFETY: makes a palloc'd copy of a NUL-terminated string.
    unsafe { ServerText::copied(pg_sys::quote_literal_cstr(text.as_c_str().as_ptr())) }
        .unwrap_or_default()
}
