//! Connection strings of libpq: `key=value` pairs, URIs, or the name of a database.

use crate::failure::{Failure, refuse};

/// Refuses connection strings that contain a password: other users of the machine can read the
/// arguments of programs.
pub(super) fn require_no_secret(conninfo: &str) -> Result<(), Failure> {
    let lower = conninfo.to_ascii_lowercase();
    // password and sslpassword, in pairs and as parameters of a URI.
    let mut rest = lower.as_str();
    let mut has_password = false;
    while let Some((_, after)) = rest.split_once("password") {
        has_password |= after.trim_start().starts_with('=');
        rest = after;
    }
    // postgresql://user:password@host
    let authority = is_uri(conninfo).then(|| lower.split_once("://")).flatten();
    let authority = authority.and_then(|(_, rest)| rest.split(['/', '?']).next());
    let login = authority.and_then(|authority| authority.rsplit_once('@'));
    has_password |= login.is_some_and(|(login, _)| login.contains(':'));
    if !has_password {
        return Ok(());
    }
    Err(refuse("the connection string contains a password")
        .with_detail("Other users of this machine can read the arguments of programs.")
        .with_hint("Use a password file (~/.pgpass, PGPASSFILE), a service file, or PGPASSWORD."))
}

/// The same connection to another database. Its name may be anything.
pub(super) fn with_database(conninfo: Option<&str>, database: &str) -> String {
    let quoted = database.replace('\\', "\\\\").replace('\'', "\\'");
    match conninfo {
        Some(uri) if is_uri(uri) => {
            let mark = if uri.contains('?') { '&' } else { '?' };
            format!("{uri}{mark}dbname={}", percent_encoded(database))
        }
        // Of a keyword that occurs twice, libpq uses the second.
        Some(pairs) if pairs.contains('=') => format!("{pairs} dbname='{quoted}'"),
        _ => format!("dbname='{quoted}'"),
    }
}

fn is_uri(conninfo: &str) -> bool {
    conninfo.starts_with("postgresql://") || conninfo.starts_with("postgres://")
}

fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_refused() {
        for secret in [
            "host=h password=x",
            "PASSWORD = 'x'",
            "sslpassword=x",
            "postgresql://u:x@h/d",
            "postgres://h/d?password=x",
        ] {
            let refused = require_no_secret(secret).unwrap_err();
            assert!(!format!("{refused:?}").contains('\''), "{refused:?}");
        }
        for usual in [
            "postgres",
            "host=/run user=password dbname=passwords",
            "postgresql://u@h:5432/d",
            "postgresql://h:5432,h2:5433/d?passfile=/f",
            "service=db passfile=/f",
        ] {
            assert!(require_no_secret(usual).is_ok(), "{usual}");
        }
    }

    #[test]
    fn a_name_stays_a_name() {
        let name = "a' host=\\evil";
        let quoted = "dbname='a\\' host=\\\\evil'";
        assert_eq!(with_database(None, name), quoted);
        assert_eq!(with_database(Some("postgres"), name), quoted);
        assert_eq!(with_database(Some("port=1"), name), format!("port=1 {quoted}"));
        let encoded = "dbname=a%27%20host%3D%5Cevil";
        assert_eq!(with_database(Some("postgres://h"), name), format!("postgres://h?{encoded}"));
        let uri = "postgresql://h/d?port=1";
        assert_eq!(with_database(Some(uri), name), format!("{uri}&{encoded}"));
    }
}
