//! Workload identity federation: a signed token of another issuer, in a file, is exchanged for one
//! of Google (RFC 8693), and that, if the configuration says so, for one of a service account.
//!
//! The configuration names the file. Only a signed token is read from it, and it is sent only to
//! Google: so whoever writes a configuration cannot have other files sent anywhere.

use std::path::{Path, PathBuf};

use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::credentials::{File, SCOPE, token_service};
use super::settings::token_address;
use crate::failure::Failure;
use crate::options::{absolute_path, bad, printable};
use crate::rest::assertion::is_signed_token;
use crate::rest::oauth::{self, Asker};
use crate::rest::{Reply, Rest, Service};
use crate::trust::{FileKind, read};

const GRANT: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";

/// Types of tokens that are signed JSON.
const SIGNED: [&str; 2] =
    ["urn:ietf:params:oauth:token-type:jwt", "urn:ietf:params:oauth:token-type:id_token"];

/// What the token of the pool must permit, to get one of the service account.
const IMPERSONATION_SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";

/// Lifetime of the service account's token.
const LIFETIME: &str = "600s";

const ADVICE: &str = "Compare issuer, audience and expiry of the token with the provider of the workload identity pool, and its attribute condition.";

/// A file of type `external_account`.
pub(super) struct Federation {
    audience: String,
    subject_token_type: String,
    token_url: Url,
    /// Where the service account's token is issued.
    impersonation_url: Option<Url>,
    token_file: PathBuf,
    /// The property with the token, if the file is JSON.
    token_property: Option<String>,
}

#[derive(Deserialize)]
struct Source {
    file: Option<String>,
    #[serde(default)]
    format: Format,
}

#[derive(Deserialize, Default)]
struct Format {
    #[serde(rename = "type")]
    kind: Option<String>,
    subject_token_field_name: Option<String>,
}

impl Federation {
    pub(super) fn read(
        file: &File,
        insecure: bool,
        unusable: &dyn Fn(&str) -> Failure,
    ) -> Result<Federation, Failure> {
        let lacks = |property: &str| unusable(&format!("It has no {property}."));
        let audience = file.audience.clone().ok_or_else(|| lacks("audience"))?;
        let kind = file.subject_token_type.clone().ok_or_else(|| lacks("subject_token_type"))?;
        if !SIGNED.contains(&kind.as_str()) {
            return Err(unusable(
                "Its subject_token_type is not that of a signed token (jwt, id_token).",
            ));
        }
        let source = file.credential_source.clone().ok_or_else(|| lacks("credential_source"))?;
        let source: Source = serde_json::from_value(source)
            .map_err(|_| unusable("Its credential_source has an unknown form."))?;
        let path = source.file.ok_or_else(|| {
            unusable("Its credential_source is not a file. Programs, addresses and the identity of AWS are not supported.")
        })?;
        let token_property = match source.format.kind.as_deref() {
            None | Some("text") => None,
            Some("json") => Some(
                source
                    .format
                    .subject_token_field_name
                    .ok_or_else(|| lacks("subject_token_field_name"))?,
            ),
            Some(_) => return Err(unusable("The format of its credential_source is unknown.")),
        };
        let token_url = file.token_url.as_deref().ok_or_else(|| lacks("token_url"))?;
        let impersonation_url = file.service_account_impersonation_url.as_deref();
        Ok(Federation {
            audience,
            subject_token_type: kind,
            token_url: token_address("token_url", token_url, insecure)?,
            impersonation_url: impersonation_url
                .map(|url| impersonation(url, insecure))
                .transpose()?,
            token_file: absolute_path(&path)?,
            token_property,
        })
    }

    pub(super) fn shown(&self) -> String {
        let pool = printable(self.audience.trim_start_matches("//iam.googleapis.com/"));
        let file = self.token_file.display();
        match self.account() {
            Some(account) => {
                format!("service account {account}, by the token in {file} for {pool}")
            }
            None => format!("the token in {file} for {pool}"),
        }
    }

    fn account(&self) -> Option<String> {
        let path = self.impersonation_url.as_ref()?.path();
        let (_, account) = path.split_once("/serviceAccounts/")?;
        Some(printable(account.strip_suffix(":generateAccessToken")?))
    }

    pub(super) fn token(&self, rest: &Rest) -> Result<Zeroizing<String>, Failure> {
        let subject = self.subject()?;
        let scope = if self.impersonation_url.is_some() { IMPERSONATION_SCOPE } else { SCOPE };
        let form = [
            ("grant_type", GRANT),
            ("audience", self.audience.as_str()),
            ("scope", scope),
            ("requested_token_type", ACCESS_TOKEN),
            ("subject_token_type", self.subject_token_type.as_str()),
            ("subject_token", subject.as_str()),
        ];
        let request = rest.post_form(self.token_url.clone(), &form);
        let who = format!("the token in {}", self.token_file.display());
        let asker = Asker { who: &who, advice: ADVICE, secrets: &[&subject] };
        let token = oauth::token(rest, &token_service(&self.token_url), request, &asker)?;
        match &self.impersonation_url {
            Some(url) => self.impersonate(rest, url, &token),
            None => Ok(token),
        }
    }

    /// The other issuer's token.
    fn subject(&self) -> Result<Zeroizing<String>, Failure> {
        let path = &self.token_file;
        let token = match &self.token_property {
            None => read::read(path, FileKind::ServiceAccount)?,
            Some(property) => {
                let text = read::read_whole(path, FileKind::ServiceAccount)?;
                let value: Value = serde_json::from_slice(&text).unwrap_or_default();
                let token = value.get(property).and_then(Value::as_str).unwrap_or_default();
                Zeroizing::new(token.to_owned())
            }
        };
        if is_signed_token(&token) {
            return Ok(token);
        }
        Err(no_token(path))
    }

    fn impersonate(
        &self,
        rest: &Rest,
        url: &Url,
        token: &str,
    ) -> Result<Zeroizing<String>, Failure> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Issued {
            access_token: String,
        }
        let service = token_service(url);
        let body = json!({"scope": [SCOPE], "lifetime": LIFETIME});
        let reply = rest.ask(&service, rest.post(url.clone(), &body)?.bearer_auth(token))?;
        if !reply.is_success() {
            return Err(self.refusal(&service, &reply));
        }
        let issued: Issued = reply.parse().ok_or_else(|| service.foreign(reply.status))?;
        oauth::usable(&service, Zeroizing::new(issued.access_token))
    }

    /// The service answers in the form of Cloud KMS.
    fn refusal(&self, service: &Service, reply: &Reply) -> Failure {
        let account = self.account().unwrap_or_default();
        let need = super::failure::Need {
            permission: "iam.serviceAccounts.getAccessToken",
            on: &format!("service account {account}"),
        };
        let error = super::failure::of(reply, service, need);
        let is_lasting = matches!(
            error.class,
            ErrorClass::Denied | ErrorClass::KeyMissing | ErrorClass::BadOptions
        );
        if !is_lasting {
            return error;
        }
        // It says nothing about the master key.
        Failure { class: ErrorClass::Unauthenticated, ..error }.with_hint(format!(
            "Grant the identity of the pool roles/iam.workloadIdentityUser on {account}, and check that the account exists."
        ))
    }
}

fn impersonation(text: &str, insecure: bool) -> Result<Url, Failure> {
    let url = token_address("service_account_impersonation_url", text, insecure)?;
    let account = url.path().strip_prefix("/v1/projects/-/serviceAccounts/");
    if account.is_some_and(|rest| rest.ends_with(":generateAccessToken") && !rest.contains('/')) {
        return Ok(url);
    }
    Err(bad("service_account_impersonation_url is not that of a service account")
        .with_detail(
            "It does not end with /v1/projects/-/serviceAccounts/<account>:generateAccessToken.",
        )
        .with_hint("Create the file again: gcloud iam workload-identity-pools create-cred-config."))
}

fn no_token(path: &Path) -> Failure {
    bad(format!("\"{}\" does not contain a signed token", path.display()))
        .with_detail("The content is not a JSON Web Token, so it was not sent.")
        .with_hint("Check the configuration's credential_source, and its format.")
}
