//! The options of the provider, checked for their form only.

use std::net::Ipv6Addr;
use std::path::PathBuf;

use rustls::pki_types::ServerName;

use super::message::Version;
use crate::failure::Failure;
use crate::net::Trust;
use crate::options::{Options, bad};

/// Names of all options.
pub const OPTIONS: &[&str] = &[
    "address",
    "addresses",
    "ca_file",
    "cert_file",
    "key_file",
    "username",
    "password_file",
    "version",
    "allow_extractable",
];

/// Options that decide which credentials are read, and where they are sent.
pub const CREDENTIAL_OPTIONS: &[&str] =
    &["address", "addresses", "cert_file", "key_file", "username", "password_file"];

/// The port that IANA has assigned to KMIP.
const PORT: u16 = 5696;

/// Maximum number of addresses.
const ADDRESS_LIMIT: usize = 16;

/// The options.
pub(super) struct Settings {
    /// At least one.
    pub(super) addresses: Vec<Address>,
    /// Trusted authorities, and the certificate of this client.
    pub(super) trust: Trust,
    /// User name, and the file with the password.
    pub(super) login: Option<(String, PathBuf)>,
    /// The only version to use.
    pub(super) version: Option<Version>,
    /// Accept keys whose values may leave the server.
    pub(super) allow_extractable: bool,
}

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// The name that its certificate must have.
    pub(super) name: ServerName<'static>,
    pub(super) host: String,
    pub(super) port: u16,
}

impl Address {
    /// As in options and messages.
    pub(super) fn shown(&self) -> String {
        if self.host.contains(':') {
            return format!("[{}]:{}", self.host, self.port);
        }
        format!("{}:{}", self.host, self.port)
    }
}

impl Settings {
    /// Reads the options.
    ///
    /// # Errors
    /// `bad_options` if one has the wrong form.
    pub(super) fn of(options: &Options<'_>) -> Result<Settings, Failure> {
        let texts = match (options.text("address")?, options.texts("addresses")?) {
            (Some(address), None) => vec![address],
            (None, Some(addresses)) if (1..=ADDRESS_LIMIT).contains(&addresses.len()) => addresses,
            (None, Some(_)) => {
                return Err(bad(format!(
                    "option \"addresses\" must have 1 to {ADDRESS_LIMIT} addresses"
                )));
            }
            (Some(_), Some(_)) => {
                return Err(bad("options \"address\" and \"addresses\" exclude each other")
                    .with_hint("Give one address, or the addresses of all servers of a cluster."));
            }
            (None, None) => return Err(options.missing("address", "\"kmip.example.com\"")),
        };
        let login = match (options.text("username")?, options.optional_path("password_file")?) {
            (Some(name), Some(file)) => Some((name.to_owned(), file)),
            (None, None) => None,
            _ => {
                return Err(bad("options \"username\" and \"password_file\" belong together")
                    .with_hint("Specify both, or none if the certificate is enough."));
            }
        };
        let identity = (options.absolute_path("cert_file")?, options.absolute_path("key_file")?);
        Ok(Settings {
            addresses: texts.into_iter().map(address).collect::<Result<_, _>>()?,
            trust: Trust { ca_file: options.optional_path("ca_file")?, identity: Some(identity) },
            login,
            version: options.text("version")?.map(version).transpose()?,
            allow_extractable: options.flag("allow_extractable")?,
        })
    }
}

/// A host, and a port if it is not the standard one.
fn address(text: &str) -> Result<Address, Failure> {
    let wrong = || {
        // The value is not repeated: it may contain a credential by mistake.
        bad("option \"address\" or \"addresses\" is not the address of a server")
            .with_detail("An address consists of a host name or an IP address, and a port if it is not 5696.")
            .with_hint("Specify it as \"kmip.example.com\", \"kmip.example.com:5696\", \"10.0.0.1\" or \"[fd00::1]:5696\".")
    };
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, Some(rest.strip_prefix(':').ok_or_else(wrong)?)),
        None if text.parse::<Ipv6Addr>().is_ok() => (text, None),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let digits = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let port = match port {
        None => PORT,
        Some(port) => port.parse().ok().filter(|_| digits(port)).ok_or_else(wrong)?,
    };
    let name = ServerName::try_from(host.to_owned()).map_err(|_| wrong())?;
    if port == 0 || text.starts_with('[') && host.parse::<Ipv6Addr>().is_err() {
        return Err(wrong());
    }
    Ok(Address { name, host: host.to_owned(), port })
}

fn version(text: &str) -> Result<Version, Failure> {
    Version::ALL.into_iter().find(|version| version.name() == text).ok_or_else(|| {
        bad("option \"version\" is not a supported version of KMIP")
            .with_hint("Specify \"1.4\", \"2.0\" or \"2.1\", or leave it out: then the newest that the server knows is used.")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagevault_keystore::protocol::ErrorClass;
    use serde_json::{Value, json};

    fn read(more: &Value) -> Result<Settings, Failure> {
        let mut values =
            json!({"address": "kmip.example.com", "cert_file": "/c", "key_file": "/k"});
        let map = values.as_object_mut().unwrap();
        for (name, value) in more.as_object().unwrap() {
            match value {
                Value::Null => drop(map.remove(name)),
                value => drop(map.insert(name.clone(), value.clone())),
            }
        }
        Settings::of(&Options::new("kmip", map, OPTIONS)?)
    }

    #[test]
    fn options_are_read() {
        let settings = read(&json!({"version": "1.4", "username": "db", "password_file": "/p",
            "allow_extractable": true, "ca_file": "/ca"}))
        .unwrap();
        assert_eq!(settings.version, Some(Version::V1_4));
        assert_eq!(settings.login, Some(("db".to_owned(), "/p".into())));
        assert!(settings.allow_extractable);
        let settings = read(&json!({"address": null, "addresses": ["a", "b:1"]})).unwrap();
        let shown: Vec<String> = settings.addresses.iter().map(Address::shown).collect();
        assert_eq!(shown, ["a:5696", "b:1"]);
        assert!(settings.login.is_none() && !settings.allow_extractable);
    }

    #[test]
    fn addresses_are_hosts_with_ports() {
        for (text, shown) in [
            ("kmip.example.com", "kmip.example.com:5696"),
            ("kmip:9000", "kmip:9000"),
            ("10.0.0.1", "10.0.0.1:5696"),
            ("10.0.0.1:1", "10.0.0.1:1"),
            ("fd00::1", "[fd00::1]:5696"),
            ("[fd00::1]", "[fd00::1]:5696"),
            ("[fd00::1]:65535", "[fd00::1]:65535"),
        ] {
            assert_eq!(address(text).unwrap().shown(), shown);
        }
        for wrong in [
            "",
            ":5696",
            "kmip:",
            "kmip:0",
            "kmip:65536",
            "kmip:+1",
            "kmip:5696:1",
            "https://kmip",
            "kmip/path",
            "user:hunter2@kmip",
            "[kmip]:1",
            "[fd00::1]1",
            "[fd00::1",
            "a b",
        ] {
            let error = address(wrong).err().unwrap_or_else(|| panic!("accepted: {wrong}"));
            assert_eq!(error.class, ErrorClass::BadOptions);
            assert!(!format!("{error:?}").contains("hunter2"));
        }
    }

    #[test]
    fn options_of_another_form_are_refused() {
        for wrong in [
            json!({"address": null}),
            json!({"address": ["a"]}),
            json!({"addresses": ["a"]}),
            json!({"address": null, "addresses": []}),
            json!({"address": null, "addresses": vec!["a"; ADDRESS_LIMIT + 1]}),
            json!({"cert_file": null}),
            json!({"cert_file": "c"}),
            json!({"key_file": null}),
            json!({"ca_file": "ca"}),
            json!({"username": "db"}),
            json!({"password_file": "/p"}),
            json!({"password": "hunter2"}),
            json!({"version": "1.2"}),
            json!({"version": 2}),
            json!({"allow_extractable": "yes"}),
        ] {
            let error = read(&wrong).err().unwrap_or_else(|| panic!("accepted: {wrong}"));
            assert_eq!(error.class, ErrorClass::BadOptions, "{wrong}");
            assert!(!format!("{error:?}").contains("hunter2"));
        }
    }
}
