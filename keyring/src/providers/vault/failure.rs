//! The meaning of Vault's errors.
//!
//! Only Vault itself can say that a key must not be used any more, by an HTTP status together with
//! one of the messages below. A status alone may come from any server in between: a load balancer
//! whose servers are down, a proxy with changed rules. Vault itself uses 400 or 404 when it does
//! not serve: as a disaster recovery secondary, as a standby, while it starts. All these are
//! outages, during which unlocked keys stay unlocked.
//!
//! The messages are those of OpenBao 2.6 and Vault 1.21: sdk/helper/keysutil/policy.go,
//! builtin/logical/transit/path_*.go, vault/router.go, sdk/logical/error.go.

use pagevault_keystore::protocol::ErrorClass;

use super::api::NoAnswer;
use super::auth::Auth;
use super::session::{Need, Server};
use crate::failure::Failure;
use crate::net::REPLY_LIMIT;
use crate::options::printable;

/// Vault's replies about a key: HTTP status, part of the message, meaning.
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

/// Messages of a server that does not serve, or not yet. The last is that of a server that does not
/// have a new version of the key yet (keysutil/policy.go): a follower with a delay, or one that was
/// restored from a backup.
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
    /// The token is unknown, or has no permission.
    Denied,
    /// There is no such key, version or mount.
    Missing,
    /// The key no longer decrypts what this version of it wrapped.
    TooOld,
    /// The key was deleted, and can be restored.
    Deleted,
    /// Wrapped by another key or with another context.
    Foreign,
}

/// Result of a second request, about the token, after an unclear refusal.
pub(super) enum Known {
    /// Vault knows the token.
    Token,
    /// Vault does not know the token, or does not say.
    Nothing,
    /// The second request failed.
    Unasked(NoAnswer),
}

/// Whether the refusal can be interpreted only with a second request.
pub(super) fn is_unclear(error: &NoAnswer) -> bool {
    is_nothing(error) || is_denial(error)
}

/// A status without a text: what Vault answers to a read of something that does not exist.
pub(super) fn is_nothing(error: &NoAnswer) -> bool {
    matches!(error, NoAnswer::Refused { status: 404, says } if says.is_empty())
}

/// True if Vault did not write, because the secret has another version (`pathDataWrite`,
/// path_data.go of its KV engine).
pub(super) fn is_overtaken(error: &NoAnswer) -> bool {
    matches!(error, NoAnswer::Refused { status: 400, says }
        if is_said(says, "check-and-set parameter did not match the current version"))
}

/// True if the server has certainly not processed the request, and another of its cluster may.
pub(super) fn is_unserved(error: &NoAnswer) -> bool {
    match error {
        NoAnswer::Unconnected(_) | NoAnswer::Redirected { .. } => true,
        NoAnswer::Refused { status, says } => !is_active(says) || is_sealed(*status, says),
        _ => false,
    }
}

fn is_sealed(status: u16, says: &[String]) -> bool {
    status == 503 && says.iter().any(|said| said.contains("sealed"))
}

/// True if Vault says that the token is unknown or has no permission.
pub(super) fn is_denial(error: &NoAnswer) -> bool {
    matches!(error, NoAnswer::Refused { status, says }
        if verdict(*status, says) == Some(Verdict::Denied))
}

fn verdict(status: u16, says: &[String]) -> Option<Verdict> {
    if !is_active(says) {
        return None;
    }
    let mut known =
        VERDICTS.iter().filter(|(known, text, _)| *known == status && is_said(says, text));
    known.next().map(|(.., verdict)| *verdict)
}

/// Whether Vault's messages contain a text outside of quotes: quoted are names of mounts and keys.
fn is_said(says: &[String], text: &str) -> bool {
    says.iter().any(|said| said.split('"').step_by(2).any(|words| words.contains(text)))
}

/// The failure of a request; `known` if it [was unclear](is_unclear).
pub(super) fn of_request(
    error: NoAnswer,
    server: &Server,
    auth: &Auth,
    need: &Need<'_>,
    known: Option<Known>,
) -> Failure {
    let (status, says) = match (error, known) {
        // A read of a missing key is answered with a status only, which any server could have sent.
        // It counts if the second request got a reply that only Vault gives.
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
            Failure::new(ErrorClass::Denied, format!("{place} denied permission"))
                .with_detail(format!("{} may not {} {path}. {text}", auth.shown(), need.capability))
                .with_hint(format!(
                    "Add to its policy: path \"{path}\" {{ capabilities = [\"{}\"] }}",
                    need.capability
                ))
        }
        Some(Verdict::Missing) => missing(server, &text),
        Some(Verdict::TooOld) => Failure::new(
            ErrorClass::KeyDisabled,
            format!("{place} no longer decrypts with this version of the key"),
        )
        .with_detail(text)
        .with_hint("Lower min_decryption_version of the key, or restore from a newer backup."),
        Some(Verdict::Deleted) => {
            Failure::new(ErrorClass::KeyDisabled, format!("key is deleted at {place}"))
                .with_detail(text)
                .with_hint(
                    "Restore the key: vault write -f <mount>/keys/<name>/soft-delete-restore",
                )
        }
        Some(Verdict::Foreign) => Failure::new(
            ErrorClass::WrongCiphertext,
            format!("wrapped key cannot be unwrapped at {place}"),
        )
        .with_detail(format!(
            "It was wrapped by another key of the same name or for another database, or it is damaged. {text}"
        ))
        .with_hint("Use the Vault server and the mount that wrapped it."),
    }
}

/// The failure of a login. Each method has its own messages for this, so every refusal by Vault
/// counts.
pub(super) fn of_login(error: NoAnswer, server: &Server, auth: &Auth) -> Failure {
    match error {
        NoAnswer::Refused { status: 400..=404, says } if !says.is_empty() && is_active(&says) => {
            unauthenticated(server, auth, &shown(&says))
        }
        error => of_outage(error, server),
    }
}

/// The failure if Vault is sealed or was never initialized.
pub(super) fn sealed(server: &Server) -> Failure {
    Failure::new(ErrorClass::Sealed, format!("{} is sealed", server.shown()))
        .with_detail("Its keys cannot be used until it is unsealed.")
        .with_hint("Unseal it: vault operator unseal. Nothing needs to be changed in PostgreSQL.")
}

fn is_active(says: &[String]) -> bool {
    !INACTIVE.iter().any(|text| is_said(says, text))
}

fn shown(says: &[String]) -> String {
    match says {
        [] => "Vault gave no reason.".to_owned(),
        says => format!("Vault says: {}.", printable(&says.join("; "))),
    }
}

fn unauthenticated(server: &Server, auth: &Auth, text: &str) -> Failure {
    Failure::new(
        ErrorClass::Unauthenticated,
        format!("{} does not accept the credentials", server.shown()),
    )
    .with_detail(format!("The login used {}. {text}", auth.shown()))
    .with_hint(auth.advice())
}

fn missing(server: &Server, text: &str) -> Failure {
    Failure::new(ErrorClass::KeyMissing, format!("there is no such key at {}", server.shown()))
        .with_detail(text)
        .with_hint(
            "Check the key's name and the option \"mount\". To create a key, use: vault write -f <mount>/keys/<name> derived=true",
        )
}

/// A failure that says nothing about the key.
pub(super) fn of_outage(error: NoAnswer, server: &Server) -> Failure {
    let others = server.nodes.count() - 1;
    let tried = others > 0 && is_unserved(&error);
    let failure = of_one(error, server);
    if !tried {
        return failure;
    }
    let detail = format!(
        "{} The other addresses ({others}) in the option \"addresses\" were tried too.",
        failure.detail()
    );
    failure.with_detail(detail)
}

/// A description of a key that was not asked for.
pub(super) fn of_another_key(server: &Server) -> Failure {
    let place = server.shown();
    Failure::new(
        ErrorClass::Unreachable,
        format!("{place} gave a reply that does not fit the request"),
    )
    .with_detail("It is about another key. Nothing of the reply was used.")
    .with_hint("Check the address, and proxies and load balancers on the way to it.")
    .transient()
}

fn of_one(error: NoAnswer, server: &Server) -> Failure {
    let place = server.shown();
    let outage = |message: String| Failure::new(ErrorClass::Unreachable, message);
    match error {
        NoAnswer::Lost(cause) | NoAnswer::Unconnected(cause) => cause.about(place),
        NoAnswer::TooLong => outage(format!("reply from {place} is too large"))
            .with_detail(format!("The reply has more than {REPLY_LIMIT} bytes."))
            .with_hint("Check that the address is that of Vault or OpenBao."),
        NoAnswer::Unsent => Failure::new(
            ErrorClass::Internal,
            format!("could not build a request to {place}"),
        )
        .with_hint("Check the provider's options."),
        NoAnswer::Redirected { status, location } => {
            let to = location.map(|location| location.origin().ascii_serialization());
            let to = to.map_or(String::new(), |to| format!(" to {}", printable(&to)));
            outage(format!("{place} redirects to another address"))
                .with_detail(format!(
                    "The HTTP status is {status}. Redirections{to} are not followed, because credentials would be sent there."
                ))
                .with_hint("Use the address of the load balancer, or give the addresses of all servers of the cluster in the option \"addresses\".")
                // During a change of leaders a server may redirect that would forward the request a
                // moment later.
                .transient()
        }
        NoAnswer::Foreign(429) | NoAnswer::Refused { status: 429, .. } => {
            Failure::new(ErrorClass::Throttled, format!("too many requests to {place}"))
                .with_detail("The HTTP status is 429, \"too many requests\".")
                .with_hint("Try again later, or raise the rate limit quota.")
                .transient()
        }
        NoAnswer::Foreign(status) => {
            outage(format!("reply from {place} is not a Vault reply"))
                .with_detail(format!(
                    "The HTTP status is {status}, and the reply does not have the format of Vault's replies. It may be from a proxy or load balancer."
                ))
                .with_hint("Check that the address is that of Vault or OpenBao, and check proxies and load balancers on the way to it.")
                .transient()
        }
        NoAnswer::Refused { status, says } if is_sealed(status, &says) => sealed(server),
        NoAnswer::Refused { status, says } if !is_active(&says) => {
            outage(format!("{place} is not active"))
                .with_detail(format!("The HTTP status is {status}. {}", shown(&says)))
                .with_hint("Use the address of the active server or of the load balancer.")
                .transient()
        }
        NoAnswer::Refused { status, says } => outage(format!("{place} reported an error"))
            .with_detail(format!("The HTTP status is {status}. {}", shown(&says)))
            .with_hint("See the log of Vault, and check the provider's options.")
            .transient(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_names_are_not_part_of_messages() {
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
