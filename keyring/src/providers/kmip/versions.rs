//! Master keys in the server, and their versions.
//!
//! A master key is given by its name (the attribute Name), or as `id:` and its unique identifier.
//! The key that is found this way is a version of the master key, and so are the keys that replace
//! it, by the attribute Link (Replacement Object Link), and those that replace these. Only who may
//! change a key can add a link to it. Another key that happens to have the same name, or was given
//! it by somebody else, is no version: that is refused.
//!
//! KMIP has no version numbers. The version is the time at which the key was made (Initial Date),
//! as the number `YYYYMMDDhhmmss` in UTC. A wrapped key names the unique identifier of the key that
//! wrapped it, so that versions can be equal.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_keystore::protocol::ErrorClass;

use super::attributes::{Attributes, identifier};
use super::failure;
use super::keys::{Key, State, examine, is_denied, is_missing, named};
use super::names::{self, Operation};
use super::operations::{self, Call, LOCATE_LIMIT};
use super::session::Session;
use crate::failure::Failure;
use crate::options::printable;

/// Before the unique identifier of a key, where names are expected.
const BY_ID: &str = "id:";

/// Maximum number of versions of a master key that are looked at.
const VERSION_LIMIT: usize = 256;

/// What is known of the versions of a master key.
pub(super) struct Versions {
    /// The newest that is or was active; if there is none, one that is not active yet.
    pub(super) newest: Key,
    /// Keys that are not active yet, and replace all that are.
    pub(super) pending: Vec<Key>,
}

/// All versions of a master key.
///
/// # Errors
/// `key_missing` if there is none, `bad_options` if it cannot be told which keys are its versions.
pub(super) fn find(session: &Session, name: &str) -> Result<Versions, Failure> {
    let roots = match name.strip_prefix(BY_ID) {
        Some(id) => vec![identifier(id).ok_or_else(|| bad_name(name))?],
        None => locate(session, name)?,
    };
    let mut found: BTreeMap<String, Key> = BTreeMap::new();
    let mut missing = BTreeSet::new();
    let mut hidden = None;
    let mut next = roots.clone();
    while let Some(id) = next.pop() {
        if found.contains_key(&id) || missing.contains(&id) {
            continue;
        }
        if found.len() + missing.len() == VERSION_LIMIT {
            return Err(too_many(name));
        }
        match examine(session, &id) {
            Ok(key) => {
                next.extend(key.attributes.replacements.iter().cloned());
                found.insert(id, key);
            }
            Err(error) if is_missing(&error) => drop(missing.insert(id)),
            // A key of somebody else that has the same name, where names are not unique.
            Err(error) if is_denied(&error) && roots.len() > 1 && roots.contains(&id) => {
                missing.insert(id);
                hidden.get_or_insert(error);
            }
            Err(error) => {
                let key = named(name, &id);
                return Err(failure::of(error, &session.shown(), Operation::GetAttributes, &key));
            }
        }
    }
    let roots: Vec<&str> =
        roots.iter().map(String::as_str).filter(|id| found.contains_key(*id)).collect();
    choose(name, &roots, &found).ok_or_else(|| match hidden {
        Some(error) => {
            let key = format!("key \"{}\"", printable(name));
            failure::of(error, &session.shown(), Operation::GetAttributes, &key)
        }
        None => no_key(session, name),
    })?
}

/// Sorts the versions of a master key. `None` if there is none.
fn choose(
    name: &str,
    roots: &[&str],
    found: &BTreeMap<String, Key>,
) -> Option<Result<Versions, Failure>> {
    // A destroyed key may keep its attributes, and thus its name.
    let lives = |id: &str| found.get(id).is_some_and(|key| key.state() != State::Destroyed);
    let living: Vec<&str> = roots.iter().copied().filter(|id| lives(id)).collect();
    let roots = if living.is_empty() { roots } else { &living };
    // Of several keys with the name, only keys that replace all others can be the newest: with its
    // own links, a key can neither make another one a version, nor itself.
    let (first, rest) = roots.split_first()?;
    let mut common = reachable(first, found);
    for root in rest {
        let also = reachable(root, found);
        common.retain(|id| also.contains(id));
    }
    if common.is_empty() {
        return Some(Err(several(name, roots)));
    }
    if common.iter().any(|id| lives(id)) {
        common.retain(|id| lives(id));
    }
    let keys = common.iter().filter_map(|id| found.get(*id));
    let (pending, used): (Vec<&Key>, Vec<&Key>) =
        keys.partition(|key| key.state() == State::PreActive);
    let candidates = if used.is_empty() { &pending } else { &used };
    // A key that another one replaces is not the newest. Two servers may have replaced it at the
    // same time: both keys are good, and all servers choose the same one.
    let is_replaced = |key: &Key| {
        let by = |id: &String| candidates.iter().any(|other| other.id == *id);
        key.attributes.replacements.iter().any(by)
    };
    let newest = *candidates.iter().max_by_key(|key| (!is_replaced(key), key.version, &key.id))?;
    let pending = pending.into_iter().cloned().collect();
    Some(accept(name, Versions { newest: newest.clone(), pending }))
}

/// The keys that can be reached from one by links, itself included.
fn reachable<'a>(root: &'a str, found: &'a BTreeMap<String, Key>) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    let mut next = vec![root];
    while let Some(id) = next.pop() {
        if let Some(key) = found.get(id)
            && seen.insert(key.id.as_str())
        {
            next.extend(key.attributes.replacements.iter().map(String::as_str));
        }
    }
    seen
}

/// Refuses a key of another kind.
fn accept(name: &str, versions: Versions) -> Result<Versions, Failure> {
    let Attributes { object_type, algorithm, .. } = &versions.newest.attributes;
    let is = |told: &Option<u32>, wanted| told.is_none_or(|told| told == wanted);
    if is(object_type, names::SYMMETRIC_KEY) && is(algorithm, names::AES) {
        return Ok(versions);
    }
    let key = named(name, &versions.newest.id);
    Err(Failure::new(ErrorClass::BadOptions, format!("{key} cannot be used as a master key"))
        .with_detail("It is not a symmetric key of the algorithm AES.")
        .with_hint("Make an AES key of 256 bits; see docs/kmip.md."))
}

fn locate(session: &Session, name: &str) -> Result<Vec<String>, Failure> {
    if name.is_empty() || name.len() > 1024 || name.chars().any(char::is_control) {
        return Err(bad_name(name));
    }
    let mut found =
        session.ask(&Call::Locate(name), "", |payload, _| operations::located(payload))?;
    found.sort();
    found.dedup();
    if found.len() > LOCATE_LIMIT {
        return Err(too_many(name));
    }
    if found.is_empty() { Err(no_key(session, name)) } else { Ok(found) }
}

fn bad_name(name: &str) -> Failure {
    Failure::new(
        ErrorClass::BadRequest,
        format!("\"{}\" cannot be the name of a key", printable(name)),
    )
    .with_detail("It is empty or too long, or contains a control character.")
    .with_hint("Specify the key's name (attribute Name), or id: and its unique identifier.")
}

fn no_key(session: &Session, name: &str) -> Failure {
    let name = printable(name);
    Failure::new(
        ErrorClass::KeyMissing,
        format!("key server at {} has no key \"{name}\"", session.shown()),
    )
    .with_detail("It shows no symmetric key with this name or unique identifier to this client.")
    .with_hint(
        "Check the key's name, and the rights of this client. To make a key, see docs/kmip.md.",
    )
}

fn too_many(name: &str) -> Failure {
    Failure::new(
        ErrorClass::BadOptions,
        format!("too many keys have the name \"{}\", or replace it", printable(name)),
    )
    .with_detail(format!(
        "pagevault looks at {LOCATE_LIMIT} keys with a name, and at {VERSION_LIMIT} versions."
    ))
    .with_hint("Specify the newest key as id: and its unique identifier.")
}

fn several(name: &str, roots: &[&str]) -> Failure {
    let ids: Vec<String> = roots.iter().take(8).map(|id| printable(id)).collect();
    Failure::new(
        ErrorClass::BadOptions,
        format!("several keys have the name \"{}\"", printable(name)),
    )
    .with_detail(format!(
        "Their unique identifiers are {}. None of them is linked with all others (Replacement Object Link), so they are not versions of one key.",
        ids.join(", ")
    ))
    .with_hint("Specify the right one as id: and its unique identifier, or give the others another name.")
}

#[cfg(test)]
mod tests {
    use super::super::keys::test_key as key;
    use super::*;

    /// Id of the newest version; the class of the failure; or none.
    fn chosen(roots: &[&str], keys: &[Key]) -> Option<Result<String, ErrorClass>> {
        let found = keys.iter().map(|key| (key.id.clone(), key.clone())).collect();
        let chosen = choose("k", roots, &found)?;
        Some(chosen.map(|told| told.newest.id).map_err(|error| error.class))
    }

    #[test]
    fn the_newest_version_is_at_the_end_of_the_links() {
        let newest = |roots: &[&str], keys: &[Key]| chosen(roots, keys).unwrap().unwrap();
        let chain = [key("a", 1, 3, &["b"]), key("b", 2, 2, &["c"]), key("c", 3, 2, &[])];
        assert_eq!(newest(&["a"], &chain), "c");
        assert_eq!(newest(&["c"], &chain), "c");
        assert_eq!(newest(&["c", "a", "b"], &chain), "c");
        // The clock was turned back.
        let back = [key("a", 9, 2, &["b"]), key("b", 2, 2, &[])];
        assert_eq!(newest(&["a"], &back), "b");
        // Replaced by two keys at once.
        let two = [key("a", 1, 2, &["c", "b"]), key("b", 2, 2, &[]), key("c", 2, 2, &[])];
        assert_eq!(newest(&["a"], &two), "c");
        let circle = [key("a", 1, 2, &["b"]), key("b", 2, 2, &["a"])];
        assert_eq!(newest(&["a"], &circle), "b");
        // Not active yet, or gone.
        let pending = [key("a", 1, 2, &["b"]), key("b", 2, 1, &[])];
        assert_eq!(newest(&["a"], &pending), "a");
        assert_eq!(newest(&["b"], &pending), "b");
        let gone = [key("a", 1, 2, &["b", "x"]), key("b", 2, 5, &[])];
        assert_eq!(newest(&["a"], &gone), "a");
        let destroyed = [key("a", 1, 5, &[]), key("b", 2, 2, &[])];
        assert_eq!(newest(&["a", "b"], &destroyed), "b");
        assert_eq!(newest(&["a"], &destroyed), "a");
    }

    #[test]
    fn keys_that_only_share_a_name_are_not_versions() {
        let strangers = [key("a", 1, 2, &[]), key("b", 2, 2, &[])];
        assert_eq!(chosen(&["a", "b"], &strangers), Some(Err(ErrorClass::BadOptions)));
        let third = [key("a", 1, 2, &["b"]), key("b", 2, 2, &[]), key("x", 3, 2, &[])];
        assert_eq!(chosen(&["a", "b", "x"], &third), Some(Err(ErrorClass::BadOptions)));
        // Links from the other key give nobody a right to the name.
        let claim = [key("a", 1, 2, &[]), key("x", 3, 2, &["a", "y"]), key("y", 4, 2, &[])];
        assert_eq!(chosen(&["a"], &claim), Some(Ok("a".to_owned())));
        assert_eq!(chosen(&["a", "x"], &claim), Some(Ok("a".to_owned())));
        assert_eq!(chosen(&["a", "x", "y"], &claim), Some(Err(ErrorClass::BadOptions)));
        // Neither does being active, while the other key is not yet.
        for links in [&[][..], &["a"]] {
            let unborn = [key("a", 1, 1, &[]), key("x", 3, 2, links)];
            let expected = match links {
                [] => Err(ErrorClass::BadOptions),
                _ => Ok("a".to_owned()),
            };
            assert_eq!(chosen(&["a", "x"], &unborn), Some(expected));
        }
        assert_eq!(chosen(&[], &strangers), None);
        let mut other = key("a", 1, 2, &[]);
        other.attributes.algorithm = Some(4);
        assert_eq!(chosen(&["a"], &[other]), Some(Err(ErrorClass::BadOptions)));
    }
}
