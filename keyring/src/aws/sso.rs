//! Profiles of IAM Identity Center (SSO). A person logs in with `aws sso login`, which leaves an
//! access token in a file; with that, credentials of a role are requested here. The token is not
//! renewed: when it has expired, a person logs in again.
//!
//! The token works for whoever receives it, so it is sent to AWS only, whatever files say. In tests
//! `AWS_ENDPOINT_URL_SSO` names this machine.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};
use std::{env, fs};

use aws_config::profile;
use aws_credential_types::credential_feature::AwsCredentialFeature;
use aws_runtime::env_config::file::EnvConfigFiles;
use aws_sdk_kms::config::Credentials;
use pagevault_keystore::audit::utc;
use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;
use serde::Deserialize;
use serde_json::Value;
use zeroize::Zeroizing;

use super::source::check_region;
use crate::failure::{Failure, unreadable};
use crate::options::{bad, printable};
use crate::rest::{Reply, Rest, Service};
use crate::trust::{FileKind, read};

/// Where AWS's command line keeps tokens, below the home directory.
const CACHE: &str = ".aws/sso/cache";

/// Maximum number of files there that are read.
const FILES: usize = 100;

const ENDPOINT_VARIABLE: &str = "AWS_ENDPOINT_URL_SSO";

/// A profile with the properties of SSO.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sso {
    profile: String,
    start_url: String,
    region: String,
    account: String,
    role: String,
}

/// A file that `aws sso login` writes. Others in the same directory have no token.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cached {
    start_url: Option<String>,
    access_token: Option<String>,
    expires_at: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Issued {
    role_credentials: RoleCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RoleCredentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    /// Milliseconds since 1970.
    expiration: u64,
}

impl Sso {
    /// The selected profile, if it has a role of SSO. Errors in files are reported by the SDK.
    pub(super) async fn find(
        files: &EnvConfigFiles,
        profile: Option<String>,
    ) -> Result<Option<Sso>, Failure> {
        let name = profile.map(Cow::Owned);
        let loaded = profile::load(&Default::default(), &Default::default(), files, name).await;
        let Ok(all) = loaded else { return Ok(None) };
        let (Some(account), Some(role)) = (all.get("sso_account_id"), all.get("sso_role_name"))
        else {
            return Ok(None);
        };
        let session = all.get("sso_session").map(|name| all.sso_session(name));
        let property = |name: &str| match &session {
            Some(session) => session.and_then(|session| session.get(name)),
            None => all.get(name),
        };
        let profile = printable(all.selected_profile());
        let (Some(start_url), Some(region)) = (property("sso_start_url"), property("sso_region"))
        else {
            return Err(bad(format!("profile \"{profile}\" lacks properties of SSO"))
                .with_detail("It, or its sso_session, has no sso_start_url or no sso_region.")
                .with_hint("Configure it again: aws configure sso."));
        };
        check_region(region)?;
        Ok(Some(Sso {
            profile,
            start_url: start_url.to_owned(),
            region: region.to_owned(),
            account: account.to_owned(),
            role: role.to_owned(),
        }))
    }

    /// Credentials of the role.
    pub(super) fn credentials(&self, deadline: Option<Instant>) -> Result<Credentials, Failure> {
        let token = self.token(&cache()?)?;
        let rest = Rest::new(None, deadline)?;
        let mut url = self.endpoint()?;
        let place = format!("IAM Identity Center at {}", url.host_str().unwrap_or_default());
        let service = Service { whose: "an IAM Identity Center", place };
        url.set_path("/federation/credentials");
        url.query_pairs_mut()
            .append_pair("role_name", &self.role)
            .append_pair("account_id", &self.account);
        let request = rest.get(url).header("x-amz-sso_bearer_token", token.as_str());
        let reply = rest.ask(&service, request)?;
        if !reply.is_success() {
            return Err(self.refusal(&service, &reply));
        }
        let issued: Issued = reply.parse().ok_or_else(|| service.foreign(reply.status))?;
        let RoleCredentials { access_key_id, secret_access_key, session_token, expiration } =
            issued.role_credentials;
        let expires = UNIX_EPOCH.checked_add(Duration::from_millis(expiration));
        let mut credentials = Credentials::new(
            access_key_id,
            secret_access_key,
            Some(session_token),
            expires,
            "IAM Identity Center",
        );
        let features = credentials.get_property_mut_or_default::<Vec<AwsCredentialFeature>>();
        features.push(AwsCredentialFeature::CredentialsSso);
        Ok(credentials)
    }

    fn endpoint(&self) -> Result<Url, Failure> {
        let named = env::var(ENDPOINT_VARIABLE).ok().and_then(|text| Url::parse(&text).ok());
        let is_here =
            |url: &Url| matches!(url.host_str(), Some("localhost" | "127.0.0.1" | "[::1]"));
        if let Some(url) = named.filter(is_here) {
            return Ok(url);
        }
        let domain =
            if self.region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        let text = format!("https://portal.sso.{}.{domain}/", self.region);
        Url::parse(&text).map_err(|error| bad("invalid region").with_detail(format!("{error}.")))
    }

    /// The newest token of this session that a login has left in `directory`.
    fn token(&self, directory: &Path) -> Result<Zeroizing<String>, Failure> {
        let entries = fs::read_dir(directory).map_err(|_| self.no_login(directory))?;
        let mut newest: Option<(String, Zeroizing<String>)> = None;
        let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
        let is_json =
            |path: &PathBuf| path.extension().is_some_and(|extension| extension == "json");
        for path in paths.filter(is_json).take(FILES) {
            let text = read::read_whole(&path, FileKind::Credentials)?;
            let Ok(cached) = serde_json::from_slice::<Cached>(&text) else { continue };
            let token = cached.access_token.map(Zeroizing::new);
            let expires = cached.expires_at.unwrap_or_default();
            let is_newer = newest.as_ref().is_none_or(|(newest, _)| *newest < expires);
            if let Some(token) = token
                && is_newer
                && cached.start_url.as_deref() == Some(&self.start_url)
            {
                newest = Some((expires, token));
            }
        }
        let (expires, token) = newest.ok_or_else(|| self.no_login(directory))?;
        let now = utc(crate::clock::now_us());
        // Both are in UTC, with digits of the same width; what follows the seconds differs.
        if expires.get(..19).is_none_or(|expires| expires <= &now[..19]) {
            return Err(Failure::new(
                ErrorClass::Unauthenticated,
                format!("the login of profile \"{}\" has expired", self.profile),
            )
            .with_detail(format!("It was valid until {}.", printable(&expires)))
            .with_hint(self.advice()));
        }
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(self.no_login(directory));
        }
        Ok(token)
    }

    fn no_login(&self, directory: &Path) -> Failure {
        Failure::new(
            ErrorClass::Unauthenticated,
            format!("nobody has logged in for profile \"{}\"", self.profile),
        )
        .with_detail(format!(
            "\"{}\" has no token for {}.",
            directory.display(),
            printable(&self.start_url)
        ))
        .with_hint(self.advice())
    }

    fn advice(&self) -> String {
        format!(
            "As the server's operating system user: aws sso login --profile {}. For servers, a role of the machine is better.",
            self.profile
        )
    }

    fn refusal(&self, service: &Service, reply: &Reply) -> Failure {
        let body: Value = reply.parse().unwrap_or_default();
        let header = reply.headers.get("x-amzn-errortype").and_then(|kind| kind.to_str().ok());
        let kind = body["__type"].as_str().or(header).unwrap_or_default();
        let kind = kind.rsplit('#').next().unwrap_or_default().split(':').next();
        let kind = printable(kind.unwrap_or_default());
        let answered = format!("It answered {kind} with HTTP status {}.", reply.status);
        match (reply.status, kind.as_str()) {
            (429, _) => service.throttled(answered),
            (500.., _) => service.unavailable(answered),
            (401, "UnauthorizedException") => Failure::new(
                ErrorClass::Unauthenticated,
                format!("the login of profile \"{}\" has ended", self.profile),
            )
            .with_detail(answered)
            .with_hint(self.advice()),
            (
                400 | 403 | 404,
                "ForbiddenException" | "ResourceNotFoundException" | "InvalidRequestException",
            ) => Failure::new(
                ErrorClass::Unauthenticated,
                format!("profile \"{}\" gives no credentials", self.profile),
            )
            .with_detail(answered)
            .with_hint("Check sso_account_id and sso_role_name, and that the role is assigned."),
            _ => service.foreign(reply.status),
        }
    }
}

/// The directory of tokens.
fn cache() -> Result<PathBuf, Failure> {
    let home = env::var_os("HOME").filter(|home| !home.is_empty()).ok_or_else(|| {
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        unreadable(Path::new(CACHE), &missing).with_hint(
            "The server's environment has no HOME, in which `aws sso login` keeps tokens.",
        )
    })?;
    Ok(PathBuf::from(home).join(CACHE))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use aws_runtime::env_config::file::EnvConfigFileKind;

    use super::*;

    fn find(config: &str, profile: &str) -> Result<Option<Sso>, Failure> {
        let files = EnvConfigFiles::builder()
            .with_contents(EnvConfigFileKind::Config, config)
            .with_contents(EnvConfigFileKind::Credentials, "")
            .build();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Sso::find(&files, Some(profile.to_owned())))
    }

    const CONFIG: &str = "[profile new]
sso_session = corp
sso_account_id = 111122223333
sso_role_name = postgres
[profile old]
sso_start_url = https://corp.awsapps.com/start
sso_region = eu-central-1
sso_account_id = 111122223333
sso_role_name = postgres
[profile lacking]
sso_session = gone
sso_account_id = 111122223333
sso_role_name = postgres
[profile foreign]
sso_start_url = https://corp.awsapps.com/start
sso_region = evil.example.com/
sso_account_id = 111122223333
sso_role_name = postgres
[profile plain]
region = eu-central-1
[sso-session corp]
sso_start_url = https://corp.awsapps.com/start
sso_region = eu-central-1
";

    #[test]
    fn both_forms_of_profiles_are_known() {
        for name in ["new", "old"] {
            let found = find(CONFIG, name).unwrap().unwrap();
            let expected = Sso {
                profile: name.to_owned(),
                start_url: "https://corp.awsapps.com/start".to_owned(),
                region: "eu-central-1".to_owned(),
                account: "111122223333".to_owned(),
                role: "postgres".to_owned(),
            };
            assert_eq!(found, expected);
            let host = found.endpoint().unwrap();
            assert_eq!(host.as_str(), "https://portal.sso.eu-central-1.amazonaws.com/");
        }
        assert_eq!(find(CONFIG, "plain").unwrap(), None);
        assert_eq!(find(CONFIG, "none").unwrap(), None);
        assert_eq!(find("garbage", "none").unwrap(), None);
        for name in ["lacking", "foreign"] {
            assert_eq!(find(CONFIG, name).unwrap_err().class, ErrorClass::BadOptions, "{name}");
        }
    }

    #[test]
    fn the_newest_token_of_the_session_is_used() {
        let sso = find(CONFIG, "new").unwrap().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, start: &str, token: &str, expires: &str| {
            let path = directory.path().join(name);
            let text = serde_json::json!({"startUrl": start, "accessToken": token,
                "expiresAt": expires, "region": "eu-central-1"});
            fs::write(&path, text.to_string()).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        };
        let class = |sso: &Sso| sso.token(directory.path()).map_err(|error| error.class);
        let missing = sso.token(&directory.path().join("none")).unwrap_err();
        assert_eq!(missing.class, ErrorClass::Unauthenticated);
        assert_eq!(class(&sso), Err(ErrorClass::Unauthenticated));
        fs::write(directory.path().join("other.txt"), "x").unwrap();
        write("registration.json", "x", "", "2099-01-01T00:00:00Z");
        write("other.json", "https://other.awsapps.com/start", "no", "2099-01-01T00:00:00Z");
        write("a.json", &sso.start_url, "old", "2020-01-01T00:00:00UTC");
        assert_eq!(class(&sso), Err(ErrorClass::Unauthenticated));
        write("b.json", &sso.start_url, "new", "2098-01-01T00:00:00Z");
        write("c.json", &sso.start_url, "older", "2097-01-01T00:00:00Z");
        assert_eq!(class(&sso).map(|token| token.to_string()), Ok("new".to_owned()));
        let path = directory.path().join("c.json");
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(class(&sso), Err(ErrorClass::Insecure));
    }
}
