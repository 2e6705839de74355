//! What Vault's refusals mean.
//!
//! That a key must not be used any more is believed of Vault only, and only where it says so: an
//! HTTP status with a text that is known below. Anybody on the way may answer with a status: a load
//! balancer whose servers are down, a proxy whose rules have changed. And Vault itself says 400 or
//! 404 where it does not serve: as a disaster recovery secondary, as a standby, while it starts.
//! All of that are outages, in which what is unlocked stays so.
//!
//! The texts are those of OpenBao 2.6 and Vault 1.21: sdk/helper/keysutil/policy.go,
//! builtin/logical/transit/path_*.go, vault/router.go, sdk/logical/error.go.

use pagevault_keystore::protocol::ErrorClass;

use super::api::NoAnswer;
use super::auth::Auth;
use super::session::{Need, Server};
use crate::failure::Failure;
use crate::net::REPLY_LIMIT;
use crate::options::printable;

/// What Vault says of a key to a request that uses one: HTTP status, part of the text, what it
/// means.
const VERDICTS: &[(u16, &str, Verdict)] = &[
    (403, "permission denied", Verdict::Denied),
    (400, "key not found", Verdict::Missing),
    (400, "no such key version", Verdict::Missing),
    (404, "route entry not found", Verdict::Missing),
    (404, "unsupported path", Verdict::Missing),
    (400, "disallowed by policy", Verdict::TooOld),
    (400, "refusing to use soft-deleted key", Verdict::Deleted),
    (400, "message authentication failed", Verdict::Foreign),
    (400, "invalid ciphertext", Verdict::Foreign),
    (400, "decryption not supported for key type", Verdict::Foreign),
    (400, "derivation not supported for key type", Verdict::Foreign),
];

/// Texts of a server that does not serve, or not yet; the last is of one that has not heard of a
/// new version of the key (keysutil/policy.go), as one that follows another one a moment behind,
/// or was restored from before.
const INACTIVE: &[&str] = &[
    "DR secondary",
    "standby",
    "please forward to the active node",
    "active cluster node not found",
    "backend is nil",
    "version is too new",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The token is not known, or it may not.
    Denied,
    /// There is no such key, version or mount.
    Missing,
    /// The key no longer opens what this version of it wrapped.
    TooOld,
    /// The key was deleted and can be restored.
    Deleted,
    /// Another key wrapped it, or another context.
    Foreign,
}

/// What was found out about a refusal that does not tell who gives it or why.
pub(super) enum Known {
    /// Vault knows the token.
    Token,
    /// Vault does not, or does not say so.
    Nothing,
    /// Vault could not be asked.
    Unasked(NoAnswer),
}

/// Whether more must be known to tell what this refusal means.
pub(super) fn is_unclear(error: &NoAnswer) -> bool {
    match error {
        NoAnswer::Refused { status: 404, says } => says.is_empty(),
        error => is_denial(error),
    }
}

/// True if Vault says that the token is not known, or that it may not.
pub(super) fn is_denial(error: &NoAnswer) -> bool {
    matches!(error, NoAnswer::Refused { status, says } if verdict(*status, says) == Some(Verdict::Denied))
}

fn verdict(status: u16, says: &[String]) -> Option<Verdict> {
    if !is_active(says) {
        return None;
    }
    let mut known =
        VERDICTS.iter().filter(|(known, text, _)| *known == status && is_said(says, text));
    known.next().map(|(.., verdict)| *verdict)
}

/// Whether a text stands in what Vault says, in its own words: names of mounts and keys stand there
/// in quotes.
fn is_said(says: &[String], text: &str) -> bool {
    says.iter().any(|said| said.split('"').step_by(2).any(|words| words.contains(text)))
}

/// A request that failed, and what was found out if it [is unclear](is_unclear).
pub(super) fn of_request(
    error: NoAnswer,
    server: &Server,
    auth: &Auth,
    need: &Need<'_>,
    known: Option<Known>,
) -> Failure {
    let (status, says) = match (error, known) {
        // To read what is not there is answered with a status alone, which anybody could have
        // given. So it counts if something else is answered as only Vault answers it.
        (NoAnswer::Refused { status: 404, says }, Some(Known::Token | Known::Nothing))
            if says.is_empty() =>
        {
            return missing(server, "Vault says: not found.");
        }
        (_, Some(Known::Unasked(error))) => return of_outage(error, server),
        (NoAnswer::Refused { status, says }, None | Some(Known::Token)) => (status, says),
        (NoAnswer::Refused { says, .. }, Some(Known::Nothing)) => {
            return unauthenticated(server, auth, &shown(&says));
        }
        (error, _) => return of_outage(error, server),
    };
    let (text, path) = (shown(&says), need.path);
    let place = server.shown();
    match verdict(status, &says) {
        None => of_outage(NoAnswer::Refused { status, says }, server),
        Some(Verdict::Denied) => {
            Failure::new(ErrorClass::Denied, format!("{place} denies it"))
                .with_detail(format!("{} may not {} {path}. {text}", auth.shown(), need.capability))
                .with_hint(format!(
                    "Give its policy: path \"{path}\" {{ capabilities = [\"{}\"] }}",
                    need.capability
                ))
        }
        Some(Verdict::Missing) => missing(server, &text),
        Some(Verdict::TooOld) => Failure::new(
            ErrorClass::KeyDisabled,
            format!("{place} no longer opens this version of the key"),
        )
        .with_detail(text)
        .with_hint("Lower min_decryption_version of the key, or restore from a newer backup."),
        Some(Verdict::Deleted) => {
            Failure::new(ErrorClass::KeyDisabled, format!("key is deleted at {place}"))
                .with_detail(text)
                .with_hint("Restore the key: vault write -f <mount>/keys/<name>/soft-delete-restore")
        }
        Some(Verdict::Foreign) => Failure::new(
            ErrorClass::WrongCiphertext,
            format!("wrapped key cannot be unwrapped at {place}"),
        )
        .with_detail(format!(
            "It was wrapped by another key of the same name, for another database, or it is damaged. {text}"
        ))
        .with_hint("Give the provider the Vault and the mount that wrapped it."),
    }
}

/// A login that failed. Each method has its own words for it, so all that Vault refuses counts.
pub(super) fn of_login(error: NoAnswer, server: &Server, auth: &Auth) -> Failure {
    match error {
        NoAnswer::Refused { status: 400..=404, says } if !says.is_empty() && is_active(&says) => {
            unauthenticated(server, auth, &shown(&says))
        }
        error => of_outage(error, server),
    }
}

/// Vault is sealed, or was never initialized.
pub(super) fn sealed(server: &Server) -> Failure {
    Failure::new(ErrorClass::Sealed, format!("{} is sealed", server.shown()))
        .with_detail("Until it is unsealed nobody can use its keys.")
        .with_hint("Have it unsealed: vault operator unseal. Nothing here needs to be done then.")
}

fn is_active(says: &[String]) -> bool {
    !INACTIVE.iter().any(|text| is_said(says, text))
}

fn shown(says: &[String]) -> String {
    match says {
        [] => "Vault says nothing more.".to_owned(),
        says => format!("Vault says: {}.", printable(&says.join("; "))),
    }
}

fn unauthenticated(server: &Server, auth: &Auth, text: &str) -> Failure {
    Failure::new(
        ErrorClass::Unauthenticated,
        format!("{} does not accept the credentials", server.shown()),
    )
    .with_detail(format!("Used was {}. {text}", auth.shown()))
    .with_hint("It may have expired or been revoked. Renew it; nothing here needs to be changed.")
}

fn missing(server: &Server, text: &str) -> Failure {
    Failure::new(ErrorClass::KeyMissing, format!("there is no such key at {}", server.shown()))
        .with_detail(text)
        .with_hint(
            "Check the key's name and the option \"mount\". A key is made with: \
             vault write -f <mount>/keys/<name> derived=true",
        )
}

/// A failure that says nothing of the key.
pub(super) fn of_outage(error: NoAnswer, server: &Server) -> Failure {
    let place = server.shown();
    let outage = |message: String| Failure::new(ErrorClass::Unreachable, message);
    match error {
        NoAnswer::Lost(cause) => cause.about(place),
        NoAnswer::TooLong => outage(format!("{place} answers with more than Vault does"))
            .with_detail(format!("The answer has more than {REPLY_LIMIT} bytes."))
            .with_hint("Check that the address is that of Vault or OpenBao."),
        NoAnswer::Unsent => Failure::new(
            ErrorClass::Internal,
            format!("could not form a request to {place}"),
        )
        .with_hint("Check the provider's options."),
        NoAnswer::Foreign(status @ 300..=399) | NoAnswer::Refused { status: status @ 300..=399, .. } => {
            outage(format!("{place} points to another address"))
                .with_detail(format!("The HTTP status is {status}."))
                .with_hint("Give the address of the active server or of the load balancer.")
                // Between two leaders a server points elsewhere that would forward a moment later.
                .transient()
        }
        NoAnswer::Foreign(429) | NoAnswer::Refused { status: 429, .. } => {
            Failure::new(ErrorClass::Throttled, format!("{place} has too many requests"))
                .with_detail("The HTTP status is 429, \"too many requests\".")
                .with_hint("Try again later, or raise the rate limit quota.")
                .transient()
        }
        NoAnswer::Foreign(status) => outage(format!("{place} answers something else than Vault does"))
            .with_detail(format!(
                "The HTTP status is {status}; the answer is not of the form that Vault's have. A proxy or load balancer may have given it."
            ))
            .with_hint("Check what stands between here and Vault, and that the address is that of Vault or OpenBao.")
            .transient(),
        NoAnswer::Refused { status: 503, says } if says.iter().any(|said| said.contains("sealed")) => sealed(server),
        NoAnswer::Refused { status, says } if !is_active(&says) => {
            outage(format!("{place} is not active"))
                .with_detail(format!("The HTTP status is {status}. {}", shown(&says)))
                .with_hint("Give the address of the active server or of the load balancer.")
                .transient()
        }
        NoAnswer::Refused { status, says } => outage(format!("{place} has a problem"))
            .with_detail(format!("The HTTP status is {status}. {}", shown(&says)))
            .with_hint("See the log of Vault, and check the provider's options.")
            .transient(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_quotes_are_no_words_of_vaults() {
        let of = |status, said: &str| verdict(status, &[said.to_owned()]);
        for mount in ["transit", "standby", "eu-standby", "DR secondary"] {
            let said =
                format!("no handler for route \"{mount}/decrypt/k\". route entry not found.");
            assert_eq!(of(404, &said), Some(Verdict::Missing), "{said}");
        }
        assert_eq!(of(400, "no handler for \"permission denied/key not found\""), None);
        for said in ["path disabled in replication DR secondary mode", "Vault is in standby mode"] {
            assert_eq!(of(400, said), None, "{said}");
        }
    }
}
