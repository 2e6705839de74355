//! Connection strings of libpq: `key=value` pairs, URIs, or the name of a database.

use crate::failure::{Failure, refuse};

/// Keywords of PostgreSQL 15 to 19 whose values are not secret (fe-connect.c, `PQconninfoOptions`),
/// and `ssl`, which URIs may have. The others are not all known: each version adds some.
const NOT_SECRET: &[&str] = &[
    "application_name",
    "channel_binding",
    "client_encoding",
    "connect_timeout",
    "dbname",
    "fallback_application_name",
    "gssdelegation",
    "gssencmode",
    "gsslib",
    "host",
    "hostaddr",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "krbsrvname",
    "load_balance_hosts",
    "max_protocol_version",
    "min_protocol_version",
    "oauth_client_id",
    "oauth_issuer",
    "oauth_scope",
    "options",
    "passfile",
    "port",
    "replication",
    "require_auth",
    "requirepeer",
    "service",
    "servicefile",
    "ssl",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "sslcert",
    "sslcertmode",
    "sslcompression",
    "sslcrl",
    "sslcrldir",
    "sslkey",
    "sslkeylogfile",
    "sslmode",
    "sslnegotiation",
    "sslrootcert",
    "sslsni",
    "target_session_attrs",
    "tcp_user_timeout",
    "user",
];
/// Those that are.
const SECRET: &[&str] =
    &["oauth_client_secret", "password", "scram_client_key", "scram_server_key", "sslpassword"];

/// Refuses connection strings that contain a password or another secret, or may contain one: other
/// users of the machine can read the arguments of programs.
pub(super) fn require_no_secret(conninfo: &str) -> Result<(), Failure> {
    let keywords = match authority_and_parameters(conninfo) {
        Some((authority, parameters)) => {
            // postgresql://user:password@host. libpq does not end it at a question mark.
            let (login, hosts) = authority.split_once('@').unwrap_or(("", authority));
            // A port that is no number may be a password with a slash in it.
            if login.contains(':') || !hosts.split('?').next().is_none_or(has_ports) {
                return Err(refused("a password"));
            }
            uri_keywords(parameters)
        }
        None if conninfo.contains('=') => pair_keywords(conninfo),
        // The name of a database.
        None => return Ok(()),
    };
    for keyword in keywords {
        let keyword = keyword.to_ascii_lowercase();
        if SECRET.contains(&keyword.as_str()) {
            return Err(refused(match keyword.as_str() {
                "password" | "sslpassword" => "a password",
                _ => "a secret",
            }));
        }
        // It is not shown: it may be a part of a password that was not quoted.
        if !NOT_SECRET.contains(&keyword.as_str()) {
            return Err(refused("a keyword that is not known, and may be a secret"));
        }
    }
    Ok(())
}

fn refused(what: &str) -> Failure {
    refuse(format!("the connection string contains {what}"))
        .with_detail("Other users of this machine can read the arguments of programs.")
        .with_hint("Use a password file (~/.pgpass, PGPASSFILE), a service file, or PGPASSWORD.")
}

/// What is between the scheme of a URI and the first slash, and the parameters.
fn authority_and_parameters(conninfo: &str) -> Option<(&str, &str)> {
    let (_, rest) = conninfo.split_once("://").filter(|_| is_uri(conninfo))?;
    let authority = rest.split('/').next().unwrap_or_default();
    // A question mark before the host is a part of the login.
    let host = authority.split_once('@').map_or(0, |(login, _)| login.len() + 1);
    let parameters = rest[host..].split_once('?').map_or("", |(_, parameters)| parameters);
    Some((authority, parameters))
}

/// Whether all ports in the hosts of a URI are numbers; addresses may be in brackets.
fn has_ports(hosts: &str) -> bool {
    hosts.split(',').all(|host| {
        let name_and_port = host.rsplit_once(']').map_or(host, |(_, after)| after);
        let port = name_and_port.split_once(':').map_or("", |(_, port)| port);
        port.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// The keywords of the parameters of a URI.
fn uri_keywords(parameters: &str) -> Vec<String> {
    let parameters = parameters.split('&').filter(|parameter| !parameter.is_empty());
    parameters
        .map(|parameter| percent_decoded(parameter.split('=').next().unwrap_or_default()))
        .collect()
}

/// The keywords of pairs, as libpq reads them (`conninfo_parse`); a word without a value counts.
fn pair_keywords(pairs: &str) -> Vec<String> {
    let mut keywords = Vec::new();
    let mut rest = pairs.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c.is_ascii_whitespace()).unwrap_or(rest.len());
        keywords.push(rest[..end].to_owned());
        let after = rest[end..].trim_start();
        rest = match after.strip_prefix('=') {
            Some(value) => after_value(value.trim_start()).trim_start(),
            None => after,
        };
    }
    keywords
}

/// What follows a value, which may be quoted.
fn after_value(text: &str) -> &str {
    let (text, is_quoted) = match text.strip_prefix('\'') {
        Some(text) => (text, true),
        None => (text, false),
    };
    let mut escaped = false;
    for (at, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\'' if is_quoted => return &text[at + 1..],
            _ if !is_quoted && character.is_ascii_whitespace() => return &text[at..],
            _ => {}
        }
    }
    ""
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

/// Percent signs that do not begin two digits stay, and make a keyword unknown.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('%') {
        bytes.extend_from_slice(before.as_bytes());
        match after.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(b'%');
                rest = after;
            }
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    String::from_utf8_lossy(&bytes).into_owned()
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
            "postgres://h/d?port=1&passw%6Frd=x",
            "postgres://h?%70assword=x",
            "postgres://u:x?y@h/d",
            "postgres://u:x@y@h/d",
            "postgres://u:x/y@h/d",
            "host='a b\\' c'password=x",
            "host=a\\ password=x password\t=x",
            "oauth_client_secret=x",
            "scram_client_key=x",
            "postgres://h/d?scram_server_key=x",
            "host=h later_secret=x",
            "host=h password x=y",
            "postgres://h/d?a%zz=x",
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
            "host = '/run/it\\'s' dbname='password=x' user=a\\ b",
            "postgresql://%2Frun/d?sslmode=require&application_name=password%3Dx",
            "postgresql://u@/d?host=/run&user=a@b:c",
            "postgresql://h/d?",
            "postgresql://u@[::1]:5432,[fe80::1],h/d",
            "",
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
