//! Logging in to Vault. Options name files and roles; secrets are only in the files.
//!
//! ```json
//! {"token_file": "/run/vault/token"}
//! {"approle": {"role_id_file": "...", "secret_id_file": "...", "mount": "approle"}}
//! {"kubernetes": {"role": "postgres", "jwt_file": "...", "mount": "kubernetes"}}
//! {"cert": {"cert_file": "...", "key_file": "...", "name": "postgres", "mount": "cert"}}
//! ```

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use vaultrs::api::auth::approle::requests::LoginWithApproleRequest;
use vaultrs::api::auth::cert::requests::LoginRequest;
use vaultrs::api::auth::kubernetes::requests::LoginWithKubernetesRequest;
use zeroize::Zeroizing;

use super::api::{Api, NoAnswer, built};
use crate::failure::Failure;
use crate::options::{Options, bad};
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
    Kubernetes {
        mount: String,
        role: String,
        jwt_file: PathBuf,
    },
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
    AppRole { role_id: Zeroizing<String>, secret_id: Zeroizing<String> },
    Kubernetes { jwt: Zeroizing<String> },
    Cert,
}

impl Auth {
    pub(super) fn from_options(auth: Option<&Map<String, Value>>) -> Result<Auth, Failure> {
        const METHODS: &[&str] = &["token_file", "approle", "kubernetes", "cert"];
        let hint = "Specify one of \"token_file\", \"approle\", \"kubernetes\", \"cert\".";
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
            return Ok(Auth::Kubernetes {
                mount: mount(&options, "kubernetes")?,
                role: options.required_text("role")?.to_owned(),
                jwt_file: jwt_file.unwrap_or_else(|| SERVICE_ACCOUNT.into()),
            });
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
            Auth::Kubernetes { mount, role, .. } => {
                format!("Kubernetes role \"{role}\" at auth/{mount}")
            }
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
            Auth::Kubernetes { jwt_file, .. } => {
                Credentials::Kubernetes { jwt: read::read(jwt_file, FileKind::ServiceAccount)? }
            }
            Auth::Cert { .. } => Credentials::Cert,
        })
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
            (Auth::Kubernetes { mount, role, .. }, Credentials::Kubernetes { jwt }) => {
                let mut request = LoginWithKubernetesRequest::builder();
                request.mount(mount).role(role).jwt(jwt.as_str());
                api.log_in(built(request.build())?).await
            }
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

fn mount(options: &Options<'_>, default: &str) -> Result<String, Failure> {
    super::path("mount", options.text("mount")?.unwrap_or(default))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(auth: Value) -> Result<Auth, Failure> {
        Auth::from_options(auth.as_object())
    }

    #[test]
    fn exactly_one_method_of_logging_in_is_accepted() {
        for good in [
            json!({"token_file": "/t"}),
            json!({"approle":
                {"role_id_file": "/r", "secret_id_file": "/s", "mount": "team/approle"}}),
            json!({"kubernetes": {"role": "db"}}),
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
            json!({"cert": {"cert_file": "/c"}}),
            json!({"cert": {"cert_file": "/c", "key_file": "/k", "mount": "../sys"}}),
        ] {
            let error = parse(wrong.clone()).err().unwrap_or_else(|| panic!("{wrong}"));
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
