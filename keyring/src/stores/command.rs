//! A store of notes behind programs of the operator. docs/anchor.md describes their input and
//! output. They are subject to the rules for programs of the provider `command`.

use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;
use crate::options::Options;
use crate::program::Ended;
use crate::provider::Environment;
use crate::providers::command::program::{Program, unusable};
use crate::store::{Store, StoredNote, Written};

/// Names of all options.
pub(super) const OPTIONS: &[&str] = &["read", "write"];

/// The first line of a request.
const PROTOCOL: &str = "pagevault-anchor 1";
/// Exit status for "the note is another".
const OVERTAKEN: i32 = 18;

struct Commands {
    read: Program,
    write: Program,
    environment: Environment,
}

/// Creates the store from its options.
pub(super) fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Store>, Failure> {
    Ok(Box::new(Commands {
        read: Program::required(options, "read")?,
        write: Program::required(options, "write")?,
        environment: environment.clone(),
    }))
}

impl Store for Commands {
    fn read(&self) -> Result<Option<StoredNote>, Failure> {
        let ended = self.read.attempt(&self.environment, PROTOCOL, "read", &[])?;
        if ended.code != 0 {
            return Err(self.failed(&self.read, &ended, &[]));
        }
        parse(&ended.output).map_err(|wrong| unusable(&self.read, wrong))
    }

    fn write(&self, note: &str, replaces: Option<u64>) -> Result<Written, Failure> {
        let replaced = replaces.unwrap_or(0).to_string();
        let fields = [("replaces", replaced.as_str()), ("note", note)];
        let ended = self.write.attempt(&self.environment, PROTOCOL, "write", &fields)?;
        match ended.code {
            0 => {
                let version = version(&ended.output);
                let wrong = "It must be one line: \"version\", a space, a number from 1.";
                version.map(Written::Done).ok_or_else(|| unusable(&self.write, wrong))
            }
            OVERTAKEN => Ok(Written::Overtaken),
            _ => Err(self.failed(&self.write, &ended, &fields)),
        }
    }
}

impl Commands {
    /// The failure of a program, by its exit status; those of the provider `command` have the same
    /// meaning.
    fn failed(&self, program: &Program, ended: &Ended, fields: &[(&str, &str)]) -> Failure {
        let failure = program.failure(&self.environment, ended, fields);
        match failure.class {
            // Of a status without a meaning the hint is to try the program as a key provider.
            ErrorClass::Unreachable if !failure.retry => failure.with_hint(
                "Run the program as the server's operating system user, with a request of this store.",
            ),
            _ => failure,
        }
    }
}

/// Nothing, or a version and a note.
fn parse(output: &[u8]) -> Result<Option<StoredNote>, &'static str> {
    const WRONG: &str = "It must be empty, or two lines: \"version\", a space and a number from 1; \"note\", a space and the note.";
    if output.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let lines: Vec<&[u8]> = output.trim_ascii_end().split(|byte| *byte == b'\n').collect();
    let [first, second] = lines[..] else { return Err(WRONG) };
    let note = second.strip_prefix(b"note ").and_then(|note| std::str::from_utf8(note).ok());
    let (version, note) = (version(first).ok_or(WRONG)?, note.ok_or(WRONG)?.trim_end().to_owned());
    Ok(Some(StoredNote { note, version }))
}

fn version(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line.trim_ascii_end().strip_prefix(b"version ")?).ok()?;
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|version| digits && *version > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_a_version_and_a_note() {
        for empty in ["", "\n", " \r\n"] {
            assert_eq!(parse(empty.as_bytes()), Ok(None));
        }
        let stored = StoredNote { note: "{\"a\": 1}".to_owned(), version: 7 };
        for text in ["version 7\nnote {\"a\": 1}", "version 7\r\nnote {\"a\": 1}\r\n"] {
            assert_eq!(parse(text.as_bytes()), Ok(Some(stored.clone())), "{text:?}");
        }
        for text in [
            "version 7",
            "note x",
            "note x\nversion 7",
            "version 0\nnote x",
            "version +7\nnote x",
            "version 7\nnote x\nmore",
            "version 7\n\nnote x",
            "<html>",
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(parse(b"version 7\nnote \xff").is_err());
        assert_eq!(version(b"version 8\n"), Some(8));
    }
}
