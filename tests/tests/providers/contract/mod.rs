//! What every provider promises, whatever its service: one list of points ([`Point`]) that all
//! subjects pass. A point that a provider cannot have is declared with the reason, which
//! docs/testing.md shows ([`guide`]).

mod guide;
mod moving;
mod points;
mod subject;
mod subjects;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::helper::Provider;
use serde_json::{Value, json};

pub(crate) use self::points::Point;
pub(crate) use self::subject::{Group, State, Subject};
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

/// All tests of the contract.
pub(crate) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = subjects::all().iter().flat_map(|row| (row.tests)()).collect();
    tests.extend(guide::TESTS);
    tests.extend(moving::tests());
    tests
}

/// The tests of one subject, a group of points each.
fn tests_of<S: Subject>() -> Vec<Test> {
    let test = |name: &str, run: fn() -> Result<()>| Test {
        // One name for each test of the process.
        name: Box::leak(format!("{}::contract_{name}", S::NAME).into_boxed_str()),
        needs: S::NEEDS,
        run,
    };
    vec![
        test("keys", || keep::<S>(Group::Keys)),
        test("versions", || keep::<S>(Group::Versions)),
        test("states", || keep::<S>(Group::States)),
        test("outages", || keep::<S>(Group::Outages)),
    ]
}

/// Passes the points of a group in their order, with one service.
fn keep<S: Subject>(group: Group) -> Result<()> {
    let mut subject = S::start(group)?;
    let (_, first, _) = wrapped(&subject)?;
    for point in group.points() {
        if S::LACKS.iter().any(|(lacking, _)| lacking == point) {
            continue;
        }
        if let Some(reason) = subject.cannot(*point) {
            eprintln!("{}: {point:?}: {reason}", S::NAME);
            continue;
        }
        points::pass(*point, &mut subject, &first).with_context(|| format!("{point:?}"))?;
    }
    Ok(())
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

/// A provider that wraps, with what it has wrapped.
fn wrapped<S: Subject>(subject: &S) -> Result<(Provider, Value, u64)> {
    let provider = subject.provider();
    let (wrapped, version) = provider.wrap(&subject.key(), CONTEXT, SECRET)?;
    Ok((provider, wrapped, version))
}
