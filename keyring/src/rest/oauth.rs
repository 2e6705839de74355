//! Access tokens of OAuth 2.0 (RFC 6749 section 5).

use pagevault_keystore::protocol::ErrorClass;
use reqwest::RequestBuilder;
use serde::Deserialize;
use zeroize::Zeroizing;

use super::{Reply, Rest, Service};
use crate::failure::Failure;
use crate::options::printable;

/// Maximum length of a token, which becomes a header.
const TOKEN_LIMIT: usize = 16 * 1024;

/// Length of a part of a secret that messages do not repeat.
const RECOGNIZABLE: usize = 8;

/// Who asks for a token, for messages.
pub(crate) struct Asker<'a> {
    /// For example "service account x".
    pub(crate) who: &'a str,
    /// What to do if the credentials are not accepted.
    pub(crate) advice: &'a str,
    /// Secrets of the request: a server could repeat them in its messages.
    pub(crate) secrets: &'a [&'a str],
}

#[derive(Deserialize)]
struct Issued {
    access_token: String,
    token_type: Option<String>,
}

/// Errors of token endpoints. Entra's descriptions begin with a code such as `AADSTS7000215`.
#[derive(Deserialize)]
struct Refused {
    error: String,
    #[serde(default)]
    error_description: String,
}

/// Codes of refusals (RFC 6749 section 5.2, RFC 8693 section 2.2.2, and Entra's own). Others may be
/// those of a proxy.
const REFUSALS: &[&str] = &[
    "access_denied",
    "consent_required",
    "interaction_required",
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "invalid_resource",
    "invalid_scope",
    "invalid_target",
    "unauthorized_client",
    "unsupported_grant_type",
];

/// Requests a token.
///
/// # Errors
/// `unauthenticated` if the service refuses the credentials, `throttled`, `unreachable` and others
/// if there is no usable reply.
pub(crate) fn token(
    rest: &Rest,
    service: &Service,
    request: RequestBuilder,
    asker: &Asker<'_>,
) -> Result<Zeroizing<String>, Failure> {
    let reply = rest.ask(service, request)?;
    if !reply.is_success() {
        return Err(refusal(service, &reply, asker));
    }
    let issued: Issued = reply.parse().ok_or_else(|| service.foreign(reply.status))?;
    let token = Zeroizing::new(issued.access_token);
    if issued.token_type.is_some_and(|kind| !kind.eq_ignore_ascii_case("bearer")) {
        return Err(service.wrong("The token is not a bearer token."));
    }
    usable(service, token)
}

/// Refuses a token that cannot be sent in a header.
pub(crate) fn usable(
    service: &Service,
    token: Zeroizing<String>,
) -> Result<Zeroizing<String>, Failure> {
    let is_plain = token.bytes().all(|byte| byte.is_ascii_graphic());
    if token.is_empty() || token.len() > TOKEN_LIMIT || !is_plain {
        return Err(service.wrong("The token is empty, too long or not printable."));
    }
    Ok(token)
}

/// The failure for a reply that refuses.
pub(crate) fn refusal(service: &Service, reply: &Reply, asker: &Asker<'_>) -> Failure {
    let status = reply.status;
    let answered = format!("It answered with HTTP status {status}.");
    match (status, reply.parse::<Refused>()) {
        (429, _) => service.throttled(answered),
        (500.., _) => service.unavailable(answered),
        (400..=403, Some(refused)) if REFUSALS.contains(&refused.error.as_str()) => {
            let said = said(&refused.error_description, asker.secrets);
            Failure::new(
                ErrorClass::Unauthenticated,
                format!("{} does not accept the credentials", service.place),
            )
            .with_detail(format!("It answered {} to {}.{said}", refused.error, asker.who))
            .with_hint(asker.advice)
        }
        _ => service.foreign(status),
    }
}

/// The first line of a description, unless it repeats a part of a secret.
fn said(description: &str, secrets: &[&str]) -> String {
    let repeats = |secret: &&str| {
        let parts = secret.as_bytes().windows(RECOGNIZABLE.min(secret.len().max(1)));
        parts.into_iter().any(|part| {
            description.as_bytes().windows(part.len()).any(|in_description| in_description == part)
        })
    };
    let line = description.lines().next().unwrap_or_default().trim();
    if line.is_empty() || secrets.iter().any(repeats) {
        return String::new();
    }
    format!(" {}.", printable(line).trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service() -> Service {
        Service { whose: "a test", place: "test at x".to_owned() }
    }

    fn refused(status: u16, body: &str) -> Failure {
        let body = Zeroizing::new(body.as_bytes().to_vec());
        let reply = Reply { status, headers: reqwest::header::HeaderMap::new(), body };
        let secrets = ["0123456789abcdef"];
        let asker = Asker { who: "account a", advice: "Renew it.", secrets: &secrets };
        refusal(&service(), &reply, &asker)
    }

    #[test]
    fn each_refusal_has_its_class() {
        use ErrorClass::{Throttled, Unauthenticated, Unreachable};
        for (status, body, class, retry) in [
            (400, r#"{"error":"invalid_grant","error_description":"x"}"#, Unauthenticated, false),
            (401, r#"{"error":"invalid_client"}"#, Unauthenticated, false),
            (400, r#"{"error":"temporarily_unavailable"}"#, Unreachable, true),
            (403, "<html>", Unreachable, true),
            (404, r#"{"error":"not_found"}"#, Unreachable, true),
            (302, "", Unreachable, true),
            (429, "", Throttled, true),
            (503, r#"{"error":"invalid_client"}"#, Unreachable, true),
        ] {
            let error = refused(status, body);
            assert_eq!((error.class, error.retry), (class, retry), "{status} {body}");
            assert!(!error.detail().is_empty() && !error.hint().is_empty());
        }
    }

    #[test]
    fn descriptions_are_repeated_unless_they_repeat_a_secret() {
        let text = r#"{"error":"invalid_client","error_description":"AADSTS7000215: Bad.\nTrace"}"#;
        let detail = refused(401, text).detail().to_owned();
        assert_eq!(detail, "It answered invalid_client to account a. AADSTS7000215: Bad.");
        let text = r#"{"error":"invalid_client","error_description":"it is ..56789abcd.."}"#;
        assert_eq!(refused(401, text).detail(), "It answered invalid_client to account a.");
        let text = r#"{"error":"\u001b[2J 0123456789abcdef"}"#;
        assert_eq!(refused(401, text).detail(), "It answered with HTTP status 401.");
    }

    #[test]
    fn only_tokens_that_fit_into_a_header_are_used() {
        let used = |text: &str| usable(&service(), Zeroizing::new(text.to_owned())).is_ok();
        assert!(used("ya29.a0-_~+/="));
        for bad in ["", "a b", "a\r\nx: y", "\u{e9}", &"x".repeat(TOKEN_LIMIT + 1)] {
            assert!(!used(bad), "{bad:?}");
        }
    }
}
