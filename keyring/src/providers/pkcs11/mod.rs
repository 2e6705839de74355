//! `pkcs11`: master keys in a token of PKCS#11: a hardware security module, a smart card, a TPM.
//!
//! Options: `module`, `token`, `pin_file` or `pin_command`, and optionally `module_sha256`,
//! `serial` and `environment`. docs/pkcs11.md describes them.
//!
//! ```text
//! pagevault-keyring serve          Pkcs11: options, deadline
//!  └─ pagevault-keyring pkcs11     worker: loads the module, logs in once, answers calls
//! ```
//!
//! The standard is OASIS PKCS#11, version 2.40 or 3.0. All calls of one request use one login:
//! after a wrong PIN no other attempt is made, because tokens lock.

mod calls;
mod failure;
mod keys;
mod module;
mod operations;
mod pin;
mod process;
mod settings;
mod token;
pub mod worker;
mod wrapping;

use std::cell::RefCell;

use pagevault_keystore::protocol::{Base64, ErrorClass, SecretBytes};

use crate::failure::Failure;
use crate::findings::Findings;
use crate::options::Options;
use crate::provider::{Environment, KeyInfo, Provider, Unwrapped, Wrapped};
use crate::trust::insecure;
use calls::{Answer, Call};
use module::{Module, outside_by_name};
use process::Process;
use settings::Settings;
pub use settings::{CREDENTIAL_OPTIONS, OPTIONS};

struct Pkcs11 {
    settings: Settings,
    environment: Environment,
    /// From the first call on, unless it failed.
    process: RefCell<Option<Process>>,
    /// The token refused the login.
    refused: RefCell<Option<Failure>>,
}

/// Creates the provider from its options.
pub fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Provider>, Failure> {
    if !environment.programs {
        return Err(insecure("provider is not allowed to load a module")
            .with_detail("A module is a program. The provider was configured by a role that may not execute server programs, or the module is named in key files that another user could have written.")
            .with_hint("Have a superuser or a member of pg_execute_server_program set the provider's options again with alter_provider(). For commands of pagevault-keyring that need keys, use the options --allow-command and --allow-credentials."));
    }
    Ok(Box::new(Pkcs11 {
        settings: Settings::of(options)?,
        environment: environment.clone(),
        process: RefCell::new(None),
        refused: RefCell::new(None),
    }))
}

impl Pkcs11 {
    /// Makes a call. The process is used again unless something was wrong with the token: then the
    /// next attempt begins with a new one.
    fn ask(&self, call: &Call) -> Result<Answer, Failure> {
        if let Some(refused) = self.refused.borrow().as_ref() {
            return Err(refused.clone());
        }
        let mut held = self.process.borrow_mut();
        let mut process = match held.take() {
            Some(process) => process,
            None => Process::start(&self.settings, &self.environment)?,
        };
        let answer = process.ask(call);
        match &answer {
            Err(failure) if failure.class == ErrorClass::Unauthenticated => {
                self.refused.replace(Some(failure.clone()));
            }
            Err(failure) if concerns_key(failure) => *held = Some(process),
            Err(_) => {}
            Ok(answer) => {
                self.remember_refusal(answer);
                *held = Some(process);
            }
        }
        answer
    }

    /// A refused login among the findings counts as well.
    fn remember_refusal(&self, answer: &Answer) {
        if let Answer::Examined { findings } = answer
            && let Some(failure) = findings.last().and_then(|last| last.failure.as_ref())
            && failure.class == ErrorClass::Unauthenticated
        {
            self.refused.replace(Some(failure.clone()));
        }
    }
}

/// Whether a failure concerns the key or what was wrapped, and not the token.
fn concerns_key(failure: &Failure) -> bool {
    use ErrorClass::{BadRequest, Denied, Insecure, KeyDisabled, KeyMissing, WrongCiphertext};
    matches!(
        failure.class,
        BadRequest | Denied | Insecure | KeyDisabled | KeyMissing | WrongCiphertext
    )
}

impl Provider for Pkcs11 {
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure> {
        let plaintext = SecretBytes::from_slice(plaintext);
        let call = Call::Wrap { key: key.to_owned(), context: context.to_owned(), plaintext };
        match self.ask(&call)? {
            Answer::Wrapped { wrapped, key_version } => {
                Ok(Wrapped { wrapped: wrapped.0, key_version })
            }
            _ => Err(other_answer()),
        }
    }

    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure> {
        let wrapped = Base64(wrapped.to_vec());
        let call = Call::Unwrap { key: key.to_owned(), context: context.to_owned(), wrapped };
        match self.ask(&call)? {
            Answer::Unwrapped { plaintext, key_version } => {
                let plaintext = plaintext.expose().to_vec().into();
                Ok(Unwrapped { plaintext, key_version })
            }
            _ => Err(other_answer()),
        }
    }

    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure> {
        let wrapped = Base64(wrapped.to_vec());
        match self.ask(&Call::Rotate { key: key.to_owned(), wrapped })? {
            Answer::Rotated { key_version } => Ok(key_version),
            _ => Err(other_answer()),
        }
    }

    fn describe(&self, key: &str) -> Result<KeyInfo, Failure> {
        match self.ask(&Call::Describe { key: key.to_owned() })? {
            Answer::Described { key_version, oldest_version, summary } => {
                Ok(KeyInfo { key_version, oldest_version, summary })
            }
            _ => Err(other_answer()),
        }
    }

    fn examine(&self, findings: &mut Findings) -> Option<()> {
        // A new process, also after other calls, so that all steps are tried.
        self.process.replace(None);
        match self.ask(&Call::Examine {}) {
            Ok(Answer::Examined { findings: steps }) => findings.append(steps),
            Ok(_) => findings
                .note("the module can be used", Err(other_answer()), String::clone)
                .map(drop),
            Err(failure) => {
                findings.note("the module can be used", Err(failure), String::clone).map(drop)
            }
        }
    }

    fn check_options(&self) -> Result<(), Failure> {
        let data_directory = self.environment.data_directory.as_deref();
        match Module::open(&self.settings, data_directory) {
            // It may be installed later, but not in a forbidden place.
            Err(error) if error.class == ErrorClass::Unreachable => {
                outside_by_name(&self.settings.module, data_directory)?;
            }
            other => drop(other?),
        }
        pin::check(&self.settings.pin, &self.environment)
    }
}

fn other_answer() -> Failure {
    Failure::new(ErrorClass::Internal, "the module's process gave an answer to something else")
        .with_detail("The answer has another kind than the call.")
        .with_hint("Report this, with the name and version of the token's module.")
}
