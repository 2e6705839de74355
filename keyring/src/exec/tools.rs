//! The programs of PostgreSQL that are supported, and how each of them uses WAL.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::options::{self, Line, Syntax};
use crate::failure::{Failure, refuse};

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
    pub(super) syntax: &'static Syntax,
    place: Place,
}

/// What names the data directory of a program.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Nothing: it has none, or makes one.
    Nothing,
    Option(&'static str),
    Operand,
    OptionOrOperand(&'static str),
}

const fn tool(name: &'static str, wal_use: WalUse, syntax: &'static Syntax, place: Place) -> Tool {
    Tool { name, wal_use, reader: name, syntax, place }
}

/// Programs that are not listed are refused: it is not known how they use WAL.
const TOOLS: [Tool; 10] = [
    tool("pg_basebackup", WalUse::Seal, &options::ANY, Place::Nothing),
    tool("pg_checksums", WalUse::Nothing, &options::ANY, Place::Nothing),
    tool("pg_combinebackup", WalUse::Nothing, &options::ANY, Place::Nothing),
    tool("pg_receivewal", WalUse::Seal, &options::ANY, Place::Nothing),
    tool("pg_resetwal", WalUse::Seal, &options::PG_RESETWAL, Place::OptionOrOperand("pgdata")),
    tool("pg_rewind", WalUse::Rewind, &options::PG_REWIND, Place::Option("target-pgdata")),
    tool("pg_upgrade", WalUse::Upgrade, &options::PG_UPGRADE, Place::Nothing),
    Tool {
        reader: "pg_waldump",
        ..tool("pg_verifybackup", WalUse::ReadByOther, &options::PG_VERIFYBACKUP, Place::Operand)
    },
    tool("pg_waldump", WalUse::Read, &options::PG_WALDUMP, Place::Option("path")),
    // Summaries say which blocks changed, and contain none of their data.
    tool("pg_walsummary", WalUse::Nothing, &options::ANY, Place::Nothing),
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

    /// The data directory that the arguments name. For `pg_waldump` it may be any with segments.
    pub(super) fn directory(self, line: &Line) -> Option<PathBuf> {
        let operand = || line.operands.first().map(OsString::as_os_str);
        let named = match self.place {
            Place::Nothing => None,
            Place::Option(name) => line.value(name),
            Place::Operand => operand(),
            Place::OptionOrOperand(name) => line.value(name).or_else(operand),
        };
        named.map(PathBuf::from)
    }

    /// Whether it writes WAL that it receives from a server.
    pub(super) fn receives(self) -> bool {
        self.wal_use == WalUse::Seal && matches!(self.place, Place::Nothing)
    }

    /// Whether it writes into the data directory that is named.
    pub(super) fn writes_there(self) -> bool {
        self.wal_use == WalUse::Seal && !matches!(self.place, Place::Nothing)
    }
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
    fn segments_name_no_data_directory() {
        let directory = |program: &str, line: &[&str]| {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            let tool = Tool::of(Path::new(program)).unwrap();
            tool.directory(&tool.syntax.read(&line))
        };
        let is = |found: Option<PathBuf>| assert_eq!(found, Some("/x".into()));
        assert_eq!(directory("pg_waldump", &["-n", "3", "/x/pg_wal/0001"]), None);
        is(directory("pg_waldump", &["-p", "/x", "0001"]));
        is(directory("pg_resetwal", &["-x", "100", "/x"]));
        is(directory("pg_resetwal", &["-D", "/x", "-f"]));
        is(directory("pg_resetwal", &["/x", "-f"]));
        is(directory("pg_resetwal", &["--pgd=/x", "/y"]));
        is(directory("pg_verifybackup", &["-m", "/y", "/x", "-q"]));
        assert_eq!(directory("pg_receivewal", &["-D", "/x"]), None);
    }

    #[test]
    fn other_programs_are_refused() {
        assert!(Tool::of(Path::new("/usr/bin/cp")).is_err());
        assert!(Tool::of(Path::new("/usr/bin/pg_waldump")).is_ok());
    }
}
