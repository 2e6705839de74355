//! The providers, one module each with the same parts: option names, constructor, [`Provider`]. A
//! new kind is another module and another row in `KINDS`.

#[cfg(feature = "aws_kms")]
pub mod aws_kms;
#[cfg(feature = "azure_key_vault")]
pub mod azure_key_vault;
#[cfg(feature = "command")]
pub mod command;
pub mod file;
#[cfg(feature = "gcp_kms")]
pub mod gcp_kms;
#[cfg(feature = "kmip")]
pub mod kmip;
#[cfg(feature = "pkcs11")]
pub mod pkcs11;
#[cfg(any(feature = "aws_kms", feature = "gcp_kms"))]
mod service_wrapping;
#[cfg(feature = "vault")]
pub mod vault;

use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::options::{Options, printable};
use crate::provider::{Environment, Provider};

/// A kind of provider: name, known options, constructor.
struct Kind {
    name: &'static str,
    options: &'static [&'static str],
    /// Options that decide which credentials are read, and where they are sent.
    credential_options: &'static [&'static str],
    /// Whether it always runs in a process of its own.
    has_process: bool,
    build: Constructor,
}

type Constructor = fn(&Options<'_>, &Environment) -> Result<Box<dyn Provider>, Failure>;

const KINDS: &[Kind] = &[
    Kind {
        name: "file",
        options: file::OPTIONS,
        credential_options: &[],
        has_process: false,
        build: file::build,
    },
    #[cfg(feature = "vault")]
    Kind {
        name: "vault",
        options: vault::OPTIONS,
        credential_options: vault::CREDENTIAL_OPTIONS,
        has_process: false,
        build: vault::build,
    },
    #[cfg(feature = "aws_kms")]
    Kind {
        name: "aws_kms",
        options: aws_kms::OPTIONS,
        credential_options: aws_kms::CREDENTIAL_OPTIONS,
        has_process: false,
        build: aws_kms::build,
    },
    #[cfg(feature = "gcp_kms")]
    Kind {
        name: "gcp_kms",
        options: gcp_kms::OPTIONS,
        credential_options: gcp_kms::CREDENTIAL_OPTIONS,
        has_process: false,
        build: gcp_kms::build,
    },
    #[cfg(feature = "azure_key_vault")]
    Kind {
        name: "azure_key_vault",
        options: azure_key_vault::OPTIONS,
        credential_options: azure_key_vault::CREDENTIAL_OPTIONS,
        has_process: false,
        build: azure_key_vault::build,
    },
    // Its module is permitted separately, see `access`.
    #[cfg(feature = "pkcs11")]
    Kind {
        name: "pkcs11",
        options: pkcs11::OPTIONS,
        credential_options: pkcs11::CREDENTIAL_OPTIONS,
        has_process: true,
        build: pkcs11::build,
    },
    #[cfg(feature = "kmip")]
    Kind {
        name: "kmip",
        options: kmip::OPTIONS,
        credential_options: kmip::CREDENTIAL_OPTIONS,
        has_process: false,
        build: kmip::build,
    },
    // Its programs are permitted separately, see `access`.
    #[cfg(feature = "command")]
    Kind {
        name: "command",
        options: command::OPTIONS,
        credential_options: &[],
        has_process: true,
        build: command::build,
    },
];

/// The names of all kinds, built in or not. Each but `file` is also a feature of this crate.
const NAMES: [&str; 8] =
    ["file", "vault", "aws_kms", "gcp_kms", "azure_key_vault", "pkcs11", "kmip", "command"];

/// All kinds by name, and whether they are built in.
pub(crate) fn kinds() -> impl Iterator<Item = (&'static str, bool)> {
    NAMES.iter().map(|name| (*name, KINDS.iter().any(|kind| kind.name == *name)))
}

/// The failure for something that this program was built without.
pub(crate) fn not_built_in(what: &str, feature: &str) -> Failure {
    Failure::new(ErrorClass::BadOptions, format!("{what} is not built in"))
        .with_detail(format!(
            "This pagevault-keyring was built without the Cargo feature \"{feature}\"."
        ))
        .with_hint(
            "Use the program of pagevault's packages, which has all features, or build it with this one. \"pagevault-keyring providers\" shows what is built in.",
        )
}

/// Those of the given options that decide which credentials are read, and where they are sent.
pub(crate) fn credential_options(kind: &str, options: &Map<String, Value>) -> Vec<&'static str> {
    let known = KINDS.iter().find(|known| known.name == kind);
    let names = known.map_or(&[][..], |known| known.credential_options).iter().copied();
    names.filter(|name| options.contains_key(*name)).collect()
}

/// Whether providers of this kind run in processes of their own. Others may start programs if they
/// are permitted to ([`Environment::programs`]).
pub(crate) fn has_process(kind: &str) -> bool {
    KINDS.iter().any(|known| known.name == kind && known.has_process)
}

/// Creates a provider of the given kind, without using network or keys.
///
/// # Errors
/// `bad_options` for an unknown kind, one that is not built in, an unknown option or a value of the
/// wrong form.
pub fn build(
    kind: &str,
    options: &Map<String, Value>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let Some(known) = KINDS.iter().find(|known| known.name == kind) else {
        if NAMES.contains(&kind) {
            return Err(not_built_in(&format!("provider kind \"{kind}\""), kind));
        }
        return Err(Failure::new(
            ErrorClass::BadOptions,
            format!("unknown provider kind \"{}\"", printable(kind)),
        )
        .with_hint(format!("Known kinds: {}.", NAMES.join(", "))));
    };
    (known.build)(&Options::new(known.name, options, known.options)?, environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "vault")]
    #[test]
    fn every_option_with_a_destination_of_credentials_is_known_as_such() {
        let options = serde_json::json!({"address": "", "addresses": [], "auth": {}, "mount": ""});
        let named = credential_options("vault", options.as_object().unwrap());
        assert_eq!(named, ["address", "addresses", "auth"]);
    }

    #[cfg(all(feature = "gcp_kms", feature = "azure_key_vault"))]
    #[test]
    fn so_it_is_with_providers_of_clouds() {
        let options = serde_json::json!({"vault": "", "auth": {}, "ca_file": "", "key_ring": "",
            "credentials_file": "", "endpoint": "", "insecure_loopback_http": true});
        for (kind, expected) in [
            ("azure_key_vault", ["vault", "auth", "insecure_loopback_http"]),
            ("gcp_kms", ["credentials_file", "endpoint", "insecure_loopback_http"]),
        ] {
            assert_eq!(credential_options(kind, options.as_object().unwrap()), expected, "{kind}");
        }
    }

    #[cfg(feature = "kmip")]
    #[test]
    fn credentials_of_kmip_are_known_as_such() {
        let options = serde_json::json!({"address": "", "cert_file": "", "key_file": "",
            "username": "", "password_file": "", "ca_file": "", "version": ""});
        let named = credential_options("kmip", options.as_object().unwrap());
        assert_eq!(named, ["address", "cert_file", "key_file", "username", "password_file"]);
    }

    #[test]
    fn each_kind_is_built_in_or_said_to_be_missing() {
        assert!(KINDS.iter().all(|kind| NAMES.contains(&kind.name)));
        let environment = Environment {
            data_directory: None,
            deadline: None,
            programs: false,
            repeats_programs: false,
        };
        for (name, is_built_in) in kinds() {
            let error = build(name, &Map::new(), &environment).err().map(|error| error.message);
            let is_missing = error.is_some_and(|message| message.ends_with("is not built in"));
            assert_eq!(is_missing, !is_built_in, "{name}");
        }
    }
}
