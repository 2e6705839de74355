//! `pagevault-keyring file`: creating and listing key files.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use nix::unistd::geteuid;
use pagevault_keystore::protocol::ErrorClass;

use crate::failure::{Failure, unprintable};
use crate::keyfile::format::{NAME_LIMIT, valid_name};
use crate::keyfile::place::Place;
use crate::keyfile::store;
use crate::options::{absolute_path, printable};
use crate::providers::file::{add_version, outside};

/// Creates the key `name`, and the file at `path` if it does not exist.
pub(super) fn create(
    out: &mut impl Write,
    path: &str,
    name: &str,
    data_directory: Option<&Path>,
) -> Result<ExitCode, Failure> {
    if !valid_name(name) {
        return Err(Failure::new(ErrorClass::BadOptions, "invalid key name").with_detail(format!(
            "A name has 1 to {NAME_LIMIT} bytes and no control characters."
        )));
    }
    let path_given = absolute_path(path)?;
    let place = Place::resolve(&path_given).map_err(|failure| {
        match path_given.parent().filter(|directory| !directory.exists()) {
            Some(directory) => failure.with_hint(format!(
                "Check the path. To create the directory, run as the user that runs the server: mkdir -m 0700 \"{}\"",
                directory.display()
            )),
            None => failure,
        }
    })?;
    outside(&place, data_directory)?;
    place.check_directories()?;
    store::make_if_missing(&place)?;
    let mut locked = store::lock(&place)?;
    if locked.keys.key(name).is_some() {
        return Err(Failure::new(
            ErrorClass::BadOptions,
            format!("key \"{}\" already exists in key file \"{path}\"", printable(name)),
        )
        .with_hint(
            "To make a new version of it, use SQL: SELECT pagevault.rotate_database_master_key()",
        ));
    }
    add_version(&mut locked.keys, name)?;
    locked.replace()?;

    let shown = place.path();
    let shown = shown.display();
    writeln!(out, "Created key \"{}\", version 1, in {shown}", printable(name))
        .and_then(|()| {
            writeln!(
                out,
                "Back up this file, separately from the database: without it the data is lost."
            )
        })
        .map_err(unprintable)?;
    if geteuid().is_root() {
        writeln!(
            out,
            "The file belongs to root. Make the user that runs the server its owner, for example: \
             chown postgres \"{shown}\""
        )
        .map_err(unprintable)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists names, versions and times.
pub(super) fn list(out: &mut impl Write, path: &str) -> Result<ExitCode, Failure> {
    let place = Place::resolve(&absolute_path(path)?)?;
    let file = store::load(&place)?;
    writeln!(out, "{:<32} {:>8}  created", "key", "version").map_err(unprintable)?;
    for (name, key) in file.keys() {
        for version in key.versions() {
            let created = utc(version.created);
            writeln!(out, "{name:<32} {:>8}  {created}", version.version).map_err(unprintable)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Seconds since 1970 as ISO 8601 in UTC.
fn utc(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days are counted from 1 March of year 0, in periods of 400 years, so that the leap day is the
    // last day of a year.
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + next;
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_those_of_date_u() {
        // date -u -d @N '+%F %TZ'
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (951_782_400, "2000-02-29 00:00:00Z"),
            (1_767_225_599, "2025-12-31 23:59:59Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
            (-1, "1969-12-31 23:59:59Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
