//! The version of a server, from its file.

use std::ops::RangeInclusive;

/// The majors that pagevault supports.
pub const MAJORS: RangeInclusive<u32> = 15..=19;

/// `PG_BACKEND_VERSIONSTR` (pg_ctl, initdb and `postgres --version` print it) without the version.
const BEFORE: &[u8] = b"postgres (PostgreSQL) ";

/// The version of the server with these bytes, such as `17.2`; `None` if it is no server.
pub(crate) fn version(file: &[u8]) -> Option<String> {
    let at = file.windows(BEFORE.len()).position(|window| window == BEFORE)? + BEFORE.len();
    let rest = &file[at..];
    let end = rest.iter().position(|byte| !(32..127).contains(byte))?;
    Some(String::from_utf8_lossy(&rest[..end]).into_owned())
}

/// The major in a version such as `17.2 (Debian 17.2-1)` or `19beta1`.
#[must_use]
pub fn major_of(version: &str) -> Option<u32> {
    version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_program_itself() {
        let file = b"\0PostgreSQL 9.6\0postgres (PostgreSQL) 17.2 (Debian 17.2-1)\n\0rest";
        assert_eq!(version(file).as_deref(), Some("17.2 (Debian 17.2-1)"));
        assert_eq!(version(b"\x7fELF initdb (PostgreSQL) 17.2\n"), None);
        assert_eq!(version(b"postgres (PostgreSQL) 17"), None);
    }

    #[test]
    fn majors() {
        assert_eq!(major_of("17.2 (Debian 17.2-1)"), Some(17));
        assert_eq!(major_of("19beta1"), Some(19));
        assert_eq!(major_of("devel"), None);
    }
}
