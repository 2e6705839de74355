//! The user PIN: from a file or from a program of the operator, into memory that is wiped.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::settings::Pin;
use crate::failure::Failure;
use crate::program;
use crate::provider::Environment;
use crate::providers::command::program::{Program, interrupted};
use crate::trust::FileKind;
use crate::trust::read::read;

/// Time for the program without a deadline.
const LONGEST: Duration = Duration::from_secs(60);

/// Time that is left for the token.
const MARGIN: Duration = Duration::from_millis(500);

/// Reads the PIN. `None` if the options name none.
///
/// # Errors
/// Those of reading a credentials file, or of running a program.
pub(super) fn read_pin(
    pin: &Pin,
    environment: &Environment,
) -> Result<Option<Zeroizing<String>>, Failure> {
    match pin {
        Pin::None => Ok(None),
        Pin::File(path) => read(path, FileKind::Credentials).map(Some),
        Pin::Program(path, arguments) => run(path, arguments, environment).map(Some),
    }
}

/// Refuses a program that must not be run, and a file that must not be read. They may not exist
/// yet.
pub(super) fn check(pin: &Pin, environment: &Environment) -> Result<(), Failure> {
    let checked = match pin {
        Pin::None => Ok(()),
        Pin::File(path) => read(path, FileKind::Credentials).map(drop),
        Pin::Program(path, arguments) => {
            let program = program(path, arguments);
            match program.safe(environment) {
                Err(error) if error.class == ErrorClass::Unreachable => {
                    program.outside_by_name(environment)
                }
                other => other.map(drop),
            }
        }
    };
    match checked {
        Err(error) if error.class == ErrorClass::Unreachable => Ok(()),
        other => other,
    }
}

/// Where the PIN comes from, in words.
pub(super) fn source(pin: &Pin) -> String {
    match pin {
        Pin::None => "no PIN; the token needs no login".to_owned(),
        Pin::File(path) => format!("from {}", path.display()),
        Pin::Program(path, _) => format!("printed by {}", path.display()),
    }
}

fn program(path: &Path, arguments: &[String]) -> Program {
    let path = PathBuf::from(path);
    Program { option: "pin_command", path, arguments: arguments.to_vec() }
}

fn run(
    path: &Path,
    arguments: &[String],
    environment: &Environment,
) -> Result<Zeroizing<String>, Failure> {
    let program = program(path, arguments);
    let place = program.safe(environment)?.path();
    let now = Instant::now();
    let deadline = environment
        .deadline
        .map_or(now + LONGEST, |deadline| deadline.checked_sub(MARGIN).unwrap_or(now));
    let ended = program::run(&place, arguments, &[], deadline)
        .map_err(|stopped| interrupted(&program, stopped))?;
    let shown = path.display();
    if ended.code != 0 {
        // Nothing that it printed is repeated: a careless program may print the PIN, as `set -x`
        // does, also before it would print it on standard output.
        let message = format!("program \"{shown}\" gives no PIN");
        return Err(Failure::new(ErrorClass::Unreachable, message)
            .with_detail(format!(
                "Its exit status was {}. What it printed is not repeated here, because it may contain the PIN.",
                ended.code
            ))
            .with_hint(
                "Run the program as the server's operating system user, and read what it prints: it must print the PIN, and exit with status 0.",
            ));
    }
    let text = std::str::from_utf8(&ended.output).unwrap_or_default().trim();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let message = format!("program \"{shown}\" printed something else than a PIN");
        return Err(Failure::new(ErrorClass::BadOptions, message)
            .with_detail("It must print one word of printable ASCII.")
            .with_hint("Print the PIN on standard output, and messages on standard error."));
    }
    Ok(Zeroizing::new(text.to_owned()))
}
