//! Commands within commands: event triggers and functions run them during another command, and
//! catch their errors.

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::{expect_error, run_sql, text};

use super::cluster;

/// Event triggers that run `body` at start and end of every SECURITY LABEL, except those that they
/// run themselves.
fn at_labels(cluster: &Cluster, body: &str) -> Result<()> {
    cluster.sql(&format!(
        "DROP FUNCTION IF EXISTS nest() CASCADE;
         CREATE FUNCTION nest() RETURNS event_trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF current_setting('nest.inside', true) = 'on' THEN RETURN; END IF;
             PERFORM set_config('nest.inside', 'on', true);
             {body}
             PERFORM set_config('nest.inside', 'off', true);
         END $$;
         CREATE EVENT TRIGGER nest_start ON ddl_command_start WHEN TAG IN ('SECURITY LABEL') EXECUTE FUNCTION nest();
         CREATE EVENT TRIGGER nest_end ON ddl_command_end WHEN TAG IN ('SECURITY LABEL') EXECUTE FUNCTION nest()"
    ))
}

const FAILS: &str = "BEGIN SECURITY LABEL FOR pagevault ON VIEW app.v IS 'encrypted'; EXCEPTION WHEN OTHERS THEN NULL; END;";

/// Commands that event triggers run during a SECURITY LABEL.
const NESTED: [&str; 5] = [
    "SECURITY LABEL FOR pagevault ON TABLE app.other IS 'encrypted';",
    "PERFORM pagevault.encrypt('app.other');",
    "PERFORM pagevault.encrypt('app.other'); PERFORM pagevault.decrypt('app.other');",
    "CREATE TABLE app.made (id int); ALTER TABLE app.other ADD s serial; ALTER TABLE app.other DROP s; DROP TABLE app.made;",
    FAILS,
];

#[test]
fn event_triggers_may_label_and_run_ddl_while_something_is_labelled() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE app.other AS SELECT 1 AS id; CREATE VIEW app.v AS SELECT 1 AS id")?;
    for body in NESTED {
        at_labels(&cluster, body)?;
        cluster.sql("CREATE TABLE app.t AS SELECT 1 AS id; SELECT pagevault.encrypt('app.t')")?;
        ensure!(cluster.text("SELECT pagevault.is_encrypted('app.t')")? == "t", "{body}");
        cluster.sql("SELECT pagevault.decrypt('app.t')")?;
        cluster.sql("SECURITY LABEL FOR pagevault ON TABLE app.t IS 'encrypted'")?;
        ensure!(cluster.text("SELECT pagevault.is_encrypted('app.t')")? == "t", "{body}");
        cluster.sql("DROP TABLE app.t")?;
    }
    cluster.sql("DROP FUNCTION nest() CASCADE")?;
    cluster.finish()
}

/// Functions that set labels build a statement with the name of the object. Commands nested in it
/// neither count as that statement nor end it.
#[test]
fn labels_set_by_event_triggers_are_not_confused_with_the_outer_one() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE TABLE app.t AS SELECT 1 AS id; CREATE SCHEMA decoy; CREATE TABLE decoy.t AS SELECT 1 AS id;
         CREATE SCHEMA third; CREATE TABLE third.other AS SELECT 1 AS id; CREATE VIEW third.v AS SELECT 1 AS id",
    )?;
    for body in NESTED {
        let body = body.replace("app.", "third.");
        at_labels(
            &cluster,
            &format!("{body} ALTER SCHEMA app RENAME TO was; ALTER SCHEMA decoy RENAME TO app;"),
        )?;
        for statement in ["SELECT pagevault.encrypt('app.t')", "SELECT pagevault.decrypt('app.t')"]
        {
            let error = cluster.error(statement)?;
            ensure!(error.sqlstate == "55006", "{body}: {statement}: {error}");
            let message = "table was.t was given another name meanwhile";
            ensure!(error.message == message, "{body}: {statement}: {error}");
        }
    }
    cluster.sql("DROP FUNCTION nest() CASCADE")?;
    for table in ["decoy.t", "app.t"] {
        let encrypted = cluster.text(&format!("SELECT pagevault.is_encrypted('{table}')"))?;
        ensure!(encrypted == "f", "{table}");
    }
    cluster.finish()
}

/// An event trigger encrypts every new table, whoever creates it.
#[test]
fn event_triggers_may_encrypt_new_tables() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE FUNCTION seal() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
         DECLARE made record;
         BEGIN
             FOR made IN SELECT * FROM pg_event_trigger_ddl_commands() WHERE object_type = 'table' LOOP
                 PERFORM pagevault.encrypt(made.objid);
             END LOOP;
         END $$;
         CREATE EVENT TRIGGER seal ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'CREATE TABLE AS', 'CREATE SCHEMA')
             EXECUTE FUNCTION seal()",
    )?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "SET SESSION AUTHORIZATION owner; SET search_path = app;
         CREATE TABLE a (id serial PRIMARY KEY, name text); INSERT INTO a VALUES (1, 'a');
         CREATE TABLE b AS SELECT * FROM a;
         CREATE TABLE p (id int) PARTITION BY RANGE (id);
         CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (10); INSERT INTO p VALUES (1)",
    )?;
    for table in ["a", "b", "p_1", "a_id_seq"] {
        let encrypted = format!("SELECT pagevault.is_encrypted('{table}')");
        ensure!(text(&mut client, &encrypted)? == "t", "{table}");
    }
    drop(client);
    cluster.finish()
}

/// A partitioned table with a label `encrypted`, and a function that runs for each row of an
/// attached table.
const ATTACHED: &str = "
    CREATE FUNCTION app.look() RETURNS int LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
        BEGIN
            COMMENT ON SCHEMA app IS 'seen';
        EXCEPTION WHEN OTHERS THEN NULL;
        END;
        RETURN 0;
    END $$;
    CREATE FUNCTION app.key(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN id + app.look(); END';
    CREATE TABLE app.p (id int) PARTITION BY RANGE (app.key(id));
    SECURITY LABEL FOR pagevault ON TABLE app.p IS 'encrypted';
    CREATE TABLE app.loose (id int); INSERT INTO app.loose VALUES (1), (20)";

/// `pagevault.enforce_encryption` checks at the end of a command what the command did. A function
/// within it can neither trigger that check earlier nor catch its error.
#[test]
fn functions_within_a_command_cannot_avoid_enforcement() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION owner")?;
    run_sql(&mut client, ATTACHED)?;
    let attach = "ALTER TABLE app.p ATTACH PARTITION app.loose FOR VALUES FROM (0) TO (100)";
    let error = expect_error(&mut client, attach)?;
    ensure!(error.sqlstate == "42501", "{error}");
    ensure!(error.message.contains("app.loose would be in plaintext"), "{error}");
    drop(client);
    cluster.finish()
}

/// A command is not checked for the effects of an earlier one that failed.
#[test]
fn failed_commands_leave_no_state() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "CREATE TABLE app.p (id int) PARTITION BY RANGE (id);
         SECURITY LABEL FOR pagevault ON TABLE app.p IS 'encrypted';
         CREATE TABLE app.loose (id int); INSERT INTO app.loose VALUES (1), (20)",
    )?;
    // Plaintext that should be encrypted from now on is drift, and no error.
    run_sql(&mut client, "SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted'")?;
    run_sql(&mut client, "SET pagevault.enforce_encryption = on")?;
    let attach = "ALTER TABLE app.p ATTACH PARTITION app.loose FOR VALUES FROM (0) TO (10)";
    let caught = format!("DO $$ BEGIN {attach}; EXCEPTION WHEN check_violation THEN NULL; END $$");
    for failing in [attach, &caught] {
        let error = client.batch_execute(failing).err();
        ensure!(error.is_some() == (failing == attach), "{failing}: {error:?}");
        run_sql(&mut client, "COMMENT ON SCHEMA app IS 'another command'")?;
    }
    drop(client);
    cluster.finish()
}

/// The statistics of newly encrypted relations are sealed at the end of the command. If a nested
/// command tries that first and fails, the outer one still does it.
#[test]
fn statistics_are_sealed_though_a_nested_command_could_not() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE app.t AS SELECT 1 AS id")?;
    at_labels(
        &cluster,
        "PERFORM set_config('lock_timeout', '50ms', true);
         BEGIN COMMENT ON SCHEMA app IS 'seen'; EXCEPTION WHEN lock_not_available THEN RAISE WARNING 'not available'; END;
         PERFORM set_config('lock_timeout', '500ms', true);",
    )?;
    let mut other = cluster.client()?;
    run_sql(&mut other, "BEGIN; LOCK TABLE pg_statistic_ext_data IN SHARE UPDATE EXCLUSIVE MODE")?;
    let error = cluster.error("SELECT pagevault.encrypt('app.t')")?;
    ensure!(error.sqlstate == "55P03", "{error}");
    run_sql(&mut other, "COMMIT")?;
    cluster.sql("SELECT pagevault.encrypt('app.t')")?;
    for catalog in ["pg_statistic", "pg_statistic_ext_data"] {
        let sealed = format!(
            "SELECT bool_and(encrypted) FROM pagevault.relations WHERE relation = '{catalog}'::regclass"
        );
        ensure!(cluster.text(&sealed)? == "t", "{catalog}");
    }
    drop(other);
    let mut cluster = cluster;
    cluster.allow_log("not available");
    cluster.finish()
}
