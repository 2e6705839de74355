//! Operations that change the protection of data, or access to it, write one line before and one
//! after.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};
use postgres::Client;
use serde_json::Value;

use super::trail;

/// The lines written during `work`.
pub(super) fn written(cluster: &Cluster, work: impl FnOnce() -> Result<()>) -> Result<Vec<Value>> {
    let before = trail(cluster)?.len();
    work()?;
    Ok(trail(cluster)?.split_off(before))
}

/// The lines with this action.
pub(super) fn of<'a>(lines: &'a [Value], action: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["action"] == action).collect()
}

/// Their outcomes.
fn outcomes(lines: &[Value], action: &str) -> String {
    let outcomes =
        of(lines, action).into_iter().map(|line| line["outcome"].as_str().unwrap_or("?"));
    outcomes.collect::<Vec<_>>().join(" ")
}

/// The outcomes in the lines of a statement, which may fail.
fn of_statement(cluster: &Cluster, statement: &str, action: &str) -> Result<String> {
    let mut client = cluster.client()?;
    let lines = written(cluster, || {
        let _ = run_sql(&mut client, statement);
        settle(&mut client)
    })?;
    Ok(outcomes(&lines, action))
}

/// Waits until the transaction of a failed statement is rolled back; the client gets the error
/// earlier.
pub(super) fn settle(client: &mut Client) -> Result<()> {
    run_sql(client, "SELECT 1").or_else(|_| run_sql(client, "ROLLBACK"))
}

#[test]
fn every_function_records_attempt_and_outcome() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql("CREATE TABLE t (id int); CREATE TABLE u AS SELECT 1 AS id")?;
    let job = "(SELECT max(job) FROM pagevault.rekey_jobs)";
    for (action, call) in [
        ("encrypt", "SELECT pagevault.encrypt('t')".to_owned()),
        ("decrypt", "SELECT pagevault.decrypt('t')".to_owned()),
        ("reconcile", "SELECT pagevault.reconcile('u')".to_owned()),
        ("encrypt_catalogs", "SELECT pagevault.encrypt_catalogs()".to_owned()),
        ("encrypt_database", "SELECT pagevault.encrypt_database()".to_owned()),
        ("rotate_data_key", "ALTER SYSTEM SET pagevault.rekey_workers = 0; SELECT pg_reload_conf(); SELECT pagevault.rotate_data_key('u')".to_owned()),
        ("pause_rekey", format!("SELECT pagevault.pause_rekey({job})")),
        ("resume_rekey", format!("SELECT pagevault.resume_rekey({job})")),
        ("cancel_rekey", format!("SELECT pagevault.cancel_rekey({job})")),
        ("rotate_all_data_keys", "SELECT pagevault.rotate_all_data_keys()".to_owned()),
        ("decrypt_database", "ALTER SYSTEM RESET pagevault.rekey_workers; SELECT pg_reload_conf(); SELECT count(pagevault.wait_for_rekey(job)) FROM pagevault.rekey_jobs WHERE state NOT IN ('cancelled', 'done'); SELECT pagevault.decrypt_database()".to_owned()),
        ("rotate_wal_key", "SELECT pagevault.rotate_wal_key()".to_owned()),
        ("rotate_database_key", "SELECT pagevault.rotate_database_key()".to_owned()),
        ("rotate_cluster_master_key", "SELECT pagevault.rotate_cluster_master_key()".to_owned()),
        (
            "set_database_master_key",
            "SELECT pagevault.set_database_master_key('local', 'main')".to_owned(),
        ),
        ("rotate_database_master_key", "SELECT pagevault.rotate_database_master_key()".to_owned()),
        ("unlock", "SELECT pagevault.unlock()".to_owned()),
    ] {
        let lines = written(&cluster, || {
            call.split("; ").try_for_each(|statement| cluster.sql(statement))
        })?;
        let found: Vec<_> = of(&lines, action).into_iter().filter(|l| l["by"] == action).collect();
        ensure!(found.len() == 2, "{action}: {lines:#?}");
        ensure!(found[0]["outcome"] == "attempted", "{action}: {lines:#?}");
        ensure!(found[1]["outcome"] == "ok", "{action}: {lines:#?}");
        ensure!(found.iter().all(|line| line["role"] == "postgres"), "{action}: {lines:#?}");
    }
    let error = cluster.error("SELECT pagevault.shred('u', 'wrong')")?;
    ensure!(error.sqlstate == "22023", "{error}");
    let lines = trail(&cluster)?;
    // Not simply the last line: jobs may still run.
    ensure!(outcomes(&lines, "shred") == "attempted failed", "{lines:#?}");
    let failed = of(&lines, "shred")[1];
    ensure!(failed["sqlstate"] == "22023", "{failed}");
    cluster.finish()
}

#[test]
fn a_label_has_its_outcome_when_its_transaction_ends() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id int); CREATE SCHEMA s; CREATE ROLE owner LOGIN; CREATE ROLE other LOGIN; ALTER TABLE t OWNER TO owner")?;
    let label =
        |object: &str, label: &str| format!("SECURITY LABEL FOR pagevault ON {object} IS {label}");
    let encrypt = label("TABLE t", "'encrypted'");
    let lines = written(&cluster, || cluster.sql(&encrypt))?;
    ensure!(outcomes(&lines, "label") == "attempted ok", "{lines:#?}");
    let line = of(&lines, "label")[1];
    ensure!(line["object"] == "public.t" && line["to"] == "encrypted", "{line}");
    for (object, to) in [
        ("SCHEMA s", "'encrypted'"),
        ("SCHEMA s", "NULL"),
        ("DATABASE postgres", "'encrypted'"),
        ("DATABASE postgres", "NULL"),
    ] {
        let output = of_statement(&cluster, &label(object, to), "label")?;
        ensure!(output == "attempted ok", "{object} {to}: {output}");
    }
    let lines = written(&cluster, || cluster.sql(&label("TABLE t", "'plaintext'")))?;
    let line = of(&lines, "label")[1];
    ensure!(line["from"] == "encrypted" && line["to"] == "plaintext", "{line}");
    // Rolled back, completely and partly.
    for (statements, expected) in [
        (format!("BEGIN; {encrypt}; ROLLBACK"), "attempted rolled_back"),
        (format!("BEGIN; SAVEPOINT a; {encrypt}; ROLLBACK TO a; COMMIT"), "attempted rolled_back"),
        (format!("BEGIN; SAVEPOINT a; {encrypt}; RELEASE a; COMMIT"), "attempted ok"),
        (format!("BEGIN; {encrypt}; SELECT 1/0; COMMIT"), "attempted rolled_back"),
        (
            format!(
                "DO $$ BEGIN {}; EXCEPTION WHEN others THEN END $$",
                label("VIEW pg_class", "'plaintext'")
            ),
            "attempted failed",
        ),
        // Refused by the server, and by pagevault.
        (format!("SET ROLE other; {encrypt}"), "attempted denied"),
        (format!("SET ROLE owner; {}", label("TABLE t", "'plaintext'")), "attempted denied"),
        (label("TABLE nothing", "'plaintext'"), "attempted failed"),
        (label("TABLE t", "'nonsense'"), "attempted failed"),
    ] {
        let output = of_statement(&cluster, &statements, "label")?;
        ensure!(output == expected, "{statements}: {output}");
    }
    cluster.finish()
}

#[test]
fn changes_of_relevant_settings_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let lines = trail(&cluster)?;
    let start = of(&lines, "start")[0]["settings"].as_str().context("no settings")?.to_owned();
    ensure!(start.contains("pagevault.enforce_encryption='off'"), "{start}");
    // In the configuration.
    cluster.set(&[("pagevault.enforce_encryption", "on"), ("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.set(&[("pagevault.wal_encryption", "off")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "f")?;
    cluster.eventually_that("reload", || {
        let lines = trail(&cluster)?;
        let reloaded = |name: &str, from: &str, to: &str| {
            let mut set = lines.iter().filter(|line| line["by"] == "reload");
            set.any(|l| l["object"] == name && l["from"] == from && l["to"] == to)
        };
        ensure!(reloaded("pagevault.enforce_encryption", "off", "on"), "{lines:#?}");
        ensure!(reloaded("pagevault.wal_encryption", "keep", "on"), "{lines:#?}");
        ensure!(reloaded("pagevault.wal_encryption", "on", "off"), "{lines:#?}");
        ensure!(outcomes(&lines, "wal_encryption") == "attempted ok attempted ok", "{lines:#?}");
        Ok(())
    })?;
    let by = |by: &str, statement: &str| -> Result<Vec<Value>> {
        let lines = written(&cluster, || cluster.sql(statement))?;
        Ok(lines.into_iter().filter(|line| line["by"] == by).collect())
    };
    // By statements, for other sessions and later ones.
    for (who, statement, object) in [
        (
            "ALTER SYSTEM",
            "ALTER SYSTEM RESET pagevault.enforce_encryption",
            "pagevault.enforce_encryption",
        ),
        ("ALTER SYSTEM", "ALTER SYSTEM RESET ALL", "ALL"),
        (
            "ALTER ROLE",
            "ALTER ROLE postgres SET Pagevault.Enforce_Encryption = off",
            "pagevault.enforce_encryption of role postgres",
        ),
        (
            "ALTER DATABASE",
            "ALTER DATABASE template1 SET pagevault.enforce_encryption = off",
            "pagevault.enforce_encryption of database template1",
        ),
    ] {
        let lines = by(who, statement)?;
        ensure!(outcomes(&lines, "set") == "attempted ok", "{statement}: {lines:#?}");
        ensure!(lines.iter().all(|line| line["object"] == object), "{lines:#?}");
    }
    // Within a session, in several ways; the first is the value from ALTER ROLE.
    let mut client = cluster.client()?;
    for (statement, to) in [
        ("SELECT 1", "off"),
        ("SET pagevault.enforce_encryption = on", "on"),
        ("SELECT set_config('pagevault.enforce_encryption', 'off', false)", "off"),
        (
            "DO $$ BEGIN SET LOCAL pagevault.enforce_encryption = on; RAISE EXCEPTION 'no'; END $$",
            "on",
        ),
    ] {
        let before = trail(&cluster)?.len();
        let _ = run_sql(&mut client, statement);
        settle(&mut client)?;
        let lines = trail(&cluster)?.split_off(before.min(trail(&cluster)?.len()));
        let lines: Vec<_> = match statement {
            "SELECT 1" => trail(&cluster)?,
            _ => lines,
        };
        let set = lines.iter().rfind(|line| line["by"] == "session");
        let set = set.with_context(|| format!("{statement}: {lines:#?}"))?;
        ensure!(set["to"] == to && set["role"] == "postgres", "{statement}: {set}");
    }
    ensure!(text(&mut client, "SHOW pagevault.enforce_encryption")? == "off", "rolled back");
    drop(client);
    cluster.finish()
}

#[test]
fn refusals_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE nobody LOGIN; CREATE TABLE t (id int)")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET ROLE nobody")?;
    for (statement, object) in [
        ("SELECT pagevault.shred('t', 'public.t')", "function shred"),
        ("SELECT pagevault.add_provider('x', 'file', '{}')", "function add_provider"),
        ("SELECT pagevault.decrypt_database()", "function decrypt_database"),
        ("SET pagevault.enforce_encryption = off", "pagevault.enforce_encryption"),
    ] {
        let before = trail(&cluster)?.len();
        let error = expect_error(&mut client, statement)?;
        ensure!(error.sqlstate == "42501", "{error}");
        settle(&mut client)?;
        let lines = trail(&cluster)?.split_off(before);
        ensure!(lines.len() == 1, "{statement}: {lines:#?}");
        let line = &lines[0];
        ensure!(line["outcome"] == "denied" && line["object"] == object, "{line}");
        ensure!(line["role"] == "postgres" && line["current_role"] == "nobody", "{line}");
    }
    // The role may call the function, but pagevault refuses.
    let mut admin = cluster.client()?;
    run_sql(&mut admin, "GRANT EXECUTE ON FUNCTION pagevault.unlock() TO nobody")?;
    let before = trail(&cluster)?.len();
    expect_error(&mut client, "SELECT pagevault.unlock()")?;
    let lines = trail(&cluster)?.split_off(before);
    ensure!(outcomes(&lines, "unlock") == "attempted denied", "{lines:#?}");
    cluster.finish()
}

/// Its files are copied, and may hold pages in plaintext from then on.
#[test]
fn moving_a_database_is_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE app")?;
    let statement = "ALTER DATABASE app SET TABLESPACE space";
    let output = of_statement(&cluster, statement, "move_database")?;
    ensure!(output == "attempted ok", "{output}");
    let lines = trail(&cluster)?;
    let line = lines.iter().rfind(|line| line["action"] == "move_database").context("a line")?;
    ensure!(line["object"] == "app" && line["to"] == "space", "{line}");
    let others = "ALTER DATABASE app CONNECTION LIMIT 7";
    ensure!(of_statement(&cluster, others, "move_database")?.is_empty(), "another change");
    cluster.finish()
}

#[test]
fn creating_and_dropping_the_extension_is_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let lines = trail(&cluster)?;
    ensure!(outcomes(&lines, "create_extension") == "attempted ok", "{lines:#?}");
    let output =
        of_statement(&cluster, "BEGIN; DROP EXTENSION pagevault; ROLLBACK", "drop_extension")?;
    ensure!(output == "attempted rolled_back", "{output}");
    cluster.sql("CREATE TABLE t (id int); SELECT pagevault.encrypt('t')")?;
    let output = of_statement(&cluster, "DROP SCHEMA pagevault CASCADE", "drop_extension")?;
    ensure!(output == "attempted failed" || output.is_empty(), "{output}");
    let output = of_statement(&cluster, "DROP EXTENSION pagevault", "drop_extension")?;
    ensure!(output == "attempted failed", "{output}");
    cluster.sql("CREATE DATABASE other")?;
    let before = trail(&cluster)?.len();
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault; DROP EXTENSION pagevault")?;
    let lines = trail(&cluster)?.split_off(before);
    ensure!(outcomes(&lines, "drop_extension") == "attempted ok", "{lines:#?}");
    drop(other);
    cluster.finish()
}

#[test]
fn ends_of_jobs_and_revocations_are_recorded() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.rekey_threshold = 0")
        .conf("pagevault.revoked_key_action = lock")
        .conf("pagevault.revoked_key_grace = 0")
        .conf("pagevault.revalidate_interval = 1s");
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("pagevault");
    cluster.sql("CREATE TABLE t AS SELECT 1 AS id")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    cluster.eventually_that("the end of the job", || {
        let lines = trail(&cluster)?;
        let ended =
            lines.iter().any(|line| line["by"] == "rekey_worker" && line["outcome"] == "ok");
        ensure!(ended, "{lines:#?}");
        Ok(())
    })?;
    keys.take_away()?;
    cluster.key_file("keys", "another")?;
    let has = |outcome: &str| {
        cluster.eventually_that("a revocation", || {
            let lines = trail(&cluster)?;
            ensure!(outcomes(&lines, "revocation").contains(outcome), "{lines:#?}");
            Ok(())
        })
    };
    has("locked")?;
    keys.bring_back()?;
    has("restored")?;
    cluster.finish()
}

#[test]
fn escrow_of_keys_is_recorded() -> Result<()> {
    let settings = Settings::default().conf("pagevault.revalidate_interval = 1s");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    let recipient = age::x25519::Identity::generate().to_public().to_string();
    let export = |name: &str| {
        let mut command = cluster.program("pagevault-keyring");
        command.args(["escrow", "export"]).arg(cluster.data_directory());
        command.args(["--recipient", &recipient, "--output"]).arg(cluster.directory().join(name));
        command
    };
    run(&mut export("bundle"))?;
    cluster.eventually_that("what the server says of it", || {
        let lines = trail(&cluster)?;
        ensure!(outcomes(&lines, "escrow_export") == "noticed", "{lines:#?}");
        Ok(())
    })?;
    keys.take_away()?;
    ensure!(run(&mut export("another")).is_err(), "exported without a provider");
    keys.bring_back()?;
    let tools = cluster.data_directory().join("pagevault/audit.tools");
    let lines: Vec<Value> = std::fs::read_to_string(&tools)?
        .lines()
        .map(serde_json::from_str)
        .collect::<std::result::Result<_, _>>()?;
    ensure!(outcomes(&lines, "escrow_export") == "attempted ok attempted failed", "{lines:#?}");
    ensure!(lines.iter().all(|line| line["to"] == recipient.as_str()), "{lines:#?}");
    let verify = || {
        let mut command = cluster.program("pagevault-keyring");
        command.args(["audit", "verify", "-D"]).arg(cluster.data_directory());
        run(command.arg(cluster.directory().join("log")))
    };
    // The confirms the last attempt, made without a key, is not verified yet.
    ensure!(verify().is_err(), "lines without a MAC count");
    run(&mut export("third"))?;
    let output = verify()?;
    ensure!(output.contains("pagevault-keyring's own audit trail: 2 with a MAC, 4"), "{output}");
    cluster.finish()
}
