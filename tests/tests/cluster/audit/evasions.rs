//! Attempts to keep a line out of the audit trail, or to falsify it.

use std::io::Write;
use std::iter;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings, StopMode};
use serde_json::Value;

use super::operations::{of, settle, written};
use super::trail;
use crate::revalidate::{STATE, replace, strict};

#[test]
fn no_setting_keeps_lines_out_of_the_log() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id int)")?;
    for least in ["log", "fatal", "panic"] {
        let lines = written(&cluster, || {
            let encrypt = "SELECT pagevault.encrypt('t')";
            cluster.sql(&format!("SET log_min_messages = {least}; {encrypt}"))
        })?;
        ensure!(of(&lines, "encrypt").len() == 2, "{least}: {lines:#?}");
    }
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET log_min_messages = panic; SET pagevault.enforce_encryption = on")?;
    ensure!(
        trail(&cluster)?.iter().any(|line| line["by"] == "session"),
        "a setting is not told of"
    );
    drop(client);
    // In recovery another hook handles messages until the data directory is consistent.
    cluster.append_conf("log_min_messages = fatal")?;
    cluster.crash()?;
    let starts = trail(&cluster)?.iter().filter(|line| line["action"] == "start").count();
    ensure!(starts == 2, "{starts} starts");
    cluster.finish()
}

/// In functions that run outside a portal.
#[test]
fn settings_changed_outside_of_statements_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE FUNCTION set_it(value text) RETURNS text IMMUTABLE LANGUAGE plpgsql
            AS $$ BEGIN RETURN set_config('pagevault.enforce_encryption', value, false); END $$;
        CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN PERFORM set_config('pagevault.enforce_encryption', 'off', false); RETURN NULL; END $$;
        CREATE TABLE t (id int);
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION at_commit()",
    )?;
    let mut client = cluster.client()?;
    for (statement, to) in
        [("SELECT set_it('on') FROM t", "on"), ("INSERT INTO t VALUES (1)", "off")]
    {
        let lines = written(&cluster, || run_sql(&mut client, statement))?;
        let set = of(&lines, "set");
        ensure!(set.len() == 1 && set[0]["to"] == to, "{statement}: {lines:#?}");
    }
    drop(client);
    // In a single-user server.
    cluster.stop(StopMode::Fast)?;
    let mut server = cluster.installation().command("postgres");
    server.args(["--single", "-D"]).arg(cluster.data_directory()).arg("postgres");
    let mut server = server.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut input = server.stdin.take().context("its input")?;
    input.write_all(b"SET pagevault.enforce_encryption = on\n")?;
    drop(input);
    let output = server.wait_with_output()?;
    let response = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(response.contains("\"by\":\"session\",\"role\":\"postgres\""), "{response}");
    cluster.finish()
}

/// Rights over our functions that come with another schema, or another owner, and members of the
/// role from its first moment on.
#[test]
fn functions_in_other_hands_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE mallory")?;
    let unlock = "FUNCTION pagevault.unlock()";
    let cases = [
        (format!("ALTER {unlock} SET SCHEMA public"), "rename", "function unlock", "public"),
        ("ALTER FUNCTION public.unlock() SET SCHEMA pagevault".to_owned(), "", "", ""),
        (format!("ALTER {unlock} OWNER TO mallory"), "grant", "function unlock", "mallory"),
        (
            "ALTER FUNCTION pagevault.unlock() OWNER TO postgres".to_owned(),
            "grant",
            "function unlock",
            "postgres",
        ),
        (
            "ALTER SCHEMA pagevault OWNER TO mallory".to_owned(),
            "grant",
            "schema pagevault",
            "mallory",
        ),
        (
            "REASSIGN OWNED BY mallory TO postgres".to_owned(),
            "grant",
            "all that mallory owns here",
            "postgres",
        ),
    ];
    for (statement, action, object, to) in cases {
        let lines = written(&cluster, || cluster.sql(&statement))?;
        let told = |line: &Value| line["object"] == object && line["to"] == to;
        let found = of(&lines, action).into_iter().filter(|line| told(line)).count();
        ensure!(found == if action.is_empty() { 0 } else { 2 }, "{statement}: {lines:#?}");
    }
    cluster.sql("DROP EXTENSION pagevault CASCADE; DROP ROLE pagevault_admin")?;
    let create = "CREATE ROLE pagevault_admin ROLE mallory ADMIN postgres";
    let lines = written(&cluster, || cluster.sql(create))?;
    let grants = of(&lines, "grant");
    let told = grants
        .iter()
        .any(|line| line["object"] == "role pagevault_admin" && line["to"] == "mallory, postgres");
    ensure!(told, "{lines:#?}");
    cluster.finish()
}

#[test]
fn values_are_recorded_exactly() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let set = |statement: &str| -> Result<Value> {
        let lines = written(&cluster, || cluster.sql(statement))?;
        let mut set = of(&lines, "set").into_iter().filter(|line| line["by"] != "session");
        set.next_back().cloned().with_context(|| format!("{statement}: {lines:#?}"))
    };
    let line = set(
        "SET pagevault.enforce_encryption = on; ALTER ROLE postgres SET pagevault.enforce_encryption FROM CURRENT",
    )?;
    ensure!(line["to"] == "on", "{line}");
    let line = set("ALTER ROLE postgres RESET pagevault.enforce_encryption")?;
    ensure!(line["to"] == "(default)", "{line}");
    let long = format!("/{}/helper", "./".repeat(300));
    let line = set(&format!("ALTER SYSTEM SET pagevault.keyring_command = '{long}'"))?;
    let to = line["to"].as_str().unwrap_or_default();
    ensure!(to.ends_with("... (608 bytes)"), "{line}");
    // Without the library there will be no further lines.
    let line = set("ALTER SYSTEM SET shared_preload_libraries = ''")?;
    ensure!(line["object"] == "shared_preload_libraries" && line["to"] == "\"\"", "{line}");
    cluster.finish()
}

#[test]
fn changes_of_the_session_user_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE other; GRANT pagevault_admin TO other")?;
    let lines = written(&cluster, || {
        cluster.sql("SET SESSION AUTHORIZATION other; SELECT pagevault.rotate_cluster_master_key()")
    })?;
    let is_recorded = |line: &Value| line["role"] == "other" && line["login_role"] == "postgres";
    ensure!(!lines.is_empty() && lines.iter().all(is_recorded), "{lines:#?}");
    cluster.finish()
}

const OF_POSTGRES: &str = "pagevault.enforce_encryption of role postgres";

#[test]
fn grants_of_key_administration_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE ROLE dba; CREATE ROLE app; CREATE ROLE peer; GRANT pagevault_admin, app TO dba",
    )?;
    for (statement, action, object, to) in [
        ("GRANT pagevault_admin TO app", "grant", "role pagevault_admin", "app"),
        ("REVOKE pagevault_admin FROM app", "revoke", "role pagevault_admin", "app"),
        ("GRANT dba, app TO CURRENT_USER", "grant", "role dba", "postgres"),
        ("GRANT dba, pagevault_admin TO peer", "grant", "role dba, role pagevault_admin", "peer"),
        ("CREATE ROLE new IN ROLE app, dba", "grant", "role dba", "new"),
        ("ALTER GROUP dba ADD USER new", "grant", "role dba", "new"),
        ("ALTER GROUP dba DROP USER new", "revoke", "role dba", "new"),
        ("ALTER GROUP CURRENT_USER ADD USER new", "grant", "role postgres", "new"),
        ("CREATE ROLE spy IN ROLE SESSION_USER ROLE new", "grant", "role postgres", "spy, new"),
        (
            "ALTER ROLE CURRENT_USER SET pagevault.enforce_encryption = off",
            "set",
            OF_POSTGRES,
            "off",
        ),
        (
            "GRANT ALL ON FUNCTION postgres.pagevault.provider_rows, pagevault.report TO PUBLIC",
            "grant",
            "function provider_rows, function report",
            "PUBLIC",
        ),
        (
            "SET search_path = pagevault; GRANT ALL ON FUNCTION key_age_rows TO app; RESET search_path",
            "grant",
            "function key_age_rows",
            "app",
        ),
        ("GRANT EXECUTE ON FUNCTION pagevault.unlock() TO app", "grant", "function unlock", "app"),
        (
            "GRANT ALL ON ALL FUNCTIONS IN SCHEMA pagevault TO PUBLIC, app",
            "grant",
            "all functions of schema pagevault",
            "PUBLIC, app",
        ),
        (
            "GRANT SET ON PARAMETER work_mem, Pagevault.Enforce_Encryption TO app",
            "grant",
            "setting pagevault.enforce_encryption",
            "app",
        ),
    ] {
        let lines = written(&cluster, || cluster.sql(statement))?;
        let outcomes: Vec<_> = lines.iter().map(|line| line["outcome"].clone()).collect();
        ensure!(outcomes == ["attempted", "ok"], "{statement}: {lines:#?}");
        let line = &lines[1];
        ensure!(line["action"] == action && line["object"] == object, "{statement}: {line}");
        ensure!(line["to"] == to, "{statement}: {line}");
    }
    let others = "GRANT app TO new; GRANT SELECT ON pg_class TO app; ALTER ROLE app LOGIN";
    let lines = written(&cluster, || cluster.sql(others))?;
    ensure!(lines.is_empty(), "{lines:#?}");
    cluster.finish()
}

/// The names of roles are shared by databases with other encodings.
#[test]
fn grants_of_roles_whose_names_a_database_cannot_write_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE ROLE \"schlüssel\"; GRANT pagevault_admin TO \"schlüssel\"; CREATE ROLE app",
    )?;
    cluster.sql("CREATE DATABASE latin ENCODING latin1 TEMPLATE template0 LOCALE 'C'")?;
    // The bytes of the name in UTF-8.
    let psql = |statement: &str| {
        let statement = format!("SET client_encoding = latin1; {statement}");
        run(cluster.program("psql").args(["-q", "-d", "latin", "-c", &statement]))
    };
    for statement in [
        "GRANT \"schlüssel\" TO app",
        "CREATE ROLE new IN ROLE \"schlüssel\"",
        "ALTER GROUP \"schlüssel\" ADD USER app",
    ] {
        let lines = written(&cluster, || psql(statement).map(drop))?;
        let grants = of(&lines, "grant");
        ensure!(grants.len() == 2, "{statement}: {lines:#?}");
    }
    cluster.finish()
}

/// The role that its members can manage keys by, or the schema, has another name for a moment.
#[test]
fn a_grant_under_another_name_is_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE app")?;
    let lines = written(&cluster, || {
        cluster.sql(
            "BEGIN; ALTER ROLE pagevault_admin RENAME TO x; GRANT x TO app;
             ALTER ROLE x RENAME TO pagevault_admin; ALTER SCHEMA pagevault RENAME TO x;
             GRANT ALL ON ALL FUNCTIONS IN SCHEMA x TO app;
             ALTER SCHEMA x RENAME TO pagevault; COMMIT",
        )
    })?;
    let renames = of(&lines, "rename");
    for (object, to) in [
        ("role pagevault_admin", "x"),
        ("role x", "pagevault_admin"),
        ("schema pagevault", "x"),
        ("schema x", "pagevault"),
    ] {
        let renames = renames.iter().filter(|line| line["object"] == object && line["to"] == to);
        let outcomes: Vec<_> = renames.map(|line| &line["outcome"]).collect();
        ensure!(outcomes == ["attempted", "ok"], "{object}: {lines:#?}");
    }
    cluster.finish()
}

/// The extension's script grants as well, but not what a trigger does meanwhile.
#[test]
fn grants_while_the_extension_is_created_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE app")?;
    cluster.sql("CREATE DATABASE other")?;
    let mut other = cluster.client_to("other")?;
    other.batch_execute(
        "CREATE FUNCTION helps() RETURNS event_trigger LANGUAGE plpgsql
             AS 'BEGIN GRANT pagevault_admin TO app;
                 GRANT SET ON PARAMETER pagevault.enforce_encryption TO app; END';
         CREATE EVENT TRIGGER helps ON ddl_command_end WHEN TAG IN ('CREATE VIEW')
             EXECUTE FUNCTION helps()",
    )?;
    let lines = written(&cluster, || run_sql(&mut other, "CREATE EXTENSION pagevault"))?;
    let grants = of(&lines, "grant");
    for object in ["role pagevault_admin", "setting pagevault.enforce_encryption"] {
        ensure!(grants.iter().any(|line| line["object"] == object), "{object}: {lines:#?}");
    }
    ensure!(grants.iter().all(|line| line["to"] == "app"), "{lines:#?}");
    drop(other);
    cluster.finish()
}

#[test]
fn all_refusals_within_a_transaction_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE nobody LOGIN; CREATE TABLE t (id int)")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET ROLE nobody; BEGIN; SAVEPOINT a")?;
    expect_error(&mut client, "SELECT pagevault.shred('t', 'public.t')")?;
    run_sql(&mut client, "ROLLBACK TO a")?;
    expect_error(&mut client, "SELECT pagevault.unlock()")?;
    let lines = written(&cluster, || settle(&mut client))?;
    let objects: Vec<_> = of(&lines, "call").iter().map(|line| line["object"].clone()).collect();
    ensure!(objects == ["function shred", "function unlock"], "{lines:#?}");
    drop(client);
    cluster.finish()
}

/// More of them than are kept apart.
#[test]
fn very_many_changes_and_refusals_in_a_transaction_are_recorded() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE nobody LOGIN")?;
    let mut client = cluster.client()?;
    let changes = "DO $$ BEGIN FOR i IN 1..10001 LOOP PERFORM set_config(
        'pagevault.enforce_encryption', CASE WHEN i % 2 = 1 THEN 'on' ELSE 'off' END, false);
        END LOOP; END $$";
    let lines = written(&cluster, || run_sql(&mut client, changes))?;
    let last = lines.last().context("no line")?;
    ensure!(last["action"] == "set" && last["to"] == "on", "{last}");
    run_sql(&mut client, "SET ROLE nobody; BEGIN; SAVEPOINT a")?;
    for call in iter::repeat_n("check_provider('x')", 10_002).chain(["unlock()"]) {
        expect_error(&mut client, &format!("SELECT pagevault.{call}"))?;
        run_sql(&mut client, "ROLLBACK TO a")?;
    }
    let lines = written(&cluster, || run_sql(&mut client, "ROLLBACK"))?;
    let calls = of(&lines, "call");
    let [.., more, last] = &calls[..] else { bail!("no lines") };
    ensure!(more["object"] == "function check_provider" && more["to"] == "2 more times", "{more}");
    ensure!(last["object"] == "function unlock" && last["outcome"] == "denied", "{last}");
    drop(client);
    cluster.finish()
}

/// Names come from catalogs, which may be locked; no second error may be raised during an error.
#[test]
fn refusals_while_shared_catalogs_are_locked_are_recorded() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&strict())?;
    cluster.allow_log("was revoked");
    cluster.sql("CREATE ROLE nobody LOGIN")?;
    cluster.set(&[("pagevault.shared_catalog_encryption", "on")])?;
    cluster.sql("SELECT pagevault.encrypt_catalogs()")?;
    let mut watching = cluster.client()?;
    run_sql(&mut watching, "SELECT count(*) FROM pagevault.status")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET ROLE nobody")?;
    expect_error(&mut client, "SELECT pagevault.unlock()")?;
    // The backend's cached row of the login role becomes invalid.
    cluster.sql("ALTER ROLE postgres CONNECTION LIMIT 90")?;
    run_sql(&mut client, "SELECT 1")?;
    replace(&cluster, &keys, "main")?;
    cluster.eventually_logs("None is left.")?;
    let error = expect_error(&mut client, "SELECT pagevault.unlock()")?;
    ensure!(error.sqlstate == "42501", "{error}");
    let error = expect_error(&mut client, "SELECT pagevault.unlock()")?;
    ensure!(error.sqlstate == "42501", "{error}");
    run_sql(&mut watching, "SELECT 1")?;
    let lines = trail(&cluster)?;
    let last = of(&lines, "call").last().copied().context("no line")?.clone();
    ensure!(last["role"] == "postgres" && last["current_role"] == "nobody", "{last}");
    keys.bring_back()?;
    cluster.eventually_logs("is usable again")?;
    cluster.eventually(STATE, "unlocked")?;
    cluster.finish()
}
