//! Finds PostgreSQL's programs: in the directory of this program, or on `PATH`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, refuse, unreadable};

/// The program `name`: if it has no path, in the directory of this program, else on `PATH`.
pub(crate) fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    if Path::new(name).components().count() > 1 {
        let path = Path::new(name);
        return fs::canonicalize(path).map_err(|error| unreadable(path, &error));
    }
    let beside = own_directory().map(|directory| directory.join(name));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).map(|directory| directory.join(name));
    beside
        .into_iter()
        .chain(places)
        .find_map(|place| fs::canonicalize(place).ok())
        .ok_or_else(|| refuse(format!("there is no program \"{}\"", name.display())))
}

pub(crate) fn own_directory() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.to_owned())
}
