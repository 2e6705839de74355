//! What Vault's refusals mean.
//!
//! Vault tells causes by HTTP status and text. 400 and 403 are final; 429, 412 and 5xx may pass.

use pagevault_keystore::protocol::ErrorClass;
use rustify::errors::ClientError as HttpError;
use vaultrs::error::ClientError;

use super::auth::Auth;
use super::session::{Need, Server};
use crate::net::cause_of;
use crate::options::printable;
use crate::provider::ProviderError;

/// What came back instead of an answer.
enum Refusal {
    /// An HTTP status and what Vault says.
    Status(u16, String),
    /// Nothing, or nothing that can be understood.
    Other(ProviderError),
}

/// True for 403: the token is not known, or it may not.
pub(super) fn is_denial(error: &ClientError) -> bool {
    matches!(error, ClientError::APIError { code: 403, .. })
}

/// A request that failed. `token_is_known` tells, after a denial, whether Vault knows the token.
pub(super) fn of_request(
    error: ClientError,
    server: &Server,
    auth: &Auth,
    need: &Need<'_>,
    token_is_known: Option<bool>,
) -> ProviderError {
    let (code, text) = match refusal(error, server) {
        Refusal::Status(code, text) => (code, text),
        Refusal::Other(error) => return error,
    };
    let shown = server.shown();
    let path = need.path;
    match code {
        403 if token_is_known == Some(false) => unauthenticated(server, auth, &text),
        403 => ProviderError::new(ErrorClass::Denied, format!("{shown} denies it"))
            .with_detail(format!("{} may not {} {path}. {text}", auth.shown(), need.capability))
            .with_hint(format!(
                "Give its policy: path \"{path}\" {{ capabilities = [\"{}\"] }}",
                need.capability
            )),
        404 => missing(server, &text),
        400 if text.contains("encryption key not found") => missing(server, &text),
        400 if text.contains("disallowed by policy") => ProviderError::new(
            ErrorClass::KeyDisabled,
            format!("{shown} no longer opens this version of the key"),
        )
        .with_detail(text)
        .with_hint("Lower min_decryption_version of the key, or restore from a newer backup."),
        400 if path.contains("crypt/") || path.contains("/rewrap/") => ProviderError::new(
            ErrorClass::WrongCiphertext,
            format!("wrapped key does not open at {shown}"),
        )
        .with_detail(format!(
            "It was wrapped by another key of the same name, for another database, or it is damaged. {text}"
        ))
        .with_hint("Give the provider the Vault and the mount that wrapped it."),
        _ => of_status(code, text, server),
    }
}

/// A login that failed.
pub(super) fn of_login(error: ClientError, server: &Server, auth: &Auth) -> ProviderError {
    match refusal(error, server) {
        Refusal::Status(400..=404, text) => unauthenticated(server, auth, &text),
        Refusal::Status(code, text) => of_status(code, text, server),
        Refusal::Other(error) => error,
    }
}

/// Vault is sealed, or was never initialized.
pub(super) fn sealed(server: &Server) -> ProviderError {
    ProviderError::new(ErrorClass::Sealed, format!("{} is sealed", server.shown()))
        .with_detail("Until it is unsealed nobody can use its keys.")
        .with_hint("Have it unsealed: vault operator unseal. Nothing here needs to be done then.")
}

fn refusal(error: ClientError, server: &Server) -> Refusal {
    match error {
        ClientError::APIError { code, errors } => {
            Refusal::Status(code, format!("Vault says: {}.", printable(&errors.join("; "))))
        }
        // The body, which is not repeated, is not Vault's: a proxy's, say.
        ClientError::RestClientError { source: HttpError::ServerResponseError { code, .. } } => {
            Refusal::Status(code, format!("The HTTP status is {code}, without an explanation."))
        }
        ClientError::RestClientError {
            source: error @ (HttpError::RequestError { .. } | HttpError::ResponseError { .. }),
        } => Refusal::Other(cause_of(&error).about(server.shown())),
        // Others may hold what was sent or received.
        _ => Refusal::Other(
            ProviderError::new(
                ErrorClass::Internal,
                format!("{} answers something else than expected", server.shown()),
            )
            .with_detail("The answer could not be understood.")
            .with_hint("Check that the address is that of Vault or OpenBao, and its version."),
        ),
    }
}

fn unauthenticated(server: &Server, auth: &Auth, text: &str) -> ProviderError {
    ProviderError::new(
        ErrorClass::Unauthenticated,
        format!("{} does not accept the credentials", server.shown()),
    )
    .with_detail(format!("Used was {}. {text}", auth.shown()))
    .with_hint("It may have expired or been revoked. Renew it; nothing here needs to be changed.")
}

fn missing(server: &Server, text: &str) -> ProviderError {
    ProviderError::new(
        ErrorClass::KeyMissing,
        format!("there is no such key at {}", server.shown()),
    )
    .with_detail(text)
    .with_hint(
        "Check the key's name and the option \"mount\". A key is made with: \
             vault write -f <mount>/keys/<name> derived=true",
    )
}

fn of_status(code: u16, text: String, server: &Server) -> ProviderError {
    let shown = server.shown();
    let error = |class, message: String| ProviderError::new(class, message).with_detail(&text);
    match code {
        300..=399 => error(ErrorClass::Unreachable, format!("{shown} points to another address"))
            .with_hint("Give the address of the active server or of the load balancer.")
            // Between two leaders a server points elsewhere that would forward a moment later.
            .transient(),
        429 => error(ErrorClass::Throttled, format!("{shown} has too many requests"))
            .with_hint("Try again later, or raise the rate limit quota.")
            .transient(),
        503 if text.contains("sealed") => sealed(server),
        412 | 500..=599 => error(ErrorClass::Unreachable, format!("{shown} has a problem"))
            .with_hint("See the log of Vault.")
            .transient(),
        _ => error(ErrorClass::BadRequest, format!("{shown} refuses the request"))
            .with_hint("See the log of Vault, and check the provider's options."),
    }
}
