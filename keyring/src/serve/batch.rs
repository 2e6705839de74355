//! The operations of a request, divided by providers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pagevault_keystore::anchor;
use pagevault_keystore::protocol::{Action, Base64, Operation, Outcome, ProviderSpec, SecretBytes};

use super::bad_request;
use super::workers::Reports;
use crate::check::check;
use crate::failure::Failure;
use crate::options::printable;
use crate::provider::{Environment, Provider};
use crate::retry::{Backoff, retry};
use crate::store::{Store, Written};
use crate::{providers, stores};

/// A worker's report on an operation.
pub(super) enum Update {
    /// An attempt failed; another follows.
    Retrying(Failure),
    Done(Done),
}

/// Result and duration of an operation.
pub(super) struct Done {
    pub(super) result: Result<Outcome, Failure>,
    pub(super) elapsed: Duration,
}

/// The subject of an operation in error messages.
pub(super) fn title(operation: &Operation) -> String {
    if operation.provider.kind == anchor::KIND {
        return "anchor".to_owned();
    }
    let provider = printable(&operation.provider.name);
    let about_key = !operation.key.is_empty() && !matches!(operation.action, Action::CheckOptions);
    if about_key {
        format!("master key \"{}\" of provider \"{provider}\"", printable(&operation.key))
    } else {
        format!("provider \"{provider}\"")
    }
}

/// The operations of one provider, with their indexes in the request.
pub(super) struct Batch {
    provider: ProviderSpec,
    operations: Vec<(usize, Operation)>,
}

/// Divides operations into one [`Batch`] per provider, so that a provider that hangs does not delay
/// others.
pub(super) fn divide(operations: Vec<Operation>) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    // A name may occur with several options, if the provider is about to be changed.
    let mut by_name: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, operation) in operations.into_iter().enumerate() {
        let provider = &operation.provider;
        let same = |at: &usize| {
            let other = &batches[*at].provider;
            (&other.kind, &other.options, other.programs)
                == (&provider.kind, &provider.options, provider.programs)
        };
        let named = by_name.entry(provider.name.clone()).or_default();
        if let Some(at) = named.iter().copied().find(|at| same(at)) {
            batches[at].operations.push((index, operation));
        } else {
            named.push(batches.len());
            batches
                .push(Batch { provider: provider.clone(), operations: vec![(index, operation)] });
        }
    }
    batches
}

impl Batch {
    /// Indexes of the operations in the request.
    pub(super) fn indexes(&self) -> impl Iterator<Item = usize> {
        self.operations.iter().map(|(index, _)| *index)
    }

    /// Whether processes may be started.
    pub(super) fn runs_programs(&self) -> bool {
        self.provider.programs || providers::has_process(&self.provider.kind)
    }

    /// Performs the operations in order, with one login or process for all.
    pub(super) fn run(self, environment: &Environment, reports: &Reports<(usize, Update)>) {
        let environment = &Environment { programs: self.provider.programs, ..environment.clone() };
        let target = Target::of(&self.provider, environment);
        let mut out_of_order = None;
        for (index, operation) in self.operations {
            let start = Instant::now();
            let result = match (&target, &out_of_order) {
                (Err(error), _) => Err(error.clone()),
                (_, Some(error)) if operation.once => Err(Failure::clone(error)),
                (Ok(target), _) if operation.once => target.perform(&operation),
                (Ok(target), _) => retry(
                    Backoff::default(),
                    environment.deadline,
                    // Sending fails if the deadline has passed, which `retry` notices as well.
                    |error| _ = reports.send((index, Update::Retrying(error))),
                    || target.perform(&operation),
                ),
            };
            if let Err(error) = &result
                && error.retry
            {
                out_of_order = Some(error.clone());
            }
            let done = Done { result, elapsed: start.elapsed() };
            if !reports.send((index, Update::Done(done))) {
                return; // the deadline has passed
            }
        }
    }
}

/// What a batch of operations concerns.
enum Target {
    Provider(Box<dyn Provider>),
    Store(Box<dyn Store>),
}

impl Target {
    fn of(spec: &ProviderSpec, environment: &Environment) -> Result<Target, Failure> {
        if spec.kind == anchor::KIND {
            return stores::of_request(&spec.options, environment).map(Target::Store);
        }
        providers::build(&spec.kind, &spec.options, environment).map(Target::Provider)
    }

    fn perform(&self, operation: &Operation) -> Result<Outcome, Failure> {
        match self {
            Target::Provider(provider) => perform(provider.as_ref(), operation),
            Target::Store(store) => perform_on_store(store.as_ref(), &operation.action),
        }
    }
}

fn perform_on_store(store: &dyn Store, action: &Action) -> Result<Outcome, Failure> {
    match action {
        Action::ReadNote => Ok(Outcome::Note { stored: store.read()? }),
        Action::WriteNote { note, replaces } => Ok(match store.write(note, *replaces)? {
            Written::Done(version) => Outcome::Noted { version },
            Written::Overtaken => Outcome::Overtaken,
        }),
        _ => Err(bad_request("operation does not concern an anchor")),
    }
}

fn perform(provider: &dyn Provider, operation: &Operation) -> Result<Outcome, Failure> {
    let (key, context) = (&operation.key, &operation.context);
    Ok(match &operation.action {
        Action::Wrap { plaintext } => {
            let done = provider.wrap(key, context, plaintext.expose())?;
            Outcome::Wrapped { wrapped: Base64(done.wrapped), key_version: done.key_version }
        }
        Action::Unwrap { wrapped } => {
            let done = provider.unwrap(key, context, &wrapped.0)?;
            let plaintext = SecretBytes::from_vec(done.plaintext);
            Outcome::Unwrapped { plaintext, key_version: done.key_version }
        }
        Action::Rewrap { from_key, wrapped } => {
            let done = provider.rewrap(from_key, key, context, &wrapped.0)?;
            Outcome::Wrapped { wrapped: Base64(done.wrapped), key_version: done.key_version }
        }
        Action::Rotate { wrapped } => {
            Outcome::Rotated { key_version: provider.rotate(key, &wrapped.0)? }
        }
        Action::Check => {
            let key = Some(key.as_str()).filter(|key| !key.is_empty());
            Outcome::Checked { findings: check(provider, key) }
        }
        Action::CheckOptions => provider.check_options().map(|()| Outcome::OptionsOk)?,
        Action::ReadNote | Action::WriteNote { .. } => {
            return Err(bad_request("operation does not concern a key provider"));
        }
    })
}
