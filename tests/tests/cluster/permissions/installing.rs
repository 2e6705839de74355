//! CREATE EXTENSION: existing objects and privileges, and the result.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use super::response;

/// Default privileges do not apply to objects of the extension.
#[test]
fn with_generous_default_privileges() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("DROP EXTENSION pagevault; DROP SCHEMA pagevault")?;
    cluster.sql(
        "CREATE ROLE stranger; CREATE ROLE \"odd name\";
         ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO stranger, \"odd name\" WITH GRANT OPTION;
         ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO stranger, PUBLIC;
         ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO stranger, PUBLIC;
         ALTER DEFAULT PRIVILEGES GRANT ALL ON TYPES TO stranger;
         CREATE EXTENSION pagevault",
    )?;
    let mut client = cluster.client()?;
    let theirs = "
        SELECT what || ': ' || a.grantee::regrole || ' ' || a.privilege_type
        FROM (SELECT oid::regprocedure::text AS what, proacl AS acl FROM pg_proc
              WHERE pronamespace = 'pagevault'::regnamespace
              UNION ALL
              SELECT oid::regclass::text, relacl FROM pg_class WHERE relnamespace = 'pagevault'::regnamespace
              UNION ALL
              SELECT nspname, nspacl FROM pg_namespace WHERE nspname = 'pagevault') o, aclexplode(o.acl) a
        WHERE a.grantee::regrole::text IN ('stranger', '\"odd name\"')
           OR (a.grantee = 0 AND a.privilege_type NOT IN ('EXECUTE', 'SELECT', 'USAGE'))";
    let theirs = column(&mut client, theirs)?;
    ensure!(theirs.is_empty(), "{theirs:#?}");
    run_sql(&mut client, "SET SESSION AUTHORIZATION stranger")?;
    for statement in [
        "SELECT * FROM pagevault.providers",
        "SELECT * FROM pagevault.provider_rows()",
        "SELECT * FROM pagevault.database_key_rows()",
        "SELECT * FROM pagevault.drift",
        "SELECT * FROM pagevault.verify('pg_class')",
        "SELECT pagevault.unlock()",
        "CREATE TABLE pagevault.t (id int)",
    ] {
        let response = response(&mut client, statement)?;
        ensure!(response.as_deref() == Some("42501"), "{statement}: {response:?}");
    }
    run_sql(&mut client, "SELECT * FROM pagevault.status")?;
    drop(client);
    cluster.finish()
}

/// The owner of the schema could own its contents, and objects that the extension's script takes
/// for PostgreSQL's own.
#[test]
fn with_an_existing_schema() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("DROP EXTENSION pagevault; DROP SCHEMA pagevault; CREATE ROLE stranger")?;
    let mut client = cluster.client()?;
    for (schema, why) in [
        ("CREATE SCHEMA pagevault AUTHORIZATION stranger", "belongs to stranger"),
        ("CREATE SCHEMA pagevault; CREATE TYPE pagevault.regclass AS (id int)", "is not empty"),
        (
            "CREATE SCHEMA pagevault; CREATE FUNCTION pagevault.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "is not empty",
        ),
    ] {
        run_sql(&mut client, schema)?;
        let error = expect_error(&mut client, "CREATE EXTENSION pagevault")?;
        ensure!(error.sqlstate == "55000" && error.text().contains(why), "{error}");
        ensure!(error.hint.contains("DROP SCHEMA pagevault CASCADE"), "{error}");
        run_sql(&mut client, "DROP SCHEMA pagevault CASCADE")?;
    }
    // As pg_dump writes it.
    run_sql(
        &mut client,
        "CREATE SCHEMA pagevault; CREATE EXTENSION IF NOT EXISTS pagevault WITH SCHEMA pagevault",
    )?;
    run_sql(&mut client, "DROP EXTENSION pagevault; CREATE EXTENSION pagevault")?;
    drop(client);
    cluster.finish()
}

#[test]
fn only_by_superusers_and_only_in_its_schema() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE owner; CREATE ROLE keeper; GRANT pagevault_admin TO keeper")?;
    cluster.sql("CREATE DATABASE theirs OWNER owner")?;
    let mut client = cluster.client_to("theirs")?;
    for who in ["owner", "keeper"] {
        run_sql(&mut client, &format!("SET SESSION AUTHORIZATION {who}"))?;
        ensure!(
            response(&mut client, "CREATE EXTENSION pagevault")?.as_deref() == Some("42501"),
            "{who}"
        );
        run_sql(&mut client, "RESET SESSION AUTHORIZATION")?;
    }
    let elsewhere = response(&mut client, "CREATE EXTENSION pagevault SCHEMA public")?;
    ensure!(elsewhere.as_deref() == Some("0A000"), "{elsewhere:?}");
    run_sql(&mut client, "CREATE EXTENSION pagevault; CREATE SCHEMA other")?;
    let moved = response(&mut client, "ALTER EXTENSION pagevault SET SCHEMA other")?;
    ensure!(moved.as_deref() == Some("0A000"), "{moved:?}");
    drop(client);
    cluster.finish()
}

/// Users who may create objects in the schema could do so while the extension's script runs.
#[test]
fn with_a_schema_open_to_others() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("DROP EXTENSION pagevault; DROP SCHEMA pagevault; CREATE ROLE stranger")?;
    cluster.sql("CREATE SCHEMA pagevault; GRANT CREATE ON SCHEMA pagevault TO stranger")?;
    let error = cluster.error("CREATE EXTENSION pagevault")?;
    ensure!(error.sqlstate == "55000", "{error}");
    ensure!(
        error.message == "schema pagevault already exists and others may create objects in it",
        "{error}"
    );
    cluster.sql("REVOKE CREATE ON SCHEMA pagevault FROM stranger")?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.finish()
}

/// Creating the role before the extension gives no right to manage keys.
#[test]
fn with_an_existing_role() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster
        .sql("DROP EXTENSION pagevault; DROP ROLE pagevault_admin; CREATE ROLE maker CREATEROLE")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION maker; CREATE ROLE innocent")?;
    for statement in
        ["CREATE ROLE pagevault_admin", "ALTER ROLE innocent RENAME TO pagevault_admin"]
    {
        let error = expect_error(&mut client, statement)?;
        ensure!(error.sqlstate == "42939", "{statement}: {error}");
        ensure!(error.message == "role name \"pagevault_admin\" is reserved", "{error}");
        ensure!(error.detail.contains("may manage keys"), "{error}");
        ensure!(error.hint == "A superuser makes it with CREATE EXTENSION pagevault.", "{error}");
    }
    drop(client);
    // While the library was not loaded, such grants were possible.
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.restart()?;
    cluster.sql("SET SESSION AUTHORIZATION maker; CREATE ROLE pagevault_admin")?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.restart()?;
    if cluster.installation().major >= 16 {
        let error = cluster.error("CREATE EXTENSION pagevault")?;
        ensure!(error.sqlstate == "55000", "{error}");
        ensure!(
            error.message == "role pagevault_admin already exists and was created by maker",
            "{error}"
        );
        ensure!(error.hint.ends_with("DROP ROLE pagevault_admin."), "{error}");
        cluster.sql("DROP ROLE pagevault_admin; CREATE ROLE pagevault_admin")?;
    }
    cluster.sql("GRANT pagevault_admin TO maker; CREATE EXTENSION pagevault")?;
    cluster.finish()
}

/// pg_dump writes the administrator's grants, and not those of the extension.
#[test]
fn grants_in_a_dump() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE owner")?;
    cluster.sql("CREATE DATABASE restored")?;
    let dump = |database: &str| {
        run(cluster.program("pg_dump").args(["--schema-only", "--dbname", database]))
    };
    let of_functions = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| line.contains("ON FUNCTION pagevault."));
        lines.map(str::to_owned).collect()
    };
    ensure!(of_functions(&dump("postgres")?).is_empty(), "{:?}", of_functions(&dump("postgres")?));
    cluster.sql(
        "GRANT EXECUTE ON FUNCTION pagevault.encrypt TO owner;
         REVOKE EXECUTE ON FUNCTION pagevault.is_encrypted FROM PUBLIC",
    )?;
    let granted = dump("postgres")?;
    ensure!(of_functions(&granted).len() == 2, "{:?}", of_functions(&granted));
    let mut restored = cluster.client_to("restored")?;
    // Without lines for clients: psql's commands. pg_dump also leaves the search path empty.
    let statements: Vec<_> = granted.lines().filter(|line| !line.starts_with('\\')).collect();
    run_sql(&mut restored, &statements.join("\n"))?;
    ensure!(of_functions(&dump("restored")?) == of_functions(&granted), "the restored grants");
    drop(restored);
    cluster.finish()
}
