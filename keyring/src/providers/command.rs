//! `command`: master keys behind programs of the operator, where no other provider fits.
//!
//! Options: `wrap` and `unwrap`, and optionally `rotate`, each an array of a program and its
//! arguments. docs/command-provider.md describes input and output of these programs.
//!
//! A program may not be able to authenticate a context, so it never gets the secret. It wraps a
//! random key that is used once; that key wraps the secret. The associated data consist of all
//! bytes before the nonce, the key's name, and the context.
//!
//! ```text
//! byte   0        1                        9         11
//!        +--------+------------------------+---------+----------------+-------------------------+
//!        | format | key version, 8 bytes,  | length  | text that the  | nonce, ciphertext, tag  |
//!        | = 1    | most significant first | of text | program        | (pagevault_cipher::wrap)|
//!        |        |                        |         | returned       |                         |
//!        +--------+------------------------+---------+----------------+-------------------------+
//! ```

pub mod reply;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use pagevault_cipher::Secret32;
use pagevault_cipher::wrap::{self, OVERHEAD, WrapKey};
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::findings::Findings;
use crate::keyfile::place::Place;
use crate::options::{Options, printable};
use crate::program::{self, Ended, Stopped};
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};
use crate::providers::file::outside;
use crate::trust::{FileKind, insecure};
use reply::Reply;

/// Names of all options.
pub const OPTIONS: &[&str] = &["wrap", "unwrap", "rotate"];

const FORMAT: u8 = 1;
const HEADER: usize = 11;

/// A program is killed this long before the deadline, so that the reply can still report it.
const MARGIN: Duration = Duration::from_millis(200);

/// Maximum run time of a program without a deadline.
const LONGEST: Duration = Duration::from_secs(60 * 60);

struct CommandProvider {
    wrap: Program,
    unwrap: Program,
    rotate: Option<Program>,
    environment: Environment,
}

struct Program {
    option: &'static str,
    path: PathBuf,
    arguments: Vec<String>,
}

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    if !environment.programs {
        return Err(insecure("provider is not allowed to run programs")
            .with_detail("It was configured by a role that may not execute server programs, or the programs are named in key files that another user could have written.")
            .with_hint("Have a superuser or a member of pg_execute_server_program set the provider's programs again with alter_provider(). For commands of pagevault-keyring that need keys, use the option --allow-command."));
    }
    let given = |option: &'static str| -> Result<Option<Program>, Failure> {
        let program = options.program(option)?;
        Ok(program.map(|(path, arguments)| Program { option, path, arguments }))
    };
    let required = |option: &'static str| {
        given(option)?.ok_or_else(|| {
            Failure::new(
                ErrorClass::BadOptions,
                format!("option \"{option}\" is missing for a provider of kind \"command\""),
            )
            .with_hint(format!(
                "Specify it as {{\"{option}\": [\"/absolute/path\", \"argument\"]}}."
            ))
        })
    };
    Ok(Box::new(CommandProvider {
        wrap: required("wrap")?,
        unwrap: required("unwrap")?,
        rotate: given("rotate")?,
        environment: environment.clone(),
    }))
}

impl Provider for CommandProvider {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let once = Secret32::random().map_err(|error| internal(format!("{error}.")))?;
        let encoded = Zeroizing::new(STANDARD.encode(once.expose()));
        let fields = [("key", key), ("context", context), ("plaintext", encoded.as_str())];
        let ended = self.run(&self.wrap, "wrap", &fields)?;
        let reply = self.read(&self.wrap, &ended, &["wrapped", "key_version"])?;
        let text = reply.wrapped.ok_or_else(|| unusable(&self.wrap, "It lacks \"wrapped\"."))?;
        let key_version = reply.key_version.unwrap_or(1);

        let mut wrapped = vec![FORMAT];
        wrapped.extend_from_slice(&key_version.to_be_bytes());
        let length = u16::try_from(text.len());
        wrapped.extend_from_slice(&length.map_err(|_| too_much(&self.wrap))?.to_be_bytes());
        wrapped.extend_from_slice(text.as_bytes());
        let bound = associated_data(&wrapped, key, context);
        let start = wrapped.len();
        wrapped.resize(start + plaintext.len() + OVERHEAD, 0);
        wrap::wrap(&WrapKey::new(once.expose()), &bound, plaintext, &mut wrapped[start..])
            .map_err(|error| internal(format!("{error}.")))?;
        Ok(Wrapped { wrapped, key_version })
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        let Parts { head, key_version, text, body } = Parts::of(wrapped)
            .ok_or_else(|| refused("It was not wrapped by a provider of kind \"command\"."))?;
        let version = key_version.to_string();
        let fields =
            [("key", key), ("context", context), ("key_version", &version), ("wrapped", text)];
        let ended = self.run(&self.unwrap, "unwrap", &fields)?;
        let reply = self.read(&self.unwrap, &ended, &["plaintext"])?;
        let once = reply
            .plaintext
            .ok_or_else(|| unusable(&self.unwrap, "It lacks \"plaintext\", 32 bytes in base64."))?;
        let mut plaintext = Zeroizing::new(vec![0; body.len().saturating_sub(OVERHEAD)]);
        let bound = associated_data(head, key, context);
        wrap::unwrap(&WrapKey::new(&once), &bound, body, &mut plaintext).map_err(|_| {
            refused(
                "It was wrapped by another key of the same name, under another name or for another database, or it is damaged.",
            )
        })?;
        Ok(Unwrapped { plaintext, key_version })
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let current = Parts::of(wrapped).map(|parts| parts.key_version);
        let is_new = |version: u64| current.is_none_or(|current| version > current);
        if current.is_some() {
            let newest = self.describe(key)?.key_version;
            if is_new(newest) {
                return Ok(newest);
            }
        }
        let program = self.rotate.as_ref().ok_or_else(|| cannot_rotate(key))?;
        let ended = self.run(program, "rotate", &[("key", key)])?;
        let reply = self.read(program, &ended, &["key_version"])?;
        let version =
            reply.key_version.ok_or_else(|| unusable(program, "It lacks \"key_version\"."))?;
        if !is_new(version) {
            let wrong = format!(
                "It reports key version {version}, which is not newer than the one in use."
            );
            return Err(unusable(program, &wrong));
        }
        Ok(version)
    }

    /// A command cannot describe a key without using it, so an empty secret is wrapped.
    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        let tried = self.wrap(key, "pagevault/1/describe", &[])?;
        Ok(KeyInfo {
            key_version: tried.key_version,
            oldest_version: 1,
            summary: format!("wrapped by program {}", self.wrap.path.display()),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        for program in self.programs() {
            let what = format!("the program for \"{}\" is safe to run", program.option);
            findings.note(&what, self.safe(program), |place| {
                format!(
                    "{}, outside the data directory, writable only by root or the current user",
                    place.path().display()
                )
            })?;
        }
        Some(())
    }

    fn check_options(&self) -> Result<(), Failure> {
        for program in self.programs() {
            match self.safe(program) {
                // It may be created later, but not in a forbidden place.
                Err(error) if error.class == ErrorClass::Unreachable => {
                    self.outside_by_name(program)?;
                }
                other => drop(other?),
            }
        }
        Ok(())
    }
}

impl CommandProvider {
    fn programs(&self) -> impl Iterator<Item = &Program> {
        [&self.wrap, &self.unwrap].into_iter().chain(&self.rotate)
    }

    /// The program's place, if the program is safe to receive keys.
    fn safe(&self, program: &Program) -> Result<Place, Failure> {
        let place = Place::resolve_as(FileKind::Program, &program.path)?;
        outside(&place, self.environment.data_directory.as_deref())?;
        place.check_directories()?;
        place.check_program()?;
        Ok(place)
    }

    /// For a program that does not exist: only its path can be checked.
    fn outside_by_name(&self, program: &Program) -> Result<(), Failure> {
        let path = &program.path;
        match &self.environment.data_directory {
            Some(root) if path.starts_with(root) => Err(Failure::new(
                ErrorClass::Insecure,
                format!("program \"{}\" is inside the data directory", path.display()),
            )
            .with_hint("Move the program to another directory, for example /etc/pagevault.")),
            _ => Ok(()),
        }
    }

    /// Runs the program with a request and requires that it succeeds.
    fn run(
        &self,
        program: &Program,
        operation: &str,
        fields: &[(&str, &str)],
    ) -> Result<Ended, Failure> {
        for (name, value) in fields {
            if value.is_empty() || value.trim() != *value || value.chars().any(char::is_control) {
                return Err(cannot_be_passed(name));
            }
        }
        let path = self.safe(program)?.path();
        let size = fields.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>();
        // With full capacity: a string that grows leaves copies behind.
        let mut request = Zeroizing::new(String::with_capacity(64 + operation.len() + size));
        request.push_str("pagevault-command 1\n");
        for (name, value) in [("operation", operation)].iter().chain(fields) {
            for part in [name, " ", value, "\n"] {
                request.push_str(part);
            }
        }
        let now = Instant::now();
        let deadline = self
            .environment
            .deadline
            .map_or(now + LONGEST, |deadline| deadline.checked_sub(MARGIN).unwrap_or(now));
        let ended = program::run(&path, &program.arguments, request.as_bytes(), deadline)
            .map_err(|stopped| interrupted(program, stopped))?;
        if ended.code == 0 {
            return Ok(ended);
        }
        // A careless program may print parts of its input, or of its output as `set -x` does. They
        // must not reach the log.
        let given = fields.iter().filter(|(name, _)| *name == "plaintext");
        let leaks =
            given.into_iter().any(|(_, secret)| repeats(&ended.last_error, secret.as_bytes()))
                || reply::opened(&ended.output).any(|secret| repeats(&ended.last_error, secret));
        Err(failed(program, ended.code, if leaks { None } else { Some(&ended.last_error) }))
    }

    fn read(&self, program: &Program, ended: &Ended, known: &[&str]) -> Result<Reply, Failure> {
        Reply::read(&ended.output, known).map_err(|wrong| unusable(program, &wrong))
    }
}

/// Whether a text contains a significant part of a secret.
fn repeats(text: &str, secret: &[u8]) -> bool {
    const PART: usize = 12;
    let text = text.as_bytes();
    secret.windows(PART).any(|part| text.windows(PART).any(|found| found == part))
}

/// A parsed wrapped key.
struct Parts<'a> {
    /// Everything before the nonce.
    head: &'a [u8],
    key_version: u64,
    text: &'a str,
    body: &'a [u8],
}

impl Parts<'_> {
    fn of(wrapped: &[u8]) -> Option<Parts<'_>> {
        let ([FORMAT, version @ .., l0, l1], rest) = wrapped.split_first_chunk::<HEADER>()? else {
            return None;
        };
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        let text = std::str::from_utf8(rest.get(..length)?).ok()?;
        let (head, body) = wrapped.split_at(HEADER + length);
        let key_version = u64::from_be_bytes(*version);
        reply::is_opaque(text).then_some(Parts { head, key_version, text, body })
    }
}

/// Associated data: each part is preceded by its length, so that different triples give different
/// data.
fn associated_data(head: &[u8], key: &str, context: &str) -> Vec<u8> {
    let mut bound = b"pagevault command provider 1".to_vec();
    for part in [head, key.as_bytes(), context.as_bytes()] {
        bound.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bound.extend_from_slice(part);
    }
    bound
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

fn failed(program: &Program, code: i32, said: Option<&str>) -> Failure {
    let path = program.path.display();
    let said = match said {
        None => "It printed a key on standard error, which is not repeated here.".to_owned(),
        Some("") => "It printed nothing on standard error.".to_owned(),
        Some(said) => format!("It printed: \"{}\".", printable(said)),
    };
    let known = STATUSES.iter().find(|(status, ..)| *status == code);
    let Some((_, class, passes, what, hint)) = known else {
        let signal = Signal::try_from(code - 128);
        let how = signal.map_or(format!("Its exit status was {code}."), |signal| {
            format!("It was ended by {signal} (exit status {code}).")
        });
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

fn interrupted(program: &Program, stopped: Stopped) -> Failure {
    let path = program.path.display();
    match stopped {
        Stopped::Late => {
            Failure::new(ErrorClass::Deadline, format!("program \"{path}\" did not end in time"))
                .with_detail("It was killed, together with all processes that it had started.")
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

fn too_much(program: &Program) -> Failure {
    let limit = program::OUTPUT_LIMIT;
    unusable(program, &format!("It has more than {limit} bytes."))
}

/// The failure for a program that reports success without a usable result.
fn unusable(program: &Program, wrong: &str) -> Failure {
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

fn cannot_rotate(key: &str) -> Failure {
    Failure::new(ErrorClass::BadOptions, "provider has no program that rotates keys")
        .with_detail(format!(
            "It has no option \"rotate\", and key \"{}\" has no newer version than the one in use.",
            printable(key)
        ))
        .with_hint(
            "Create a new version of the key with the tools of the key server, and try again; or create a new key, and pass its name to set_database_master_key() or set_cluster_master_key().",
        )
}

fn refused(cause: &str) -> Failure {
    Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be unwrapped")
        .with_detail(cause)
        .with_hint("Use the master key that wrapped it.")
}

fn internal(cause: String) -> Failure {
    Failure::new(ErrorClass::Internal, "could not wrap the key").with_detail(cause)
}
