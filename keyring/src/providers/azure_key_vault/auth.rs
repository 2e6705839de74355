//! Access tokens of Microsoft Entra ID, and of the metadata service of a machine. Options name
//! files and ids; secrets are only in the files.
//!
//! ```json
//! {"managed_identity": {"client_id": "..."}}
//! {"workload_identity": {"tenant": "...", "client_id": "...", "token_file": "..."}}
//! {"client_secret": {"tenant": "...", "client_id": "...", "secret_file": "..."}}
//! {"client_certificate":
//!     {"tenant": "...", "client_id": "...", "cert_file": "...", "key_file": "..."}}
//! ```
//!
//! Without any of them: the workload identity of the pod, if the environment has its variables,
//! else the managed identity of the machine.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use pagevault_cipher::secret::fill_random;
use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::settings::{Settings, word};
use crate::failure::Failure;
use crate::net::pem;
use crate::options::{Options, absolute_path, bad};
use crate::rest::assertion::{Algorithm, Signer, is_signed_token, now};
use crate::rest::oauth::{self, Asker};
use crate::rest::{Rest, Service, metadata};
use crate::trust::{FileKind, read};

/// Variables that Azure's webhook sets in pods.
const TENANT: &str = "AZURE_TENANT_ID";
const CLIENT: &str = "AZURE_CLIENT_ID";
const TOKEN_FILE: &str = "AZURE_FEDERATED_TOKEN_FILE";

/// The variable of Azure's tools that names another metadata service.
const METADATA_VARIABLE: &str = "AZURE_POD_IDENTITY_AUTHORITY_HOST";

const ASSERTION: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";

/// Lifetime of a signed request for a token, in seconds.
const ASSERTION_LIFETIME: u64 = 600;

const METHODS: &[&str] =
    &["managed_identity", "workload_identity", "client_secret", "client_certificate"];

/// A way to get tokens.
pub(super) enum Auth {
    /// Whatever the environment offers.
    Ambient,
    Managed {
        client_id: Option<String>,
    },
    Workload(Workload),
    Secret {
        client: Client,
        file: PathBuf,
    },
    Certificate {
        client: Client,
        cert_file: PathBuf,
        key_file: PathBuf,
    },
}

/// What is not given is taken from the environment.
#[derive(Default)]
pub(super) struct Workload {
    tenant: Option<String>,
    client_id: Option<String>,
    token_file: Option<PathBuf>,
}

/// An application in a tenant.
#[derive(Clone)]
pub(super) struct Client {
    tenant: String,
    id: String,
}

/// What a request for a token needs, read from files and the environment.
pub(super) enum Credentials {
    Managed { client_id: Option<String> },
    Federated { client: Client, file: PathBuf, token: Zeroizing<String> },
    Secret { client: Client, secret: Zeroizing<String> },
    Certificate { client: Client, thumbprint: String, signer: Signer },
}

impl Auth {
    /// From the option `auth`.
    pub(super) fn from_options(auth: Option<&Map<String, Value>>) -> Result<Auth, Failure> {
        let Some(auth) = auth else { return Ok(Auth::Ambient) };
        let options = Options::new("azure_key_vault", auth, METHODS)?;
        if auth.len() != 1 {
            return Err(bad("option \"auth\" must have exactly one login method")
                .with_hint(format!("Specify one of {}.", METHODS.join(", "))));
        }
        if let Some(values) = options.object("managed_identity")? {
            let options = Options::new("azure_key_vault", values, &["client_id"])?;
            return Ok(Auth::Managed { client_id: id(&options, "client_id")? });
        }
        if let Some(values) = options.object("workload_identity")? {
            let known = &["tenant", "client_id", "token_file"];
            let options = Options::new("azure_key_vault", values, known)?;
            return Ok(Auth::Workload(Workload {
                tenant: id(&options, "tenant")?,
                client_id: id(&options, "client_id")?,
                token_file: options.optional_path("token_file")?,
            }));
        }
        if let Some(values) = options.object("client_secret")? {
            let known = &["tenant", "client_id", "secret_file"];
            let options = Options::new("azure_key_vault", values, known)?;
            let file = options.absolute_path("secret_file")?;
            return Ok(Auth::Secret { client: client(&options)?, file });
        }
        let values = options.object("client_certificate")?;
        let values = values.ok_or_else(|| bad("invalid option \"auth\""))?;
        let known = &["tenant", "client_id", "cert_file", "key_file"];
        let options = Options::new("azure_key_vault", values, known)?;
        Ok(Auth::Certificate {
            client: client(&options)?,
            cert_file: options.absolute_path("cert_file")?,
            key_file: options.absolute_path("key_file")?,
        })
    }

    /// Refuses files that cannot work. A missing file may be created later.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        if matches!(self, Auth::Ambient | Auth::Workload(Workload { token_file: None, .. })) {
            return Ok(());
        }
        let missing = |path: &PathBuf| !path.exists();
        match self {
            Auth::Certificate { cert_file, key_file, .. }
                if missing(cert_file) || missing(key_file) =>
            {
                Ok(())
            }
            // The ids may be those of another environment than that of the server.
            Auth::Workload(Workload { token_file: Some(file), .. }) => found(federated(file)),
            _ => found(self.read()),
        }
    }

    /// Reads the files.
    pub(super) fn read(&self) -> Result<Credentials, Failure> {
        Ok(match self {
            Auth::Ambient if std::env::var_os(TOKEN_FILE).is_none_or(|path| path.is_empty()) => {
                Credentials::Managed { client_id: None }
            }
            Auth::Ambient => Workload::default().read()?,
            Auth::Managed { client_id } => Credentials::Managed { client_id: client_id.clone() },
            Auth::Workload(workload) => workload.read()?,
            Auth::Secret { client, file } => Credentials::Secret {
                client: client.clone(),
                secret: read::read(file, FileKind::Credentials)?,
            },
            Auth::Certificate { client, cert_file, key_file } => {
                let client = client.clone();
                let thumbprint = thumbprint(cert_file)?;
                let key = pem(key_file, FileKind::Credentials)?;
                let signer = Signer::from_pem(&key, Algorithm::Ps256).ok_or_else(|| {
                    bad(format!("\"{}\" is not an RSA key in PEM", key_file.display()))
                        .with_detail("Entra accepts RSA keys only.")
                        .with_hint("Specify the key of the certificate in \"cert_file\".")
                })?;
                Credentials::Certificate { client, thumbprint, signer }
            }
        })
    }
}

fn found<T>(read: Result<T, Failure>) -> Result<(), Failure> {
    match read {
        Err(error) if error.class != ErrorClass::Unreachable => Err(error),
        _ => Ok(()),
    }
}

fn id(options: &Options<'_>, name: &str) -> Result<Option<String>, Failure> {
    Ok(options.text(name)?.map(|text| word(name, text)).transpose()?.map(str::to_owned))
}

fn client(options: &Options<'_>) -> Result<Client, Failure> {
    let tenant = word("tenant", options.required_text("tenant")?)?.to_owned();
    let id = word("client_id", options.required_text("client_id")?)?.to_owned();
    Ok(Client { tenant, id })
}

/// The SHA-256 of the certificate, as Entra shows it.
fn thumbprint(path: &Path) -> Result<String, Failure> {
    let text = pem(path, FileKind::Trusted)?;
    let certificate = CertificateDer::from_pem_slice(&text).map_err(|error| {
        bad(format!("\"{}\" is not a certificate in PEM", path.display()))
            .with_detail(format!("{error}."))
            .with_hint("Specify the certificate that is registered with the application.")
    })?;
    Ok(URL_SAFE_NO_PAD.encode(Sha256::digest(&certificate)))
}

/// The token in a file. A file with other content is not sent anywhere.
fn federated(file: &Path) -> Result<Zeroizing<String>, Failure> {
    let token = read::read(file, FileKind::ServiceAccount)?;
    if is_signed_token(&token) {
        return Ok(token);
    }
    Err(bad(format!("\"{}\" does not contain a signed token", file.display()))
        .with_detail("The content is not a JSON Web Token, so it was not sent.")
        .with_hint("Check the path of the token."))
}

impl Workload {
    fn read(&self) -> Result<Credentials, Failure> {
        let ambient = |given: &Option<String>, variable: &str| -> Result<String, Failure> {
            let named = given.clone().or_else(|| std::env::var(variable).ok());
            let named = named.filter(|text| !text.is_empty()).ok_or_else(|| lacking(variable))?;
            word(variable, &named).map(str::to_owned)
        };
        let file = match &self.token_file {
            Some(file) => file.clone(),
            None => {
                let named = std::env::var(TOKEN_FILE).ok().filter(|text| !text.is_empty());
                absolute_path(&named.ok_or_else(|| lacking(TOKEN_FILE))?)?
            }
        };
        let tenant = ambient(&self.tenant, TENANT)?;
        let id = ambient(&self.client_id, CLIENT)?;
        let token = federated(&file)?;
        Ok(Credentials::Federated { client: Client { tenant, id }, file, token })
    }
}

fn lacking(variable: &str) -> Failure {
    bad(format!("no workload identity: neither the options nor {variable} specify it"))
        .with_detail(
            "Azure's webhook sets the variables in pods whose service account has an identity.",
        )
        .with_hint("Set tenant, client_id and token_file in the option \"auth\".")
}

impl Credentials {
    /// Description for messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Credentials::Managed { client_id: None } => "the machine's managed identity".to_owned(),
            Credentials::Managed { client_id: Some(id) } => format!("managed identity {id}"),
            Credentials::Federated { client, file, .. } => {
                format!("application {}, by the token in {}", client.id, file.display())
            }
            Credentials::Secret { client, .. } => format!("application {}, by a secret", client.id),
            Credentials::Certificate { client, .. } => {
                format!("application {}, by a certificate", client.id)
            }
        }
    }

    /// An access token for the vault.
    pub(super) fn token(
        &self,
        rest: &Rest,
        settings: &Settings,
    ) -> Result<Zeroizing<String>, Failure> {
        match self {
            Credentials::Managed { client_id } => {
                self.managed_token(rest, settings, client_id.as_deref())
            }
            Credentials::Federated { client, token, .. } => {
                let form = [("client_assertion_type", ASSERTION), ("client_assertion", token)];
                let advice = "Compare issuer, subject and audience of the token with the federated credential of the application; it may have expired.";
                self.ask(rest, settings, client, &form, advice)
            }
            Credentials::Secret { client, secret } => {
                let advice = "The secret may have expired. Replace the file; nothing needs to be changed in PostgreSQL.";
                self.ask(rest, settings, client, &[("client_secret", secret.as_str())], advice)
            }
            Credentials::Certificate { client, thumbprint, signer } => {
                let url = token_address(settings, client)?;
                let assertion = assertion(client, thumbprint, signer, &url)?;
                let form = [
                    ("client_assertion_type", ASSERTION),
                    ("client_assertion", assertion.as_str()),
                ];
                let advice = "Check that the certificate is registered with the application and has not expired, and that this machine's clock is correct.";
                self.ask(rest, settings, client, &form, advice)
            }
        }
    }

    /// Asks Entra; the last field of `form` is secret.
    fn ask(
        &self,
        rest: &Rest,
        settings: &Settings,
        client: &Client,
        form: &[(&str, &str)],
        advice: &str,
    ) -> Result<Zeroizing<String>, Failure> {
        let scope = format!("{}/.default", settings.resource);
        let mut fields = vec![
            ("grant_type", "client_credentials"),
            ("client_id", client.id.as_str()),
            ("scope", scope.as_str()),
        ];
        fields.extend_from_slice(form);
        let host = settings.login.host_str().unwrap_or_default();
        let service =
            Service { whose: "a Microsoft Entra", place: format!("Microsoft Entra at {host}") };
        let request = rest.post_form(token_address(settings, client)?, &fields);
        let secret = form.last().map_or("", |(_, secret)| secret);
        let asker = Asker { who: &self.shown(), advice, secrets: &[secret] };
        oauth::token(rest, &service, request, &asker)
    }

    /// Asks the metadata service of the machine.
    fn managed_token(
        &self,
        rest: &Rest,
        settings: &Settings,
        client_id: Option<&str>,
    ) -> Result<Zeroizing<String>, Failure> {
        let mut url = metadata::address(METADATA_VARIABLE)?;
        let place = format!("Azure's metadata service at {}", url.as_str().trim_end_matches('/'));
        let service = Service { whose: "a metadata service's", place };
        url.set_path("/metadata/identity/oauth2/token");
        url.query_pairs_mut()
            .append_pair("api-version", "2018-02-01")
            .append_pair("resource", settings.resource);
        if let Some(id) = client_id {
            url.query_pairs_mut().append_pair("client_id", id);
        }
        let request = rest.get(url).header("Metadata", "true");
        let advice = "Assign an identity to the machine: az vm identity assign. If it has several, set client_id in \"managed_identity\".";
        let asker = Asker { who: &self.shown(), advice, secrets: &[] };
        oauth::token(rest, &service, request, &asker).map_err(|error| match error.class {
            ErrorClass::Unreachable | ErrorClass::Deadline => error.with_hint(
                "Set the option \"auth\", if this machine has no metadata service of Azure.",
            ),
            _ => error,
        })
    }
}

fn token_address(settings: &Settings, client: &Client) -> Result<Url, Failure> {
    let url = settings.login.join(&format!("{}/oauth2/v2.0/token", client.tenant));
    url.map_err(|error| bad("invalid tenant").with_detail(format!("{error}.")))
}

/// A signed request for a token (Microsoft identity platform, "certificate credentials").
fn assertion(
    client: &Client,
    thumbprint: &str,
    signer: &Signer,
    url: &Url,
) -> Result<Zeroizing<String>, Failure> {
    let failed = || Failure::new(ErrorClass::Internal, "could not sign a request to Entra");
    let mut id = [0; 16];
    fill_random(&mut id).map_err(|_| failed())?;
    let issued = now();
    let header = json!({"alg": signer.name(), "typ": "JWT", "x5t#S256": thumbprint});
    let claims = json!({"aud": url.as_str(), "iss": client.id, "sub": client.id,
        "jti": URL_SAFE_NO_PAD.encode(id), "nbf": issued, "exp": issued + ASSERTION_LIFETIME});
    signer.sign(&header, &claims).ok_or_else(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_method_of_logging_in_is_accepted() {
        let parse = |auth: Value| Auth::from_options(auth.as_object());
        for good in [
            json!({"managed_identity": {}}),
            json!({"managed_identity": {"client_id": "1"}}),
            json!({"workload_identity": {}}),
            json!({"workload_identity": {"tenant": "t", "client_id": "1", "token_file": "/t"}}),
            json!({"client_secret": {"tenant": "t", "client_id": "1", "secret_file": "/s"}}),
            json!({"client_certificate":
                {"tenant": "t", "client_id": "1", "cert_file": "/c", "key_file": "/k"}}),
        ] {
            assert!(parse(good.clone()).is_ok(), "{good}");
        }
        assert!(matches!(Auth::from_options(None), Ok(Auth::Ambient)));
        for wrong in [
            json!({}),
            json!({"managed_identity": {}, "workload_identity": {}}),
            json!({"managed_identity": "hunter2"}),
            json!({"client_secret": {"tenant": "t", "client_id": "1", "secret": "hunter2"}}),
            json!({"client_secret": {"tenant": "t", "client_id": "1"}}),
            json!({"client_secret": {"tenant": "a/b", "client_id": "1", "secret_file": "/s"}}),
            json!({"client_secret": {"tenant": "t", "client_id": "1", "secret_file": "s"}}),
            json!({"client_certificate": {"tenant": "t", "client_id": "1", "cert_file": "/c"}}),
            json!({"azure_cli": {}}),
        ] {
            let error = parse(wrong.clone()).err().unwrap_or_else(|| panic!("{wrong}"));
            assert_eq!(error.class, ErrorClass::BadOptions);
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
