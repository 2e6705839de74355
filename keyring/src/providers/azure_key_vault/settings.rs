//! The provider's options, and the addresses to which credentials may be sent.
//!
//! An access token is not bound to the server that receives it. So tokens are sent only to hosts of
//! Azure, and in tests to this machine.

use std::path::PathBuf;

use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;

use super::auth::Auth;
use crate::failure::Failure;
use crate::net::{Trust, client_config};
use crate::options::{INSECURE_HTTP, Options, bad, printable, server_address};

/// A kind of vault in one of Azure's clouds.
struct Cloud {
    /// What the names of its vaults end with.
    suffix: &'static str,
    /// What tokens for it are issued for.
    resource: &'static str,
    /// Who issues tokens.
    login: &'static str,
}

const PUBLIC_LOGIN: &str = "https://login.microsoftonline.com";
const CHINA_LOGIN: &str = "https://login.partner.microsoftonline.cn";
const GOVERNMENT_LOGIN: &str = "https://login.microsoftonline.us";

const CLOUDS: &[Cloud] = &[
    Cloud { suffix: ".vault.azure.net", resource: "https://vault.azure.net", login: PUBLIC_LOGIN },
    Cloud {
        suffix: ".managedhsm.azure.net",
        resource: "https://managedhsm.azure.net",
        login: PUBLIC_LOGIN,
    },
    Cloud { suffix: ".vault.azure.cn", resource: "https://vault.azure.cn", login: CHINA_LOGIN },
    Cloud {
        suffix: ".managedhsm.azure.cn",
        resource: "https://managedhsm.azure.cn",
        login: CHINA_LOGIN,
    },
    Cloud {
        suffix: ".vault.usgovcloudapi.net",
        resource: "https://vault.usgovcloudapi.net",
        login: GOVERNMENT_LOGIN,
    },
    Cloud {
        suffix: ".managedhsm.usgovcloudapi.net",
        resource: "https://managedhsm.usgovcloudapi.net",
        login: GOVERNMENT_LOGIN,
    },
];

/// Only the form is checked; files are read when they are needed.
pub(super) struct Settings {
    pub(super) vault: Url,
    /// What tokens are issued for.
    pub(super) resource: &'static str,
    /// Who issues tokens.
    pub(super) login: Url,
    pub(super) auth: Auth,
    pub(super) ca_file: Option<PathBuf>,
}

impl Settings {
    /// Reads the options, without accessing files.
    pub(super) fn read(options: &Options<'_>) -> Result<Settings, Failure> {
        let insecure = options.flag(INSECURE_HTTP)?;
        let vault = server_address("vault", options.required_text("vault")?, insecure)?;
        let (resource, login) = place(&vault, insecure)?;
        Ok(Settings {
            vault,
            resource,
            login,
            auth: Auth::from_options(options.object("auth")?)?,
            ca_file: options.optional_path("ca_file")?,
        })
    }

    /// Refuses files that cannot work. A missing file may be created later.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        if self.ca_file.as_ref().is_some_and(|path| path.exists()) {
            client_config(&Trust { ca_file: self.ca_file.clone(), identity: None })?;
        }
        self.auth.check_files()
    }
}

/// What tokens for a vault are issued for, and by whom. In tests, this machine is both vault and
/// issuer.
fn place(vault: &Url, insecure: bool) -> Result<(&'static str, Url), Failure> {
    let host = vault.host_str().unwrap_or_default();
    let is_https = vault.scheme() == "https" && vault.port().is_none();
    let cloud = CLOUDS
        .iter()
        .filter(|_| is_https)
        .find(|cloud| host.strip_suffix(cloud.suffix).is_some_and(|name| !name.is_empty()));
    if let Some(cloud) = cloud {
        return Ok((cloud.resource, server_address("login", cloud.login, false)?));
    }
    if insecure && matches!(host, "localhost" | "127.0.0.1" | "[::1]") {
        return Ok((CLOUDS[0].resource, vault.clone()));
    }
    let suffixes: Vec<&str> = CLOUDS.iter().map(|cloud| cloud.suffix).collect();
    Err(Failure::new(
        ErrorClass::Insecure,
        "credentials would be sent to another host than Azure's",
    )
    .with_detail(format!(
        "The host in option \"vault\" does not end with one of {}, or the address is not https.",
        suffixes.join(", ")
    ))
    .with_hint("Specify it as \"https://<name>.vault.azure.net\" or \"https://<name>.managedhsm.azure.net\"."))
}

/// A word of a URL or a form: an id of a tenant, of a client.
pub(super) fn word<'a>(what: &str, text: &'a str) -> Result<&'a str, Failure> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    if text.len() <= 255 && text.bytes().all(is_plain) && !text.starts_with('.') {
        return Ok(text);
    }
    Err(bad(format!("{what} \"{}\" is not valid", printable(text)))
        .with_detail("It consists of letters, digits, \"-\" and \".\".")
        .with_hint("Copy the id from the Azure portal, or from: az account show, az ad app list."))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(options: Value) -> Result<Settings, Failure> {
        let options = options.as_object().unwrap();
        Settings::read(&Options::new("azure_key_vault", options, super::super::OPTIONS)?)
    }

    #[test]
    fn tokens_are_sent_to_azure_only() {
        for (vault, resource, login) in [
            ("https://db.vault.azure.net", "https://vault.azure.net", "login.microsoftonline.com"),
            (
                "https://DB.managedhsm.azure.net/",
                "https://managedhsm.azure.net",
                "login.microsoftonline.com",
            ),
            (
                "https://db.vault.azure.cn",
                "https://vault.azure.cn",
                "login.partner.microsoftonline.cn",
            ),
            (
                "https://db.managedhsm.usgovcloudapi.net",
                "https://managedhsm.usgovcloudapi.net",
                "login.microsoftonline.us",
            ),
        ] {
            let settings = read(json!({"vault": vault})).unwrap();
            assert_eq!((settings.resource, settings.login.host_str()), (resource, Some(login)));
        }
        for bad in [
            "https://vault.example.com",
            "https://db.vault.azure.net.example.com",
            "https://.vault.azure.net",
            "https://vault.azure.net",
            "https://dbvault.azure.net",
            "https://db.vault.azure.net:8443",
            "https://127.0.0.1",
            "http://127.0.0.1:8080",
            "http://db.vault.azure.net",
        ] {
            assert!(read(json!({"vault": bad})).is_err(), "{bad}");
        }
        let here = read(json!({"vault": "http://127.0.0.1:8080", INSECURE_HTTP: true})).unwrap();
        assert_eq!(here.login, here.vault);
        let far = json!({"vault": "https://vault.example.com", INSECURE_HTTP: true});
        assert_eq!(read(far).err().unwrap().class, ErrorClass::Insecure);
    }

    #[test]
    fn ids_cannot_escape_from_their_path() {
        assert!(word("tenant", "72f988bf-86f1-41af-91ab-2d7cd011db47").is_ok());
        assert!(word("tenant", "contoso.onmicrosoft.com").is_ok());
        for bad in ["..", "a/b", "a?b", "a b", "a&b", "\u{e4}", &"x".repeat(256)] {
            assert!(word("tenant", bad).is_err(), "{bad}");
        }
    }
}
