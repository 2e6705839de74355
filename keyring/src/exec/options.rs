//! Options of PostgreSQL's programs, as `getopt_long` of the C library finds them: joined short
//! options, abbreviated long ones, and operands between them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// An option: its long name, and its short one; 0 if it has none.
type Names = (&'static str, u8);

/// The options of a program in all supported majors. Options that are not listed have no value.
#[derive(Debug)]
pub(super) struct Syntax {
    /// Followed by a value. If an abbreviation stands for several, the first counts: those behind
    /// came with later majors, in which the abbreviation is refused.
    values: &'static [Names],
    /// Without a value.
    flags: &'static [Names],
}

/// Nothing of it is looked at.
pub(super) const ANY: Syntax = Syntax { values: &[], flags: &[] };

/// pg_resetwal.c: main
pub(super) const PG_RESETWAL: Syntax = Syntax {
    values: &[
        ("commit-timestamp-ids", b'c'),
        ("pgdata", b'D'),
        ("epoch", b'e'),
        ("next-wal-file", b'l'),
        ("multixact-ids", b'm'),
        ("next-oid", b'o'),
        ("multixact-offset", b'O'),
        ("oldest-transaction-id", b'u'),
        ("next-transaction-id", b'x'),
        ("wal-segsize", 0),
        ("char-signedness", 0),
    ],
    flags: &[],
};

/// pg_rewind.c: main
pub(super) const PG_REWIND: Syntax = Syntax {
    values: &[
        ("target-pgdata", b'D'),
        ("source-pgdata", 0),
        ("source-server", 0),
        ("config-file", 0),
        ("sync-method", 0),
    ],
    flags: &[],
};

/// pg_upgrade, option.c: `parseCommandLine`
pub(super) const PG_UPGRADE: Syntax = Syntax {
    values: &[
        ("old-datadir", b'd'),
        ("new-datadir", b'D'),
        ("old-bindir", b'b'),
        ("new-bindir", b'B'),
        ("old-options", b'o'),
        ("new-options", b'O'),
        ("old-port", b'p'),
        ("new-port", b'P'),
        ("username", b'U'),
        ("jobs", b'j'),
        ("socketdir", b's'),
        ("sync-method", 0),
        ("set-char-signedness", 0),
    ],
    flags: &[("check", b'c')],
};

/// pg_verifybackup.c: main
pub(super) const PG_VERIFYBACKUP: Syntax = Syntax {
    values: &[
        ("ignore", b'i'),
        ("manifest-path", b'm'),
        ("wal-directory", b'w'),
        ("format", b'F'),
        ("wal-path", b'w'),
    ],
    flags: &[],
};

/// pg_waldump.c: main
pub(super) const PG_WALDUMP: Syntax = Syntax {
    values: &[
        ("block", b'B'),
        ("end", b'e'),
        ("fork", b'F'),
        ("limit", b'n'),
        ("path", b'p'),
        ("relation", b'R'),
        ("rmgr", b'r'),
        ("start", b's'),
        ("timeline", b't'),
        ("xid", b'x'),
        ("save-fullpage", 0),
    ],
    flags: &[],
};

/// What a command line says.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Values of options, by the long name.
    values: Vec<(&'static str, OsString)>,
    flags: Vec<&'static str>,
    pub(super) operands: Vec<OsString>,
}

impl Line {
    /// The value of an option. The last one counts.
    pub(super) fn value(&self, name: &str) -> Option<&OsStr> {
        self.all(name).next_back()
    }

    /// The values of an option that may be repeated.
    pub(super) fn all(&self, name: &str) -> impl DoubleEndedIterator<Item = &OsStr> {
        let found = self.values.iter().filter(move |(known, _)| *known == name);
        found.map(|(_, value)| value.as_os_str())
    }

    pub(super) fn has(&self, flag: &str) -> bool {
        self.flags.contains(&flag)
    }
}

impl Syntax {
    /// Reads arguments. What the program itself would refuse is left out.
    pub(super) fn read(&self, arguments: &[OsString]) -> Line {
        // Then `getopt_long` does not look behind the first operand.
        self.read_as(arguments, std::env::var_os("POSIXLY_CORRECT").is_some())
    }

    fn read_as(&self, arguments: &[OsString], only_before_operands: bool) -> Line {
        let mut line = Line::default();
        let mut left = arguments.iter();
        while let Some(argument) = left.next() {
            let bytes = argument.as_bytes();
            if bytes == b"--" {
                break;
            }
            if let Some(long) = bytes.strip_prefix(b"--") {
                self.long(long, &mut left, &mut line);
            } else if let Some(short @ [_, ..]) = bytes.strip_prefix(b"-") {
                self.short(short, &mut left, &mut line);
            } else {
                line.operands.push(argument.clone());
                if only_before_operands {
                    break;
                }
            }
        }
        line.operands.extend(left.cloned());
        line
    }

    fn long<'a>(
        &self,
        text: &[u8],
        left: &mut impl Iterator<Item = &'a OsString>,
        line: &mut Line,
    ) {
        let (name, value) = match text.iter().position(|byte| *byte == b'=') {
            Some(at) => (&text[..at], Some(OsString::from_vec(text[at + 1..].to_vec()))),
            None => (text, None),
        };
        let find = |options: &'static [Names]| {
            let is = |(known, _): &&Names| !name.is_empty() && known.as_bytes().starts_with(name);
            options.iter().find(is).map(|(known, _)| *known)
        };
        if let Some(known) = find(self.values) {
            let value = value.or_else(|| left.next().cloned());
            line.values.extend(value.map(|value| (known, value)));
        } else {
            line.flags.extend(find(self.flags));
        }
    }

    fn short<'a>(
        &self,
        letters: &[u8],
        left: &mut impl Iterator<Item = &'a OsString>,
        line: &mut Line,
    ) {
        for (at, letter) in letters.iter().enumerate() {
            let find = |options: &'static [Names]| {
                options.iter().find(|(_, short)| short == letter).map(|(known, _)| *known)
            };
            let Some(known) = find(self.values) else {
                line.flags.extend(find(self.flags));
                continue;
            };
            let rest = &letters[at + 1..];
            let value = (!rest.is_empty()).then(|| OsString::from_vec(rest.to_vec()));
            let value = value.or_else(|| left.next().cloned());
            line.values.extend(value.map(|value| (known, value)));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(syntax: &Syntax, line: &[&str]) -> Line {
        let line: Vec<OsString> = line.iter().map(OsString::from).collect();
        syntax.read_as(&line, false)
    }

    #[test]
    fn values_are_found_however_they_are_written() {
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
            &["operand", "-D", "/x", "-"],
        ] {
            let found = read(&PG_REWIND, line);
            assert_eq!(found.value("target-pgdata"), Some(OsStr::new("/x")), "{line:?}");
        }
        for line in [&["-n"][..], &["--", "-D", "/x"], &["--source-pgdata", "-D"], &["-D"], &[]] {
            assert_eq!(read(&PG_REWIND, line).value("target-pgdata"), None, "{line:?}");
        }
        for line in
            [&["--source-pg=/x", "-D/y"][..], &["-D", "--source-pgdata=/y", "--source-p", "/x"]]
        {
            let found = read(&PG_REWIND, line);
            assert_eq!(found.value("source-pgdata"), Some(OsStr::new("/x")), "{line:?}");
        }
    }

    #[test]
    fn flags_are_found_however_they_are_written() {
        for line in [&["-c"][..], &["--check"], &["--chec"], &["-vc"], &["-ckd", "/x"]] {
            assert!(read(&PG_UPGRADE, line).has("check"), "{line:?}");
        }
        for line in [&["-v"][..], &["--copy"], &["-d", "-c"], &["-dc"], &["--", "-c"]] {
            assert!(!read(&PG_UPGRADE, line).has("check"), "{line:?}");
        }
        let line = read(&PG_UPGRADE, &["-O", "-D /y", "--old-data=/x", "-vD/z"]);
        assert_eq!(line.value("new-datadir"), Some(OsStr::new("/z")));
        assert_eq!(line.value("old-datadir"), Some(OsStr::new("/x")));
    }

    #[test]
    fn operands_are_found_between_options() {
        let line = ["-x", "100", "/x", "-f", "--", "-y"];
        assert_eq!(read(&PG_RESETWAL, &line).operands, ["/x", "-y"]);
        assert_eq!(read(&PG_RESETWAL, &["-fx100", "-", "-nl", "/y"]).operands, ["-"]);
        let line = line.map(OsString::from);
        let found = PG_RESETWAL.read_as(&line[2..], true);
        assert_eq!(found.operands, ["/x", "-f", "--", "-y"]);
    }
}
