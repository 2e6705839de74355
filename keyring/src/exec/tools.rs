//! The programs of PostgreSQL that are supported, and how each of them uses WAL.

use crate::failure::{Failure, refuse};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// How a program uses WAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WalUse {
    /// Not at all, or nothing that is encrypted.
    Nothing,
    /// Reads segments.
    Read,
    /// Runs another program that reads segments.
    ReadByOther,
    /// Writes segments.
    Seal,
    /// Reads segments of one data directory and copies those of another.
    Rewind,
    /// Starts servers, which read and write segments; they also need all other keys.
    Upgrade,
}

/// A supported program.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tool {
    name: &'static str,
    pub(super) wal_use: WalUse,
    /// The program that reads or writes the segments.
    pub(super) reader: &'static str,
}

const fn tool(name: &'static str, wal_use: WalUse) -> Tool {
    Tool { name, wal_use, reader: name }
}

/// Programs that are not listed are refused: it is not known how they use WAL.
const TOOLS: [Tool; 10] = [
    tool("pg_basebackup", WalUse::Seal),
    tool("pg_checksums", WalUse::Nothing),
    tool("pg_combinebackup", WalUse::Nothing),
    tool("pg_receivewal", WalUse::Seal),
    tool("pg_resetwal", WalUse::Seal),
    tool("pg_rewind", WalUse::Rewind),
    tool("pg_upgrade", WalUse::Upgrade),
    Tool { name: "pg_verifybackup", wal_use: WalUse::ReadByOther, reader: "pg_waldump" },
    tool("pg_waldump", WalUse::Read),
    // Summaries say which blocks changed, and contain none of their data.
    tool("pg_walsummary", WalUse::Nothing),
];

impl Tool {
    /// The entry for a program, by its file name.
    pub(super) fn of(program: &Path) -> Result<Tool, Failure> {
        let name = program.file_name().unwrap_or_default();
        let known = TOOLS.iter().find(|tool| OsStr::new(tool.name) == name).copied();
        known.ok_or_else(|| {
            let names = TOOLS.map(|tool| tool.name).join(", ");
            refuse(format!("program \"{}\" is not supported", program.display()))
                .with_hint(format!("Supported programs: {names}."))
        })
    }

    /// Data directories that the arguments name or may name. Segments are not data directories.
    pub(super) fn places(self, arguments: &[OsString]) -> Vec<OsString> {
        // These create a directory, which does not exist yet.
        if matches!(self.name, "pg_basebackup" | "pg_receivewal") {
            return Vec::new();
        }
        let named = option(arguments, &["-D", "--pgdata", "-p", "--path"]);
        // For most programs the last argument may be the directory; for pg_waldump it is a segment.
        let last = arguments.last().filter(|last| !last.as_bytes().starts_with(b"-"));
        let last = last.filter(|_| self.name != "pg_waldump");
        named.into_iter().chain(last.cloned()).collect()
    }
}

/// The value of an option with any of these names, in all forms that PostgreSQL's programs accept:
/// `-D DIR`, `-DDIR`, `--pgdata DIR`, `--pgdata=DIR`. The last one counts.
pub(super) fn option(arguments: &[OsString], names: &[&str]) -> Option<OsString> {
    let mut found = None;
    for (at, argument) in arguments.iter().enumerate() {
        let argument = argument.as_bytes();
        if argument == b"--" {
            break;
        }
        for name in names {
            let Some(rest) = argument.strip_prefix(name.as_bytes()) else { continue };
            let is_long = name.starts_with("--");
            match rest {
                [] => found = arguments.get(at + 1).cloned().or(found),
                [b'=', value @ ..] if is_long => found = Some(OsString::from_vec(value.to_vec())),
                value if !is_long => found = Some(OsString::from_vec(value.to_vec())),
                _ => {}
            }
        }
    }
    found
}

/// The options of pg_rewind (pg_rewind.c) that are followed by a value: `-D` and these.
const REWIND_VALUES: [&str; 5] =
    ["target-pgdata", "source-pgdata", "source-server", "config-file", "sync-method"];

/// The value of an option of pg_rewind, by its long name without hyphens, as `getopt_long` finds
/// it: joined short options, and abbreviations, included. The last one counts.
pub(super) fn option_of_rewind(arguments: &[OsString], wanted: &str) -> Option<OsString> {
    let mut found = None;
    let mut left = arguments.iter();
    while let Some(argument) = left.next() {
        let argument = argument.as_bytes();
        if argument == b"--" {
            break;
        }
        if let Some(long) = argument.strip_prefix(b"--") {
            let (name, value) = match long.iter().position(|byte| *byte == b'=') {
                Some(at) => (&long[..at], Some(OsString::from_vec(long[at + 1..].to_vec()))),
                None => (long, None),
            };
            let is = |known: &&&str| !name.is_empty() && known.as_bytes().starts_with(name);
            let Some(known) = REWIND_VALUES.iter().find(is) else { continue };
            let value = value.or_else(|| left.next().cloned());
            found = if *known == wanted { value.or(found) } else { found };
        } else if let Some(short) = argument.strip_prefix(b"-")
            && let Some(at) = short.iter().position(|byte| *byte == b'D')
        {
            // All others have no value.
            let value = Some(&short[at + 1..]).filter(|value| !value.is_empty());
            let value = value.map(|value| OsString::from_vec(value.to_vec()));
            let value = value.or_else(|| left.next().cloned());
            found = if wanted == "target-pgdata" { value.or(found) } else { found };
        }
    }
    found
}

/// Whether the program only prints its version or usage: PostgreSQL's programs look for that in
/// their first argument.
pub(super) fn only_prints_info(arguments: &[OsString]) -> bool {
    let first = arguments.first().map(|first| first.as_bytes());
    matches!(first, Some(b"--help" | b"-?" | b"--version" | b"-V"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_however_they_are_written() {
        let names = ["-D", "--pgdata"];
        for line in [&["-D", "/x"][..], &["-D/x"], &["--pgdata", "/x"], &["-n", "--pgdata=/x", "y"]]
        {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            assert_eq!(option(&line, &names), Some("/x".into()), "{line:?}");
        }
        for line in [&["-n"][..], &["--", "-D", "/x"], &["--pgdatas=/x"], &["-D"]] {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            assert_eq!(option(&line, &names), None, "{line:?}");
        }
    }

    #[test]
    fn the_target_of_pg_rewind_is_found_as_it_finds_it() {
        let target = |line: &[&str]| {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            option_of_rewind(&line, "target-pgdata").map(|found| found.into_string().unwrap())
        };
        for line in [
            &["-D", "/x"][..],
            &["-D/x"],
            &["-nD", "/x"],
            &["-nPD/x"],
            &["--target-pgdata", "/x"],
            &["--target-pgdata=/x"],
            &["--target-pg=/x"],
            &["--t", "/x"],
            &["--source-server", "-D/y", "-D", "/x"],
            &["-D", "/y", "--source-server=-D/z", "--dry-run", "-D", "/x"],
        ] {
            assert_eq!(target(line).as_deref(), Some("/x"), "{line:?}");
        }
        for line in [&["-n"][..], &["--", "-D", "/x"], &["--source-pgdata", "-D"], &["-D"]] {
            assert_eq!(target(line), None, "{line:?}");
        }
        for line in
            [&["--source-pg=/x", "-D/y"][..], &["-D", "--source-pgdata=/y", "--source-p", "/x"]]
        {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            assert_eq!(option_of_rewind(&line, "source-pgdata"), Some("/x".into()), "{line:?}");
        }
    }

    #[test]
    fn segments_name_no_data_directory() {
        let places = |program: &str, line: &[&str]| {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            Tool::of(Path::new(program)).unwrap().places(&line)
        };
        assert!(places("pg_waldump", &["-n", "3", "/x/pg_wal/0001"]).is_empty());
        assert_eq!(places("pg_waldump", &["-p", "/x", "0001"]), ["/x"]);
        assert_eq!(places("pg_resetwal", &["-x", "100", "/x"]), ["/x"]);
        assert_eq!(places("pg_resetwal", &["-D", "/x", "-f"]), ["/x"]);
        assert!(places("pg_receivewal", &["-D", "/x"]).is_empty());
    }

    #[test]
    fn other_programs_are_refused() {
        assert!(Tool::of(Path::new("/usr/bin/cp")).is_err());
        assert!(Tool::of(Path::new("/usr/bin/pg_waldump")).is_ok());
    }
}
