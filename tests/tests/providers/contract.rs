//! What every provider in the cloud promises, whatever its service: one list of tests for all.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;
use serde_json::{Value, json};

use crate::Test;

/// What database keys are bound to, and what they are not bound to.
pub(crate) const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/5";
pub(crate) const OTHER_CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/6";

/// 32 bytes in base64.
pub(crate) const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// A name of a key at every subject.
pub(crate) const KEY: &str = "db-kek";
/// Another one.
pub(crate) const NEXT: &str = "db-next";

/// A provider and its server, and what happens to the server.
pub(crate) trait Subject: Sized {
    /// The kind of the provider.
    const KIND: &str;
    /// What it needs.
    const NEEDS: &[Server] = &[];

    fn start() -> Result<Self>;
    /// The provider, with the keys [`KEY`] and [`NEXT`].
    fn provider(&self) -> Provider;
    /// Disables and enables the version of [`KEY`] that wrapped first.
    fn disable(&self) -> Result<()>;
    fn enable(&self) -> Result<()>;
    /// Deletes [`KEY`] so that it can be restored.
    fn delete(&self) -> Result<()>;
    /// Deletes [`KEY`] for ever.
    fn destroy(&self) -> Result<()>;
    /// The service limits the rate of this many requests.
    fn throttle(&self, times: usize);
    /// The service has a failure of its own, this many times.
    fn fail(&self, times: usize);
    /// The service does not answer.
    fn silence(&self);
    /// Nobody listens any more.
    fn stop(&mut self);
    /// All replies are about another key.
    fn answer_for_another_key(&self);
    /// Everything is as at the start.
    fn repair(&self);
    /// Number of requests to use a key since the last call.
    fn uses(&self) -> usize;
}

/// The list for one subject.
pub(crate) fn tests<S: Subject>() -> Vec<Test> {
    let test = |name: &str, run: fn() -> Result<()>| Test {
        // One name for each test of the process.
        name: Box::leak(format!("{}::contract_{name}", S::KIND).into_boxed_str()),
        needs: S::NEEDS,
        run,
    };
    vec![
        test("wraps_and_unwraps", wraps_and_unwraps::<S>),
        test("each_changed_or_missing_byte_is_refused", changed_bytes::<S>),
        test("rotation_is_done_once_and_old_versions_unwrap", rotation::<S>),
        test("a_wrong_or_missing_key_is_refused", wrong_key::<S>),
        test("a_disabled_key_says_so_and_works_again", disabled::<S>),
        test("a_deleted_key_says_so", deleted::<S>),
        test("throttled_is_tried_again", throttled::<S>),
        test("a_slow_server_costs_the_deadline", slow::<S>),
        test("nobody_there_is_unreachable", unreachable::<S>),
        test("an_answer_of_another_key_is_not_used", another_key::<S>),
        test("check_tells_what_works", check::<S>),
    ]
}

pub(crate) fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

pub(crate) fn unwrap(wrapped: &Value) -> Value {
    json!({"unwrap": {"wrapped": wrapped}})
}

pub(crate) fn rotate(wrapped: &Value) -> Value {
    json!({"rotate": {"wrapped": wrapped}})
}

/// Bytes of what a provider returned.
pub(crate) fn bytes(wrapped: &Value) -> Result<Vec<u8>> {
    Ok(STANDARD.decode(wrapped.as_str().context("no text")?)?)
}

/// Fails unless message, detail or hint contain `part`.
pub(crate) fn says(failure: &Value, part: &str) -> Result<()> {
    let texts =
        ["message", "detail", "hint"].map(|name| failure[name].as_str().unwrap_or_default());
    ensure!(texts.iter().any(|text| text.contains(part)), "{part:?} is not in {failure}");
    Ok(())
}

fn wraps_and_unwraps<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let provider = subject.provider();
    let (wrapped, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version > 0 && provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    let (again, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(again != wrapped, "the same secret wrapped to the same bytes");
    for length in [0, 1, 31, 64, 5000] {
        let secret = STANDARD.encode(vec![0xa7; length]);
        let (wrapped, _) = provider.wrap(KEY, CONTEXT, &secret)?;
        ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == secret, "{length} bytes");
    }
    // Binding to the context.
    let failure = provider.refused(KEY, OTHER_CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
    ensure!(failure["retry"] == false, "{failure}");
    // To another key of the same provider.
    let (moved, _) = provider.rewrap(KEY, NEXT, CONTEXT, &wrapped)?;
    ensure!(provider.unwrap(NEXT, CONTEXT, &moved)? == SECRET);
    provider.refused(NEXT, OTHER_CONTEXT, unwrap(&moved), "wrong_ciphertext")?;
    Ok(())
}

fn changed_bytes<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    let wrapped = bytes(&wrapped)?;
    let mut wrong: Vec<Vec<u8>> = (0..wrapped.len()).map(|n| wrapped[..n].to_vec()).collect();
    for at in 0..wrapped.len() {
        let mut changed = wrapped.clone();
        changed[at] ^= 1 << (at % 8);
        wrong.push(changed);
    }
    wrong.push([&wrapped[..], &[0]].concat());
    wrong.push([&wrapped[..], &[0; 100_000]].concat());
    wrong.extend([vec![0xff; 32], b"vault:v1:abcd".to_vec()]);
    let actions = wrong.iter().map(|bytes| unwrap(&json!(STANDARD.encode(bytes)))).collect();
    for (outcome, bytes) in provider.ask_all(KEY, CONTEXT, actions)?.iter().zip(&wrong) {
        let Some(class) = outcome["failed"]["class"].as_str() else {
            // The number of the version is information only, unless it is bound.
            ensure!(outcome["unwrapped"]["plaintext"] == SECRET, "other bytes: {outcome}");
            let changed = bytes.iter().zip(&wrapped).filter(|(one, other)| one != other).count();
            ensure!(changed == 1 && bytes.len() == wrapped.len(), "{} bytes unwrap", bytes.len());
            continue;
        };
        // Another version is one that the service does not have.
        let refused = matches!(class, "wrong_ciphertext" | "key_missing");
        ensure!(refused, "{} bytes: {outcome}", bytes.len());
    }
    Ok(())
}

fn rotation<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let provider = subject.provider();
    let (first, old) = provider.wrap(KEY, CONTEXT, SECRET)?;
    let new = provider.rotate(KEY, &first)?;
    ensure!(new > old, "{old}, {new}");
    // A caller that did not get the reply repeats the request with the old version.
    ensure!(provider.rotate(KEY, &first)? == new, "rotated twice");
    let (second, version) = provider.rewrap(KEY, KEY, CONTEXT, &first)?;
    ensure!(version == new, "{version} instead of {new}");
    for wrapped in [&first, &second] {
        ensure!(provider.unwrap(KEY, CONTEXT, wrapped)? == SECRET);
    }
    let newest = provider.rotate(KEY, &second)?;
    ensure!(newest > new && provider.rotate(KEY, &first)? == newest);
    let (_, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version == newest, "{version} instead of {newest}");
    for wrapped in [&first, &second] {
        ensure!(provider.unwrap(KEY, CONTEXT, wrapped)? == SECRET);
    }
    let response = provider.ask(KEY, CONTEXT, json!("check"))?.to_string();
    let expected = format!("wraps with version {newest}, unwraps versions from {old} on; ");
    ensure!(response.contains(&expected), "{response}");
    Ok(())
}

fn wrong_key<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    // Where versions have names of their own, the other key lacks this one.
    let outcome = provider.ask(NEXT, CONTEXT, unwrap(&wrapped))?;
    let class = outcome["failed"]["class"].as_str();
    ensure!(matches!(class, Some("wrong_ciphertext" | "key_missing")), "{outcome}");
    let failure = provider.refused("typo", CONTEXT, wrap(), "key_missing")?;
    says(&failure, "typo")?;
    ensure!(failure["retry"] == false, "{failure}");
    let _ = subject.uses();
    for name in ["a/b", "../db-kek", "db-kek?x=y", "db-kek:encrypt", "a b", "\u{e4}"] {
        let outcome = provider.ask(name, CONTEXT, wrap())?;
        let class = outcome["failed"]["class"].as_str();
        ensure!(matches!(class, Some("bad_options" | "key_missing")), "{name}: {outcome}");
    }
    ensure!(subject.uses() == 0, "a strange name was sent");
    Ok(())
}

fn disabled<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    subject.disable()?;
    for action in [wrap(), unwrap(&wrapped)] {
        let failure = provider.refused(KEY, CONTEXT, action, "key_disabled")?;
        ensure!(failure["retry"] == false, "{failure}");
    }
    // Another key is not affected.
    provider.wrap(NEXT, CONTEXT, SECRET)?;
    subject.enable()?;
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    provider.wrap(KEY, CONTEXT, SECRET)?;
    Ok(())
}

fn deleted<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    subject.delete()?;
    for action in [wrap(), unwrap(&wrapped)] {
        let failure = provider.refused(KEY, CONTEXT, action, "key_disabled")?;
        ensure!(failure["retry"] == false, "{failure}");
    }
    subject.destroy()?;
    for action in [wrap(), unwrap(&wrapped), rotate(&wrapped)] {
        let failure = provider.refused(KEY, CONTEXT, action, "key_missing")?;
        ensure!(failure["retry"] == false, "{failure}");
    }
    Ok(())
}

fn throttled<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let mut provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    for meet in [S::throttle, S::fail] {
        let _ = subject.uses();
        meet(&subject, 2);
        ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
        ensure!(subject.uses() == 3, "it was not tried again");
    }
    provider.deadline_ms = 2000;
    for (meet, class) in [(S::throttle as fn(&S, usize), "throttled"), (S::fail, "unreachable")] {
        meet(&subject, usize::MAX);
        let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), class)?;
        ensure!(failure["retry"] == true, "{failure}");
        says(&failure, "Tried ")?;
        subject.repair();
    }
    Ok(())
}

fn slow<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let mut provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    subject.silence();
    provider.deadline_ms = 2000;
    let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), "deadline")?;
    ensure!(failure["retry"] == true, "{failure}");
    subject.repair();
    provider.deadline_ms = 10_000;
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn unreachable<S: Subject>() -> Result<()> {
    let mut subject = S::start()?;
    let mut provider = subject.provider();
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    subject.stop();
    provider.deadline_ms = 2000;
    let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), "unreachable")?;
    ensure!(failure["retry"] == true, "{failure}");
    says(&failure, "could not reach")
}

fn another_key<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let mut provider = subject.provider();
    provider.wrap(KEY, CONTEXT, SECRET)?;
    subject.answer_for_another_key();
    provider.deadline_ms = 2000;
    let failure = provider.refused(KEY, CONTEXT, wrap(), "unreachable")?;
    says(&failure, "another key")?;
    subject.repair();
    provider.wrap(KEY, CONTEXT, SECRET)?;
    Ok(())
}

fn check<S: Subject>() -> Result<()> {
    let subject = S::start()?;
    let reply = subject.provider().ask(KEY, CONTEXT, json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
    ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
    let what: Vec<&str> = findings.iter().filter_map(|finding| finding["what"].as_str()).collect();
    let last =
        ["the key exists", "the key wraps and unwraps", "wrapped keys are bound to their database"];
    ensure!(what.len() > 4 && what.ends_with(&last), "{what:?}");
    Ok(())
}
