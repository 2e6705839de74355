//! Errors that users can cause: SQLSTATE, message, DETAIL, HINT.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::{Cluster, Settings};

/// Runs each statement in a new session and compares the server's messages with the golden file
/// `errors/NAME.txt`. `{dir}` in it represents the cluster's directory. `PAGEVAULT_BLESS=1`
/// rewrites the file.
fn check(name: &str, cluster: &Cluster, role: Option<&str>, statements: &[&str]) -> Result<()> {
    let directory = cluster.directory().to_string_lossy().into_owned();
    let mut output = String::new();
    for statement in statements {
        let mut client = cluster.client()?;
        if let Some(role) = role {
            run_sql(&mut client, &format!("SET SESSION AUTHORIZATION {role}"))?;
        }
        let error = expect_error(&mut client, &statement.replace("{dir}", &directory))?;
        output.push_str(&format!("{statement};\n{error}\n\n").replace(&directory, "{dir}"));
    }
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/cluster/errors/{name}.txt"));
    if std::env::var_os("PAGEVAULT_BLESS").is_some() {
        std::fs::write(&golden, &output)?;
    }
    let expected = std::fs::read_to_string(&golden)?;
    let differences: Vec<_> = output
        .split("\n\n")
        .zip(expected.split("\n\n"))
        .filter(|(output, expected)| output != expected)
        .map(|(output, expected)| format!("said:\n{output}\nexpected:\n{expected}"))
        .collect();
    ensure!(output == expected, "{name}:\n{}", differences.join("\n\n"));
    Ok(())
}

#[test]
fn providers_and_master_keys() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let _other = cluster.key_file("other", "main")?;
    let _loose = cluster.key_file("loose", "main")?;
    std::fs::set_permissions(cluster.directory().join("loose"), Permissions::from_mode(0o644))?;
    check(
        "providers_and_master_keys",
        &cluster,
        None,
        &[
            r#"SELECT pagevault.add_provider('local', 'file', '{"path": "/k"}')"#,
            "SELECT pagevault.add_provider('x', 'abacus', '{}')",
            "SELECT pagevault.add_provider('x', 'file', '{}')",
            r#"SELECT pagevault.add_provider('x', 'file', '{"path": "keys"}')"#,
            r#"SELECT pagevault.add_provider('x', 'file', '{"path": 7}')"#,
            r#"SELECT pagevault.add_provider('x', 'file', '{"path": "/k", "mode": 1}')"#,
            "SELECT pagevault.add_provider('x', 'file', '[1]')",
            r#"SELECT pagevault.add_provider('', 'file', '{"path": "/k"}')"#,
            r#"SELECT pagevault.add_provider('x', 'file', '{"path": "{dir}/data/keys"}')"#,
            r#"SELECT pagevault.add_provider('x', 'file', '{"path": "{dir}/loose"}')"#,
            r#"SELECT pagevault.alter_provider('nobody', '{"path": "/k"}')"#,
            r#"SELECT pagevault.alter_provider('local', '{"path": "{dir}/other"}')"#,
            "SELECT pagevault.drop_provider('nobody')",
            "SELECT pagevault.drop_provider('local')",
            "SELECT pagevault.set_cluster_master_key('nobody', 'main')",
            "SELECT pagevault.set_cluster_master_key('local', 'typo')",
            "SELECT pagevault.set_cluster_master_key('local', '')",
            "SELECT pagevault.set_database_master_key('local', 'typo')",
            "SELECT pagevault.rotate_database_master_key()",
        ],
    )?;
    cluster.finish()
}

#[test]
fn before_there_is_a_master_key() -> Result<()> {
    let cluster = Cluster::start(&Settings::default())?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql("CREATE TABLE t (id int)")?;
    check(
        "before_there_is_a_master_key",
        &cluster,
        None,
        &[
            "SET pagevault.default_encryption = on; CREATE TABLE u (id int)",
            "SELECT pagevault.encrypt('t')",
            "SECURITY LABEL FOR pagevault ON SCHEMA public IS 'encrypted'",
            "SELECT pagevault.set_cluster_master_key('local', 'main')",
            "SELECT pagevault.rotate_database_master_key()",
            "SELECT pagevault.rotate_cluster_master_key()",
            "SELECT pagevault.rotate_database_key()",
        ],
    )?;
    cluster.finish()
}

#[test]
fn labels() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE TABLE t (id int PRIMARY KEY, name text);
         CREATE VIEW v AS SELECT 1 AS id;
         CREATE TABLE parts (id int) PARTITION BY RANGE (id);",
    )?;
    check(
        "labels",
        &cluster,
        None,
        &[
            "SELECT pagevault.encrypt('t', 'rot13')",
            "SELECT pagevault.encrypt('v')",
            "SELECT pagevault.encrypt('t_pkey')",
            "SECURITY LABEL FOR pagevault ON TABLE pg_class IS 'encrypted'",
            "SELECT pagevault.encrypt('pg_class_oid_index')",
            "SELECT pagevault.encrypt('pg_authid')",
            "SELECT pagevault.encrypt(1)",
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'secret'",
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted rot13'",
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-256-xts twice'",
            "SECURITY LABEL FOR pagevault ON COLUMN t.id IS 'encrypted'",
            "SECURITY LABEL FOR pagevault ON VIEW v IS 'encrypted'",
            "SECURITY LABEL FOR pagevault ON TABLE parts IS 'secret'",
            "SECURITY LABEL FOR pagevault ON SCHEMA public IS 'secret'",
            "SECURITY LABEL FOR pagevault ON SCHEMA pg_catalog IS 'encrypted'",
            "SECURITY LABEL FOR pagevault ON TABLESPACE pg_global IS 'encrypted'",
            "SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted rot13'",
            "SECURITY LABEL FOR pagevault ON ROLE postgres IS 'encrypted'",
            "SET pagevault.cipher = 'rot13'",
            "SET pagevault.nonsense = 1",
            "SELECT * FROM pagevault.verify(1)",
            "SELECT pagevault.is_encrypted(1)",
            "CREATE TABLE pagevault.mine (id int)",
        ],
    )?;
    cluster.finish()
}

#[test]
fn roles() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE ROLE ordinary;
         CREATE ROLE keeper; GRANT pagevault_admin TO keeper;
         GRANT CREATE ON SCHEMA public TO ordinary;
         CREATE TABLE foreign_table (id int);
         CREATE SCHEMA own_schema AUTHORIZATION ordinary;
         SET SESSION AUTHORIZATION ordinary;
         CREATE TABLE own (id int);
         SECURITY LABEL FOR pagevault ON TABLE own IS 'encrypted';
         SECURITY LABEL FOR pagevault ON SCHEMA own_schema IS 'encrypted'",
    )?;
    check(
        "roles",
        &cluster,
        Some("ordinary"),
        &[
            r#"SELECT pagevault.add_provider('x', 'file', '{"path": "/k"}')"#,
            "SELECT pagevault.set_cluster_master_key('local', 'main')",
            "SELECT pagevault.rotate_database_key()",
            "SELECT pagevault.unlock()",
            "SELECT * FROM pagevault.providers",
            "SELECT pagevault.encrypt('foreign_table')",
            "SECURITY LABEL FOR pagevault ON TABLE own IS 'plaintext'",
            "SECURITY LABEL FOR pagevault ON TABLE own IS NULL",
            "SECURITY LABEL FOR pagevault ON SCHEMA own_schema IS 'plaintext'",
            "SECURITY LABEL FOR pagevault ON SCHEMA own_schema IS NULL",
            "SECURITY LABEL FOR pagevault ON SCHEMA public IS 'encrypted'",
            "SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted'",
            "SET pagevault.enforce_encryption = on",
            "SELECT * FROM pagevault.drift",
            "SET pagevault.default_encryption = on",
            "SELECT * FROM pagevault.verify('own')",
        ],
    )?;
    // A key administrator does not thereby become the server's operating system user.
    let run = r#"{"wrap": ["/bin/sh"], "unwrap": ["/bin/sh"]}"#;
    check(
        "roles_of_key_keepers",
        &cluster,
        Some("keeper"),
        &[
            &format!("SELECT pagevault.add_provider('x', 'command', '{run}')"),
            "SELECT pagevault.drop_provider('nobody')",
        ],
    )?;
    // The cluster's administrator may.
    let mut keeper = cluster.client()?;
    run_sql(
        &mut keeper,
        "SET SESSION AUTHORIZATION keeper;
         SELECT pagevault.rotate_cluster_master_key();
         SELECT pagevault.rotate_database_key();
         SELECT * FROM pagevault.providers;
         SELECT * FROM pagevault.database_keys",
    )?;
    drop(keeper);
    cluster.finish()
}

#[test]
fn enforcement() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE SCHEMA app; SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted';
         CREATE TABLE app.t AS SELECT 1 AS id; CREATE TABLE open AS SELECT 1 AS id;
         CREATE TABLE parts (id int) PARTITION BY LIST (id);
         SECURITY LABEL FOR pagevault ON TABLE parts IS 'encrypted'",
    )?;
    cluster.make_tablespace("space")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLESPACE space IS 'encrypted'")?;
    cluster.sql("CREATE DATABASE sealed")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON DATABASE sealed IS 'encrypted'")?;
    cluster.sql("CREATE DATABASE model")?;
    run_sql(&mut cluster.client_to("model")?, "CREATE TABLE open (id int)")?;
    cluster.set(&[("pagevault.enforce_encryption", "on")])?;
    check(
        "enforcement",
        &cluster,
        None,
        &[
            "SECURITY LABEL FOR pagevault ON TABLE app.t IS 'plaintext'",
            "SECURITY LABEL FOR pagevault ON SCHEMA app IS 'plaintext'",
            "SECURITY LABEL FOR pagevault ON SCHEMA app IS NULL",
            "SECURITY LABEL FOR pagevault ON TABLESPACE space IS NULL",
            "SECURITY LABEL FOR pagevault ON DATABASE sealed IS NULL",
            "ALTER DATABASE model SET TABLESPACE space",
            "ALTER TABLE open SET SCHEMA app",
            "ALTER TABLE parts ATTACH PARTITION open FOR VALUES IN (1)",
            "SET pagevault.default_encryption = on; SECURITY LABEL FOR pagevault ON TABLE open IS 'plaintext'",
        ],
    )?;
    cluster.finish()
}

#[test]
fn the_helper() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let rotate = "SELECT pagevault.rotate_cluster_master_key()";
    std::fs::set_permissions(keys.path(), Permissions::from_mode(0o640))?;
    check("key_file_open_to_others", &cluster, None, &[rotate])?;
    std::fs::set_permissions(keys.path(), Permissions::from_mode(0o600))?;
    keys.take_away()?;
    // To create a new file is proposed only where no key is in use.
    let elsewhere = r#"SELECT pagevault.add_provider('new', 'file', '{"path": "{dir}/new"}')"#;
    cluster.sql(&elsewhere.replace("{dir}", &cluster.directory().to_string_lossy()))?;
    check(
        "key_file_away",
        &cluster,
        None,
        &[
            rotate,
            "SELECT pagevault.set_cluster_master_key('local', 'next')",
            "SELECT pagevault.set_cluster_master_key('new', 'main')",
        ],
    )?;
    keys.bring_back()?;

    let hanging = cluster.script("hanging", "exec sleep 60")?;
    let not_ours = cluster.script("not_ours", "cat >/dev/null\necho hello")?;
    let silent = cluster.script("silent", "cat >/dev/null")?;
    let deadline = format!("SET pagevault.keyring_timeout = '1s'; {rotate}");
    let cancelled = format!("SET statement_timeout = '500ms'; {rotate}");
    for (name, program, statements) in [
        ("helper_missing", "/nonexistent/helper", &[rotate] as &[&str]),
        ("helper_silent", &silent, &[rotate]),
        ("helper_not_ours", &not_ours, &[rotate]),
        ("helper_hanging", &hanging, &[&deadline, &cancelled]),
    ] {
        cluster.set(&[("pagevault.keyring_command", program)])?;
        check(name, &cluster, None, statements)?;
    }
    cluster.set(&[("pagevault.keyring_command", "")])?;
    cluster.sql(rotate)?;
    cluster.finish()
}
