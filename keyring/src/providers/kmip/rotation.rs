//! New versions of a master key.
//!
//! By Re-key, where the server has it: the server makes the new key, moves the name to it, and
//! links both. Otherwise by Create, Activate and Add Attribute, in this order, so that a key
//! becomes a version only when it can be used. A rotation that is interrupted leaves a key that is
//! no version, or a version that the next rotation finds and activates.

use std::thread;
use std::time::{Duration, Instant};

use pagevault_cipher::secret::fill_random;
use pagevault_keystore::protocol::ErrorClass;

use super::attributes::Given;
use super::format::Parts;
use super::keys::{self, Key, State};
use super::names::Operation;
use super::operations::{self, Abilities, Call};
use super::session::Session;
use super::versions::{Versions, find};
use crate::failure::Failure;
use crate::options::printable;

/// Longest wait for a time after that of the newest version, in seconds.
const LONGEST: i64 = 60;

/// Length in bits of a new key, if the server does not tell that of the old one.
const BITS: i32 = 256;

/// How a server makes new versions, for messages.
pub(super) fn described(abilities: &Abilities) -> &'static str {
    if abilities.has(Operation::ReKey) {
        return "yes; new versions of keys by Re-key";
    }
    if can_link(abilities) {
        return "yes; new versions of keys by Create and Add Attribute";
    }
    "yes; it cannot make new versions of keys: see docs/kmip.md, \"Rotation\""
}

fn can_link(abilities: &Abilities) -> bool {
    [Operation::Create, Operation::Activate, Operation::AddAttribute]
        .into_iter()
        .all(|operation| abilities.has(operation))
}

/// Ensures that there is a version newer than the one that wrapped.
pub(super) fn rotate(session: &Session, name: &str, parts: &Parts<'_>) -> Result<u64, Failure> {
    let versions = find(session, name)?;
    let newest = &versions.newest;
    let is_other = newest.id != parts.id;
    if is_other && newest.state() == State::Active {
        return Ok(newest.version);
    }
    if let Some(key) = left_behind(&versions) {
        return activate(session, name, key);
    }
    let abilities = session.abilities()?;
    wait_for_another_second(session, newest)?;
    let id = if abilities.has(Operation::ReKey) {
        re_key(session, name, newest)?
    } else if can_link(&abilities) {
        create(session, name, newest)?
    } else {
        return Err(unable(name));
    };
    let made = keys::of_id(session, &id, name)?;
    if made.state() == State::PreActive {
        activate(session, name, &made)?;
    }
    // Another server may have made one at the same time.
    let newest = find(session, name)?.newest;
    if newest.id != parts.id && newest.version > parts.key_version {
        return Ok(newest.version);
    }
    Err(Failure::new(ErrorClass::Internal, format!("key server does not show the new version of key \"{}\"", printable(name)))
        .with_detail(format!("It made the key with the unique identifier {}, but the newest version is still {}.", printable(&id), printable(&newest.id)))
        .with_hint("Check the names, the links and the dates (Initial Date) of both keys at the key server, and its clock."))
}

/// A version that was made and is not active: its activation was interrupted. One with a date for
/// its activation waits for that.
fn left_behind(versions: &Versions) -> Option<&Key> {
    versions.pending.iter().find(|key| key.attributes.activation.is_none())
}

/// Activates a key, unless somebody else just did.
fn activate(session: &Session, name: &str, key: &Key) -> Result<u64, Failure> {
    let what = format!("key \"{}\"", printable(name));
    let activated = session.ask(&Call::Activate(&key.id), &what, |_, _| Ok(()));
    let now = keys::of_id(session, &key.id, name)?;
    match (activated, now.state()) {
        (_, State::Active) => Ok(now.version),
        (Err(failure), _) => Err(failure),
        (Ok(()), _) => now.may_wrap(name).map(|()| now.version),
    }
}

/// Versions are times in seconds, so a second must have passed since the newest one was made. The
/// server's clock counts.
fn wait_for_another_second(session: &Session, newest: &Key) -> Result<(), Failure> {
    let (Some(made), Some(now)) = (newest.attributes.made, session.time()) else { return Ok(()) };
    let wait = made.saturating_add(1).saturating_sub(now);
    if wait > LONGEST {
        return Err(Failure::new(ErrorClass::Unreachable, "clock of the key server is wrong")
            .with_detail("The newest version of the key was made later than the time that the key server tells.")
            .with_hint("Set the clock of the key server, then try again."));
    }
    let wait = Duration::from_secs(u64::try_from(wait).unwrap_or_default());
    if session.deadline.is_some_and(|deadline| Instant::now() + wait >= deadline) {
        return Err(Failure::new(ErrorClass::Deadline, "no time left to make a new version")
            .with_detail("The newest version of the key was made in this second.")
            .with_hint("Try again, or raise pagevault.keyring_timeout.")
            .transient());
    }
    thread::sleep(wait);
    Ok(())
}

fn re_key(session: &Session, name: &str, newest: &Key) -> Result<String, Failure> {
    let what = format!("key \"{}\"", printable(name));
    session.ask(&Call::ReKey(&newest.id), &what, |payload, _| operations::made(payload))
}

/// Makes a key like `newest`, activates it, and links it as its replacement.
fn create(session: &Session, name: &str, newest: &Key) -> Result<String, Failure> {
    let what = format!("key \"{}\"", printable(name));
    let told = &newest.attributes;
    // Names are unique in most servers.
    let mut random = [0; 8];
    fill_random(&mut random)
        .map_err(|error| Failure::new(ErrorClass::Internal, format!("no random bytes: {error}")))?;
    let new_name = format!("{name}.{:016x}", u64::from_be_bytes(random));
    let mut given = vec![
        Given::Aes,
        Given::Bits(told.bits.unwrap_or(BITS)),
        Given::Use,
        Given::Name(&new_name),
    ];
    // Only attributes that the server knows.
    if told.sensitive.is_some() {
        given.push(Given::Sensitive);
    }
    if told.extractable.is_some() {
        given.push(Given::Extractable(false));
    }
    let made = session.ask(&Call::Create(&given), &what, |payload, _| operations::made(payload))?;
    let key = keys::of_id(session, &made, name)?;
    if key.state() == State::PreActive {
        activate(session, name, &key)?;
    }
    let link = Call::AddAttribute { id: &newest.id, given: Given::Replacement(&made) };
    session.ask(&link, &what, |payload, _| operations::about(payload, &newest.id))?;
    Ok(made)
}

fn unable(name: &str) -> Failure {
    let name = printable(name);
    Failure::new(ErrorClass::Denied, format!("key server cannot make a new version of key \"{name}\""))
        .with_detail("It supports, or permits to this client, neither Re-key, nor Create together with Activate and Add Attribute.")
        .with_hint("Make another key, and move to it with set_cluster_master_key() or set_database_master_key().")
}
