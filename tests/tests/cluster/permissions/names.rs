//! Misleading names.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};

use super::cluster;

/// A schema of traps, first in every search path: functions, operators, types and tables with names
/// that pagevault's SQL uses, and with better argument matches than PostgreSQL's.
const TRAPS: &str = "
    CREATE TABLE public.sprung (who name, trap text); GRANT ALL ON public.sprung TO PUBLIC;
    CREATE SCHEMA trap AUTHORIZATION stranger;
    SET SESSION AUTHORIZATION stranger; SET search_path = trap;
    CREATE FUNCTION spring(text) RETURNS boolean LANGUAGE sql VOLATILE
        AS $$ INSERT INTO public.sprung VALUES (current_user, $1) RETURNING true $$;
    CREATE TABLE pg_class (oid oid); CREATE TABLE pg_database (oid oid); CREATE TABLE pg_seclabel (oid oid);
    CREATE VIEW status_rows AS SELECT spring('status_rows');
    CREATE FUNCTION current_database() RETURNS name LANGUAGE sql AS $$ SELECT CASE WHEN trap.spring('current_database') THEN 'x'::name END $$;
    CREATE FUNCTION pg_relation_size(oid) RETURNS bigint LANGUAGE sql AS $$ SELECT trap.spring('pg_relation_size')::int::bigint $$;
    CREATE FUNCTION pg_relation_filenode(oid) RETURNS oid LANGUAGE sql AS $$ SELECT trap.spring('pg_relation_filenode')::int::oid $$;
    CREATE FUNCTION is_equal(anyelement, anyelement) RETURNS boolean LANGUAGE sql AS $$ SELECT trap.spring('=') $$;
    CREATE FUNCTION is_equal_name(name, name) RETURNS boolean LANGUAGE sql AS $$ SELECT trap.spring('=') $$;
    CREATE FUNCTION is_equal_oid(oid, oid) RETURNS boolean LANGUAGE sql AS $$ SELECT trap.spring('=') $$;
    CREATE FUNCTION is_equal_text(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT trap.spring('=') $$;
    CREATE OPERATOR = (LEFTARG = name, RIGHTARG = name, FUNCTION = is_equal_name);
    CREATE OPERATOR = (LEFTARG = oid, RIGHTARG = oid, FUNCTION = is_equal_oid);
    CREATE OPERATOR = (LEFTARG = text, RIGHTARG = text, FUNCTION = is_equal_text);
    CREATE OPERATOR >= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = is_equal_oid);
    CREATE DOMAIN regclass AS text CHECK (trap.spring('regclass'));
    CREATE TABLE t (id int);
    GRANT USAGE ON SCHEMA trap TO PUBLIC; GRANT SELECT ON ALL TABLES IN SCHEMA trap TO PUBLIC;
    RESET SESSION AUTHORIZATION; RESET search_path;";

#[test]
fn in_a_hostile_search_path() -> Result<()> {
    let (cluster, keys) = cluster()?;
    cluster.sql(TRAPS)?;
    cluster.sql("CREATE TABLE app.t (id int)")?;
    let options = format!(r#"{{"path": "{}"}}"#, keys.path().display());
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET search_path = trap, pg_catalog, public")?;
    for statement in [
        "SELECT * FROM pagevault.status",
        "SELECT * FROM pagevault.relations",
        "SELECT * FROM pagevault.data_keys",
        "SELECT * FROM pagevault.providers",
        "SELECT * FROM pagevault.database_keys",
        "SELECT * FROM pagevault.drift",
        "SELECT * FROM pagevault.drift(true)",
        "SELECT pagevault.encrypt('app.t')",
        "SELECT pagevault.is_encrypted('app.t')",
        "SELECT * FROM pagevault.verify('app.t')",
        "SELECT pagevault.check_provider('local')",
        "SELECT pagevault.set_database_master_key('local', 'main')",
        "SELECT pagevault.rotate_database_master_key()",
        "SELECT pagevault.rotate_database_key()",
        "SELECT pagevault.unlock()",
        "SET pagevault.data_catalog_encryption = off",
        "SELECT pagevault.decrypt('app.t')",
        "SELECT pagevault.decrypt('pg_statistic')",
        "SELECT pagevault.decrypt('pg_statistic_ext_data')",
        "SELECT pagevault.decrypt('pg_largeobject')",
        "SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs",
        "DROP EXTENSION pagevault",
        "CREATE EXTENSION pagevault",
        &format!("SELECT pagevault.add_provider('other', 'file', '{options}')"),
        "TRUNCATE app.t",
        "VACUUM FULL app.t",
    ] {
        run_sql(&mut client, statement)?;
    }
    // Verify the traps: the same names without schema trigger them.
    let sprung = "SELECT trap FROM public.sprung";
    ensure!(column(&mut client, sprung)?.is_empty(), "{:?}", column(&mut client, sprung)?);
    run_sql(
        &mut client,
        "SELECT pg_relation_size('app.t'::pg_catalog.regclass::oid), current_database()",
    )?;
    ensure!(!column(&mut client, sprung)?.is_empty(), "the traps do not work");
    drop(client);
    cluster.finish()
}

/// The commands in `pagevault.drift` can be run as displayed.
#[test]
fn in_commands_against_drift() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    for strings in ["on", "off"] {
        run_sql(
            &mut client,
            r#"CREATE TABLE public.spare (id int); CREATE TABLE app."t'\'; x" (id int);
               CREATE SEQUENCE app."s\'); DROP TABLE public.spare; --";
               CREATE INDEX "i"" ON app.t; DROP TABLE public.spare; --" ON app."t'\'; x" (id);
               SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted'"#,
        )?;
        let commands = column(&mut client, "SELECT fix FROM pagevault.drift")?;
        ensure!(commands.len() == 3, "{commands:?}");
        run_sql(&mut client, &format!("SET standard_conforming_strings = {strings}"))?;
        for command in commands {
            run_sql(&mut client, &command)?;
        }
        ensure!(column(&mut client, "SELECT fix FROM pagevault.drift")?.is_empty(), "left");
        run_sql(&mut client, "RESET standard_conforming_strings; DROP TABLE public.spare")?;
        run_sql(&mut client, "DROP SCHEMA app CASCADE; CREATE SCHEMA app")?;
    }
    drop(client);
    cluster.finish()
}

/// Functions that set labels build a statement with the name of the object. The schema could be
/// renamed before the statement looks it up: here by an event trigger, otherwise by another
/// session.
#[test]
fn of_objects_that_are_renamed_meanwhile() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE TABLE app.t AS SELECT 1 AS id; CREATE SCHEMA decoy; CREATE TABLE decoy.t AS SELECT 1 AS id;
         CREATE FUNCTION swap() RETURNS event_trigger LANGUAGE plpgsql AS
             'BEGIN ALTER SCHEMA app RENAME TO was; ALTER SCHEMA decoy RENAME TO app; END';
         CREATE EVENT TRIGGER swap ON ddl_command_start WHEN TAG IN ('SECURITY LABEL')
             EXECUTE FUNCTION swap()",
    )?;
    for statement in ["SELECT pagevault.encrypt('app.t')", "SELECT pagevault.decrypt('app.t')"] {
        let error = cluster.error(statement)?;
        ensure!(error.sqlstate == "55006", "{statement}: {error}");
        ensure!(error.message == "table was.t was given another name meanwhile", "{error}");
        ensure!(error.hint == "Try again.", "{error}");
    }
    cluster.sql("DROP EVENT TRIGGER swap; SELECT pagevault.encrypt('app.t')")?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('decoy.t')")? == "f", "the decoy");
    // A failed statement leaves no state behind.
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE decoy.t IS 'encrypted'")?;
    cluster.finish()
}

/// VACUUM FULL fills a table whose name any user may choose; the label of the original table
/// applies to it.
#[test]
fn of_tables_that_are_being_rewritten() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE TABLE app.open (id int); SECURITY LABEL FOR pagevault ON TABLE app.open IS 'plaintext';
         ALTER TABLE app.open OWNER TO owner;
         CREATE SCHEMA sealed AUTHORIZATION owner;
         SECURITY LABEL FOR pagevault ON SCHEMA sealed IS 'encrypted'",
    )?;
    let name = format!("sealed.pg_temp_{}", cluster.text("SELECT 'app.open'::regclass::oid")?);
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION owner")?;
    for statement in
        ["CREATE TABLE {name} (id int)", "TRUNCATE {name}", "ALTER TABLE {name} ADD s serial"]
    {
        run_sql(
            &mut client,
            &format!(
                "BEGIN; LOCK TABLE app.open; {}; INSERT INTO {name} VALUES (1); COMMIT",
                statement.replace("{name}", &name)
            ),
        )?;
        let encrypted = format!("SELECT pagevault.is_encrypted('{name}')");
        run_sql(&mut cluster.client()?, "CHECKPOINT")?;
        ensure!(text(&mut client, &encrypted)? == "t", "plaintext after {statement}");
    }
    drop(client);
    cluster.finish()
}
