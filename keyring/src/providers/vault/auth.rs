//! Logging in to Vault. Options name files and roles; secrets are only in the files.
//!
//! ```json
//! {"token_file": "/run/vault/token"}
//! {"approle": {"role_id_file": "...", "secret_id_file": "...", "mount": "approle"}}
//! {"kubernetes": {"role": "postgres", "jwt_file": "...", "mount": "kubernetes"}}
//! {"jwt": {"role": "postgres", "jwt_file": "...", "mount": "jwt"}}
//! {"aws": {"role": "postgres", "server_id": "vault.example.com", "mount": "aws"}}
//! {"cert": {"cert_file": "...", "key_file": "...", "name": "postgres", "mount": "cert"}}
//! ```

use std::path::{Path, PathBuf};

use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value};
use vaultrs::api::auth::approle::requests::LoginWithApproleRequest;
use vaultrs::api::auth::cert::requests::LoginRequest;
use vaultrs::api::auth::oidc::requests::JWTLoginRequest;
use zeroize::Zeroizing;

use super::api::{Api, NoAnswer, built};
#[cfg(feature = "aws_kms")]
use super::aws_login::{AwsLogin, SignedRequest};
use crate::failure::Failure;
use crate::options::{Options, bad};
use crate::provider::Environment;
use crate::trust::{FileKind, read};

/// The file in which Kubernetes puts the token of a container's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// A method of logging in.
pub(super) enum Auth {
    /// In a file, which an agent or an operator maintains.
    TokenFile(PathBuf),
    AppRole {
        mount: String,
        role_id_file: PathBuf,
        secret_id_file: PathBuf,
    },
    /// A signed token: of the service account (`kubernetes`), or of another issuer (`jwt`).
    Jwt {
        mount: String,
        role: String,
        jwt_file: PathBuf,
        is_kubernetes: bool,
    },
    /// As a principal of AWS.
    #[cfg(feature = "aws_kms")]
    Aws(AwsLogin),
    Cert {
        mount: String,
        name: String,
        cert_file: PathBuf,
        key_file: PathBuf,
    },
}

/// The content of the files of [`Auth`].
pub(super) enum Credentials {
    Token(Zeroizing<String>),
    AppRole {
        role_id: Zeroizing<String>,
        secret_id: Zeroizing<String>,
    },
    Jwt(Zeroizing<String>),
    #[cfg(feature = "aws_kms")]
    Aws(SignedRequest),
    Cert,
}

impl Auth {
    /// From the option `auth`.
    pub(super) fn from_options(
        auth: Option<&Map<String, Value>>,
        environment: &Environment,
    ) -> Result<Auth, Failure> {
        const METHODS: &[&str] = &["token_file", "approle", "kubernetes", "jwt", "aws", "cert"];
        let hint = "Specify one of \"token_file\", \"approle\", \"kubernetes\", \"jwt\", \"aws\", \"cert\".";
        let empty = Map::new();
        let auth = auth.unwrap_or(&empty);
        let options = Options::new("vault", auth, METHODS)?;
        if auth.len() != 1 {
            let problem = if auth.is_empty() { "has no" } else { "has more than one" };
            return Err(bad(format!("option \"auth\" {problem} login method")).with_hint(hint));
        }
        if let Some(path) = options.optional_path("token_file")? {
            return Ok(Auth::TokenFile(path));
        }
        if let Some(values) = options.object("approle")? {
            let known = &["role_id_file", "secret_id_file", "mount"];
            let options = Options::new("vault", values, known)?;
            return Ok(Auth::AppRole {
                mount: mount(&options, "approle")?,
                role_id_file: options.absolute_path("role_id_file")?,
                secret_id_file: options.absolute_path("secret_id_file")?,
            });
        }
        if let Some(values) = options.object("kubernetes")? {
            let options = Options::new("vault", values, &["role", "jwt_file", "mount"])?;
            let jwt_file = options.optional_path("jwt_file")?;
            return Ok(Auth::Jwt {
                mount: mount(&options, "kubernetes")?,
                role: options.required_text("role")?.to_owned(),
                jwt_file: jwt_file.unwrap_or_else(|| SERVICE_ACCOUNT.into()),
                is_kubernetes: true,
            });
        }
        if let Some(values) = options.object("jwt")? {
            let options = Options::new("vault", values, &["role", "jwt_file", "mount"])?;
            return Ok(Auth::Jwt {
                mount: mount(&options, "jwt")?,
                role: options.required_text("role")?.to_owned(),
                jwt_file: options.absolute_path("jwt_file")?,
                is_kubernetes: false,
            });
        }
        if let Some(values) = options.object("aws")? {
            return aws(values, environment);
        }
        let values = options.object("cert")?.ok_or_else(|| bad("invalid option \"auth\""))?;
        let options = Options::new("vault", values, &["cert_file", "key_file", "name", "mount"])?;
        Ok(Auth::Cert {
            mount: mount(&options, "cert")?,
            name: options.text("name")?.unwrap_or_default().to_owned(),
            cert_file: options.absolute_path("cert_file")?,
            key_file: options.absolute_path("key_file")?,
        })
    }

    /// Certificate and key for TLS.
    pub(super) fn identity(&self) -> Option<(PathBuf, PathBuf)> {
        match self {
            Auth::Cert { cert_file, key_file, .. } => Some((cert_file.clone(), key_file.clone())),
            _ => None,
        }
    }

    /// Description for messages.
    pub(super) fn shown(&self) -> String {
        let path = |path: &Path| path.display().to_string();
        match self {
            Auth::TokenFile(file) => format!("the token in {}", path(file)),
            Auth::AppRole { mount, .. } => format!("AppRole at auth/{mount}"),
            Auth::Jwt { mount, role, is_kubernetes: true, .. } => {
                format!("Kubernetes role \"{role}\" at auth/{mount}")
            }
            Auth::Jwt { mount, role, jwt_file, .. } => {
                format!("the JWT in {} for role \"{role}\" at auth/{mount}", path(jwt_file))
            }
            #[cfg(feature = "aws_kms")]
            Auth::Aws(login) => login.shown(),
            Auth::Cert { mount, cert_file, .. } => {
                format!("certificate {} at auth/{mount}", path(cert_file))
            }
        }
    }

    /// Reads the files, except those that the TLS configuration reads.
    pub(super) fn read(&self) -> Result<Credentials, Failure> {
        Ok(match self {
            Auth::TokenFile(file) => Credentials::Token(read::read(file, FileKind::Credentials)?),
            Auth::AppRole { role_id_file, secret_id_file, .. } => Credentials::AppRole {
                role_id: read::read(role_id_file, FileKind::Trusted)?,
                secret_id: read::read(secret_id_file, FileKind::Credentials)?,
            },
            Auth::Jwt { jwt_file, is_kubernetes, .. } => {
                let kind =
                    if *is_kubernetes { FileKind::ServiceAccount } else { FileKind::Credentials };
                Credentials::Jwt(read::read(jwt_file, kind)?)
            }
            #[cfg(feature = "aws_kms")]
            Auth::Aws(login) => Credentials::Aws(login.sign()?),
            Auth::Cert { .. } => Credentials::Cert,
        })
    }

    /// Refuses files that cannot work, without using the network. A missing file may be created
    /// later.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        let read = match self {
            #[cfg(feature = "aws_kms")]
            Auth::Aws(login) => login.check_file(),
            _ => self.read().map(drop),
        };
        match read {
            Err(error) if error.class == ErrorClass::Unreachable => Ok(()),
            read => read,
        }
    }

    /// What to examine if Vault does not accept the login.
    pub(super) fn advice(&self) -> &'static str {
        match self {
            Auth::Jwt { .. } => {
                "It may have expired. Renew it, or compare its audience, issuer and claims with what the role requires."
            }
            #[cfg(feature = "aws_kms")]
            Auth::Aws(_) => AwsLogin::ADVICE,
            _ => {
                "It may have expired or been revoked. Renew it; nothing needs to be changed in PostgreSQL."
            }
        }
    }

    /// The token: the credentials themselves, or the one that Vault returns for them.
    pub(super) async fn token(
        &self,
        api: &Api,
        credentials: &Credentials,
    ) -> Result<Zeroizing<String>, NoAnswer> {
        match (self, credentials) {
            (_, Credentials::Token(token)) => Ok(token.clone()),
            (Auth::AppRole { mount, .. }, Credentials::AppRole { role_id, secret_id }) => {
                let mut request = LoginWithApproleRequest::builder();
                request.mount(mount).role_id(role_id.as_str()).secret_id(secret_id.as_str());
                api.log_in(built(request.build())?).await
            }
            (Auth::Jwt { mount, role, .. }, Credentials::Jwt(jwt)) => {
                let mut request = JWTLoginRequest::builder();
                request.mount(mount).role(role).jwt(jwt.as_str());
                api.log_in(built(request.build())?).await
            }
            #[cfg(feature = "aws_kms")]
            (Auth::Aws(login), Credentials::Aws(signed)) => login.token(api, signed).await,
            (Auth::Cert { mount, name, .. }, Credentials::Cert) => {
                let mut request = LoginRequest::builder();
                request.mount(mount).cert_name(name);
                api.log_in(built(request.build())?).await
            }
            _ => Err(NoAnswer::Unsent),
        }
    }

    /// True if the token was issued for this process and is to be revoked at the end.
    pub(super) fn token_is_ours(&self) -> bool {
        !matches!(self, Auth::TokenFile(_))
    }
}

#[cfg(feature = "aws_kms")]
fn aws(values: &Map<String, Value>, environment: &Environment) -> Result<Auth, Failure> {
    let options = Options::new("vault", values, AwsLogin::OPTIONS)?;
    AwsLogin::read(&options, mount(&options, "aws")?, environment).map(Auth::Aws)
}

#[cfg(not(feature = "aws_kms"))]
fn aws(_: &Map<String, Value>, _: &Environment) -> Result<Auth, Failure> {
    Err(crate::providers::not_built_in("login \"aws\" to Vault", "aws_kms"))
}

fn mount(options: &Options<'_>, default: &str) -> Result<String, Failure> {
    super::path("mount", options.text("mount")?.unwrap_or(default))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(auth: Value) -> Result<Auth, Failure> {
        let environment = Environment {
            data_directory: None,
            deadline: None,
            programs: false,
            repeats_programs: false,
        };
        Auth::from_options(auth.as_object(), &environment)
    }

    #[test]
    fn exactly_one_method_of_logging_in_is_accepted() {
        for good in [
            json!({"token_file": "/t"}),
            json!({"approle":
                {"role_id_file": "/r", "secret_id_file": "/s", "mount": "team/approle"}}),
            json!({"kubernetes": {"role": "db"}}),
            json!({"jwt": {"role": "db", "jwt_file": "/j"}}),
            json!({"aws": {"role": "db"}}),
            json!({"aws": {"role": "db", "server_id": "vault.example.com", "region": "eu-central-1",
                "profile": "db", "credentials_file": "/c", "mount": "team/aws"}}),
            json!({"cert": {"cert_file": "/c", "key_file": "/k"}}),
        ] {
            assert!(parse(good.clone()).is_ok(), "{good}");
        }
        for wrong in [
            json!({}),
            json!(null),
            json!({"token": "hvs.hunter2"}),
            json!({"token_file": "relative"}),
            json!({"token_file": "/t", "cert": {"cert_file": "/c", "key_file": "/k"}}),
            json!({"approle": {"role_id": "hunter2", "secret_id": "hunter2"}}),
            json!({"approle": {"role_id_file": "/r"}}),
            json!({"approle": "hunter2"}),
            json!({"kubernetes": {}}),
            json!({"jwt": {"role": "db"}}),
            json!({"jwt": {"role": "db", "jwt": "hunter2"}}),
            json!({"jwt": {"role": "db\r\nx", "jwt_file": "/j"}}),
            json!({"aws": {}}),
            json!({"aws": {"role": "db", "secret_access_key": "hunter2"}}),
            json!({"aws": {"role": "db", "server_id": "a\r\nx-vault-token: hunter2"}}),
            json!({"aws": {"role": "db", "server_id": "ä"}}),
            json!({"aws": {"role": "db", "region": "evil.example.com/"}}),
            json!({"cert": {"cert_file": "/c"}}),
            json!({"cert": {"cert_file": "/c", "key_file": "/k", "mount": "../sys"}}),
        ] {
            let error = parse(wrong.clone()).err().unwrap_or_else(|| panic!("{wrong}"));
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
