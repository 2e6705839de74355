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

pub(crate) mod program;
pub mod reply;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_cipher::Secret32;
use pagevault_cipher::wrap::{self, OVERHEAD, WrapKey};
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::{Options, printable};
use crate::program::Ended;
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};
use crate::trust::insecure;
use program::{Program, too_much, unusable};
use reply::Reply;

/// Names of all options.
pub const OPTIONS: &[&str] = &["wrap", "unwrap", "rotate"];

const FORMAT: u8 = 1;
const HEADER: usize = 11;

struct CommandProvider {
    wrap: Program,
    unwrap: Program,
    rotate: Option<Program>,
    environment: Environment,
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
    Ok(Box::new(CommandProvider {
        wrap: Program::required(options, "wrap")?,
        unwrap: Program::required(options, "unwrap")?,
        rotate: Program::given(options, "rotate")?,
        environment: environment.clone(),
    }))
}

impl Provider for CommandProvider {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let once = Secret32::random().map_err(|error| internal(format!("{error}.")))?;
        let encoded = Zeroizing::new(STANDARD.encode(once.expose()));
        let fields = [("key", key), ("context", context), ("plaintext", encoded.as_str())];
        let ended = self.wrap.run(&self.environment, "wrap", &fields)?;
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
        let ended = self.unwrap.run(&self.environment, "unwrap", &fields)?;
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
        let ended = program.run(&self.environment, "rotate", &[("key", key)])?;
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
            oldest_version: None,
            summary: format!("wrapped by program {}", self.wrap.path.display()),
        })
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        for program in self.programs() {
            let what = format!("the program for \"{}\" is safe to run", program.option);
            findings.note(&what, program.safe(&self.environment), |place| {
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
            match program.safe(&self.environment) {
                // It may be created later, but not in a forbidden place.
                Err(error) if error.class == ErrorClass::Unreachable => {
                    program.outside_by_name(&self.environment)?;
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

    fn read(&self, program: &Program, ended: &Ended, known: &[&str]) -> Result<Reply, Failure> {
        Reply::read(&ended.output, known).map_err(|wrong| unusable(program, &wrong))
    }
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
