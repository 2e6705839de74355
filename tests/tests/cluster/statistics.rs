//! Catalogs with values of user tables are sealed as soon as anything in the database is encrypted.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::datafile::if_exists;
use pagevault_tests::{Cluster, DataFile, KeyFile, Settings, StopMode};
use postgres::Client;

use crate::catalogs::expect_no_drift_of_catalogs;
use crate::labels::{drift, expect_no_drift, label};
use crate::{assert_plain, assert_sealed};

/// Occurs in the most common values of a column, of a pair of columns, and in a large object.
const CANARY: &str = "kanarienvogel";

const CATALOGS: [&str; 3] = ["pg_statistic", "pg_statistic_ext_data", "pg_largeobject"];

const TABLE: &str = "CREATE TABLE secret (id int, name text, colour text)";

const FILL: &str = "
    INSERT INTO secret
        SELECT i, CASE WHEN i % 2 = 0 THEN 'kanarienvogel' ELSE 'other' END, 'kanarienvogel'
        FROM generate_series(1, 1000) i;
    CREATE STATISTICS pair (mcv) ON name, colour FROM secret;
    ANALYZE secret;
    SELECT lo_from_bytea(0, convert_to(repeat('kanarienvogel ', 100), 'UTF8'));";

fn start() -> Result<(Cluster, KeyFile)> {
    Cluster::with_keys(&Settings::default())
}

/// All files of the database `postgres` and of the cluster that contain the canary.
fn leaks(cluster: &Cluster) -> Result<Vec<String>> {
    let mut found = leaks_below(cluster, &directory(&mut cluster.client()?)?)?;
    found.extend(leaks_below(cluster, "global")?);
    Ok(found)
}

/// Directory of the client's database.
fn directory(client: &mut Client) -> Result<String> {
    text(client, "SELECT 'base/' || oid FROM pg_database WHERE datname = current_database()")
}

fn leaks_below(cluster: &Cluster, directory: &str) -> Result<Vec<String>> {
    fn search(directory: &Path, found: &mut Vec<String>) -> Result<()> {
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                search(&path, found)?;
            } else if if_exists(DataFile { path: path.clone() }.contains_text(CANARY))?
                == Some(true)
            {
                found.push(path.display().to_string());
            }
        }
        Ok(())
    }
    cluster.sql("CHECKPOINT")?;
    let mut found = Vec::new();
    search(&cluster.data_directory().join(directory), &mut found)?;
    Ok(found)
}

/// In the database of `client`.
fn expect_sealed_in(client: &mut Client) -> Result<()> {
    for catalog in CATALOGS {
        let found = text(client, &format!("SELECT pagevault.is_encrypted('{catalog}')"))?;
        ensure!(found == "t", "is_encrypted says {found} of {catalog}");
    }
    expect_no_drift_of_catalogs(client)
}

fn expect_sealed(cluster: &Cluster) -> Result<()> {
    let found = leaks(cluster)?;
    ensure!(found.is_empty(), "the canary is in {found:?}");
    for catalog in CATALOGS {
        assert_sealed(&cluster.family_files(catalog)?).with_context(|| catalog.to_owned())?;
    }
    expect_sealed_in(&mut cluster.client()?)
}

fn check_statistics(cluster: &Cluster) -> Result<()> {
    check_statistics_in(&mut cluster.client()?)
}

fn check_statistics_in(client: &mut Client) -> Result<()> {
    let queries = [
        "SELECT most_common_vals::text FROM pg_stats
         WHERE tablename = 'secret' AND attname = 'colour'",
        "SELECT most_common_vals[1][2] FROM pg_stats_ext WHERE tablename = 'secret'",
        "SELECT convert_from(lo_get(oid), 'UTF8') FROM pg_largeobject_metadata
         ORDER BY oid DESC LIMIT 1",
    ];
    for query in queries {
        let found = text(client, query)?;
        ensure!(found.contains(CANARY), "{found}: {query}");
    }
    Ok(())
}

/// Each way to create the first encrypted relation of a database, with ANALYZE as early as
/// possible.
#[test]
fn no_sampled_value_of_an_encrypted_table_is_on_disk() -> Result<()> {
    let on = "SET pagevault.default_encryption = on;";
    let encrypt = "SELECT pagevault.encrypt('secret');";
    let by_schema = label("SCHEMA public", "'encrypted'");
    let routes = [
        ("created", format!("{on} {TABLE}; {FILL}")),
        ("in one transaction", format!("BEGIN; {on} {TABLE}; {FILL} COMMIT")),
        ("encrypted with statistics", format!("{TABLE}; {FILL} {encrypt}")),
        ("encrypted in their transaction", format!("BEGIN; {TABLE}; {FILL} {encrypt} COMMIT")),
        ("label first", format!("{by_schema} {TABLE}; {FILL}")),
        ("prepared", format!("BEGIN; {on} {TABLE}; {FILL} PREPARE TRANSACTION 'p'")),
        (
            "after a savepoint",
            format!(
                "BEGIN; SAVEPOINT s; {on} CREATE TABLE gone (id int); ROLLBACK TO s;
                 {on} {TABLE}; {FILL} COMMIT"
            ),
        ),
        (
            "by a procedure",
            format!("{on} DO $$ BEGIN EXECUTE '{TABLE}'; ANALYZE secret; COMMIT; END $$; {FILL}"),
        ),
        (
            "rewritten and analyzed by one command",
            format!("{TABLE}; {FILL} {on} VACUUM (FULL, ANALYZE) secret"),
        ),
        ("rolled back", format!("{TABLE}; {FILL} BEGIN; {encrypt} ROLLBACK")),
    ];
    let (cluster, _keys) =
        Cluster::with_keys(&Settings::default().conf("max_prepared_transactions = 2"))?;
    for (name, route) in &routes {
        cluster.sql(&format!("CREATE DATABASE \"{name}\" TEMPLATE template0"))?;
        let mut client = cluster.client_to(name)?;
        run_sql(&mut client, "CREATE EXTENSION pagevault")?;
        for statement in statements(route) {
            run_sql(&mut client, &statement).with_context(|| (*name).to_owned())?;
        }
        let found = leaks_below(&cluster, &directory(&mut client)?)?;
        ensure!(found.is_empty(), "{name}: the canary is in {found:?}");
        expect_sealed_in(&mut client).with_context(|| (*name).to_owned())?;
    }
    cluster.crash()?;
    for (name, _) in &routes {
        let mut client = cluster.client_to(name)?;
        if *name == "prepared" {
            run_sql(&mut client, "COMMIT PREPARED 'p'")?;
        }
        check_statistics_in(&mut client).with_context(|| (*name).to_owned())?;
        expect_sealed_in(&mut client).with_context(|| (*name).to_owned())?;
    }
    // In the database without encryption nothing changes.
    for catalog in CATALOGS {
        let open = cluster.text(&format!("SELECT pagevault.is_encrypted('{catalog}')"))?;
        ensure!(open == "f", "{catalog} of the plain database");
    }
    cluster.finish()
}

/// Not even during a transaction, because pages may be written at any time.
#[test]
fn an_open_transaction_leaves_nothing_in_plaintext_files() -> Result<()> {
    let (cluster, _keys) = start()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN; SET LOCAL pagevault.default_encryption = on")?;
    run_sql(&mut client, TABLE)?;
    run_sql(&mut client, FILL)?;
    check_statistics_in(&mut client)?;
    let found = leaks(&cluster)?;
    ensure!(found.is_empty(), "the canary is in {found:?}");
    // The catalogs are not locked during the transaction.
    let mut other = cluster.client()?;
    run_sql(&mut other, "SET lock_timeout = '5s'")?;
    run_sql(&mut other, "VACUUM pg_statistic")?;
    drop(other);
    run_sql(&mut client, "ROLLBACK")?;
    drop(client);
    expect_sealed(&cluster)?;
    cluster.finish()
}

/// Splits the script into statements, so that each is a separate transaction unless the script has
/// a transaction block.
fn statements(script: &str) -> Vec<String> {
    let mut pieces = Vec::new();
    for (i, part) in script.split("$$").enumerate() {
        match (i % 2, pieces.pop()) {
            (1, open) => pieces.push(format!("{}$${part}$$", open.unwrap_or_default())),
            (_, open) => {
                let text: String = open.unwrap_or_default() + part;
                // Text between dollar quotes is not split.
                let (head, rest) = match text.rfind("$$") {
                    Some(at) => text.split_at(at + 2),
                    None => ("", text.as_str()),
                };
                let mut split = rest.split(';').map(str::to_owned);
                pieces.push(head.to_owned() + &split.next().unwrap_or_default());
                pieces.extend(split);
            }
        }
    }
    pieces.into_iter().filter(|piece| !piece.trim().is_empty()).collect()
}

/// Verifies the tests above: with the setting off, the same steps leave the canary in three files.
#[test]
fn without_protection_values_are_in_plaintext_files() -> Result<()> {
    let (cluster, _keys) = start()?;
    cluster.set(&[("pagevault.data_catalog_encryption", "off")])?;
    cluster.sql(&format!("{TABLE}; SELECT pagevault.encrypt('secret')"))?;
    cluster.sql(FILL)?;
    check_statistics(&cluster)?;
    let found = leaks(&cluster)?;
    ensure!(found.len() >= 3, "the canary is in {found:?} only");
    for catalog in CATALOGS {
        assert_plain(&cluster.family_files(catalog)?)?;
    }
    expect_no_drift(&cluster)?;

    // With the setting on, the view shows drift and the command against it.
    cluster.set(&[("pagevault.data_catalog_encryption", "on")])?;
    let rows = drift(&cluster)?;
    for catalog in CATALOGS {
        let row = format!("{catalog}: encrypted (setting pagevault.data_catalog_encryption)");
        ensure!(rows.contains(&row), "{row} is not in {rows:?}");
    }
    let mut client = cluster.client()?;
    for heal in column(&mut client, "SELECT DISTINCT fix FROM pagevault.drift")? {
        run_sql(&mut client, &heal)?;
    }
    drop(client);
    expect_sealed(&cluster)?;

    // Off again: what is sealed stays sealed until it is decrypted.
    let refused = cluster.error("SELECT pagevault.decrypt('pg_statistic')")?;
    ensure!(refused.detail.contains("data_catalog_encryption is on"), "{refused}");
    cluster.set(&[("pagevault.data_catalog_encryption", "off")])?;
    cluster.sql("ANALYZE")?;
    expect_sealed(&cluster)?;
    cluster.sql("VACUUM FULL pg_statistic")?;
    expect_sealed(&cluster)?;
    cluster.sql("SELECT pagevault.decrypt('pg_statistic')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('pg_statistic'::regclass, '60 s')")?;
    cluster.sql("CHECKPOINT")?;
    assert_plain(&cluster.family_files("pg_statistic")?)?;
    cluster.crash()?;
    check_statistics(&cluster)?;
    cluster.finish()
}

#[test]
fn new_storage_of_protected_catalogs_is_sealed() -> Result<()> {
    let (cluster, _keys) = start()?;
    cluster.sql(&format!("{TABLE}; SELECT pagevault.encrypt('secret')"))?;
    cluster.sql(FILL)?;
    let mut commands = vec!["VACUUM FULL".to_owned(), "REINDEX SYSTEM postgres".to_owned()];
    for catalog in CATALOGS {
        for command in ["VACUUM FULL", "REINDEX TABLE", "VACUUM (FREEZE, INDEX_CLEANUP on)"] {
            commands.push(format!("{command} {catalog}"));
        }
    }
    commands.push("CLUSTER pg_statistic USING pg_statistic_relid_att_inh_index".to_owned());
    commands.push("REINDEX INDEX pg_largeobject_loid_pn_index".to_owned());
    for command in commands {
        cluster.sql(&command).with_context(|| command.clone())?;
        cluster.sql("ANALYZE")?;
        expect_sealed(&cluster).with_context(|| command.clone())?;
        assert_plain(&cluster.family_files("pg_class")?).with_context(|| command.clone())?;
    }
    cluster.crash()?;
    expect_sealed(&cluster)?;
    check_statistics(&cluster)?;
    // Rebuilt while encryption is demanded but missing: sealed too.
    cluster.set(&[("pagevault.data_catalog_encryption", "off")])?;
    cluster.sql("SELECT pagevault.decrypt('pg_statistic')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('pg_statistic'::regclass, '60 s')")?;
    cluster.set(&[("pagevault.data_catalog_encryption", "on")])?;
    cluster.sql("VACUUM FULL pg_statistic")?;
    expect_sealed(&cluster)?;
    cluster.finish()
}

/// Creates large objects with 80 MiB, more than is sealed at once.
const MANY_LARGE_OBJECTS: &str = "
    CREATE TABLE piece AS SELECT string_agg(sha256(i::text::bytea), '') AS bytes
        FROM generate_series(1, 32768) i;
    SELECT lo_from_bytea(0, bytes) FROM piece, generate_series(1, 80);
    DROP TABLE piece";

/// There may be many old large objects. New ones are sealed at once, old ones on demand.
#[test]
fn many_old_large_objects_are_sealed_on_demand() -> Result<()> {
    let (cluster, _keys) = start()?;
    cluster.sql(MANY_LARGE_OBJECTS)?;
    let before = cluster
        .text("SELECT md5(string_agg(md5(data), '' ORDER BY loid, pageno)) FROM pg_largeobject")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql(&format!("{TABLE}; SELECT pagevault.encrypt('secret')"))?;
    cluster.sql(FILL)?;
    let found = leaks(&cluster)?;
    ensure!(found.is_empty(), "the canary is in {found:?}");
    let state = "SELECT string_agg(DISTINCT state, ' ' ORDER BY state) FROM pagevault.verify('pg_largeobject')
                 WHERE relation = 'pg_largeobject'::regclass AND fork = 'main'";
    ensure!(cluster.text(state)? == "encrypted plaintext", "{}", cluster.text(state)?);
    ensure!(cluster.text("SELECT pagevault.is_encrypted('pg_largeobject')")? == "f");
    let rows = drift(&cluster)?;
    ensure!(
        rows == ["pg_largeobject", "pg_largeobject_loid_pn_index"].map(|relation| format!(
            "{relation}: encrypted (setting pagevault.data_catalog_encryption)"
        )),
        "{rows:?}"
    );
    // More encrypted relations change nothing about that.
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE more (id int)")?;
    ensure!(cluster.text(state)? == "encrypted plaintext", "sealed by the way");
    let heal = cluster.text("SELECT DISTINCT fix FROM pagevault.drift")?;
    ensure!(heal == "SELECT pagevault.encrypt('pg_catalog.pg_largeobject')", "{heal}");
    cluster.sql(&heal)?;
    expect_sealed(&cluster)?;
    cluster.crash()?;
    let after = cluster.text(
        "SELECT md5(string_agg(md5(data), '' ORDER BY loid, pageno)) FROM pg_largeobject
         WHERE loid <> (SELECT max(loid) FROM pg_largeobject)",
    )?;
    ensure!(after == before, "large objects changed");
    cluster.finish()
}

/// A command seals many old large objects, while a label gives new ones another key.
#[test]
fn large_objects_get_another_key_while_old_ones_are_sealed() -> Result<()> {
    let (cluster, _keys) = start()?;
    cluster.sql(MANY_LARGE_OBJECTS)?;
    const LABEL: &str =
        "SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted aes-128-xts'";
    cluster.sql(LABEL)?;
    cluster.sql("CHECKPOINT")?;
    let sum = "SELECT md5(string_agg(md5(data), '' ORDER BY loid, pageno)) FROM pg_largeobject";
    let before = cluster.text(sum)?;
    cluster.stop_at("rekey.page_done")?;
    let mut client = cluster.client()?;
    let command = std::thread::spawn(move || {
        run_sql(&mut client, "SELECT pagevault.encrypt('pg_largeobject', 'aes-256-xts')")
    });
    cluster.stopped_at("rekey.page_done")?;
    cluster.sql(LABEL)?;
    cluster.resume();
    command.join().map_err(|_| anyhow::anyhow!("panic"))??;
    let keys = "SELECT string_agg(DISTINCT concat_ws(' ', state, data_key_version), ', ')
         FROM pagevault.verify('pg_largeobject')
         WHERE relation = 'pg_largeobject'::regclass AND fork = 'main' AND state <> 'empty'";
    ensure!(cluster.text(keys)? == "encrypted 3", "{}", cluster.text(keys)?);
    cluster.crash()?;
    ensure!(cluster.text(sum)? == before, "large objects changed");
    cluster.finish()
}

/// All sessions can use a catalog while it is sealed, and no change is lost.
#[test]
fn catalogs_are_sealed_while_others_write_them() -> Result<()> {
    let (cluster, _keys) = start()?;
    cluster.sql(
        "CREATE TABLE numbers (id int, name text);
         INSERT INTO numbers SELECT i, 'name ' || i FROM generate_series(1, 5000) i",
    )?;
    let writers: Vec<_> = (0..3)
        .map(|n| -> Result<_> {
            let mut client = cluster.client()?;
            Ok(std::thread::spawn(move || -> Result<u32> {
                for i in 0..40 {
                    let table = format!("t_{n}_{i}");
                    run_sql(
                        &mut client,
                        &format!(
                            "CREATE TABLE {table} AS SELECT * FROM numbers LIMIT 300;
                             ANALYZE {table}; ANALYZE numbers;
                             SELECT lo_from_bytea(0, repeat('{table} ', 2000)::bytea)"
                        ),
                    )?;
                }
                Ok(40)
            }))
        })
        .collect::<Result<_>>()?;
    cluster.sql("CREATE TABLE secret (id int); SELECT pagevault.encrypt('secret')")?;
    cluster.sql(&label("DATABASE postgres", "'encrypted'"))?;
    for writer in writers {
        ensure!(writer.join().map_err(|_| anyhow::anyhow!("a writer died"))?? == 40);
    }
    let check = || -> Result<()> {
        let tables = "SELECT count(DISTINCT tablename) FROM pg_stats WHERE tablename LIKE 't\\_%'";
        ensure!(cluster.text(tables)? == "120", "statistics of {}", cluster.text(tables)?);
        let objects =
            "SELECT count(*) FROM pg_largeobject_metadata WHERE length(lo_get(oid)) >= 12000";
        ensure!(cluster.text(objects)? == "120", "large objects: {}", cluster.text(objects)?);
        Ok(())
    };
    check()?;
    expect_sealed(&cluster)?;
    cluster.crash()?;
    check()?;
    if !cluster.installation().has_extension("amcheck") {
        eprintln!("the indexes were not checked: this installation has no amcheck");
        return cluster.finish();
    }
    let mut client = cluster.client()?;
    run_sql(&mut client, "CREATE EXTENSION amcheck")?;
    let indexes = "SELECT count(bt_index_check(indexrelid, true)) FROM pg_index
                   JOIN pg_class c ON c.oid = indexrelid WHERE c.oid < 16384 AND relkind = 'i'";
    ensure!(text(&mut client, indexes)?.parse::<u32>()? > 100, "indexes");
    drop(client);
    cluster.finish()
}

/// Temporary tables alone make no catalog depend on a key. Who wants that encrypts it before.
#[test]
fn samples_of_temporary_tables_are_sealed_on_demand() -> Result<()> {
    let (cluster, _keys) = start()?;
    cluster.sql("CREATE DATABASE open")?;
    cluster.sql("SELECT pagevault.encrypt('pg_catalog.pg_statistic')")?;
    for (database, is_sealed) in [("postgres", true), ("open", false)] {
        let mut client = cluster.client_to(database)?;
        let table = "CREATE TEMPORARY TABLE t AS SELECT 'kanarienvogel' AS name FROM generate_series(1, 1000)";
        run_sql(&mut client, &format!("{table}; ANALYZE t"))?;
        let found = leaks_below(&cluster, &directory(&mut client)?)?;
        ensure!(found.is_empty() == is_sealed, "{database}: {found:?}");
    }
    cluster.finish()
}

/// While statistics are locked, plaintext tables are used as if they had no statistics.
#[test]
fn plaintext_tables_are_usable_while_statistics_are_locked() -> Result<()> {
    let (mut cluster, keys) =
        Cluster::with_keys(&Settings::default().conf("pagevault.unlock_timeout = 0"))?;
    cluster.allow_log("pagevault");
    cluster.allow_log("is locked");
    cluster.sql(
        "CREATE TABLE secret (id int); SELECT pagevault.encrypt('secret');
         CREATE TABLE open (id int PRIMARY KEY, name text, kind int);
         INSERT INTO open SELECT i, 'name ' || i, i % 7 FROM generate_series(1, 5000) i;
         CREATE INDEX ON open (lower(name));
         CREATE TABLE other AS SELECT * FROM open;
         CREATE TABLE paired AS SELECT * FROM open;
         CREATE STATISTICS pair ON id, kind FROM paired",
    )?;
    cluster.sql("ANALYZE")?;
    cluster.stop(StopMode::Fast)?;
    keys.take_away()?;
    cluster.start_server()?;
    for (query, answer) in [
        ("SELECT name FROM open WHERE id = 7", "name 7"),
        ("SELECT count(*) FROM open WHERE lower(name) = 'name 9'", "1"),
        ("SELECT count(*) FROM open JOIN other USING (id, kind) WHERE kind < 3", "2144"),
        ("SELECT count(*) FROM (SELECT kind FROM open GROUP BY kind) k", "7"),
        (
            "SELECT count(DISTINCT o.name) FROM open o, other p WHERE o.id = p.id AND p.name LIKE 'n%'",
            "5000",
        ),
        ("SELECT count(*) FROM pg_class WHERE relname = 'open'", "1"),
    ] {
        let found = cluster.text(query).with_context(|| query.to_owned())?;
        ensure!(found == answer, "{query}: {found}");
    }
    for statement in [
        "INSERT INTO open VALUES (0, 'x', 0); UPDATE open SET name = 'y' WHERE id = 0",
        "DELETE FROM open WHERE id = 0",
        "CREATE TABLE more AS SELECT * FROM open WHERE kind = 1",
        "CREATE INDEX ON open (kind)",
        "ALTER TABLE open ADD COLUMN wide text",
        "TRUNCATE other",
        "REINDEX TABLE open",
        "VACUUM open",
    ] {
        cluster.sql(statement).with_context(|| statement.to_owned())?;
    }
    // Statements that must read or write statistics have to wait.
    for statement in
        ["ANALYZE open", "DROP TABLE more", "SELECT count(*) FROM paired", "TABLE pg_stats"]
    {
        let error = cluster.error(statement).with_context(|| statement.to_owned())?;
        ensure!(error.sqlstate == "55000" && error.text().contains("is locked"), "{error}");
    }
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.status", "unlocked")?;
    cluster.sql("ANALYZE open; DROP TABLE more; SELECT count(*) FROM paired; TABLE pg_stats")?;
    cluster.finish()
}
