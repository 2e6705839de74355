//! Other people's programs, which tools/extensions installs and lists in `PAGEVAULT_PROGRAMS`:
//! `name=path` pairs, separated by spaces.

use std::path::PathBuf;

/// Path of the program with this name, if it is listed and exists.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    find(&promised(), name).filter(|path| path.exists())
}

/// Whether the program is required.
pub(crate) fn is_promised(name: &str) -> bool {
    find(&promised(), name).is_some()
}

fn promised() -> String {
    std::env::var("PAGEVAULT_PROGRAMS").unwrap_or_default()
}

fn find(pairs: &str, name: &str) -> Option<PathBuf> {
    let mut pairs = pairs.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.find(|(known, _)| *known == name).map(|(_, path)| PathBuf::from(path))
}
