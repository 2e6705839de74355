//! What it takes until a server encrypts: which steps are done, and which are to do.
//!
//! The plan is made of what the server tells; so a second plan, after the first was carried out,
//! has nothing to do.

use serde_json::{Map, Value, json};

use crate::doctor::{preload, workers_wanted};
use crate::failure::{Failure, refuse};
use crate::quoting::literal;
use crate::server::{libraries, list, runs_without_library, text};

/// Gives a role's objects to superusers again.
const REASSIGN: &str = "Check the objects, then REASSIGN OWNED BY, or ALTER ROLE ... SUPERUSER.";

const CREATE_EXTENSION: &str = "CREATE EXTENSION pagevault";

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

/// What there is of the key file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Held {
    NoFile,
    NoKey,
    Key,
}

/// All steps in their order.
///
/// # Errors
/// If the cluster has another provider of this name, if a key that it may need is missing, or if
/// somebody may have put objects of their own in the place of those of the extension.
pub(crate) fn plan(found: &Value, wanted: &Wanted, held: Held) -> Result<Vec<Step>, Failure> {
    require_own_schema(found)?;
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
    let here = text(&found["server"]["database"]);
    let mut databases = list(&found["databases"]).iter();
    let has_extension = databases
        .any(|database| database["name"] == here && database["extension_version"].is_string());
    steps.push(step(
        format!("database \"{here}\" has the extension"),
        has_extension,
        Action::Sql(CREATE_EXTENSION.to_owned()),
        "DROP EXTENSION pagevault",
    ));
    // What a cluster without the library may have is known after the restart.
    let is_unseen = |database: &Value| database["error"].is_string();
    if runs_without_library(found)
        && (has_extension || list(&found["databases"]).iter().any(is_unseen))
    {
        steps.retain(|step| step.action != Some(Action::Sql(CREATE_EXTENSION.to_owned())));
        return Ok(steps);
    }
    // After the extension, which tells what the cluster has.
    if let Some(path) = wanted.key_file() {
        if held != Held::Key {
            require_no_key_before(found, wanted, path, held)?;
        }
        steps.push(step(
            format!("key \"{}\" is in key file \"{path}\"", wanted.key),
            held == Held::Key,
            Action::KeyFile,
            "keep the file as long as anything is encrypted, and its backups",
        ));
    }
    let [provider, kind, key] = [&wanted.provider, &wanted.kind, &wanted.key].map(|s| literal(s));
    let options = literal(&Value::Object(wanted.options.clone()).to_string());
    steps.push(step(
        format!("the cluster has the provider \"{}\"", wanted.provider),
        has_provider(found, wanted)?,
        Action::Sql(format!(
            "SELECT pagevault.add_provider({provider}, {kind}, {options}::pg_catalog.jsonb)"
        )),
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

/// Refuses a cluster that has not told what it has, and a database in which the statements of a
/// superuser could run what somebody else wrote.
fn require_own_schema(found: &Value) -> Result<(), Failure> {
    let here = text(&found["server"]["database"]);
    let mut databases = list(&found["databases"]).iter();
    let unseen = databases.clone().find(|database| database["error"].is_string());
    if let Some(database) = unseen
        && found["cluster"].is_null()
        && !runs_without_library(found)
    {
        return Err(unseen_because(database));
    }
    let Some(database) = databases.find(|database| database["name"] == here) else {
        return Ok(());
    };
    if database["foreign_schema"] == true {
        return Err(refuse(format!("database \"{here}\" has a schema pagevault of its own"))
            .with_detail("The extension is not in it, and what is in it may be anybody's.")
            .with_hint("Check its contents, then DROP SCHEMA pagevault CASCADE."));
    }
    if let Some(owner) = database["extension_owner"].as_str() {
        return Err(refuse(format!("\"{owner}\" can replace objects of the extension"))
            .with_detail(format!(
                "The role owns some in database \"{here}\", and is not a superuser."
            ))
            .with_hint(REASSIGN));
    }
    // Without the library, what is encrypted cannot be read. It is looked at after the restart.
    if database["error"].is_string() && !runs_without_library(found) {
        return Err(unseen_because(database));
    }
    Ok(())
}

fn unseen_because(database: &Value) -> Failure {
    let name = text(&database["name"]);
    refuse(format!("database \"{name}\" could not be looked at"))
        .with_detail(text(&database["error"]))
}

/// Refuses to make a key in the place of one that the cluster had: what is wrapped by that one
/// would no longer be unreachable, but refused.
fn require_no_key_before(
    found: &Value,
    wanted: &Wanted,
    path: &str,
    held: Held,
) -> Result<(), Failure> {
    let cluster = &found["cluster"];
    let uses =
        |provider: &&Value| provider["kind"] == "file" && provider["options"]["path"] == path;
    let user = list(&cluster["providers"]).iter().find(uses);
    let has_master_key = !matches!(text(&cluster["status"]["state"]), "" | "no_master_key")
        || !list(&cluster["database_keys"]).is_empty();
    let detail = match user {
        Some(provider) => {
            format!("Provider \"{}\" of the cluster uses this file.", text(&provider["provider"]))
        }
        None if has_master_key => "The cluster has a master key already.".to_owned(),
        None => return Ok(()),
    };
    let what = match held {
        Held::NoFile => format!("key file \"{path}\" is missing"),
        _ => format!("key \"{}\" is missing in key file \"{path}\"", wanted.key),
    };
    let hint = match user {
        Some(_) => "Restore the key file from its backup. A new key would not unwrap anything.",
        None => {
            "Restore the file, or name the one that the cluster uses. For a further master key: pagevault-keyring file create, pagevault.add_provider()."
        }
    };
    Err(refuse(what).with_detail(format!("{detail} No key was made.")).with_hint(hint))
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

/// The rows of the newest database key of the cluster: one for each master key.
fn newest(found: &Value) -> impl Iterator<Item = &Value> {
    let keys = list(&found["cluster"]["database_keys"]).iter();
    let keys = keys.filter(|key| key["scope"] == "cluster");
    let newest = keys.clone().filter_map(|key| key["version"].as_i64()).max();
    keys.filter(move |key| key["version"].as_i64() == newest)
}

/// What to say if the master key that is wanted wraps nothing, because the cluster has another one.
pub(crate) fn stays_with_another(found: &Value, wanted: &Wanted) -> Option<String> {
    let is_wanted =
        |key: &Value| key["provider"] == wanted.provider && key["master_key"] == wanted.key;
    newest(found).next()?;
    if newest(found).any(is_wanted) {
        return None;
    }
    let [provider, key] = [&wanted.provider, &wanted.key].map(|name| literal(name));
    Some(format!(
        "Unchanged: {}. Key \"{}\" of provider \"{}\" wraps nothing yet. To use it instead: SELECT pagevault.set_cluster_master_key({provider}, {key})",
        master_key(found),
        wanted.key,
        wanted.provider
    ))
}

/// The master key of the cluster that there is, or its lack.
fn master_key(found: &Value) -> String {
    match newest(found).min_by_key(|key| key["preference"].as_i64()) {
        None => "the cluster has a master key".to_owned(),
        Some(key) => format!(
            "the cluster has the master key \"{}\" of provider \"{}\"",
            text(&key["master_key"]),
            text(&key["provider"])
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Wanted {
        let options = json!({"path": "/etc/it's\\keys"}).as_object().cloned().unwrap_or_default();
        let [provider, kind, key] = ["local", "file", "main"].map(str::to_owned);
        Wanted { provider, kind, options, key }
    }

    fn to_do(found: &Value, held: Held) -> Vec<Action> {
        let steps = plan(found, &wanted(), held).unwrap();
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
            to_do(&found, Held::NoFile)[..3],
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
            plan(&found, &wanted(), Held::NoFile).unwrap()[0].undo,
            "ALTER SYSTEM SET shared_preload_libraries = 'a', 'b c'"
        );
        found = server("", "a, pagevault", "16");
        assert_eq!(
            to_do(&found, Held::NoFile)[..2],
            [Action::Restart, Action::Sql("CREATE EXTENSION pagevault".to_owned())]
        );
        assert_eq!(to_do(&found, Held::NoFile)[2], Action::KeyFile);
        found = server("pagevault", "pagevault", "16");
        assert_eq!(
            to_do(&found, Held::Key),
            [
                Action::Sql("CREATE EXTENSION pagevault".to_owned()),
                Action::Sql("SELECT pagevault.add_provider('local', 'file', E'{\"path\":\"/etc/it''s\\\\\\\\keys\"}'::pg_catalog.jsonb)".to_owned()),
                Action::Sql("SELECT pagevault.set_cluster_master_key('local', 'main')".to_owned()),
            ]
        );
        found["databases"][0]["extension_version"] = json!("1");
        found["cluster"] = json!({
            "status": {"state": "unlocked"},
            "providers": [{"provider": "local", "kind": "file", "options": {"path": "/etc/it's\\keys"}}],
        });
        assert_eq!(to_do(&found, Held::Key), []);
        found["cluster"]["providers"][0]["options"] = json!({"path": "/other"});
        assert!(plan(&found, &wanted(), Held::Key).is_err());
    }
    #[test]
    fn a_missing_key_is_not_made_again() {
        let mut found = server("pagevault", "pagevault", "16");
        found["databases"][0]["extension_version"] = json!("1");
        found["cluster"] = json!({"status": {"state": "no_master_key"}});
        assert_eq!(to_do(&found, Held::NoFile)[0], Action::KeyFile);
        let refused = |found: &Value, held| plan(found, &wanted(), held).unwrap_err();
        // Whatever the provider is called.
        let path = wanted().key_file().unwrap_or_default().to_owned();
        found["cluster"]["providers"] =
            json!([{"provider": "old", "kind": "file", "options": {"path": path}}]);
        let failure = refused(&found, Held::NoFile);
        assert!(failure.message.ends_with("is missing"), "{failure:?}");
        assert!(failure.hint.unwrap_or_default().starts_with("Restore"));
        found["cluster"] = json!({"status": {"state": "locked"}});
        for held in [Held::NoFile, Held::NoKey] {
            let failure = refused(&found, held);
            assert!(failure.message.contains("is missing"), "{failure:?}");
        }
        assert!(plan(&found, &wanted(), Held::Key).is_ok());
    }

    #[test]
    fn a_library_that_was_taken_away_is_put_back_first() {
        let mut found = server("", "", "16");
        found["databases"][0]["error"] = json!("ERROR:  invalid page");
        let preload = Action::Sql(preload(""));
        // Neither a key file nor anything else that the cluster may have.
        assert_eq!(to_do(&found, Held::NoFile), [preload.clone(), Action::Restart]);
        found["databases"][0] = json!({"name": "app", "extension_version": "1"});
        assert_eq!(to_do(&found, Held::NoFile), [preload, Action::Restart]);
        // With the library, another database may tell of a master key.
        let mut found = server("pagevault", "pagevault", "16");
        found["databases"] = json!([{"name": "other", "error": "ERROR:  invalid page"}]);
        assert!(plan(&found, &wanted(), Held::Key).is_err());
    }

    #[test]
    fn another_master_key_stays() {
        let mut found = server("pagevault", "pagevault", "16");
        assert_eq!(stays_with_another(&found, &wanted()), None);
        let row = |version, provider| {
            let (scope, key) = ("cluster", "main");
            json!({"scope": scope, "version": version, "provider": provider, "master_key": key})
        };
        found["cluster"] = json!({"database_keys": [row(1, "local"), row(2, "lost")]});
        let said = stays_with_another(&found, &wanted()).unwrap_or_default();
        assert!(said.contains("master key \"main\" of provider \"lost\""), "{said}");
        assert!(said.ends_with("set_cluster_master_key('local', 'main')"), "{said}");
        found["cluster"] = json!({"database_keys": [row(2, "lost"), row(2, "local")]});
        assert_eq!(stays_with_another(&found, &wanted()), None);
    }

    #[test]
    fn nothing_is_called_that_may_not_be_the_extensions() {
        for (what, value) in [
            ("foreign_schema", json!(true)),
            ("extension_owner", json!("former")),
            ("error", json!("permission denied")),
        ] {
            let mut found = server("pagevault", "pagevault", "16");
            assert!(plan(&found, &wanted(), Held::Key).is_ok());
            found["databases"][0][what] = value;
            assert!(plan(&found, &wanted(), Held::Key).is_err(), "{what}");
        }
    }
}
