//! Permissions depend on the current user, as for PostgreSQL's own commands, and never on the
//! session user.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};

use super::{cluster, response};

/// Called within functions of other users.
const UNLOCK: &str = "SELECT pagevault.unlock()";
const PLAIN: &str = "SECURITY LABEL FOR pagevault ON SCHEMA app IS 'plaintext'";

/// A SECURITY DEFINER function has exactly the rights of its owner.
#[test]
fn in_functions_that_run_as_their_owner() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted'")?;
    let trials = [
        // (owner of the function, who calls it, statement, outcome)
        ("postgres", "stranger", UNLOCK, None),
        ("trustee", "stranger", UNLOCK, None),
        ("stranger", "postgres", UNLOCK, Some("42501")),
        ("stranger", "keeper", UNLOCK, Some("42501")),
        ("owner", "keeper", PLAIN, Some("42501")),
        ("owner", "postgres", PLAIN, Some("42501")),
        ("trustee", "stranger", PLAIN, None),
        ("stranger", "postgres", "SELECT pagevault.is_encrypted('app.t')", Some("42501")),
        ("owner", "stranger", "SELECT pagevault.is_encrypted('app.t')", None),
        ("stranger", "postgres", "SELECT * FROM pagevault.verify('app.t')", Some("42501")),
        ("stranger", "postgres", "SET pagevault.enforce_encryption = off", Some("42501")),
        ("stranger", "postgres", "SELECT * FROM pagevault.providers", Some("42501")),
    ];
    cluster.sql("CREATE TABLE app.t (id int); ALTER TABLE app.t OWNER TO owner")?;
    for (number, (definer, caller, statement, outcome)) in trials.into_iter().enumerate() {
        let name = format!("trial_{number}");
        let body = statement.replace('\'', "''");
        cluster.sql(&format!(
            "CREATE FUNCTION {name}() RETURNS void LANGUAGE plpgsql SECURITY DEFINER
                 AS $$ BEGIN EXECUTE '{body}'; END $$;
             ALTER FUNCTION {name}() OWNER TO \"{definer}\""
        ))?;
        let mut client = cluster.client()?;
        run_sql(&mut client, &format!("SET SESSION AUTHORIZATION {caller}"))?;
        let response = response(&mut client, &format!("SELECT {name}()"))?;
        ensure!(response.as_deref() == outcome, "{definer}, {caller}, {statement}: {response:?}");
    }
    cluster.finish()
}

#[test]
fn after_set_role_and_set_session_authorization() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut client = cluster.client()?;
    let mut expect = |statements: &str, outcome: Option<&str>| -> Result<()> {
        run_sql(&mut client, "RESET SESSION AUTHORIZATION; RESET ROLE")?;
        let response = response(&mut client, statements)?;
        ensure!(response.as_deref() == outcome, "{statements}: {response:?}");
        Ok(())
    };
    let denied = Some("42501");
    expect(&format!("SET ROLE stranger; {UNLOCK}"), denied)?;
    expect(&format!("SET ROLE keeper; {UNLOCK}"), None)?;
    expect(&format!("SET SESSION AUTHORIZATION stranger; {UNLOCK}"), denied)?;
    expect(&format!("SET SESSION AUTHORIZATION trustee; SET ROLE owner; {UNLOCK}"), denied)?;
    expect(
        &format!("SET SESSION AUTHORIZATION trustee; SET ROLE owner; RESET ROLE; {UNLOCK}"),
        None,
    )?;
    expect(&format!("BEGIN; SET LOCAL ROLE stranger; COMMIT; {UNLOCK}"), None)?;
    // A member with NOINHERIT must use SET ROLE.
    cluster.sql("CREATE ROLE reluctant NOINHERIT; GRANT pagevault_admin TO reluctant")?;
    expect(&format!("SET SESSION AUTHORIZATION reluctant; {UNLOCK}"), denied)?;
    expect(
        &format!("SET SESSION AUTHORIZATION reluctant; SET ROLE pagevault_admin; {UNLOCK}"),
        None,
    )?;
    // A former member loses the right at once, within the same session.
    run_sql(&mut client, "RESET ROLE; SET SESSION AUTHORIZATION keeper")?;
    run_sql(&mut client, UNLOCK)?;
    cluster.sql("REVOKE pagevault_admin FROM keeper")?;
    ensure!(response(&mut client, UNLOCK)?.as_deref() == denied, "a role that was revoked");
    drop(client);
    cluster.finish()
}

/// Maintenance commands run functions in indexes, triggers and materialized views as the owner of
/// the relation, whoever runs the command.
#[test]
fn in_maintenance() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE TABLE spied (statement text, who name, said text); GRANT ALL ON spied TO PUBLIC;
         CREATE SCHEMA lair AUTHORIZATION stranger;
         CREATE TABLE app.victim AS SELECT 1 AS id; SECURITY LABEL FOR pagevault ON TABLE app.victim IS 'encrypted'",
    )?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        "SET SESSION AUTHORIZATION stranger;
         CREATE FUNCTION lair.try_all(i int) RETURNS int LANGUAGE plpgsql AS $$
         DECLARE
             try text;
         BEGIN
             FOREACH try IN ARRAY ARRAY[
                 'SELECT pagevault.unlock()', 'SELECT pagevault.rotate_cluster_master_key()',
                 'SELECT * FROM pagevault.providers', 'SELECT pagevault.encrypt(''app.victim'')',
                 'SELECT pagevault.drift(true)', 'SET pagevault.enforce_encryption = off',
                 'SECURITY LABEL FOR pagevault ON TABLE app.victim IS ''plaintext''']
             LOOP
                 BEGIN
                     EXECUTE try;
                     INSERT INTO public.spied VALUES (try, current_user, 'succeeded');
                 EXCEPTION WHEN OTHERS THEN
                     INSERT INTO public.spied VALUES (try, current_user, SQLSTATE);
                 END;
             END LOOP;
             RETURN i;
         END $$;
         CREATE FUNCTION lair.spy(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE
             AS $$ BEGIN RETURN lair.try_all(i); END $$;
         CREATE TABLE lair.t (id int);
         INSERT INTO lair.t SELECT generate_series(1, 3);
         CREATE INDEX t_spy ON lair.t (lair.spy(id));
         CREATE MATERIALIZED VIEW lair.m AS SELECT lair.spy(id) FROM lair.t;
         RESET SESSION AUTHORIZATION; TRUNCATE spied",
    )?;
    for statement in [
        "ANALYZE lair.t",
        "REINDEX TABLE lair.t",
        "VACUUM FULL lair.t",
        "CLUSTER lair.t USING t_spy",
        "REFRESH MATERIALIZED VIEW lair.m",
        "SELECT pagevault.encrypt('lair.t')",
        "SELECT pagevault.is_encrypted('lair.t'), count(*) FROM pagevault.drift(true)",
    ] {
        run_sql(&mut client, statement)?;
    }
    let seen = "SELECT count(DISTINCT statement) || ' ' || string_agg(DISTINCT who || ' ' || said, ', ') FROM spied";
    let spied = text(&mut client, seen)?;
    ensure!(spied == "7 stranger 42501", "{spied}");

    // Also in a worker that belongs to no user.
    run_sql(
        &mut client,
        "SET SESSION AUTHORIZATION stranger; INSERT INTO lair.t SELECT generate_series(4, 200);
         RESET SESSION AUTHORIZATION; TRUNCATE spied",
    )?;
    cluster.set(&[("autovacuum_naptime", "1s"), ("autovacuum", "on")])?;
    cluster.eventually(seen, "7 stranger 42501")?;
    drop(client);
    cluster.finish()
}

/// Also where no label names an object that an administrator would have to own.
#[test]
fn only_its_owner_decrypts_a_database() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE app.t AS SELECT 1 AS id")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION keeper")?;
    let response = response(&mut client, "SELECT * FROM pagevault.decrypt_database()")?;
    ensure!(response.as_deref() == Some("42501"), "keeper: {response:?}");
    ensure!(cluster.text("SELECT pagevault.is_encrypted('app.t')")? == "t", "not encrypted");
    drop(client);
    cluster.finish()
}
