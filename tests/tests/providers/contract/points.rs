//! The points, and how each is verified.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::helper::Provider;
use serde_json::{Value, json};

use super::{
    CONTEXT, OTHER_CONTEXT, SECRET, State, Subject, bytes, rotate, says, unwrap, wrap, wrapped,
};

/// A promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    Check,
    Wraps,
    Binding,
    ChangedBytes,
    WrongKey,
    AnotherKeyIsNotUsed,
    AnotherKeyIsTold,
    Rotation,
    Disabled,
    Enabled,
    Deleted,
    Destroyed,
    Throttled,
    Failing,
    Slow,
    Unreachable,
    Moved,
}

impl Point {
    /// All of them, in the order of the guide.
    pub(super) const ALL: [Point; 17] = [
        Point::Wraps,
        Point::Binding,
        Point::ChangedBytes,
        Point::Rotation,
        Point::WrongKey,
        Point::Disabled,
        Point::Enabled,
        Point::Deleted,
        Point::Destroyed,
        Point::Throttled,
        Point::Failing,
        Point::Slow,
        Point::Unreachable,
        Point::AnotherKeyIsTold,
        Point::AnotherKeyIsNotUsed,
        Point::Check,
        Point::Moved,
    ];

    /// Name and promise, for the guide.
    pub(super) fn promise(self) -> (&'static str, &'static str) {
        match self {
            Point::Wraps => (
                "wraps and unwraps",
                "secrets of any length, never twice to the same bytes; by another key, too",
            ),
            Point::Binding => (
                "bound to its context",
                "what was wrapped for one database neither unwraps nor is rewrapped for another",
            ),
            Point::ChangedBytes => (
                "changed bytes",
                "what was cut off, changed or lengthened does not unwrap, and is no outage",
            ),
            Point::Rotation => (
                "rotation",
                "is done once, although the request is repeated; old versions unwrap, the newest wraps",
            ),
            Point::WrongKey => (
                "wrong key",
                "another key does not unwrap; one that is not there is named; strange names are sent nowhere",
            ),
            Point::Disabled => {
                ("disabled key", "is told as such, not repeated, and other keys are not affected")
            }
            Point::Enabled => ("enabled again", "the key works without further action"),
            Point::Deleted => {
                ("deleted key that can be restored", "is told as disabled, not as missing")
            }
            Point::Destroyed => ("destroyed key", "is told as missing"),
            Point::Throttled => (
                "throttled",
                "is tried again until it works, or until the deadline, and told with the number of attempts",
            ),
            Point::Failing => (
                "failing service",
                "is tried again in the same way, and says nothing about the key",
            ),
            Point::Slow => ("slow service", "costs the deadline, and no more"),
            Point::Unreachable => {
                ("unreachable service", "is told as such, and says nothing about the key")
            }
            Point::AnotherKeyIsTold => {
                ("answer of another key", "is no answer, and is told as such")
            }
            Point::AnotherKeyIsNotUsed => {
                ("use of another key", "never gives other bytes than those that were wrapped")
            }
            Point::Check => ("`check`", "finds everything in order, step by step"),
            Point::Moved => {
                ("moved", "a server moves its keys to each other provider, and from it")
            }
        }
    }
}

/// Verifies a point. `first` is what the key has wrapped before the first of them.
pub(super) fn pass<S: Subject>(point: Point, subject: &mut S, first: &Value) -> Result<()> {
    match point {
        Point::Check => check(subject),
        Point::Wraps => wraps(subject),
        Point::Binding => binding(subject, first),
        Point::ChangedBytes => changed_bytes(subject, first),
        Point::WrongKey => wrong_key(subject, first),
        Point::AnotherKeyIsNotUsed => another_key_is_not_used(subject, first),
        Point::AnotherKeyIsTold => another_key_is_told(subject),
        Point::Rotation => rotation(subject),
        Point::Disabled => disabled(subject, first),
        Point::Enabled => enabled(subject, first),
        Point::Deleted => deleted(subject, first),
        Point::Destroyed => destroyed(subject, first),
        Point::Throttled => passing(subject, first, State::Throttled, "throttled"),
        Point::Failing => passing(subject, first, State::Failing, "unreachable"),
        Point::Slow => slow(subject, first),
        Point::Unreachable => unreachable(subject, first),
        // By a server: see `moving`.
        Point::Moved => Ok(()),
    }
}

/// Refused for good.
fn refused(provider: &Provider, key: &str, action: Value, class: &str) -> Result<Value> {
    let failure = provider.refused(key, CONTEXT, action, class)?;
    ensure!(failure["retry"] == false, "{failure}");
    Ok(failure)
}

fn check<S: Subject>(subject: &mut S) -> Result<()> {
    let reply = subject.provider().ask(&subject.key(), CONTEXT, json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
    ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
    let what: Vec<&str> = findings.iter().filter_map(|finding| finding["what"].as_str()).collect();
    let last =
        ["the key exists", "the key wraps and unwraps", "wrapped keys are bound to their database"];
    ensure!(what.len() > 4 && what.ends_with(&last), "{what:?}");
    Ok(())
}

fn wraps<S: Subject>(subject: &mut S) -> Result<()> {
    let (provider, wrapped, version) = wrapped(subject)?;
    let (key, next) = (subject.key(), subject.next());
    ensure!(version > 0 && provider.unwrap(&key, CONTEXT, &wrapped)? == SECRET);
    let (again, same) = provider.wrap(&key, CONTEXT, SECRET)?;
    ensure!(again != wrapped, "the same secret wrapped to the same bytes");
    ensure!(same == version, "{version}, {same}");
    for length in S::LENGTHS {
        let secret = STANDARD.encode(vec![0xa7; *length]);
        let (wrapped, _) = provider.wrap(&key, CONTEXT, &secret)?;
        ensure!(provider.unwrap(&key, CONTEXT, &wrapped)? == secret, "{length} bytes");
    }
    // To another key of the same provider.
    let (moved, _) = provider.rewrap(&key, &next, CONTEXT, &wrapped)?;
    ensure!(provider.unwrap(&next, CONTEXT, &moved)? == SECRET);
    Ok(())
}

fn binding<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    let provider = subject.provider();
    let (key, next) = (subject.key(), subject.next());
    let (moved, _) = provider.rewrap(&key, &next, CONTEXT, first)?;
    let again = || json!({"rewrap": {"from_key": key, "wrapped": first}});
    for (key, action) in
        [(&key, unwrap(first)), (&next, unwrap(&moved)), (&key, again()), (&next, again())]
    {
        let failure = provider.refused(key, OTHER_CONTEXT, action, "wrong_ciphertext")?;
        ensure!(failure["retry"] == false, "{failure}");
    }
    Ok(())
}

fn changed_bytes<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    let mut provider = subject.provider();
    let wrapped = bytes(first)?;
    let places = || (0..wrapped.len()).step_by(S::STRIDE);
    let mut wrong: Vec<Vec<u8>> = places().map(|n| wrapped[..n].to_vec()).collect();
    for at in places().filter(|at| !subject.unread().contains(at)) {
        let mut changed = wrapped.clone();
        changed[at] ^= 1 << (at % 8);
        wrong.push(changed);
    }
    wrong.push([&wrapped[..], &[0]].concat());
    wrong.push([&wrapped[..], &[0; 100_000]].concat());
    wrong.extend([vec![0xff; 32], b"vault:v1:abcd".to_vec()]);
    let actions = wrong.iter().map(|bytes| unwrap(&json!(STANDARD.encode(bytes)))).collect();
    // Of all together.
    provider.deadline_ms = 300_000;
    let outcomes = provider.ask_all(&subject.key(), CONTEXT, actions)?;
    for (outcome, bytes) in outcomes.iter().zip(&wrong) {
        let Some(class) = outcome["failed"]["class"].as_str() else {
            // The number of the version is information only, unless it is bound.
            ensure!(outcome["unwrapped"]["plaintext"] == SECRET, "other bytes: {outcome}");
            let changed = bytes.iter().zip(&wrapped).filter(|(one, other)| one != other).count();
            ensure!(changed == 1 && bytes.len() == wrapped.len(), "{} bytes unwrap", bytes.len());
            continue;
        };
        let begin = &bytes[..bytes.len().min(20)];
        ensure!(S::REFUSALS.contains(&class), "{} bytes, {begin:02x?}: {outcome}", bytes.len());
    }
    Ok(())
}

fn wrong_key<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    let provider = subject.provider();
    let outcome = provider.ask(&subject.next(), CONTEXT, unwrap(first))?;
    if S::FOLLOWS_WRAPPED {
        ensure!(outcome["unwrapped"]["plaintext"] == SECRET, "{outcome}");
    } else {
        // Where versions have names of their own, the other key lacks this one.
        let class = outcome["failed"]["class"].as_str();
        ensure!(matches!(class, Some("wrong_ciphertext" | "key_missing")), "{outcome}");
    }
    let missing = subject.missing();
    let failure = refused(&provider, &missing, wrap(), "key_missing")?;
    says(&failure, &missing)?;
    let _ = subject.uses()?;
    for name in S::STRANGE {
        let outcome = provider.ask(name, CONTEXT, wrap())?;
        let class = outcome["failed"]["class"].as_str();
        ensure!(matches!(class, Some("bad_options" | "key_missing")), "{name}: {outcome}");
    }
    ensure!(!S::NAMES_IN_ADDRESSES || subject.uses()? == 0, "a strange name was sent");
    Ok(())
}

fn another_key_is_not_used<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    let key = subject.key();
    subject.bring(State::AnotherKey)?;
    let mut provider = subject.provider();
    provider.deadline_ms = 3000;
    let outcomes = [unwrap(first), wrap()].map(|action| provider.ask(&key, CONTEXT, action));
    subject.bring(State::Repaired)?;
    let [unwrapped, other] = outcomes;
    let unwrapped = unwrapped?;
    // Where only the reply is about another key, and that reply names none, it is right.
    let is_right = unwrapped["unwrapped"]["plaintext"] == SECRET;
    let class = unwrapped["failed"]["class"].as_str().unwrap_or_default();
    let refused = S::REFUSALS.contains(&class) || class == "unreachable";
    ensure!(is_right || refused, "{unwrapped}");
    // What the other key has wrapped, this one does not unwrap to anything else.
    let provider = subject.provider();
    let other = other?;
    if let Some(wrapped) = other["wrapped"].get("wrapped") {
        let outcome = provider.ask(&key, CONTEXT, unwrap(wrapped))?;
        let class = outcome["failed"]["class"].as_str().unwrap_or_default();
        ensure!(S::REFUSALS.contains(&class), "{outcome}");
    }
    ensure!(provider.unwrap(&key, CONTEXT, first)? == SECRET);
    Ok(())
}

fn another_key_is_told<S: Subject>(subject: &mut S) -> Result<()> {
    let key = subject.key();
    subject.provider().wrap(&key, CONTEXT, SECRET)?;
    subject.bring(State::AnotherKey)?;
    let mut provider = subject.provider();
    provider.deadline_ms = 3000;
    let failure = provider.refused(&key, CONTEXT, wrap(), "unreachable")?;
    ensure!(failure["retry"] == true, "{failure}");
    says(&failure, "another key")?;
    subject.bring(State::Repaired)?;
    subject.provider().wrap(&key, CONTEXT, SECRET)?;
    Ok(())
}

fn rotation<S: Subject>(subject: &mut S) -> Result<()> {
    let (provider, first, old) = wrapped(subject)?;
    let key = subject.key();
    subject.wait_for_next_version();
    let new = provider.rotate(&key, &first)?;
    ensure!(new > old, "{old}, {new}");
    // A caller that did not get the reply repeats the request with the old version.
    subject.wait_for_next_version();
    ensure!(provider.rotate(&key, &first)? == new, "rotated twice");
    let (second, version) = provider.rewrap(&key, &key, CONTEXT, &first)?;
    ensure!(version == new, "{version} instead of {new}");
    for wrapped in [&first, &second] {
        ensure!(provider.unwrap(&key, CONTEXT, wrapped)? == SECRET);
    }
    let newest = provider.rotate(&key, &second)?;
    ensure!(newest > new && provider.rotate(&key, &first)? == newest);
    let (third, version) = provider.wrap(&key, CONTEXT, SECRET)?;
    ensure!(version == newest, "{version} instead of {newest}");
    for wrapped in [&first, &second, &third] {
        ensure!(provider.unwrap(&key, CONTEXT, wrapped)? == SECRET);
    }
    let response = provider.ask(&key, CONTEXT, json!("check"))?.to_string();
    // Not each service tells which versions it still has.
    let wraps = format!("wraps with version {newest}");
    let known = format!("{wraps}, unwraps versions from {old} on; ");
    let told = response.contains("unwraps versions from");
    ensure!(response.contains(if told { &known } else { &wraps }), "{response}");
    Ok(())
}

fn disabled<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    subject.bring(State::Disabled)?;
    let provider = subject.provider();
    refused(&provider, &subject.key(), unwrap(first), "key_disabled")?;
    if S::DISABLED_WRAPS {
        provider.wrap(&subject.key(), CONTEXT, SECRET)?;
    } else {
        refused(&provider, &subject.key(), wrap(), "key_disabled")?;
    }
    // Another key is not affected.
    provider.wrap(&subject.next(), CONTEXT, SECRET)?;
    Ok(())
}

fn enabled<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    subject.bring(State::Enabled)?;
    let provider = subject.provider();
    ensure!(provider.unwrap(&subject.key(), CONTEXT, first)? == SECRET);
    provider.wrap(&subject.key(), CONTEXT, SECRET)?;
    Ok(())
}

fn deleted<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    subject.bring(State::Deleted)?;
    let provider = subject.provider();
    for action in [wrap(), unwrap(first)] {
        refused(&provider, &subject.key(), action, "key_disabled")?;
    }
    Ok(())
}

fn destroyed<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    subject.bring(State::Destroyed)?;
    let provider = subject.provider();
    for action in [wrap(), unwrap(first), rotate(first)] {
        refused(&provider, &subject.key(), action, "key_missing")?;
    }
    Ok(())
}

/// Something that passes: it is tried again.
fn passing<S: Subject>(
    subject: &mut S,
    first: &Value,
    state: fn(usize) -> State,
    class: &str,
) -> Result<()> {
    let key = subject.key();
    let _ = subject.uses()?;
    subject.bring(state(2))?;
    ensure!(subject.provider().unwrap(&key, CONTEXT, first)? == SECRET);
    let uses = subject.uses()?;
    ensure!(uses >= 3, "it was not tried again: {uses}");
    subject.bring(state(usize::MAX))?;
    let mut provider = subject.provider();
    provider.deadline_ms = 3000;
    let failure = provider.refused(&key, CONTEXT, unwrap(first), class)?;
    ensure!(failure["retry"] == true, "{failure}");
    says(&failure, "Tried ")?;
    subject.bring(State::Repaired)?;
    ensure!(subject.provider().unwrap(&key, CONTEXT, first)? == SECRET);
    Ok(())
}

fn slow<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    let key = subject.key();
    subject.bring(State::Silent)?;
    let mut provider = subject.provider();
    provider.deadline_ms = 2000;
    let failure = provider.refused(&key, CONTEXT, unwrap(first), "deadline");
    subject.bring(State::Repaired)?;
    let failure = failure?;
    ensure!(failure["retry"] == true, "{failure}");
    ensure!(subject.provider().unwrap(&key, CONTEXT, first)? == SECRET);
    Ok(())
}

fn unreachable<S: Subject>(subject: &mut S, first: &Value) -> Result<()> {
    subject.bring(State::Away)?;
    let mut provider = subject.provider();
    provider.deadline_ms = 2000;
    for action in [unwrap(first), wrap()] {
        let failure = provider.refused(&subject.key(), CONTEXT, action, "unreachable")?;
        ensure!(failure["retry"] == S::WAITS, "{failure}");
    }
    Ok(())
}
