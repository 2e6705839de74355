//! The providers, one module each with the same parts: option names, constructor, [`Provider`]. A
//! new kind is another module and another row in `KINDS`.

pub mod aws_kms;
pub mod command;
pub mod file;
pub mod pkcs11;
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
    build: Constructor,
}

type Constructor = fn(&Options<'_>, &Environment) -> Result<Box<dyn Provider>, Failure>;

const KINDS: &[Kind] = &[
    Kind { name: "file", options: file::OPTIONS, credential_options: &[], build: file::build },
    Kind {
        name: "vault",
        options: vault::OPTIONS,
        credential_options: vault::CREDENTIAL_OPTIONS,
        build: vault::build,
    },
    Kind {
        name: "aws_kms",
        options: aws_kms::OPTIONS,
        credential_options: aws_kms::CREDENTIAL_OPTIONS,
        build: aws_kms::build,
    },
    // Its module is permitted separately, see `access`.
    Kind {
        name: "pkcs11",
        options: pkcs11::OPTIONS,
        credential_options: pkcs11::CREDENTIAL_OPTIONS,
        build: pkcs11::build,
    },
    // Its programs are permitted separately, see `access`.
    Kind {
        name: "command",
        options: command::OPTIONS,
        credential_options: &[],
        build: command::build,
    },
];

/// Those of the given options that decide which credentials are read, and where they are sent.
pub(crate) fn credential_options(kind: &str, options: &Map<String, Value>) -> Vec<&'static str> {
    let known = KINDS.iter().find(|known| known.name == kind);
    let names = known.map_or(&[][..], |known| known.credential_options).iter().copied();
    names.filter(|name| options.contains_key(*name)).collect()
}

/// Creates a provider of the given kind, without using network or keys.
///
/// # Errors
/// `bad_options` for an unknown kind, an unknown option or a value of the wrong form.
pub fn build(
    kind: &str,
    options: &Map<String, Value>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    let Some(known) = KINDS.iter().find(|known| known.name == kind) else {
        let names: Vec<&str> = KINDS.iter().map(|known| known.name).collect();
        return Err(Failure::new(
            ErrorClass::BadOptions,
            format!("unknown provider kind \"{}\"", printable(kind)),
        )
        .with_hint(format!("Known kinds: {}.", names.join(", "))));
    };
    (known.build)(&Options::new(known.name, options, known.options)?, environment)
}
