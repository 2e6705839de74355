//! Keys in the server: their states, and what they may be used for.

use pagevault_keystore::protocol::ErrorClass;

use super::attributes::Attributes;
use super::failure::{self, NoAnswer};
use super::names::{self, Operation, reason};
use super::operations::{self, Call};
use super::session::Session;
use crate::failure::Failure;
use crate::options::printable;
use crate::trust::insecure;

/// The state of a key (KMIP 1.4 section 3.22).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    PreActive,
    Active,
    Deactivated,
    Compromised,
    /// Also if it was compromised before.
    Destroyed,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::PreActive => "Pre-Active",
            State::Active => "Active",
            State::Deactivated => "Deactivated",
            State::Compromised => "Compromised",
            State::Destroyed => "Destroyed",
        }
    }
}

/// One version of a master key.
#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) id: String,
    pub(super) version: u64,
    pub(super) attributes: Attributes,
}

impl Key {
    fn new(id: String, attributes: Attributes) -> Key {
        Key { version: attributes.made.map_or(1, version_of), id, attributes }
    }

    /// A server that does not tell the state refuses what it forbids.
    pub(super) fn state(&self) -> State {
        state_of(&self.attributes)
    }

    /// Refuses a key whose value the server may give out.
    ///
    /// # Errors
    /// `insecure`.
    pub(super) fn stays_in_server(&self, name: &str, allowed: bool) -> Result<(), Failure> {
        let told = self.attributes.extractable;
        if allowed || told == Some(false) {
            return Ok(());
        }
        let why = match told {
            Some(_) => {
                "Its attribute Extractable is true: a client with access to it can fetch its value with the operation Get."
            }
            None => {
                "The server does not tell the attribute Extractable, so a client with access to the key may be able to fetch its value with the operation Get."
            }
        };
        Err(insecure(format!("key \"{}\" can leave the key server", printable(name)))
            .with_detail(format!("{why} Master keys never leave. Keys that it has wrapped can still be unwrapped."))
            .with_hint("Make a new key with Extractable false, and move to it with set_cluster_master_key() or set_database_master_key(). If the server does not know the attribute, forbid the operation Get there, and set the option \"allow_extractable\"."))
    }

    /// Refuses a key that must not wrap.
    ///
    /// # Errors
    /// `key_disabled`, `key_missing`.
    pub(super) fn may_wrap(&self, name: &str) -> Result<(), Failure> {
        let state = self.state();
        if state != State::Active {
            return Err(wrong_state(state, &named(name, &self.id)));
        }
        let both = names::MAY_ENCRYPT | names::MAY_DECRYPT;
        if self.attributes.usage.is_some_and(|mask| mask & both != both) {
            let key = named(name, &self.id);
            return Err(Failure::new(
                ErrorClass::KeyDisabled,
                format!("{key} may not be used to encrypt and decrypt"),
            )
            .with_detail(
                "Its attribute Cryptographic Usage Mask does not contain Encrypt and Decrypt.",
            )
            .with_hint("Change the mask, or use another key."));
        }
        Ok(())
    }

    /// Kind, state, and what protects it.
    pub(super) fn describe(&self) -> String {
        let bits = self.attributes.bits.map_or(String::new(), |bits| format!("-{bits}"));
        let leaves = match (self.attributes.extractable, self.attributes.never_extractable) {
            (Some(false), Some(true)) => "not extractable, and never was",
            (Some(false), _) => "not extractable",
            (Some(true), _) => "EXTRACTABLE",
            (None, _) => "the server does not tell whether it is extractable",
        };
        format!("AES{bits}, {}, {leaves}", self.state().name())
    }
}

fn state_of(attributes: &Attributes) -> State {
    match attributes.state {
        Some(1) => State::PreActive,
        Some(3) => State::Deactivated,
        Some(4) => State::Compromised,
        Some(5 | 6) => State::Destroyed,
        _ => State::Active,
    }
}

/// The failure for a key that cannot be used in its state.
fn wrong_state(state: State, key: &str) -> Failure {
    let (class, hint) = match state {
        State::Destroyed => (
            ErrorClass::KeyMissing,
            "A destroyed key cannot be restored but from a backup of the key server.",
        ),
        State::PreActive => (ErrorClass::KeyDisabled, "Activate the key at the key server."),
        _ => (
            ErrorClass::KeyDisabled,
            "It was revoked at the key server. If that was meant, use another key, or have a new version made with rotate_cluster_master_key() or rotate_database_master_key().",
        ),
    };
    Failure::new(class, format!("{key} is not active"))
        .with_detail(format!("Its state is {}.", state.name()))
        .with_hint(hint)
}

/// A key and its unique identifier, for messages.
pub(super) fn named(name: &str, id: &str) -> String {
    format!("key \"{}\" (unique identifier {})", printable(name), printable(id))
}

/// Looks up a key by its unique identifier.
pub(super) fn examine(session: &Session, id: &str) -> Result<Key, NoAnswer> {
    let call = Call::GetAttributes(id);
    let attributes =
        session.try_ask(&call, |payload, version| operations::attributes(payload, version, id))?;
    Ok(Key::new(id.to_owned(), attributes))
}

pub(super) fn is_missing(error: &NoAnswer) -> bool {
    let missing = [reason::ITEM_NOT_FOUND, reason::OBJECT_NOT_FOUND, reason::OBJECT_DESTROYED];
    error.reason().is_some_and(|reason| missing.contains(&reason))
}

pub(super) fn is_denied(error: &NoAnswer) -> bool {
    let denied = [reason::PERMISSION_DENIED, reason::NOT_AUTHORISED];
    error.reason().is_some_and(|reason| denied.contains(&reason))
}

/// Looks up a key that rotation has made.
pub(super) fn of_id(session: &Session, id: &str, name: &str) -> Result<Key, Failure> {
    examine(session, id).map_err(|error| {
        failure::of(error, &session.shown(), Operation::GetAttributes, &named(name, id))
    })
}

/// The meaning of a refused Decrypt, after a look at the key.
#[derive(Debug)]
pub(super) enum Decision {
    /// The refusal concerns the key.
    Final(Failure),
    /// The key can be used, or that is not known.
    Unclear(NoAnswer),
}

/// Servers give different reasons for a key that is not active, and some the same as for a missing
/// right.
pub(super) fn decide(session: &Session, error: NoAnswer, name: &str, id: &str) -> Decision {
    let Some(told) = error.reason() else { return Decision::Unclear(error) };
    let concerns_state = [
        reason::PERMISSION_DENIED,
        reason::NOT_AUTHORISED,
        reason::ILLEGAL_OPERATION,
        reason::WRONG_STATE,
        reason::OBJECT_ARCHIVED,
    ]
    .contains(&told);
    if !concerns_state && !failure::is_ambiguous(told) {
        return Decision::Unclear(error);
    }
    match examine(session, id) {
        Ok(key)
            if key.state() == State::Destroyed
                || concerns_state && key.state() != State::Active =>
        {
            Decision::Final(wrong_state(key.state(), &named(name, id)))
        }
        Err(missing) if is_missing(&missing) => {
            let operation = Operation::GetAttributes;
            Decision::Final(failure::of(missing, &session.shown(), operation, &named(name, id)))
        }
        // Whatever went wrong with the second question: the first one has an answer.
        _ => Decision::Unclear(error),
    }
}

/// The failure for what is still unclear.
pub(super) fn undecided(
    session: &Session,
    error: NoAnswer,
    operation: Operation,
    name: &str,
    id: &str,
) -> Failure {
    failure::of(error, &session.shown(), operation, &named(name, id))
}

/// A time in seconds since 1970 as `YYYYMMDDhhmmss` in UTC. Times before 1970 count as 1970.
fn version_of(time: i64) -> u64 {
    // Until the year 9999.
    let time = time.clamp(0, 253_402_300_799) as u64;
    let (days, seconds) = (time / 86_400, time % 86_400);
    // Days since 1 March of the year 0, in eras of 400 years (the calendar repeats after each).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = 400 * era + year + carry;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    [month, date, hour, minute, second].iter().fold(year, |number, part| number * 100 + part)
}

/// A key for tests.
#[cfg(test)]
pub(super) fn test_key(id: &str, made: i64, state: u32, replacements: &[&str]) -> Key {
    let attributes = Attributes {
        object_type: Some(2),
        algorithm: Some(3),
        state: Some(state),
        made: Some(made),
        usage: Some(12),
        replacements: replacements.iter().map(|id| (*id).to_owned()).collect(),
        ..Attributes::default()
    };
    Key::new(id.to_owned(), attributes)
}

#[cfg(test)]
mod tests {
    use super::test_key as key;
    use super::*;

    #[test]
    fn versions_are_times() {
        for (time, version) in [
            (-1, 19_700_101_000_000),
            (0, 19_700_101_000_000),
            (951_782_399, 20_000_228_235_959),
            (951_782_400, 20_000_229_000_000),
            (951_868_800, 20_000_301_000_000),
            (1_709_210_096, 20_240_229_123_456),
            (4_107_542_400, 21_000_301_000_000),
            (253_402_300_799, 99_991_231_235_959),
            (i64::MAX, 99_991_231_235_959),
        ] {
            assert_eq!(version_of(time), version, "{time}");
        }
        let times: Vec<u64> =
            (0..4000).map(|day| version_of(1_700_000_000 + day * 86_399)).collect();
        assert!(times.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn only_active_keys_wrap() {
        for (state, class) in [
            (1, Some(ErrorClass::KeyDisabled)),
            (2, None),
            (3, Some(ErrorClass::KeyDisabled)),
            (4, Some(ErrorClass::KeyDisabled)),
            (5, Some(ErrorClass::KeyMissing)),
            (6, Some(ErrorClass::KeyMissing)),
        ] {
            let error = key("a", 1, state, &[]).may_wrap("k").err();
            assert_eq!(error.as_ref().map(|error| error.class), class, "{state}");
            assert!(
                error.is_none_or(|error| !error.detail().is_empty() && !error.hint().is_empty())
            );
        }
        for (usage, may) in [(None, true), (Some(12), true), (Some(4), false), (Some(8), false)] {
            let mut key = key("a", 1, 2, &[]);
            key.attributes.usage = usage;
            assert_eq!(key.may_wrap("k").is_ok(), may);
        }
    }

    #[test]
    fn only_keys_that_stay_in_the_server_wrap() {
        for (extractable, allowed, accepted) in [
            (Some(false), false, true),
            (Some(true), false, false),
            (None, false, false),
            (Some(true), true, true),
            (None, true, true),
        ] {
            let mut key = key("a", 1, 2, &[]);
            key.attributes.extractable = extractable;
            let told = key.stays_in_server("k", allowed);
            assert_eq!(told.is_ok(), accepted);
            assert!(told.err().is_none_or(|error| error.class == ErrorClass::Insecure));
        }
    }
}
