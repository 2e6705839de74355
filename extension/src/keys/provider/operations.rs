//! All operations of key providers pass through this module, which records them in the provider's
//! health and in the audit trail.
//!
//! Also used without catalogs or transactions: in the postmaster and in recovery. The only lock
//! that may be held is the one of key management, because a request may take
//! `pagevault.keyring_timeout`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::protocol::{
    self, Action, Base64, Failure, Finding, Operation, Outcome, ProviderSpec, SIZE_LIMIT,
};
use pagevault_keystore::state::State;
use pagevault_keystore::{CheckValue, DatabaseKey, Scope, Wrapping, master_context};
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

/// One operation of a provider.
pub(crate) struct Question {
    pub(crate) provider: ProviderSpec,
    /// The master key's name; empty if no key is concerned.
    pub(crate) key: String,
    /// The scope of the database key; wrapped keys are bound to it.
    pub(crate) scope: Option<Scope>,
    pub(crate) action: Action,
    /// The database key that an unwrapping must return. If `None`, no key is taken from the answer.
    expects: Option<Expects>,
    /// See [`Operation::once`].
    once: bool,
}

impl Question {
    /// An operation that returns no unwrapped database key.
    pub(crate) fn new(
        provider: ProviderSpec,
        key: String,
        scope: Option<Scope>,
        action: Action,
    ) -> Question {
        Question { provider, key, scope, action, expects: None, once: false }
    }

    /// Unwraps a version of a scope's database key by one of the master keys in its record.
    pub(crate) fn unwrap(
        state: &State,
        (scope, version): (Scope, KeyVersion),
        record: &DatabaseKey,
        wrapping: &Wrapping,
    ) -> Result<Question> {
        let provider = spec_of(state, &wrapping.provider)?;
        Ok(Question::unwrap_by(provider, (scope, version), record.check, wrapping))
    }

    /// Like [`Question::unwrap`], by a provider whose options are not recorded yet.
    pub(crate) fn unwrap_by(
        provider: ProviderSpec,
        (scope, version): (Scope, KeyVersion),
        check: CheckValue,
        wrapping: &Wrapping,
    ) -> Question {
        Question {
            provider,
            key: wrapping.master_key.clone(),
            scope: Some(scope),
            action: Action::Unwrap { wrapped: Base64(wrapping.wrapped.clone()) },
            expects: Some(Expects { scope, version, check }),
            once: false,
        }
    }

    /// Tried once, because another master key can answer as well.
    pub(crate) fn once(self) -> Question {
        Question { once: true, ..self }
    }
}

fn subject(provider: &ProviderSpec, key: &str) -> Subject {
    let (name, kind) = (provider.name.clone(), provider.kind.clone());
    Subject { provider: name, kind, key: key.to_owned() }
}

/// The answer to a [`Question`].
pub(crate) struct Answer {
    pub(crate) subject: Subject,
    outcome: Outcome,
}

impl Answer {
    /// The failure, if the operation failed.
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

    /// The unwrapped database key, which has been verified: see [`proof`].
    pub(crate) fn unwrapped(&self, what: &str) -> Result<Secret32> {
        match &self.outcome {
            Outcome::Unwrapped { plaintext, .. } => {
                let bytes = plaintext.expose().try_into();
                bytes.map(Secret32::from_bytes).map_err(|_| unproven(&self.subject.provider))
            }
            _ => Err(self.report(what)),
        }
    }

    /// Success of a rotation.
    pub(crate) fn rotated(self, what: &str) -> Result<()> {
        match self.outcome {
            Outcome::Rotated { .. } => Ok(()),
            _ => Err(self.report(what)),
        }
    }

    /// Success of a check of options.
    pub(crate) fn options_ok(self, what: &str) -> Result<()> {
        match self.outcome {
            Outcome::OptionsOk => Ok(()),
            _ => Err(self.report(what)),
        }
    }

    /// The findings of a check; a failed check is a finding too.
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

    /// The error report for this answer if another one was expected.
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

/// Whether outcomes are recorded in the provider's health.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recording {
    Health,
    /// Not recorded: the options are not, or not yet, the provider's.
    Nothing,
}

/// Returns one answer for each question. `by` is the SQL function or worker that asks.
///
/// # Errors
/// If the helper cannot be run or does not answer. Failures of single operations are answers.
pub(crate) fn ask(by: &str, questions: Vec<Question>) -> Result<Vec<Answer>> {
    ask_recording(by, questions, Recording::Health, None)
}

/// Like [`ask`], for at most this time in all: there is no answer from those that take longer.
pub(crate) fn ask_within(
    by: &str,
    questions: Vec<Question>,
    limit: Duration,
) -> Result<Vec<Answer>> {
    ask_recording(by, questions, Recording::Health, Some(limit))
}

/// Like [`ask`], with options that the provider does not have yet.
pub(crate) fn ask_unrecorded(by: &str, questions: Vec<Question>) -> Result<Vec<Answer>> {
    ask_recording(by, questions, Recording::Nothing, None)
}

/// The properties of a question that are needed for the audit trail, once it is sent.
struct SentQuestion {
    subject: Subject,
    action: &'static str,
    from_key: Option<String>,
    scope: Option<Scope>,
    expects: Option<Expects>,
}

/// A question that can be sent.
struct Prepared {
    asked: SentQuestion,
    operation: Operation,
    /// Its length in a request, in bytes.
    length: usize,
}

impl Prepared {
    fn new(question: Question) -> Result<Prepared> {
        let Question { provider, key, scope, action, expects, once } = question;
        let asked = SentQuestion {
            subject: subject(&provider, &key),
            action: action_name(&action),
            from_key: match &action {
                Action::Rewrap { from_key, .. } if *from_key != key => Some(from_key.clone()),
                _ => None,
            },
            scope,
            expects,
        };
        let context = scope.map(context).transpose()?.unwrap_or_default();
        let operation = Operation { provider, key, context, action, once };
        let text = protocol::to_wiped_json(&operation, SIZE_LIMIT)
            .map_err(|e| internal(format!("a request to a key provider is too long: {e}")))?;
        Ok(Prepared { asked, operation, length: text.len() })
    }

    /// Why a provider is not asked again that an earlier run has found out of order.
    fn known_failure<'a>(&self, known: &'a BTreeMap<String, Failure>) -> Option<&'a Failure> {
        known.get(&self.operation.provider.name).filter(|_| self.operation.once)
    }
}

/// Maximum number of questions in one run of the helper. It asks as many providers at a time.
const BATCH: usize = 1024;

/// Maximum length of the questions of one run. Answers may be longer than questions.
const ROOM: usize = SIZE_LIMIT / 2;

/// Time for a run if others can be asked instead: a provider that accepts connections and does not
/// answer holds up the next one by no more.
const FOR_OTHERS: Duration = Duration::from_secs(10);

fn ask_recording(
    by: &str,
    questions: Vec<Question>,
    note: Recording,
    limit: Option<Duration>,
) -> Result<Vec<Answer>> {
    let mut answers: Vec<Answer> = Vec::with_capacity(questions.len());
    let prepared: Result<Vec<_>> = questions.into_iter().map(Prepared::new).collect();
    let mut questions = prepared?.into_iter().peekable();
    let deadline = limit.map(|limit| Instant::now() + limit);
    // Providers that a run has found out of order: later runs do not wait for them again.
    let mut out_of_order: BTreeMap<String, Failure> = BTreeMap::new();
    while let Some(next) = questions.peek() {
        // In the order of the questions: a run, or a question that nobody is asked.
        if let Some(failure) = next.known_failure(&out_of_order) {
            let outcome = Outcome::Failed(failure.clone());
            let subject = questions.next().map(|question| question.asked.subject);
            answers.extend(subject.map(|subject| Answer { subject, outcome }));
            continue;
        }
        let (mut some, mut length) = (Vec::new(), 0);
        while let Some(question) = questions.next_if(|question| {
            let fits = some.len() < BATCH && length + question.length <= ROOM;
            question.known_failure(&out_of_order).is_none() && (fits || some.is_empty())
        }) {
            length += question.length;
            some.push(question);
        }
        // Questions that nobody answers must not take the time of those in later runs.
        let share = deadline.map(|deadline| {
            let runs = 1 + questions.len().div_ceil(BATCH) as u32;
            deadline.saturating_duration_since(Instant::now()) / runs
        });
        let new = run_helper(by, some, note, share)?;
        for answer in &new {
            if let Some(failure) = answer.failure().filter(|failure| failure.retry) {
                out_of_order.insert(answer.subject.provider.clone(), failure.clone());
            }
        }
        answers.extend(new);
    }
    Ok(answers)
}

fn run_helper(
    by: &str,
    questions: Vec<Prepared>,
    note: Recording,
    limit: Option<Duration>,
) -> Result<Vec<Answer>> {
    let (asked, operations): (Vec<_>, Vec<_>) =
        questions.into_iter().map(|question| (question.asked, question.operation)).unzip();
    let asking = Requester { by, who: session::identity(), note };
    let started = Instant::now();
    let timeout = Duration::from_secs(guc::keyring_timeout());
    let is_once = operations.iter().all(|operation| operation.once);
    let limit = limit.or(is_once.then_some(FOR_OTHERS));
    let timeout = limit.map_or(timeout, |limit| timeout.min(limit));
    match helper::run(operations, timeout) {
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
            // A cancelled request says nothing about the provider.
            let note = if error.is_cancel() { Recording::Nothing } else { note };
            let asking = Requester { note, ..asking };
            let ended =
                Err(OperationFailure { class: error.class(), answered: false, text: error.text() });
            for asked in &asked {
                asking.record(asked, &ended, elapsed_us)?;
            }
            Err(error.into_report())
        }
    }
}

/// The outcome of an operation: the master key's version in the answer, or a failure.
type Ended = std::result::Result<Option<u64>, OperationFailure>;

/// Who asks, and where outcomes are recorded.
struct Requester<'a> {
    by: &'a str,
    who: Identity,
    note: Recording,
}

impl Requester<'_> {
    fn record(&self, asked: &SentQuestion, ended: &Ended, elapsed_us: u64) -> Result<()> {
        let provider = &asked.subject.provider;
        if self.note == Recording::Health {
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
            outcome: ended.as_ref().err().map_or("ok", |failure| failure.class),
            elapsed_us: Some(elapsed_us),
        };
        audit::log(&self.who, &event);
        Ok(())
    }
}

/// The outcome of an operation. That of a check is its first failed finding.
fn ended(outcome: &Outcome) -> Ended {
    let failure = match outcome {
        Outcome::Wrapped { key_version, .. }
        | Outcome::Unwrapped { key_version, .. }
        | Outcome::Rotated { key_version } => return Ok(Some(*key_version)),
        // The last three are of anchors, which are not asked here.
        Outcome::OptionsOk | Outcome::Note { .. } | Outcome::Noted { .. } | Outcome::Overtaken => {
            return Ok(None);
        }
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
        Action::ReadNote => "read_note",
        Action::WriteNote { .. } => "write_note",
    }
}

/// The context that a scope's wrapped key is bound to.
fn context(scope: Scope) -> Result<String> {
    let id = shmem::required()?.control.keystore_id();
    id.map(|id| master_context(&id, scope))
        .ok_or_else(|| internal("the keystore has no identity yet".into()))
}

/// A provider in the form that the helper requires.
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

/// The report for an unknown provider name.
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

/// The report for a provider that does not unwrap a key to what it wrapped.
pub(crate) fn unproven(provider: &str) -> Report {
    Report::new(
        Code::ERRCODE_DATA_EXCEPTION,
        format!("key provider \"{provider}\" did not give back the key it had wrapped"),
    )
    .detail("Nothing was changed.")
    .hint("Check that the provider holds the key that wrapped it, not another of the same name.")
}
