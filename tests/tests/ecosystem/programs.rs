//! Other people's programs, which tools/extensions fetches and names in `PAGEVAULT_PROGRAMS`:
//! `name=path` pairs, separated by spaces.

use std::path::PathBuf;

/// Where the program of this name is, if it was promised and is there.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    find(&promised(), name).filter(|path| path.exists())
}

/// Whether the program must be there.
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
