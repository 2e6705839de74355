//! The table of permissions.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql};

use super::{WHO, cluster, response};

/// A statement, and its result for each role of [`WHO`] in that order: `.` success, `x` permission
/// denied (42501), or another SQLSTATE.
type Row = (&'static str, &'static str);

/// Creates the objects for the rows of [`LABELS`], again for each attempt; `owner` owns all of
/// them.
const OBJECTS: &str = "
    DROP SCHEMA IF EXISTS app CASCADE;
    CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO PUBLIC;
    CREATE TABLE app.t (id serial PRIMARY KEY, name text);
    INSERT INTO app.t (name) VALUES ('x');
    CREATE MATERIALIZED VIEW app.seen AS SELECT 1 AS id;
    CREATE SEQUENCE app.counter;
    CREATE TABLE app.parts (id int) PARTITION BY LIST (id);
    CREATE VIEW app.view AS SELECT 1 AS id;
    CREATE TABLE app.sealed (id int); SELECT pagevault.encrypt('app.sealed');
    CREATE TABLE app.kept (id int); SECURITY LABEL FOR pagevault ON TABLE app.kept IS 'plaintext';
    ALTER TABLE app.t OWNER TO owner; ALTER MATERIALIZED VIEW app.seen OWNER TO owner;
    ALTER SEQUENCE app.counter OWNER TO owner; ALTER TABLE app.parts OWNER TO owner;
    ALTER TABLE app.sealed OWNER TO owner; ALTER TABLE app.kept OWNER TO owner;
    ALTER VIEW app.view OWNER TO owner; ALTER SCHEMA app OWNER TO owner";

/// Removes the effects of the labels on these objects.
const UNLABEL: &str = "
    SECURITY LABEL FOR pagevault ON TABLESPACE space IS NULL;
    SECURITY LABEL FOR pagevault ON DATABASE theirs IS NULL;
    SECURITY LABEL FOR pagevault ON DATABASE postgres IS NULL";

#[rustfmt::skip]
const LABELS: &[Row] = &[
    // Order: owner member stranger keeper trustee watcher postgres
    ("SECURITY LABEL FOR pagevault ON TABLE app.t IS 'encrypted'",          ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.t IS 'plaintext'",              "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.t IS NULL",                 ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.sealed IS 'encrypted aes-128-xts'",
        ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.sealed IS 'plaintext'",         "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.sealed IS NULL",            "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.kept IS 'encrypted'",       ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.kept IS NULL",              ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON MATERIALIZED VIEW app.seen IS 'encrypted'", ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON SEQUENCE app.counter IS 'encrypted'", ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.parts IS 'encrypted'",      ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLE app.parts IS 'plaintext'",          "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted'",           ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON SCHEMA app IS 'plaintext'",               "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLESPACE space IS 'encrypted'",     ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON TABLESPACE space IS 'plaintext'",         "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON DATABASE theirs IS 'encrypted'",      ". . x x . x ."),
    ("SECURITY LABEL FOR pagevault ON DATABASE theirs IS 'plaintext'",          "x x x x . x ."),
    ("SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted'",    "x x x x x x ."),
    // Objects that cannot have a label.
    (
        "SECURITY LABEL FOR pagevault ON VIEW app.view IS 'encrypted'",
        "0A000 0A000 x x 0A000 x 0A000",
    ),
    (
        "SECURITY LABEL FOR pagevault ON COLUMN app.t.name IS 'encrypted'",
        "0A000 0A000 x x 0A000 x 0A000",
    ),
    ("SECURITY LABEL FOR pagevault ON TABLE pg_class IS 'encrypted'",       "x x x x x x 0A000"),
    ("SECURITY LABEL FOR pagevault ON ROLE stranger IS 'encrypted'",         "x x x x x x 0A000"),
    (
        "SECURITY LABEL FOR pagevault ON FUNCTION pagevault.unlock() IS 'plaintext'",
        "x x x x x x 0A000",
    ),
    // No way around the statement.
    ("INSERT INTO pg_seclabel VALUES ('app.sealed'::regclass, 'pg_class'::regclass, 0, 'pagevault', 'plaintext')",
                                                                            "x x x x x x 23505"),
    ("DELETE FROM pg_seclabel WHERE provider = 'pagevault'",                "x x x x x x ."),
    ("UPDATE pg_seclabels SET label = 'plaintext'",    "55000 55000 55000 55000 55000 55000 55000"),
];

#[rustfmt::skip]
const CALLS: &[Row] = &[
    // Order: owner member stranger keeper trustee watcher postgres
    ("SELECT pagevault.encrypt('app.t')",                                   "x x x x . x ."),
    ("SELECT pagevault.encrypt('app.foreign')",                             "x x x x x x ."),
    ("SELECT pagevault.decrypt('app.plain')",                               "x x x x . x ."),
    ("SELECT pagevault.encrypt_catalogs()",                                 "x x x . . x ."),
    ("SELECT pagevault.rotate_data_key('app.plain')",                  "x x x 55000 55000 x 55000"),
    ("SELECT pagevault.reconcile('app.plain')",                             "x x x . . x ."),
    ("SELECT pagevault.reconcile('pg_catalog.pg_class')",              "x x x 42809 42809 x 42809"),
    ("SELECT pagevault.rotate_all_data_keys()",                             "x x x . . x ."),
    ("SELECT * FROM pagevault.shred('app.plain', 'app.plai')",         "x x x 22023 22023 x 22023"),
    ("SELECT * FROM pagevault.shred_schema('app', 'ap')",              "x x x 22023 22023 x 22023"),
    ("SELECT * FROM pagevault.shred_database('theirs', 'their')",      "x x x 22023 22023 x 22023"),
    ("SELECT * FROM pagevault.shred_former_files('postgre')",          "x x x 22023 22023 x 22023"),
    ("SELECT * FROM pagevault.shred_key_group('none', 'none')",        "x x x 42704 42704 x 42704"),
    ("SELECT pagevault.create_key_group('of_{who}')",                       "x x x . . x ."),
    ("SELECT pagevault.set_key_group_master_key('of_{who}', 'local', 'main')", "x x x . . x ."),
    ("SELECT pagevault.add_key_group_master_key('none', 'local', 'main')", "x x x 42704 42704 x 42704"),
    ("SELECT pagevault.drop_key_group_master_key('none', 'local', 'main')", "x x x 42704 42704 x 42704"),
    ("SELECT pagevault.rotate_key_group_master_key('of_{who}')",            "x x x . . x ."),
    ("SELECT pagevault.rotate_key_group_key('of_{who}')",                   "x x x . . x ."),
    ("SELECT pagevault.drop_key_group('of_{who}')",                         "x x x . . x ."),
    ("SELECT * FROM pagevault.encrypted_databases",                         "x x x . . . ."),
    ("SELECT * FROM pagevault.encrypted_database_rows()",                   "x x x . . . ."),
    ("SELECT * FROM pagevault.key_groups",                                  "x x x . . . ."),
    ("SELECT * FROM pagevault.key_group_rows()",                            "x x x . . . ."),
    ("SELECT * FROM pagevault.key_group_names()",                           ". . . . . . ."),
    ("SELECT pagevault.pause_rekey(999)",                              "x x x 42704 42704 x 42704"),
    ("SELECT pagevault.resume_rekey(999)",                             "x x x 42704 42704 x 42704"),
    ("SELECT pagevault.cancel_rekey(999)",                             "x x x 42704 42704 x 42704"),
    ("SELECT pagevault.wait_for_rekey(999)",           "42704 42704 42704 42704 42704 42704 42704"),
    ("SELECT pagevault.wait_for_rekey('app.plain'::regclass)",                  ". . x . . x ."),
    ("SELECT pagevault.wait_for_rekey('app.foreign'::regclass)",                "x x x . . x ."),
    ("SELECT * FROM pagevault.rekey_jobs",                              "x x x . . . ."),
    ("SELECT * FROM pagevault.rekey_job_rows()",                                "x x x . . . ."),
    ("SELECT pagevault.is_encrypted('app.t')",                              ". . x . . . ."),
    ("SELECT pagevault.is_encrypted('app.foreign')",                        "x x x . . . ."),
    ("SELECT pagevault.is_encrypted('app.t_pkey')",                         ". . x . . . ."),
    ("SELECT pagevault.is_encrypted('pg_authid')",                          "x x x . . . ."),
    ("SELECT * FROM pagevault.verify('app.t')",                             "x x x . . . ."),
    ("SELECT pagevault.report()",                                           "x x x . . x ."),
    ("SELECT * FROM pagevault.drift(true)",                                 "x x x . . . ."),
    ("SELECT * FROM pagevault.drift",                                       "x x x . . . ."),
    ("SELECT * FROM pagevault.stats",                                       "x x x . . . ."),
    ("SELECT * FROM pagevault.stats_rows()",                                     "x x x . . . ."),
    ("SELECT * FROM pagevault.status",                                      ". . . . . . ."),
    ("SELECT * FROM pagevault.status_rows()",                                ". . . . . . ."),
    ("SELECT * FROM pagevault.relations",                                   ". . . . . . ."),
    ("SELECT * FROM pagevault.tables",                                      ". . . . . . ."),
    ("SELECT * FROM pagevault.data_keys",                                   ". . . . . . ."),
    ("SELECT * FROM pagevault.data_key_rows()",                             ". . . . . . ."),
    ("SELECT * FROM pagevault.relation_rows()",                             ". . . . . . ."),
    ("SELECT * FROM pagevault.providers",                                   "x x x . . x ."),
    ("SELECT * FROM pagevault.provider_rows()",                             "x x x . . x ."),
    ("SELECT * FROM pagevault.database_keys",                                 "x x x . . x ."),
    ("SELECT * FROM pagevault.database_key_rows()",                           "x x x . . x ."),
    ("SELECT pagevault.add_provider('of_{who}', 'file', '{options}')",      "x x x . . x ."),
    ("SELECT pagevault.add_provider('run_by_{who}', 'command', '{programs}')", "x x x x x x 22023"),
    ("SELECT pagevault.alter_provider('local', '{options}')",               "x x x . . x ."),
    ("SELECT pagevault.drop_provider('of_{who}')",                          "x x x . . x ."),
    ("SELECT pagevault.check_provider('local')",                            "x x x . . x ."),
    ("SELECT pagevault.set_database_master_key('local', 'main')",                  "x x x . . x ."),
    ("SELECT pagevault.set_cluster_master_key('local', 'main')",            "x x x . . x ."),
    ("SELECT pagevault.rotate_database_master_key()",                              "x x x . . x ."),
    ("SELECT pagevault.rotate_cluster_master_key()",                        "x x x . . x ."),
    ("SELECT pagevault.rotate_database_key()",                              "x x x . . x ."),
    ("SELECT pagevault.unlock()",                                           "x x x . . x ."),
    // No other role can change the schema.
    ("CREATE TABLE pagevault.t (id int); DROP TABLE pagevault.t",                  "x x x x x x x"),
    ("CREATE OR REPLACE VIEW pagevault.status AS SELECT 1 AS loaded",       "x x x x x x 42P16"),
    ("ALTER FUNCTION pagevault.unlock() SECURITY DEFINER",                  "x x x x x x ."),
    ("ALTER FUNCTION pagevault.unlock() SECURITY INVOKER",                  "x x x x x x ."),
    ("DROP EXTENSION pagevault CASCADE",                                    "x x x x x x 2BP01"),
    ("SELECT pagevault.encrypt_database()",                                 "x x x x x x ."),
    ("SELECT pagevault.decrypt_database()",                                 "x x x x x x ."),
    // Settings.
    ("SET pagevault.rekey_threshold = 0",                                   "x x x x x x ."),
    ("SET pagevault.data_catalog_encryption = off",                              "x x x x x x ."),
    ("SET pagevault.default_encryption = on",                               "x x x x x x ."),
    ("SET pagevault.enforce_encryption = off",                                     "x x x x x x ."),
    ("SET pagevault.cipher = 'aes-128-xts'",                                "x x x x x x ."),
    ("SET pagevault.keyring_timeout = 1",                                   "x x x x x x ."),
    ("SET pagevault.keyring_command = '/bin/sh'", "55P02 55P02 55P02 55P02 55P02 55P02 55P02"),
    ("ALTER ROLE {who} SET pagevault.default_encryption = off",             "x x x x x x ."),
    ("ALTER DATABASE theirs SET pagevault.default_encryption = off",        "x x x x x x ."),
    ("ALTER SYSTEM SET pagevault.keyring_command = ''",                     "x x x x x x ."),
    ("CREATE FUNCTION app.f() RETURNS int LANGUAGE sql SET pagevault.enforce_encryption = off AS 'SELECT 1'",
                                                                            "x x x x x x ."),
    ("SET pagevault.key = 'misspelt'",      "42602 42602 42602 42602 42602 42602 42602"),
    ("SHOW pagevault.default_encryption",                                   ". . . . . . ."),
    // The status view hides it from the same roles.
    ("SHOW pagevault.keyring_command",                                      "x x x x x . ."),
];

fn check(rows: &[Row], before: impl Fn(&mut postgres::Client) -> Result<()>) -> Result<()> {
    let (cluster, key_file) = cluster()?;
    let options = format!(r#"{{"path": "{}"}}"#, key_file.path().display());
    cluster.sql(
        "CREATE TABLE app.t (id int PRIMARY KEY); CREATE TABLE app.foreign (id int);
                 CREATE TABLE app.plain (id int);
                 ALTER TABLE app.t OWNER TO owner; ALTER TABLE app.plain OWNER TO owner",
    )?;
    let mut wrong = Vec::new();
    for (statement, expected) in rows {
        let expected: Vec<_> = expected.split_whitespace().collect();
        ensure!(expected.len() == WHO.len(), "{statement}: {expected:?}");
        for (who, expected) in WHO.iter().zip(expected) {
            let mut client = cluster.client()?;
            before(&mut client)?;
            run_sql(&mut client, &format!("SET SESSION AUTHORIZATION {who}"))?;
            let statement = statement
                .replace("{who}", who)
                .replace("{options}", &options)
                .replace("{programs}", r#"{"wrap": ["nonsense"], "unwrap": ["nonsense"]}"#);
            let response = response(&mut client, &statement).with_context(|| statement.clone())?;
            let response = response.as_deref().unwrap_or(".").replace("42501", "x");
            if response != expected {
                wrong.push(format!("{who}: {statement}: {response}, not {expected}"));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    cluster.finish()
}

#[test]
fn of_labels() -> Result<()> {
    check(LABELS, |client| run_sql(client, UNLABEL).and_then(|()| run_sql(client, OBJECTS)))
}

#[test]
fn of_functions_views_and_settings() -> Result<()> {
    check(CALLS, |_| Ok(()))
}

/// Functions that PUBLIC may execute; all are read-only.
const PUBLIC: [&str; 9] = [
    "data_key_rows()",
    "is_encrypted(relation regclass)",
    "key_group_names()",
    "relation_rows()",
    "status_rows()",
    "wait_for_rekey(job bigint, timeout interval)",
    "wait_for_rekey(job integer, timeout interval)",
    "wait_for_rekey(relation regclass, timeout interval)",
    "wait_for_rekey(relation text, timeout interval)",
];

/// A new function is executable by no other role until it is in the list above, or has grants.
#[test]
fn of_all_objects_of_the_extension() -> Result<()> {
    let (cluster, key_file) = cluster()?;
    let members =
        "FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass
        AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pagevault'";
    let public = format!(
        "SELECT proname || '(' || pg_get_function_identity_arguments(p.oid) || ')' {members}
         WHERE has_function_privilege('stranger', p.oid, 'EXECUTE') ORDER BY 1"
    );
    let mut client = cluster.client()?;
    ensure!(column(&mut client, &public)? == PUBLIC, "{:?}", column(&mut client, &public)?);
    // None is SECURITY DEFINER, and none resolves names when it runs.
    let odd = format!(
        "SELECT proname {members} JOIN pg_language l ON l.oid = prolang
        WHERE prosecdef OR (lanname <> 'c' AND prosqlbody IS NULL) OR pronamespace <> 'pagevault'::regnamespace"
    );
    ensure!(column(&mut client, &odd)?.is_empty(), "{:?}", column(&mut client, &odd)?);
    ensure!(column(&mut client, &format!("SELECT proname {members}"))?.len() > 15, "too few");
    let views = "SELECT relname FROM pg_class c WHERE relnamespace = 'pagevault'::regnamespace
        AND (has_table_privilege('stranger', oid,
                 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
             OR (has_table_privilege('stranger', oid, 'SELECT')
                 AND relname NOT IN ('status', 'relations', 'tables', 'data_keys')))";
    ensure!(column(&mut client, views)?.is_empty(), "{:?}", column(&mut client, views)?);
    let settings =
        "SELECT name FROM pg_settings WHERE name LIKE 'pagevault.%' AND context = 'user'";
    ensure!(column(&mut client, settings)?.is_empty(), "anyone may set one");
    ensure!(
        cluster.text("SELECT has_schema_privilege('stranger', 'pagevault', 'CREATE')")? == "f",
        "strangers may create in the schema"
    );

    // A role without rights reads nothing about the provider, and no byte of a wrapped key.
    cluster.sql("CREATE TABLE app.t (id int); SELECT pagevault.encrypt('app.t')")?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION stranger")?;
    let mut read = String::new();
    for source in [
        "status",
        "relations",
        "tables",
        "data_keys",
        "status_rows()",
        "data_key_rows()",
        "relation_rows()",
    ] {
        let rows = column(&mut client, &format!("SELECT r::text FROM pagevault.{source} r"))?;
        ensure!(!rows.is_empty(), "{source} is empty");
        read.extend(rows);
    }
    ensure!(read.contains("app.t"), "the relation is public, as in pg_class");
    let path = key_file.path().display().to_string();
    for secret in ["local", "main", path.as_str(), "keyring"] {
        ensure!(!read.contains(secret), "a stranger reads {secret:?} in {read}");
    }
    drop(client);
    cluster.finish()
}
