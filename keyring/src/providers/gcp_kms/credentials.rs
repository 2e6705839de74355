//! Where access tokens come from: a file of credentials, or the machine's metadata service.
//!
//! The file is that of the option `credentials_file`, else that of `GOOGLE_APPLICATION_CREDENTIALS`
//! in the environment; without either, the metadata service of the machine is asked. The file
//! contains the key of a service account, or describes a workload identity (`federation`). Other
//! types are refused: those of people, and those that run programs.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_keystore::protocol::ErrorClass;
use serde::Deserialize;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::federation::Federation;
use super::settings::{Settings, token_address};
use crate::failure::Failure;
use crate::options::{bad, printable};
use crate::rest::assertion::{Algorithm, Signer, now};
use crate::rest::oauth::{self, Asker};
use crate::rest::{Rest, Service, metadata};
use crate::trust::{FileKind, read};

/// What tokens permit: Cloud KMS and nothing else.
pub(super) const SCOPE: &str = "https://www.googleapis.com/auth/cloudkms";

/// The variable of Google's tools that names a file of credentials.
const FILE_VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";

/// The variable of Google's tools that names another metadata service.
const METADATA_VARIABLE: &str = "GCE_METADATA_HOST";

const GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";

/// Lifetime of a signed request for a token, in seconds. Google accepts at most an hour.
const ASSERTION_LIFETIME: u64 = 600;

/// A source of access tokens.
pub(super) enum Credentials {
    /// The key of a service account.
    ServiceAccount(ServiceAccount),
    /// A token of another issuer.
    Federation(Federation),
    /// The service account of the machine, or of the pod.
    Metadata,
}

/// The content of a key file of a service account.
pub(super) struct ServiceAccount {
    email: String,
    key_id: Option<String>,
    signer: Signer,
    token_uri: reqwest::Url,
}

/// A file of credentials. Unknown properties are ignored, as by Google's tools.
#[derive(Deserialize)]
pub(super) struct File {
    #[serde(rename = "type", default)]
    kind: String,
    client_email: Option<String>,
    private_key: Option<String>,
    private_key_id: Option<String>,
    token_uri: Option<String>,
    universe_domain: Option<String>,
    pub(super) audience: Option<String>,
    pub(super) subject_token_type: Option<String>,
    pub(super) token_url: Option<String>,
    pub(super) service_account_impersonation_url: Option<String>,
    pub(super) credential_source: Option<Value>,
}

impl Credentials {
    /// Finds the source, and reads its file.
    pub(super) fn find(settings: &Settings) -> Result<Credentials, Failure> {
        let named = settings.credentials_file.clone();
        let ambient = || std::env::var_os(FILE_VARIABLE).filter(|path| !path.is_empty());
        let Some(path) = named.or_else(|| ambient().map(PathBuf::from)) else {
            return Ok(Credentials::Metadata);
        };
        Credentials::read(&path, settings)
    }

    /// Refuses a file that cannot work. A missing file may be created later.
    pub(super) fn check_file(settings: &Settings) -> Result<(), Failure> {
        match settings.credentials_file.as_ref().map(|path| Credentials::read(path, settings)) {
            Some(Err(error)) if error.class != ErrorClass::Unreachable => Err(error),
            _ => Ok(()),
        }
    }

    fn read(path: &Path, settings: &Settings) -> Result<Credentials, Failure> {
        let text = read::read_whole(path, FileKind::Credentials)?;
        let unusable = |detail: &str| unusable(path, detail);
        let file: File = serde_json::from_slice(&text)
            .map_err(|_| unusable("It is not JSON of the form that Google's tools write."))?;
        let file = Wiped(file);
        let domain = file.0.universe_domain.as_deref();
        if domain.is_some_and(|domain| domain != "googleapis.com") {
            return Err(unusable("Its universe_domain is another than googleapis.com."));
        }
        match file.0.kind.as_str() {
            "service_account" => service_account(&file.0, settings.insecure, &unusable)
                .map(Credentials::ServiceAccount),
            "external_account" => {
                Federation::read(&file.0, settings.insecure, &unusable).map(Credentials::Federation)
            }
            "authorized_user" => Err(unusable("It contains the credentials of a person.")),
            "" => Err(unusable("It has no type.")),
            kind => Err(unusable(&format!("Its type, {}, is not supported.", printable(kind)))),
        }
    }

    /// Description for messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Credentials::ServiceAccount(account) => format!("service account {}", account.email),
            Credentials::Federation(federation) => federation.shown(),
            Credentials::Metadata => "the machine's service account".to_owned(),
        }
    }

    /// An access token for [`SCOPE`].
    pub(super) fn token(&self, rest: &Rest) -> Result<Zeroizing<String>, Failure> {
        match self {
            Credentials::ServiceAccount(account) => account.token(rest),
            Credentials::Federation(federation) => federation.token(rest),
            Credentials::Metadata => from_metadata(rest),
        }
    }
}

/// Wipes the private key on drop.
struct Wiped(File);

impl Drop for Wiped {
    fn drop(&mut self) {
        zeroize::Zeroize::zeroize(&mut self.0.private_key);
    }
}

fn unusable(path: &Path, detail: &str) -> Failure {
    bad(format!("\"{}\" is not a usable file of Google credentials", path.display()))
        .with_detail(detail)
        .with_hint(
            "It must be the key of a service account, or the configuration of a workload identity with a token in a file: see docs/gcp-kms.md, \"Credentials\".",
        )
}

fn service_account(
    file: &File,
    insecure: bool,
    unusable: &dyn Fn(&str) -> Failure,
) -> Result<ServiceAccount, Failure> {
    let lacks = |property: &str| unusable(&format!("It has no {property}."));
    let email = file.client_email.as_deref().ok_or_else(|| lacks("client_email"))?;
    let key = file.private_key.as_deref().ok_or_else(|| lacks("private_key"))?;
    let signer = Signer::from_pem(key.as_bytes(), Algorithm::Rs256)
        .ok_or_else(|| unusable("Its private_key is not an RSA key in PEM."))?;
    let token_uri = file.token_uri.as_deref().unwrap_or("https://oauth2.googleapis.com/token");
    Ok(ServiceAccount {
        email: printable(email),
        key_id: file.private_key_id.clone(),
        signer,
        token_uri: token_address("token_uri", token_uri, insecure)?,
    })
}

/// A token service, for messages.
pub(super) fn token_service(url: &reqwest::Url) -> Service {
    let host = url.host_str().unwrap_or_default();
    Service { whose: "a token service's", place: format!("Google's token service {host}") }
}

impl ServiceAccount {
    /// Signs a request for a token, and sends it (RFC 7523 section 2.1).
    fn token(&self, rest: &Rest) -> Result<Zeroizing<String>, Failure> {
        let issued = now();
        let mut header = json!({"alg": self.signer.name(), "typ": "JWT"});
        if let Some(id) = &self.key_id {
            header["kid"] = json!(id);
        }
        let claims = json!({"iss": self.email, "scope": SCOPE, "aud": self.token_uri.as_str(),
            "iat": issued, "exp": issued + ASSERTION_LIFETIME});
        let assertion = self.signer.sign(&header, &claims).ok_or_else(|| {
            Failure::new(ErrorClass::Internal, "could not sign a request to Google")
                .with_hint("Check the key of the service account.")
        })?;
        let form = [("grant_type", GRANT), ("assertion", assertion.as_str())];
        let request = rest.post_form(self.token_uri.clone(), &form);
        let asker = Asker {
            who: &format!("service account {}", self.email),
            advice: "Check that the service account and its key exist and are enabled, and that this machine's clock is correct.",
            secrets: &[&assertion],
        };
        oauth::token(rest, &token_service(&self.token_uri), request, &asker)
    }
}

/// A token of the machine's service account. On Kubernetes with workload identity, of the pod's.
fn from_metadata(rest: &Rest) -> Result<Zeroizing<String>, Failure> {
    const PATH: &str = "computeMetadata/v1/instance/service-accounts/default/token";
    let address = metadata::address(METADATA_VARIABLE)?;
    let place = format!("Google's metadata service at {}", address.as_str().trim_end_matches('/'));
    let service = Service { whose: "a metadata service's", place };
    let url = address.join(PATH).map_err(|_| service.foreign(0))?;
    let request = rest.get(url).header("Metadata-Flavor", "Google");
    let reply = rest.ask(&service, request).map_err(|error| {
        error.with_hint(
            "Set the option \"credentials_file\", if this machine has no metadata service of Google.",
        )
    })?;
    // The service itself proves by this that it is one.
    if reply.headers.get("Metadata-Flavor").is_none_or(|flavor| flavor != "Google") {
        return Err(service.foreign(reply.status));
    }
    match reply.status {
        404 => Err(Failure::new(
            ErrorClass::Unauthenticated,
            "this machine has no service account of Google",
        )
        .with_detail("The metadata service answered with HTTP status 404.")
        .with_hint(
            "Attach a service account to the machine, or set the option \"credentials_file\".",
        )),
        429 => Err(service.throttled("It answered with HTTP status 429.".to_owned())),
        500.. => {
            Err(service.unavailable(format!("It answered with HTTP status {}.", reply.status)))
        }
        _ => {
            #[derive(Deserialize)]
            struct Issued {
                access_token: String,
            }
            let issued = Some(&reply).filter(|reply| reply.is_success());
            let issued: Option<Issued> = issued.and_then(|reply| reply.parse());
            let token = issued.ok_or_else(|| service.foreign(reply.status))?.access_token;
            oauth::usable(&service, Zeroizing::new(token))
        }
    }
}

/// Base64 as in Google's JSON.
pub(super) fn base64(bytes: &[u8]) -> Zeroizing<String> {
    Zeroizing::new(STANDARD.encode(bytes))
}
