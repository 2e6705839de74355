//! A program of the operator that keeps master keys or notes: where it may be, what it gets, and
//! what its exit status means.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::reply;
use crate::failure::Failure;
use crate::keyfile::place::Place;
use crate::options::{Options, printable};
use crate::program::{self, Ended, Stopped};
use crate::provider::Environment;
use crate::providers::file::outside;
use crate::trust::FileKind;

/// A program is killed this long before the deadline, so that the reply can still report it.
const MARGIN: Duration = Duration::from_millis(200);

/// Maximum run time of a program without a deadline.
const LONGEST: Duration = Duration::from_secs(60 * 60);

/// A program that an option names.
pub(crate) struct Program {
    pub(crate) option: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) arguments: Vec<String>,
}

impl Program {
    /// The program that an option names, if it is given.
    pub(crate) fn given(
        options: &Options<'_>,
        option: &'static str,
    ) -> Result<Option<Program>, Failure> {
        let program = options.program(option)?;
        Ok(program.map(|(path, arguments)| Program { option, path, arguments }))
    }

    /// The program that a required option names.
    pub(crate) fn required(
        options: &Options<'_>,
        option: &'static str,
    ) -> Result<Program, Failure> {
        Program::given(options, option)?
            .ok_or_else(|| options.missing(option, "[\"/absolute/path\", \"argument\"]"))
    }

    /// The program's place, if the program is safe to receive keys.
    pub(crate) fn safe(&self, environment: &Environment) -> Result<Place, Failure> {
        let place = Place::resolve_as(FileKind::Program, &self.path)?;
        outside(&place, environment.data_directory.as_deref())?;
        place.check_directories()?;
        place.check_program()?;
        Ok(place)
    }

    /// For a program that does not exist: only its path can be checked.
    pub(crate) fn outside_by_name(&self, environment: &Environment) -> Result<(), Failure> {
        let path = &self.path;
        match &environment.data_directory {
            Some(root) if path.starts_with(root) => Err(Failure::new(
                ErrorClass::Insecure,
                format!("program \"{}\" is inside the data directory", path.display()),
            )
            .with_hint("Move the program to another directory, for example /etc/pagevault.")),
            _ => Ok(()),
        }
    }

    /// Runs the program with a request and requires that it succeeds.
    pub(crate) fn run(
        &self,
        environment: &Environment,
        operation: &str,
        fields: &[(&str, &str)],
    ) -> Result<Ended, Failure> {
        let ended = self.attempt(environment, "pagevault-command 1", operation, fields)?;
        if ended.code == 0 { Ok(ended) } else { Err(self.failure(environment, &ended, fields)) }
    }

    /// Runs the program with a request, whose first line names protocol and version. Any exit
    /// status is a result.
    pub(crate) fn attempt(
        &self,
        environment: &Environment,
        protocol: &str,
        operation: &str,
        fields: &[(&str, &str)],
    ) -> Result<Ended, Failure> {
        for (name, value) in fields {
            if value.is_empty() || value.trim() != *value || value.chars().any(char::is_control) {
                return Err(cannot_be_passed(name));
            }
        }
        let path = self.safe(environment)?.path();
        let size = fields.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>();
        // With full capacity: a string that grows leaves copies behind.
        let mut request = Zeroizing::new(String::with_capacity(64 + operation.len() + size));
        request.push_str(protocol);
        request.push('\n');
        for (name, value) in [("operation", operation)].iter().chain(fields) {
            for part in [name, " ", value, "\n"] {
                request.push_str(part);
            }
        }
        let now = Instant::now();
        let deadline = environment
            .deadline
            .map_or(now + LONGEST, |deadline| deadline.checked_sub(MARGIN).unwrap_or(now));
        program::run(&path, &self.arguments, request.as_bytes(), deadline)
            .map_err(|stopped| interrupted(self, stopped))
    }

    /// The failure of a program that has ended with an error.
    ///
    /// A careless program may print parts of its input, of its output as `set -x` does, or its
    /// credentials, in any spelling. They must not reach a log, so what it prints is repeated to a
    /// person only, and even there not if it is known to contain a key.
    pub(crate) fn failure(
        &self,
        environment: &Environment,
        ended: &Ended,
        fields: &[(&str, &str)],
    ) -> Failure {
        if !environment.repeats_programs {
            let silent = ended.last_error.is_empty();
            return failed(self, ended.code, if silent { NOTHING } else { NOT_REPEATED });
        }
        let given = fields.iter().filter(|(name, _)| *name == "plaintext");
        let leaks =
            given.into_iter().any(|(_, secret)| repeats(&ended.last_error, secret.as_bytes()))
                || reply::opened(&ended.output).any(|secret| repeats(&ended.last_error, secret));
        let said = match ended.last_error.as_str() {
            _ if leaks => NOT_REPEATED.to_owned(),
            "" => NOTHING.to_owned(),
            said => format!("It printed: \"{}\".", printable(said)),
        };
        failed(self, ended.code, &said)
    }
}

/// Whether a text contains a significant part of a secret.
fn repeats(text: &str, secret: &[u8]) -> bool {
    const PART: usize = 12;
    let text = text.as_bytes();
    secret.windows(PART).any(|part| text.windows(PART).any(|found| found == part))
}

/// Exit statuses: class, whether a retry may help, message, hint.
const STATUSES: &[(i32, ErrorClass, bool, &str, &str)] = &[
    (
        10,
        ErrorClass::Unreachable,
        true,
        "the key server or token cannot be reached",
        "Check that the key server is running or the token is present, and that the program can reach it.",
    ),
    (
        11,
        ErrorClass::Unauthenticated,
        false,
        "its credentials were rejected",
        "Check the credentials or the PIN that the program uses. Some tokens lock after a few wrong \
         attempts.",
    ),
    (
        12,
        ErrorClass::Denied,
        false,
        "it is not allowed to use the key",
        "Allow the program's account to use the key.",
    ),
    (
        13,
        ErrorClass::KeyMissing,
        false,
        "there is no such key",
        "Check the key's name, or create the key with the tools of the key server.",
    ),
    (
        14,
        ErrorClass::KeyDisabled,
        false,
        "the key is disabled or about to be deleted",
        "Enable the key with the tools of the key server.",
    ),
    (15, ErrorClass::Sealed, false, "the key server is sealed", "Unseal the key server."),
    (
        16,
        ErrorClass::Throttled,
        true,
        "the key server got too many requests",
        "Try again later, or raise the limit of the key server.",
    ),
    (
        17,
        ErrorClass::WrongCiphertext,
        false,
        "the wrapped key cannot be unwrapped",
        "Use the master key that wrapped it.",
    ),
];

const NOTHING: &str = "It printed nothing on standard error.";
const NOT_REPEATED: &str =
    "What it printed on standard error is not repeated here, because it may contain secrets.";

fn failed(program: &Program, code: i32, said: &str) -> Failure {
    let path = program.path.display();
    let known = STATUSES.iter().find(|(status, ..)| *status == code);
    let Some((_, class, passes, what, hint)) = known else {
        let signal = Signal::try_from(code - 128);
        let how = match (signal, code) {
            (Ok(signal), _) => format!("It was ended by {signal} (exit status {code})."),
            // As a shell; so does [`program::supervise`].
            (_, 126) => "Its exit status was 126: it, or a program that it starts, cannot be executed.".to_owned(),
            (_, 127) => "Its exit status was 127: a program, or the interpreter of a script, does not exist.".to_owned(),
            _ => format!("Its exit status was {code}."),
        };
        return Failure::new(ErrorClass::Unreachable, format!("program \"{path}\" failed"))
            .with_detail(format!("{how} {said}"))
            .with_hint(TRY_OUT);
    };
    let error = Failure::new(*class, format!("program \"{path}\" reports that {what}"))
        .with_detail(format!("Its exit status was {code}. {said}"))
        .with_hint(*hint);
    if *passes { error.transient() } else { error }
}

const TRY_OUT: &str = "Test the provider as the server's operating system user, with: \
                       pagevault-keyring check --provider-kind command";

pub(crate) fn interrupted(program: &Program, stopped: Stopped) -> Failure {
    let path = program.path.display();
    match stopped {
        Stopped::Late => {
            Failure::new(ErrorClass::Deadline, format!("program \"{path}\" did not end in time"))
                .with_detail("It was killed, together with the processes that it had started.")
                .with_hint(
                    "The program, or the system that it waits for, is slow or does not respond. Try again, or raise \
             pagevault.keyring_timeout.",
                )
                .transient()
        }
        Stopped::TooMuch => too_much(program),
        Stopped::System(error) => {
            Failure::new(ErrorClass::Unreachable, format!("could not run program \"{path}\""))
                .with_detail(format!("{error}."))
                .with_hint(TRY_OUT)
                .transient()
        }
    }
}

pub(crate) fn too_much(program: &Program) -> Failure {
    let limit = program::OUTPUT_LIMIT;
    unusable(program, &format!("It has more than {limit} bytes."))
}

/// The failure for a program that reports success without a usable result.
pub(crate) fn unusable(program: &Program, wrong: &str) -> Failure {
    Failure::new(
        ErrorClass::Unreachable,
        format!("program \"{}\" returned an invalid answer", program.path.display()),
    )
    .with_detail(wrong)
    .with_hint(
        "Each line of the answer is a name, a space and a value. Base64 must be on one line, as \
         \"base64 -w0\" gives it.",
    )
}

fn cannot_be_passed(name: &str) -> Failure {
    let name = name.replace('_', " ");
    Failure::new(ErrorClass::BadRequest, format!("{name} cannot be passed to a program"))
        .with_detail(
            "It is empty, contains a control character, or begins or ends with white space.",
        )
        .with_hint("Use a key with another name.")
}
