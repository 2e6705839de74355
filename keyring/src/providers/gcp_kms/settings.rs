//! The provider's options, and the addresses to which credentials may be sent.
//!
//! An access token is not bound to the server that receives it, unlike a signed request. So tokens
//! are sent only to hosts of Google, and in tests to this machine.

use std::path::PathBuf;

use pagevault_keystore::protocol::ErrorClass;
use reqwest::Url;

use super::names::check_key_ring;
use crate::failure::Failure;
use crate::net::{Trust, client_config};
use crate::options::{INSECURE_HTTP, Options, bad, server_address};

/// The address of Cloud KMS.
const ENDPOINT: &str = "https://cloudkms.googleapis.com";

/// All addresses of Google's services end with this: also those of a region
/// (`cloudkms.REGION.rep.googleapis.com`) and of Private Service Connect (`NAME.p.googleapis.com`).
const GOOGLE: &str = ".googleapis.com";

/// Only the form is checked; files are read when they are needed.
pub(super) struct Settings {
    pub(super) endpoint: Url,
    /// Whether credentials may be sent to this machine without TLS.
    pub(super) insecure: bool,
    pub(super) key_ring: Option<String>,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) credentials_file: Option<PathBuf>,
}

impl Settings {
    /// Reads the options, without accessing files.
    pub(super) fn read(options: &Options<'_>) -> Result<Settings, Failure> {
        let insecure = options.flag(INSECURE_HTTP)?;
        let endpoint = options.text("endpoint")?.unwrap_or(ENDPOINT);
        let endpoint = server_address("endpoint", endpoint, insecure)?;
        if !is_allowed(&endpoint, insecure) {
            return Err(elsewhere("option \"endpoint\"").with_hint(
                "Specify it as \"https://...googleapis.com\", or leave it out: then it is \
                 https://cloudkms.googleapis.com.",
            ));
        }
        let key_ring = options.text("key_ring")?;
        Ok(Settings {
            endpoint,
            insecure,
            key_ring: key_ring.map(check_key_ring).transpose()?.map(str::to_owned),
            ca_file: options.optional_path("ca_file")?,
            credentials_file: options.optional_path("credentials_file")?,
        })
    }

    /// Refuses files that cannot work. A missing file may be created later.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        if self.ca_file.as_ref().is_some_and(|path| path.exists()) {
            client_config(&Trust { ca_file: self.ca_file.clone(), identity: None })?;
        }
        Ok(())
    }
}

/// An address of a token service, in a file of credentials.
///
/// # Errors
/// `insecure` if it is not Google's.
pub(super) fn token_address(property: &str, text: &str, insecure: bool) -> Result<Url, Failure> {
    let what = format!("property \"{property}\" of the credentials");
    let url = Url::parse(text).map_err(|error| {
        bad(format!("{what} is not an address"))
            .with_detail(format!("{error}."))
            .with_hint("Download the file from Google again.")
    })?;
    let is_plain = url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    if is_plain && is_allowed(&url, insecure) {
        return Ok(url);
    }
    Err(elsewhere(&what).with_hint("Download the file from Google again."))
}

fn is_allowed(url: &Url, insecure: bool) -> bool {
    let host = url.host_str().unwrap_or_default();
    let is_google = url.scheme() == "https" && url.port().is_none() && host.ends_with(GOOGLE);
    let is_here = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    is_google || insecure && is_here && matches!(url.scheme(), "http" | "https")
}

fn elsewhere(what: &str) -> Failure {
    Failure::new(ErrorClass::Insecure, "credentials would be sent to another host than Google's")
        .with_detail(format!(
            "The host in {what} does not end with \"{GOOGLE}\", or the address is not https."
        ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(options: Value) -> Result<Settings, Failure> {
        let options = options.as_object().unwrap();
        Settings::read(&Options::new("gcp_kms", options, super::super::OPTIONS)?)
    }

    #[test]
    fn tokens_are_sent_to_google_only() {
        assert_eq!(read(json!({})).unwrap().endpoint.as_str(), "https://cloudkms.googleapis.com/");
        for good in [
            "https://cloudkms.europe-west3.rep.googleapis.com",
            "https://cloudkms-db.p.googleapis.com/",
        ] {
            assert!(read(json!({"endpoint": good})).is_ok(), "{good}");
        }
        for bad in [
            "https://kms.example.com",
            "https://googleapis.com.example.com",
            "https://evilgoogleapis.com",
            "https://cloudkms.googleapis.com:8443",
            "https://127.0.0.1",
            "http://127.0.0.1:8080",
            "http://cloudkms.googleapis.com",
        ] {
            let error = read(json!({"endpoint": bad})).err().unwrap();
            assert_eq!(error.class, ErrorClass::Insecure, "{bad}");
        }
        for here in ["http://127.0.0.1:8080", "https://localhost:1"] {
            assert!(read(json!({"endpoint": here, INSECURE_HTTP: true})).is_ok(), "{here}");
        }
        let far = json!({"endpoint": "https://kms.example.com", INSECURE_HTTP: true});
        assert_eq!(read(far).err().unwrap().class, ErrorClass::Insecure);
    }

    #[test]
    fn token_services_are_googles() {
        let read =
            |text: &str| token_address("token_uri", text, false).map_err(|error| error.class);
        assert!(read("https://oauth2.googleapis.com/token").is_ok());
        for bad in [
            "https://evil.example.com/token",
            "https://u:p@oauth2.googleapis.com/token",
            "https://oauth2.googleapis.com/token?to=x",
            "https://oauth2.googleapis.com:444/token",
            "http://oauth2.googleapis.com/token",
            "http://127.0.0.1/token",
        ] {
            assert_eq!(read(bad), Err(ErrorClass::Insecure), "{bad}");
        }
        assert_eq!(read("token"), Err(ErrorClass::BadOptions));
        assert!(token_address("token_uri", "http://127.0.0.1:1/token", true).is_ok());
    }
}
