//! `pagevault-keyring doctor` finds what is missing in a real server, and says what cures it.

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings};
use serde_json::Value;

/// Exit code, output and errors of the program, asked about a cluster by a role.
pub(crate) fn keyring(
    cluster: &Cluster,
    role: &str,
    arguments: &[&str],
) -> Result<(i32, String, String)> {
    let output = cluster
        .program("pagevault-keyring")
        .args(arguments)
        .env("PGHOST", cluster.directory())
        .env("PGUSER", role)
        .env("PGDATABASE", "postgres")
        .output()?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let code = output.status.code().context("it was killed")?;
    Ok((code, text(output.stdout), text(output.stderr)))
}

/// The names of the findings of a severity or worse, in their order.
fn findings(cluster: &Cluster, severity: &str) -> Result<Vec<String>> {
    let (code, output, errors) =
        keyring(cluster, "postgres", &["doctor", "--json", "--severity", severity])?;
    let document: Value = serde_json::from_str(&output).context(errors)?;
    let list = document["findings"].as_array().context("findings")?;
    ensure!(code == i32::from(!list.is_empty()), "exit code {code} for {list:?}");
    Ok(list
        .iter()
        .map(|finding| {
            let name = |part: &str| finding[part].as_str().unwrap_or_default().to_owned();
            match finding["database"].as_str() {
                Some(database) => format!("{} in {database}", name("check")),
                None => name("check"),
            }
        })
        // Of the machine, not of the server.
        .filter(|check| !matches!(check.as_str(), "memory-not-locked" | "core-dumps"))
        .collect())
}

/// The same, as one string.
fn expect(cluster: &Cluster, severity: &str, expected: &[&str]) -> Result<()> {
    let found = findings(cluster, severity)?;
    ensure!(found == expected, "{found:?}, not {expected:?}");
    Ok(())
}

#[test]
fn from_a_stock_server_to_one_without_findings() -> Result<()> {
    let settings = Settings::default().without_preload().conf("max_worker_processes = 24");
    let cluster = Cluster::start(&settings)?;
    expect(&cluster, "notice", &["library-not-loaded", "extension-missing"])?;

    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    let (_, output, _) = keyring(&cluster, "postgres", &["doctor"])?;
    ensure!(output.contains("was not restarted") && output.contains("Cure: restart"), "{output}");
    cluster.restart()?;
    expect(&cluster, "notice", &["extension-missing"])?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    expect(&cluster, "notice", &["no-master-key"])?;

    let keys = cluster.key_file("keys", "main")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    expect(&cluster, "notice", &["one-master-key", "nothing-encrypted"])?;
    let second = cluster.key_file("second", "spare")?;
    cluster.sql(&second.add_provider("second"))?;
    cluster.sql("SELECT pagevault.add_cluster_master_key('second', 'spare')")?;
    cluster.sql("CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')")?;
    expect(&cluster, "notice", &["wal-plaintext", "no-anchor"])?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    expect(&cluster, "notice", &["no-anchor"])?;
    expect(&cluster, "warning", &[])?;
    let (code, output, _) =
        keyring(&cluster, "postgres", &["doctor", "--severity", "critical", "--check-files"])?;
    ensure!(code == 0 && output == "Nothing found.\n", "{output}");
    cluster.finish()
}

/// Databases and relations may have any name; a function of the name of ours may be anybody's.
#[test]
fn all_databases_are_looked_at_and_no_name_misleads() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("permission denied");
    let odd = "it's \"<i>\\ host=/nowhere user=x \u{1b}[2J";
    let quoted = odd.replace('"', "\"\"");
    cluster.sql("CREATE ROLE owner; CREATE ROLE nobody LOGIN")?;
    cluster.sql(&format!("CREATE DATABASE \"{quoted}\""))?;
    cluster.sql("CREATE DATABASE trap OWNER owner")?;
    cluster.sql("CREATE DATABASE closed ALLOW_CONNECTIONS false")?;
    let mut client = cluster.client_to(odd)?;
    client.batch_execute(
        "CREATE EXTENSION pagevault; CREATE SCHEMA \"a;b\";
         CREATE TABLE \"a;b\".\"t'\n\" (id int); INSERT INTO \"a;b\".\"t'\n\" VALUES (1);
         SECURITY LABEL FOR pagevault ON SCHEMA \"a;b\" IS 'encrypted'",
    )?;
    cluster.client_to("trap")?.batch_execute(
        "SET ROLE owner; CREATE SCHEMA pagevault;
         CREATE FUNCTION pagevault.report(check_files boolean DEFAULT false) RETURNS jsonb
         LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called'; END $$;
         CREATE VIEW pagevault.status AS SELECT pagevault.report() IS NULL AS loaded",
    )?;
    let found = findings(&cluster, "warning")?;
    ensure!(found.contains(&format!("drift in {odd}")), "{found:?}");
    ensure!(!found.iter().any(|found| found.ends_with("in trap")), "{found:?}");
    let (_, output, _) = keyring(&cluster, "postgres", &["doctor"])?;
    ensure!(output.contains("\\u{1b}[2J") && !output.contains('\u{1b}'), "{output}");
    ensure!(output.contains("\"t'\\n\""), "{output}");

    keys.take_away()?;
    cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    let found = findings(&cluster, "critical")?;
    ensure!(found == ["provider-unreachable"], "{found:?}");
    keys.bring_back()?;

    let (code, output, errors) = keyring(&cluster, "nobody", &["doctor"])?;
    ensure!(code == 2 && output.is_empty(), "{code} {output}");
    ensure!(errors.contains("permission denied for function report"), "{errors}");
    ensure!(errors.contains("Hint: Connect as a superuser"), "{errors}");
    for (conninfo, expected) in [
        ("host=/nowhere", "could not connect to the server"),
        ("host=/nowhere password=secret", "the connection string contains a password"),
    ] {
        let (code, output, errors) =
            keyring(&cluster, "postgres", &["doctor", "--dbname", conninfo])?;
        ensure!(code == 2 && output.is_empty(), "{code} {output}");
        ensure!(errors.contains(expected) && !errors.contains("secret"), "{errors}");
    }
    cluster.finish()
}

/// The server runs without the library, and cannot read the statistics of a database.
#[test]
fn a_library_that_was_taken_away_is_found() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("invalid page");
    cluster.allow_log("page verification failed");
    cluster.sql("CREATE DATABASE app")?;
    cluster.client_to("app")?.batch_execute(
        "CREATE EXTENSION pagevault; CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')",
    )?;
    let with = "shared_preload_libraries = 'pagevault'";
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.restart()?;
    let path = keys.path().display().to_string();
    let init = ["init", "--key-file", &path];
    // Only another database has something that cannot be read.
    let found = findings(&cluster, "warning")?;
    ensure!(found.contains(&"library-not-loaded".to_owned()), "{found:?}");
    cluster.append_conf(with)?;
    cluster.restart()?;
    cluster.sql("CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')")?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.restart()?;
    let found = findings(&cluster, "warning")?;
    ensure!(found.starts_with(&["library-not-loaded".to_owned()]), "{found:?}");
    ensure!(found.contains(&"database-not-seen in postgres".to_owned()), "{found:?}");
    let (_, output, errors) = keyring(&cluster, "postgres", &["doctor"])?;
    ensure!(!format!("{output}{errors}").contains("superuser"), "{output}{errors}");
    let (code, script, errors) = keyring(&cluster, "postgres", &init)?;
    ensure!(code == 0 && script.contains("SET shared_preload_libraries"), "{code}: {errors}");
    ensure!(!script.contains("CREATE EXTENSION") && !script.contains("file create"), "{script}");
    cluster.append_conf(with)?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1");
    cluster.finish()
}

/// Databases without the extension are encrypted by a setting of the cluster.
#[test]
fn encrypted_databases_without_the_extension_are_found() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.set(&[("pagevault.default_encryption", "on")])?;
    cluster.sql("CREATE DATABASE shop")?;
    cluster.sql("CREATE DATABASE closed")?;
    for database in ["shop", "closed"] {
        cluster.client_to(database)?.batch_execute("CREATE TABLE t AS SELECT 1 AS id")?;
    }
    cluster.sql("ALTER DATABASE closed ALLOW_CONNECTIONS false")?;
    let query =
        "SELECT string_agg(database, ',' ORDER BY database) FROM pagevault.encrypted_databases
                  WHERE encrypted_files > 0";
    ensure!(cluster.text(query)? == "closed,shop", "{}", cluster.text(query)?);
    let found = findings(&cluster, "warning")?;
    for expected in ["extension-missing in shop", "extension-missing in closed"] {
        ensure!(found.contains(&expected.to_owned()), "{found:?}");
    }
    let (_, output, _) = keyring(&cluster, "postgres", &["doctor"])?;
    ensure!(output.contains("ALTER DATABASE \"closed\" ALLOW_CONNECTIONS true"), "{output}");
    cluster.sql("DROP DATABASE closed")?;
    cluster.client_to("shop")?.batch_execute("DROP TABLE t")?;
    cluster.client_to("shop")?.batch_execute(
        "CREATE EXTENSION pagevault; SET pagevault.data_catalog_encryption = off;
         SELECT pagevault.decrypt(c) FROM unnest('{pg_statistic,pg_statistic_ext_data,pg_largeobject}'::regclass[]) c",
    )?;
    cluster.client_to("shop")?.batch_execute(
        "SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs; CHECKPOINT",
    )?;
    cluster.eventually("SELECT count(*) FROM pagevault.encrypted_databases", "0")?;
    cluster.finish()
}

/// What is to be encrypted in a database without the extension is decided outside of the database.
#[test]
fn a_policy_that_reaches_databases_without_the_extension_is_found() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.make_tablespace("place")?;
    cluster.make_tablespace("plain")?;
    for (database, place) in [
        ("by_setting", "pg_default"),
        ("by_tablespace", "place"),
        ("by_table", "pg_default"),
        ("exempt", "plain"),
        ("empty", "place"),
    ] {
        cluster.sql(&format!("CREATE DATABASE {database} TABLESPACE {place}"))?;
    }
    for database in ["by_setting", "by_tablespace", "exempt"] {
        cluster.client_to(database)?.batch_execute("CREATE TABLE t AS SELECT 1 AS id")?;
    }
    cluster.client_to("by_table")?.batch_execute("CREATE TABLE t (id int) TABLESPACE place")?;
    let reached = || -> Result<Vec<String>> {
        let mut found = findings(&cluster, "warning")?;
        found.retain(|found| found.starts_with("extension-missing"));
        Ok(found)
    };
    ensure!(reached()?.is_empty(), "{:?}", reached()?);
    cluster.sql(
        "ALTER DATABASE by_setting SET pagevault.default_encryption = on;
         ALTER DATABASE exempt SET pagevault.default_encryption = on;
         SECURITY LABEL FOR pagevault ON TABLESPACE plain IS 'plaintext';
         SECURITY LABEL FOR pagevault ON TABLESPACE place IS 'encrypted'",
    )?;
    let names = ["by_setting", "by_table", "by_tablespace"];
    let expected = names.map(|name| format!("extension-missing in {name}"));
    ensure!(reached()? == expected, "{:?}", reached()?);
    let (_, output, _) = keyring(&cluster, "postgres", &["doctor"])?;
    ensure!(output.contains("1 relation is to be encrypted by a setting"), "{output}");
    // With the extension, its view says which.
    cluster.client_to("by_table")?.batch_execute("CREATE EXTENSION pagevault")?;
    let found = findings(&cluster, "warning")?;
    ensure!(found.contains(&"drift in by_table".to_owned()), "{found:?}");
    cluster.finish()
}
