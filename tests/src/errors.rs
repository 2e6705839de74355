//! Server errors as clients see them.

use std::fmt;

use postgres::error::DbError;

/// The four parts of a server error that users read. Tests compare all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqlError {
    /// SQLSTATE, five characters.
    pub sqlstate: String,
    /// Primary message.
    pub message: String,
    /// DETAIL, empty when there is none.
    pub detail: String,
    /// HINT, empty when there is none.
    pub hint: String,
}

impl SqlError {
    /// The server's error within a client error; `None` if it did not come from the server.
    #[must_use]
    pub fn of(error: &postgres::Error) -> Option<SqlError> {
        error.as_db_error().map(SqlError::from)
    }

    /// All parts in one string, for `contains`.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{} {}\n{}\n{}", self.sqlstate, self.message, self.detail, self.hint)
    }
}

impl From<&DbError> for SqlError {
    fn from(error: &DbError) -> Self {
        SqlError {
            sqlstate: error.code().code().to_owned(),
            message: error.message().to_owned(),
            detail: error.detail().unwrap_or_default().to_owned(),
            hint: error.hint().unwrap_or_default().to_owned(),
        }
    }
}

impl fmt::Display for SqlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.sqlstate, self.message)?;
        if !self.detail.is_empty() {
            write!(f, "\n  DETAIL: {}", self.detail)?;
        }
        if !self.hint.is_empty() {
            write!(f, "\n  HINT: {}", self.hint)?;
        }
        Ok(())
    }
}
