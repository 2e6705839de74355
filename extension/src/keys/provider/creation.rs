//! How a key file, or a key in one, is created: said only where no key can be in use there.
//! Anywhere else a new file in the place of a missing one would turn an outage into a refusal.

use std::collections::BTreeSet;
use std::path::Path;

use pagevault_keystore::protocol::{ErrorClass, ProviderSpec};
use pagevault_keystore::state::{Provider, State};
use serde_json::{Map, Value};

use super::refusal;
use crate::pg::report::Report;

/// The report of a failure to use a master key for the first time.
pub(crate) fn explain(report: Report, state: &State, spec: &ProviderSpec, key: &str) -> Report {
    let path = spec.options.get("path").and_then(Value::as_str).filter(|_| spec.kind == "file");
    let Some(path) = path.map(Path::new) else { return report };
    let in_use = keys_in_use(state, path);
    let is = |class| report.code() == refusal::sqlstate(class) as i32;
    let what = if is(ErrorClass::Unreachable) && in_use.is_empty() && !path.exists() {
        "Check the path. To create a new key file"
    } else if is(ErrorClass::KeyMissing) && !in_use.contains(key) {
        "Check the name. To create a new key"
    } else {
        return report;
    };
    let shown = path.display().to_string();
    // Who names the file may be another person than who runs the command.
    let is_plain =
        |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-".contains(c));
    if !is_plain(&shown) || !is_plain(key) {
        return report.hint(format!("{what}, use pagevault-keyring file create."));
    }
    report.hint(format!("{what}, use: pagevault-keyring file create \"{shown}\" --key \"{key}\""))
}

/// The keys of a key file that wrap database keys, by whatever provider.
fn keys_in_use<'a>(state: &'a State, path: &Path) -> BTreeSet<&'a str> {
    let is_there = |provider: &Provider| {
        let options = serde_json::from_str::<Map<String, Value>>(&provider.options);
        let options = options.unwrap_or_default();
        let place = options.get("path").and_then(Value::as_str);
        provider.kind == "file" && place.is_some_and(|place| Path::new(place) == path)
    };
    let wrappings = state.database_keys().flat_map(|(.., key)| key.wrappings());
    let there = wrappings.filter(|by| state.provider(&by.provider).is_some_and(is_there));
    there.map(|by| by.master_key.as_str()).collect()
}
