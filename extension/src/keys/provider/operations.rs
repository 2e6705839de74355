//! The one door to key providers: every operation passes here, is noted in the provider's health
//! and leaves a line in the audit trail.
//!
//! Also used where there is neither catalog nor transaction: in the postmaster and in recovery. No
//! lock may be held that anyone but key management waits for: a provider may take
//! `pagevault.keyring_timeout`.

use std::time::{Duration, Instant};

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::protocol::{
    Action, Base64, Failure, Finding, Operation, Outcome, ProviderSpec,
};
use pagevault_keystore::state::{DatabaseKey, State};
use pagevault_keystore::{Scope, master_context};
use pgrx::PgSqlErrorCode as Code;

use super::helper;
use super::proof::{self, Expects};
use super::refusal::{self, Subject};
use crate::audit::{self, Event};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::session::{self, Identity};
use crate::pg::{guc, process};
use crate::shmem;
use crate::shmem::health::OperationFailure;

/// One operation to ask a provider for.
pub(crate) struct Question {
    pub(crate) provider: ProviderSpec,
    /// The master key's name; empty where none is concerned.
    pub(crate) key: String,
    /// Whose database key is meant, which is what a wrapped key is bound to.
    pub(crate) scope: Option<Scope>,
    pub(crate) action: Action,
    /// Which database key an unwrapping must give. Without it no key is taken from the answer.
    expects: Option<Expects>,
}

impl Question {
    /// To do something that gives no database key in clear.
    pub(crate) fn new(
        provider: ProviderSpec,
        key: String,
        scope: Option<Scope>,
        action: Action,
    ) -> Question {
        Question { provider, key, scope, action, expects: None }
    }

    /// To unwrap a version of a scope's database key as its record says.
    pub(crate) fn unwrap(
        state: &State,
        scope: Scope,
        version: KeyVersion,
        record: &DatabaseKey,
    ) -> Result<Question> {
        Ok(Question::unwrap_by(spec_of(state, &record.provider)?, scope, version, record))
    }

    /// As [`Question::unwrap`], by a provider whose options are not recorded yet.
    pub(crate) fn unwrap_by(
        provider: ProviderSpec,
        scope: Scope,
        version: KeyVersion,
        record: &DatabaseKey,
    ) -> Question {
        Question {
            provider,
            key: record.master_key.clone(),
            scope: Some(scope),
            action: Action::Unwrap { wrapped: Base64(record.wrapped.clone()) },
            expects: Some(Expects { scope, version, check: record.check }),
        }
    }
}

/// What came of a [`Question`].
pub(crate) struct Answer {
    pub(crate) subject: Subject,
    outcome: Outcome,
}

impl Answer {
    /// Why it was not done, if it was not.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        match &self.outcome {
            Outcome::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// The wrapped key and the master key's version. `what` completes "could not ...".
    pub(crate) fn wrapped(self, what: &str) -> Result<(Vec<u8>, u64)> {
        match self.outcome {
            Outcome::Wrapped { wrapped, key_version } => Ok((wrapped.0, key_version)),
            _ => Err(self.report(what)),
        }
    }

    /// The unwrapped database key, which is the right one: see [`proof`].
    pub(crate) fn unwrapped(&self, what: &str) -> Result<Secret32> {
        match &self.outcome {
            Outcome::Unwrapped { plaintext, .. } => {
                let bytes = plaintext.expose().try_into();
                bytes.map(Secret32::from_bytes).map_err(|_| unproven(&self.subject.provider))
            }
            _ => Err(self.report(what)),
        }
    }

    /// That there is a new version.
    pub(crate) fn rotated(self, what: &str) -> Result<()> {
        match self.outcome {
            Outcome::Rotated { .. } => Ok(()),
            _ => Err(self.report(what)),
        }
    }

    /// That the options are right.
    pub(crate) fn options_ok(self, what: &str) -> Result<()> {
        match self.outcome {
            Outcome::OptionsOk => Ok(()),
            _ => Err(self.report(what)),
        }
    }

    /// What was looked at; or why nothing was.
    pub(crate) fn findings(self, what: &str) -> Result<Vec<Finding>> {
        match self.outcome {
            Outcome::Checked { findings } => Ok(findings),
            Outcome::Failed(failure) => {
                let what = "the provider can be asked".to_owned();
                Ok(vec![Finding { what, seen: String::new(), failure: Some(failure) }])
            }
            _ => Err(self.report(what)),
        }
    }

    /// The error that this answer is, to someone who needed another one.
    pub(crate) fn report(&self, what: &str) -> Report {
        match self.failure() {
            Some(failure) => refusal::report(what, &self.subject, failure),
            None => Report::new(
                Code::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
                format!("could not {what}: unexpected reply of the key provider helper"),
            )
            .hint("Install the pagevault-keyring of the same release as the extension."),
        }
    }
}

/// Whether what is learnt goes into the provider's health.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Note {
    Health,
    /// The options asked with are not the provider's, or not yet.
    Nothing,
}

/// Asks and returns one answer for each question. `by` is the SQL function or worker that asks.
///
/// # Errors
/// When the helper cannot be run or does not answer; what single operations run into are answers.
pub(crate) fn ask(by: &str, questions: Vec<Question>) -> Result<Vec<Answer>> {
    ask_noting(by, questions, Note::Health)
}

/// As [`ask`], with options that the provider does not have yet.
pub(crate) fn try_out(by: &str, questions: Vec<Question>) -> Result<Vec<Answer>> {
    ask_noting(by, questions, Note::Nothing)
}

/// As [`ask`], for a single question.
pub(crate) fn ask_one(by: &str, question: Question) -> Result<Answer> {
    ask(by, vec![question])?
        .pop()
        .ok_or_else(|| internal("the key provider helper gave no result".into()))
}

/// What is left of a question when it was asked: what the audit trail says of it.
struct Asked {
    subject: Subject,
    action: &'static str,
    from_key: Option<String>,
    scope: Option<Scope>,
    expects: Option<Expects>,
}

/// Questions of one run of the helper: few enough for its time, and for the size of a message and
/// of a pipe.
const AT_ONCE: usize = 64;

fn ask_noting(by: &str, questions: Vec<Question>, note: Note) -> Result<Vec<Answer>> {
    let mut answers = Vec::with_capacity(questions.len());
    let mut questions = questions.into_iter();
    loop {
        let some: Vec<_> = questions.by_ref().take(AT_ONCE).collect();
        if some.is_empty() {
            return Ok(answers);
        }
        answers.extend(run_helper(by, some, note)?);
    }
}

fn run_helper(by: &str, questions: Vec<Question>, note: Note) -> Result<Vec<Answer>> {
    let mut asked = Vec::with_capacity(questions.len());
    let mut operations = Vec::with_capacity(questions.len());
    for Question { provider, key, scope, action, expects } in questions {
        asked.push(Asked {
            subject: Subject {
                provider: provider.name.clone(),
                kind: provider.kind.clone(),
                key: key.clone(),
            },
            action: action_name(&action),
            from_key: match &action {
                Action::Rewrap { from_key, .. } if *from_key != key => Some(from_key.clone()),
                _ => None,
            },
            scope,
            expects,
        });
        let context = scope.map(context).transpose()?.unwrap_or_default();
        operations.push(Operation { provider, key, context, action });
    }
    let asking = Asking { by, who: session::identity(), note };
    let started = Instant::now();
    match helper::run(operations, Duration::from_secs(guc::keyring_timeout())) {
        Ok(reply) => {
            let mut answers = Vec::with_capacity(asked.len());
            for ((asked, outcome), elapsed_us) in
                asked.into_iter().zip(reply.results).zip(reply.elapsed_us)
            {
                let outcome = proof::proven(outcome, &asked.subject, asked.expects);
                asking.record(&asked, &ended(&outcome), elapsed_us)?;
                answers.push(Answer { subject: asked.subject, outcome });
            }
            Ok(answers)
        }
        Err(error) => {
            let elapsed_us = started.elapsed().as_micros() as u64;
            // That we stopped waiting says nothing about the provider.
            let note = if error.is_cancel() { Note::Nothing } else { note };
            let asking = Asking { note, ..asking };
            let ended =
                Err(OperationFailure { class: error.class(), answered: false, text: error.text() });
            for asked in &asked {
                asking.record(asked, &ended, elapsed_us)?;
            }
            Err(error.into_report())
        }
    }
}

/// How an operation ended: the master key's version in the answer, or what went wrong.
type Ended = std::result::Result<Option<u64>, OperationFailure>;

/// Who asks, and what becomes of what is learnt.
struct Asking<'a> {
    by: &'a str,
    who: Identity,
    note: Note,
}

impl Asking<'_> {
    fn record(&self, asked: &Asked, ended: &Ended, elapsed_us: u64) -> Result<()> {
        let provider = &asked.subject.provider;
        if self.note == Note::Health {
            let health = &shmem::required()?.health;
            let outcome = ended.as_ref().map(drop);
            health.record(
                &KeystoreLock::acquire(),
                provider,
                process::now_us(),
                elapsed_us,
                outcome,
            );
        }
        let event = Event {
            action: asked.action,
            by: self.by,
            scope: asked.scope,
            provider,
            master_key: Some(&asked.subject.key),
            from_master_key: asked.from_key.as_deref(),
            master_key_version: ended.as_ref().ok().copied().flatten(),
            outcome: ended.as_ref().err().map_or("ok", |trouble| trouble.class),
            elapsed_us: Some(elapsed_us),
        };
        audit::log(&self.who, &event);
        Ok(())
    }
}

/// A check ends with its first finding that is not as it should be.
fn ended(outcome: &Outcome) -> Ended {
    let failure = match outcome {
        Outcome::Wrapped { key_version, .. }
        | Outcome::Unwrapped { key_version, .. }
        | Outcome::Rotated { key_version } => return Ok(Some(*key_version)),
        Outcome::OptionsOk => return Ok(None),
        Outcome::Checked { findings } => findings.iter().find_map(|f| f.failure.as_ref()),
        Outcome::Failed(failure) => Some(failure),
    };
    let Some(failure) = failure else { return Ok(None) };
    let text = match &failure.detail {
        Some(detail) => format!("{}. {detail}", failure.message),
        None => failure.message.clone(),
    };
    let answered = refusal::is_answer(failure.class);
    Err(OperationFailure { class: failure.class.name(), answered, text })
}

fn action_name(action: &Action) -> &'static str {
    match action {
        Action::Wrap { .. } => "wrap",
        Action::Unwrap { .. } => "unwrap",
        Action::Rewrap { .. } => "rewrap",
        Action::Rotate { .. } => "rotate",
        Action::Check => "check",
        Action::CheckOptions => "check_options",
    }
}

/// What a scope's wrapped key is bound to.
fn context(scope: Scope) -> Result<String> {
    let id = shmem::required()?.control.keystore_id();
    id.map(|id| master_context(&id, scope))
        .ok_or_else(|| internal("the keystore has no identity yet".into()))
}

/// A provider as the helper wants it.
pub(crate) fn spec_of(state: &State, name: &str) -> Result<ProviderSpec> {
    let provider = state.provider(name).ok_or_else(|| no_such_provider(name, state))?;
    let options = serde_json::from_str(&provider.options).map_err(|e| {
        Report::new(
            Code::ERRCODE_DATA_CORRUPTED,
            format!("options of key provider \"{name}\" in the keystore are not JSON: {e}"),
        )
    })?;
    Ok(ProviderSpec {
        name: name.to_owned(),
        kind: provider.kind.clone(),
        options,
        programs: provider.programs,
    })
}

/// The report for a name that no provider has.
pub(crate) fn no_such_provider(name: &str, state: &State) -> Report {
    let known: Vec<&str> = state.providers().map(|(name, _)| name).collect();
    let report = Report::new(
        Code::ERRCODE_UNDEFINED_OBJECT,
        format!("key provider \"{name}\" does not exist"),
    );
    if known.is_empty() {
        report.hint("Add one with pagevault.add_provider().")
    } else {
        report.hint(format!("Known providers: {}.", known.join(", ")))
    }
}

/// The report for a provider that wraps, but does not unwrap to the same.
pub(crate) fn unproven(provider: &str) -> Report {
    Report::new(
        Code::ERRCODE_DATA_EXCEPTION,
        format!("key provider \"{provider}\" did not give back the key it had wrapped"),
    )
    .detail("Nothing was changed.")
    .hint("Check that the provider holds the key that wrapped it, not another of the same name.")
}
