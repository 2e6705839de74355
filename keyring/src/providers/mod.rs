//! The providers: one file each, the same shape each (option names, constructor, [`Provider`]).
//! A new kind is one more file and one more row in `KINDS`.

pub mod aws_kms;
pub mod command;
pub mod file;
pub mod vault;

use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::options::{Options, printable};
use crate::provider::{Environment, Provider};

/// A kind of provider: its name, the options it knows, its constructor.
struct Kind {
    name: &'static str,
    options: &'static [&'static str],
    /// Those that say which credentials are read, and where they are sent.
    reaching: &'static [&'static str],
    build: Constructor,
}

type Constructor = fn(&Options<'_>, &Environment) -> Result<Box<dyn Provider>, Failure>;

const KINDS: &[Kind] = &[
    Kind { name: "file", options: file::OPTIONS, reaching: &[], build: file::build },
    Kind { name: "vault", options: vault::OPTIONS, reaching: vault::REACHING, build: vault::build },
    Kind {
        name: "aws_kms",
        options: aws_kms::OPTIONS,
        reaching: aws_kms::REACHING,
        build: aws_kms::build,
    },
    // Its programs are asked about apart.
    Kind { name: "command", options: command::OPTIONS, reaching: &[], build: command::build },
];

/// Which of these options say what credentials are read, and where they are sent.
pub(crate) fn reaching(kind: &str, options: &Map<String, Value>) -> Vec<&'static str> {
    let known = KINDS.iter().find(|known| known.name == kind);
    let names = known.map_or(&[][..], |known| known.reaching).iter().copied();
    names.filter(|name| options.contains_key(*name)).collect()
}

/// Makes a provider of the named kind. Touches neither network nor keys.
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
