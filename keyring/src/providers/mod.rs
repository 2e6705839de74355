//! The providers: one file each, the same shape each (option names, constructor, [`Provider`]).
//! A new kind is one more file and one more row in `KINDS`.

pub mod aws_kms;
pub mod command;
pub mod file;
pub mod vault;

use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value};

use crate::options::{Options, printable};
use crate::provider::{Environment, Provider, ProviderError};

/// A kind of provider: its name, the options it knows, its constructor.
struct Kind {
    name: &'static str,
    options: &'static [&'static str],
    build: Constructor,
}

type Constructor = fn(&Options<'_>, &Environment) -> Result<Box<dyn Provider>, ProviderError>;

const KINDS: &[Kind] = &[
    Kind { name: "file", options: file::OPTIONS, build: file::build },
    Kind { name: "vault", options: vault::OPTIONS, build: vault::build },
    Kind { name: "aws_kms", options: aws_kms::OPTIONS, build: aws_kms::build },
    Kind { name: "command", options: command::OPTIONS, build: command::build },
];

/// Makes a provider of the named kind. Touches neither network nor keys.
///
/// # Errors
/// `bad_options` for an unknown kind, an unknown option or a value of the wrong form.
pub fn build(
    kind: &str,
    options: &Map<String, Value>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, ProviderError> {
    let Some(known) = KINDS.iter().find(|known| known.name == kind) else {
        let names: Vec<&str> = KINDS.iter().map(|known| known.name).collect();
        return Err(ProviderError::new(
            ErrorClass::BadOptions,
            format!("unknown provider kind \"{}\"", printable(kind)),
        )
        .with_hint(format!("Known kinds: {}.", names.join(", "))));
    };
    (known.build)(&Options::new(known.name, options, known.options)?, environment)
}
