//! What it takes until a server encrypts: which steps are done, and which are to do.
//!
//! The plan is made of what the server tells; so a second plan, after the first was carried out,
//! has nothing to do.

use serde_json::{Map, Value, json};

use crate::doctor::{libraries, preload, workers_wanted};
use crate::failure::{Failure, refuse};
use crate::server::{list, text};

/// What the operator wants.
pub(crate) struct Wanted {
    /// Name of the provider.
    pub(crate) provider: String,
    pub(crate) kind: String,
    pub(crate) options: Map<String, Value>,
    /// Name of the master key at the provider.
    pub(crate) key: String,
}

impl Wanted {
    /// The key file, if the provider is one.
    pub(crate) fn key_file(&self) -> Option<&str> {
        (self.kind == "file").then(|| self.options.get("path")).flatten()?.as_str()
    }
}

/// How a step is done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// A statement.
    Sql(String),
    /// The key in the key file.
    KeyFile,
    /// By the operator.
    Restart,
}

/// A step; `action` is none if it is done already.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub(crate) what: String,
    pub(crate) action: Option<Action>,
    /// A statement, or what to do, to undo it.
    pub(crate) undo: String,
}

/// All steps in their order. `has_key` tells whether the key file contains the key.
///
/// # Errors
/// If the cluster has another provider of this name.
pub(crate) fn plan(found: &Value, wanted: &Wanted, has_key: bool) -> Result<Vec<Step>, Failure> {
    let (mut steps, pending) = settings(found);
    let step = |what: String, done: bool, action: Action, undo: &str| Step {
        what,
        action: (!done).then_some(action),
        undo: undo.to_owned(),
    };
    let restarted = !pending && steps.iter().all(|step| step.action.is_none());
    steps.push(step(
        "the server runs with these settings".to_owned(),
        restarted,
        Action::Restart,
        "restart it again after undoing them",
    ));
    if let Some(path) = wanted.key_file() {
        let what = format!("key \"{}\" is in key file \"{path}\"", wanted.key);
        steps.push(step(
            what,
            has_key,
            Action::KeyFile,
            "keep the file as long as anything is encrypted, and its backups",
        ));
    }
    let here = text(&found["server"]["database"]);
    let mut databases = list(&found["databases"]).iter();
    let has_extension = databases
        .any(|database| database["name"] == here && database["extension_version"].is_string());
    steps.push(step(
        format!("database \"{here}\" has the extension"),
        has_extension,
        Action::Sql("CREATE EXTENSION pagevault".to_owned()),
        "DROP EXTENSION pagevault",
    ));
    let [provider, kind, key] = [&wanted.provider, &wanted.kind, &wanted.key].map(|s| literal(s));
    let options = literal(&Value::Object(wanted.options.clone()).to_string());
    steps.push(step(
        format!("the cluster has the provider \"{}\"", wanted.provider),
        has_provider(found, wanted)?,
        Action::Sql(format!("SELECT pagevault.add_provider({provider}, {kind}, {options})")),
        &format!("SELECT pagevault.drop_provider({provider})"),
    ));
    let state = text(&found["cluster"]["status"]["state"]);
    steps.push(step(
        master_key(found),
        !matches!(state, "" | "no_master_key"),
        Action::Sql(format!("SELECT pagevault.set_cluster_master_key({provider}, {key})")),
        "docs/removing.md: a cluster keeps its master key",
    ));
    Ok(steps)
}

/// The steps for settings of `postgresql.conf`, and whether the server has yet to read some.
fn settings(found: &Value) -> (Vec<Step>, bool) {
    let server = &found["server"];
    let value = |name: &str| {
        let now = text(&server["settings"][name]);
        (now, server["at_next_start"][name].as_str().unwrap_or(now))
    };
    let (now, next) = value("shared_preload_libraries");
    let [is_loaded, will_be] = [now, next].map(|list| libraries(list).contains(&"pagevault"));
    let before: Vec<_> = libraries(next).into_iter().map(literal).collect();
    let undo = match before.join(", ") {
        none if none.is_empty() => "ALTER SYSTEM RESET shared_preload_libraries".to_owned(),
        before => format!("ALTER SYSTEM SET shared_preload_libraries = {before}"),
    };
    let mut steps = vec![Step {
        what: "shared_preload_libraries names pagevault".to_owned(),
        action: (!will_be).then(|| Action::Sql(preload(next))),
        undo,
    }];
    let (now, next) = value("max_worker_processes");
    let number = |text: &str| text.parse::<i64>().unwrap_or(0);
    let wanted = workers_wanted(found);
    steps.push(Step {
        what: format!("max_worker_processes is at least {wanted}"),
        action: (number(next) < wanted)
            .then(|| Action::Sql(format!("ALTER SYSTEM SET max_worker_processes = {wanted}"))),
        undo: "ALTER SYSTEM RESET max_worker_processes".to_owned(),
    });
    (steps, !is_loaded || number(now) < wanted)
}

fn has_provider(found: &Value, wanted: &Wanted) -> Result<bool, Failure> {
    let mut providers = list(&found["cluster"]["providers"]).iter();
    let Some(known) = providers.find(|provider| provider["provider"] == wanted.provider) else {
        return Ok(false);
    };
    if known["kind"] == wanted.kind && known["options"] == json!(wanted.options) {
        return Ok(true);
    }
    Err(refuse(format!("the cluster has another provider called \"{}\"", wanted.provider))
        .with_detail("Its kind or its options differ; nothing was changed.")
        .with_hint(
            "Choose another name with --provider, or change it by pagevault.alter_provider().",
        ))
}

/// The master key of the cluster that there is, or its lack.
fn master_key(found: &Value) -> String {
    let newest = list(&found["cluster"]["database_keys"])
        .iter()
        .filter(|key| key["scope"] == "cluster")
        .max_by_key(|key| key["version"].as_i64());
    match newest {
        None => "the cluster has a master key".to_owned(),
        Some(key) => format!(
            "the cluster has the master key \"{}\" of provider \"{}\"",
            text(&key["master_key"]),
            text(&key["provider"])
        ),
    }
}

/// A text as SQL, whatever standard_conforming_strings says.
fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        return format!("E'{}'", quoted.replace('\\', "\\\\"));
    }
    format!("'{quoted}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Wanted {
        let options = json!({"path": "/etc/it's\\keys"}).as_object().cloned().unwrap_or_default();
        let [provider, kind, key] = ["local", "file", "main"].map(str::to_owned);
        Wanted { provider, kind, options, key }
    }

    fn to_do(found: &Value, has_key: bool) -> Vec<Action> {
        let steps = plan(found, &wanted(), has_key).unwrap();
        steps.into_iter().filter_map(|step| step.action).collect()
    }

    fn server(now: &str, next: &str, workers: &str) -> Value {
        json!({
            "server": {
                "database": "app",
                "settings": {"shared_preload_libraries": now, "max_worker_processes": "16",
                             "max_parallel_workers": "8"},
                "at_next_start": {"shared_preload_libraries": next,
                                  "max_worker_processes": workers},
            },
            "databases": [{"name": "app", "extension_version": null}],
        })
    }

    #[test]
    fn each_step_is_done_once() {
        let mut found = server("", "a, \"b c\"", "8");
        assert_eq!(
            to_do(&found, false)[..3],
            [
                Action::Sql(
                    "ALTER SYSTEM SET shared_preload_libraries = 'a', 'b c', 'pagevault'"
                        .to_owned()
                ),
                Action::Sql("ALTER SYSTEM SET max_worker_processes = 16".to_owned()),
                Action::Restart
            ]
        );
        assert_eq!(
            plan(&found, &wanted(), false).unwrap()[0].undo,
            "ALTER SYSTEM SET shared_preload_libraries = 'a', 'b c'"
        );
        found = server("", "a, pagevault", "16");
        assert_eq!(to_do(&found, false)[..2], [Action::Restart, Action::KeyFile]);
        found = server("pagevault", "pagevault", "16");
        assert_eq!(
            to_do(&found, true),
            [
                Action::Sql("CREATE EXTENSION pagevault".to_owned()),
                Action::Sql("SELECT pagevault.add_provider('local', 'file', E'{\"path\":\"/etc/it''s\\\\\\\\keys\"}')".to_owned()),
                Action::Sql("SELECT pagevault.set_cluster_master_key('local', 'main')".to_owned()),
            ]
        );
        found["databases"][0]["extension_version"] = json!("1");
        found["cluster"] = json!({
            "status": {"state": "unlocked"},
            "providers": [{"provider": "local", "kind": "file", "options": {"path": "/etc/it's\\keys"}}],
        });
        assert_eq!(to_do(&found, true), []);
        found["cluster"]["providers"][0]["options"] = json!({"path": "/other"});
        assert!(plan(&found, &wanted(), true).is_err());
    }
}
