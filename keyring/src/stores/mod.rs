//! The stores of notes. A file outside of the data directory says which one a cluster uses:
//!
//! ```json
//! {"store": "vault", "options": {"address": "https://vault.example.com:8200",
//!   "path": "anchor/app", "auth": {"token_file": "/etc/pagevault/anchor-token"}}}
//! ```
//!
//! Not the keystore, because whoever puts back an older data directory would choose the store with
//! it. A new kind is another module and another row in `KINDS`.

#[cfg(feature = "command")]
mod command;
mod file;

use std::path::Path;

use pagevault_keystore::anchor;
use pagevault_keystore::protocol::ErrorClass;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::access::read_trusted;
use crate::failure::{Failure, unreadable};
use crate::keyfile::place::Place;
use crate::options::{Options, absolute_path, bad, printable};
use crate::provider::Environment;
use crate::providers::file::outside;
use crate::providers::not_built_in;
#[cfg(feature = "vault")]
use crate::providers::vault::kv;
use crate::store::Store;
use crate::trust::FileKind;
use crate::trust::resolve::follow;

/// A kind of store: name, known options, constructor.
struct Kind {
    name: &'static str,
    options: &'static [&'static str],
    build: Constructor,
}

type Constructor = fn(&Options<'_>, &Environment) -> Result<Box<dyn Store>, Failure>;

const KINDS: &[Kind] = &[
    #[cfg(feature = "vault")]
    Kind { name: "vault", options: kv::OPTIONS, build: kv::build },
    #[cfg(feature = "command")]
    Kind { name: "command", options: command::OPTIONS, build: command::build },
    Kind { name: "file", options: file::OPTIONS, build: file::build },
];

/// The names of all kinds. Those with features of this crate may not be built in.
const NAMES: [&str; 3] = ["vault", "command", "file"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    store: String,
    options: Map<String, Value>,
}

/// Creates the store that the options of a request name, without using it.
pub(crate) fn of_request(
    options: &Map<String, Value>,
    environment: &Environment,
) -> Result<Box<dyn Store>, Failure> {
    let options = Options::of_store(anchor::KIND, options, &[anchor::FILE])?;
    build(&options.absolute_path(anchor::FILE)?, environment)
}

/// Creates the store that a file describes, without using it.
///
/// # Errors
/// If others could have written the file, if it is in a data directory, or if it has another form.
pub(crate) fn build(path: &Path, environment: &Environment) -> Result<Box<dyn Store>, Failure> {
    let Description { store, options } = read(path, environment)?;
    let Some(kind) = KINDS.iter().find(|kind| kind.name == store) else {
        if NAMES.contains(&store.as_str()) {
            return Err(not_built_in(&format!("store kind \"{store}\""), &store));
        }
        return Err(bad(format!("unknown kind of store \"{}\"", printable(&store)))
            .with_hint(format!("Known kinds: {}.", NAMES.join(", "))));
    };
    (kind.build)(&Options::of_store(kind.name, &options, kind.options)?, environment)
}

fn read(path: &Path, environment: &Environment) -> Result<Description, Failure> {
    let given = absolute_path(&path.to_string_lossy())?;
    let resolved = follow(FileKind::Anchor, &given).map_err(|unresolved| {
        unresolved.or(|error| {
            unreadable(path, error)
                .with_detail("This file describes the store of the anchor.")
                .with_hint("Check the path in pagevault.anchor, and whether the file is there.")
        })
    })?;
    let place = Place::resolve_as(FileKind::Anchor, &resolved)?;
    outside(&place, environment.data_directory.as_deref())?;
    let text = read_trusted(FileKind::Anchor, &place.path())?;
    serde_json::from_slice(&text).map_err(|error| {
        // The text is not repeated: it may contain a credential by mistake.
        let message = format!("\"{}\" is not a valid anchor file", path.display());
        Failure::new(ErrorClass::BadOptions, message)
            .with_detail(format!(
                "The error is at line {}, column {}.",
                error.line(),
                error.column()
            ))
            .with_hint("It must contain JSON: {\"store\": \"vault\", \"options\": {...}}.")
    })
}
