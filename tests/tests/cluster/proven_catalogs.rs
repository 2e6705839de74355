//! `pagevault-keyring verify`: catalogs that are damaged themselves excuse no damage, and those
//! that a crash has left are not damaged.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings, StopMode};

const PAGE: usize = 8192;

fn flip(path: &Path, at: u64) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
}

/// A file is left over if no row of `pg_class` names it. The index says which pages have rows.
#[test]
fn a_damaged_pg_class_excuses_no_damage() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    cluster.sql("CREATE TABLE t AS SELECT i FROM generate_series(1, 5000) i")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let table = cluster.relation_path("t")?;
    let place = "SELECT (ctid::text::point)[0]::int FROM pg_class WHERE relname = 't'";
    let at = cluster.text(place)?.parse::<usize>()? * PAGE;
    let data = cluster.data_directory();
    let class = data.join(cluster.relation_path("pg_class")?);
    let index = data.join(cluster.relation_path("pg_class_oid_index")?);
    cluster.stop(StopMode::Fast)?;
    flip(&data.join(&table), 5000)?;
    let damage = format!("{} block 0: the checksum", table.display());
    let expected = [damage.as_str(), "Damage found: 1."];
    cluster.expect_verified(&data, 2, &expected)?;

    let (whole, entries) = (fs::read(&class)?, fs::read(&index)?);
    let mut lost = whole.clone();
    lost[at..at + PAGE].fill(0);
    for changed in [&whole[..at], &whole[..0], &lost] {
        fs::write(&class, changed)?;
        cluster.expect_verified(&data, 2, &expected)?;
    }
    // And the index as well.
    for at in (0..entries.len()).step_by(PAGE) {
        let mut lost = entries.clone();
        lost[at..at + PAGE].fill(0);
        for changed in [&entries[..at], &lost] {
            fs::write(&index, changed)?;
            cluster.expect_verified(&data, 2, &expected)?;
        }
    }
    fs::write(&index, &entries)?;
    fs::write(&class, &whole)?;
    flip(&data.join(&table), 5000)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "5000");
    cluster.finish()
}

/// Sessions add pages to a relation before WAL says so, several at a time, and a crash may come
/// before they are used (`RelationAddBlocks`, hio.c).
#[test]
fn pages_of_pg_class_that_were_never_used_are_no_doubt() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    let data = cluster.data_directory();
    let class = data.join(cluster.relation_path("pg_class")?);
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN")?;
    run_sql(&mut client, "CREATE TABLE lost AS SELECT i FROM generate_series(1, 5000) i")?;
    let lost = text(&mut client, "SELECT pg_relation_filepath('lost')")?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    cluster.stop(StopMode::Fast)?;
    flip(&data.join(&lost), 5000)?;
    let line = format!("left over    {lost}: belongs to no relation");
    let expected = [line.as_str(), "No damage found."];
    cluster.expect_verified(&data, 0, &expected)?;

    let mut bytes = fs::read(&class)?;
    let first = bytes.len();
    bytes.extend([0; 2 * PAGE]);
    fs::write(&class, &bytes)?;
    cluster.expect_verified(&data, 0, &expected)?;
    // The next rows are put into the last page.
    cluster.start_server()?;
    cluster.sql(
        "DO $$ BEGIN FOR i IN 1..300 LOOP EXECUTE format('CREATE TABLE t%s (i int)', i); END LOOP; END $$",
    )?;
    cluster.stop(StopMode::Fast)?;
    let bytes = fs::read(&class)?;
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    ensure!(is_zero(&bytes[first..first + PAGE]), "the page before is in use");
    ensure!(!is_zero(&bytes[first + PAGE..]), "the page behind it is not");
    cluster.expect_verified(&data, 0, &expected)?;

    flip(&data.join(&lost), 5000)?;
    cluster.start_server()?;
    cluster.finish()
}

/// Row versions with the same key share an entry of an index, when a page is full and a snapshot
/// keeps them all (`_bt_dedup_pass`, nbtdedup.c).
#[test]
fn entries_of_several_rows_are_no_doubt() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    let data = cluster.data_directory();
    cluster.sql("CREATE EXTENSION pageinspect; CREATE TABLE r (i int)")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN")?;
    run_sql(&mut client, "CREATE TABLE lost AS SELECT i FROM generate_series(1, 5000) i")?;
    let lost = text(&mut client, "SELECT pg_relation_filepath('lost')")?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    run_sql(&mut client, "SELECT 1")?;
    cluster.sql(
        "DO $$ BEGIN FOR i IN 1..1000 LOOP ALTER TABLE r RENAME TO s; ALTER TABLE s RENAME TO r; END LOOP; END $$",
    )?;
    let lists = "SELECT count(tids) FROM generate_series(1, pg_relation_size('pg_class_oid_index') / 8192 - 1) block,
        bt_page_items('pg_class_oid_index', block::int)";
    ensure!(cluster.text(lists)? != "0", "no entry has several rows");
    drop(client);
    cluster.stop(StopMode::Fast)?;
    flip(&data.join(&lost), 5000)?;
    let line = format!("left over    {lost}: belongs to no relation");
    cluster.expect_verified(&data, 0, &[line.as_str(), "No damage found."])?;
    flip(&data.join(&lost), 5000)?;
    cluster.start_server()?;
    cluster.finish()
}

/// No session starts without one. What interrupted commands leave of a database has none.
#[test]
fn maps_of_catalogs_must_be_there() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE DATABASE other")?;
    let database = cluster.text("SELECT oid FROM pg_database WHERE datname = 'other'")?;
    let (data, away) = (cluster.data_directory(), cluster.directory().join("away"));
    let other = data.join("base").join(&database);
    cluster.stop(StopMode::Fast)?;
    let lacks = |name: &str, code: i32, words: &[&str]| -> Result<()> {
        fs::rename(data.join(name), &away)?;
        cluster.expect_verified(&data, code, words)?;
        Ok(fs::rename(&away, data.join(name))?)
    };
    let in_database = format!("base/{database}/pg_filenode.map");
    for name in ["global/pg_filenode.map", &in_database] {
        let damage = format!("damaged      {name}: missing; a server needs it");
        lacks(name, 2, &[&damage, "Damage found: 1."])?;
    }

    // A copy that was interrupted (`copydir`, copydir.c), before recovery and after it.
    let copy = data.join("base/99999");
    fs::create_dir(&copy)?;
    for name in ["PG_VERSION", "1259"] {
        fs::copy(other.join(name), copy.join(name))?;
        cluster.installation().give(&copy.join(name))?;
    }
    cluster.installation().give(&copy)?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    cluster.start_server()?;
    cluster.kill()?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    let damage = format!("damaged      {in_database}: missing; a server needs it");
    lacks(&in_database, 2, &[&damage, "Damage found: 1."])?;

    // A removal that was interrupted (`dropdb`, dbcommands.c).
    cluster.start_server()?;
    let limit = |limit| {
        cluster
            .sql(&format!("UPDATE pg_database SET datconnlimit = {limit} WHERE datname = 'other'"))
    };
    limit(-2)?;
    cluster.stop(StopMode::Fast)?;
    lacks(&in_database, 0, &["No damage found."])?;
    cluster.start_server()?;
    limit(-1)?;
    fs::remove_dir_all(&copy)?;
    cluster.finish()
}

/// A cluster with the database `other`, and its directory.
fn with_other() -> Result<(Cluster, pagevault_tests::KeyFile, String)> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("not properly shut down");
    cluster.sql("CREATE DATABASE other")?;
    let directory = directory_of(&cluster, "other")?;
    Ok((cluster, keys, directory))
}

fn directory_of(cluster: &Cluster, name: &str) -> Result<String> {
    cluster.text(&format!("SELECT 'base/' || oid FROM pg_database WHERE datname = '{name}'"))
}

/// Nothing else tells that they are gone: no file is left in which anything could be wrong.
#[test]
fn databases_and_states_of_transactions_must_be_there() -> Result<()> {
    let (cluster, _keys, other) = with_other()?;
    let space = cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE apart TABLESPACE space")?;
    let link = "SELECT 'pg_tblspc/' || dattablespace FROM pg_database WHERE datname = 'apart'";
    let link = cluster.text(link)?;
    let (data, away) = (cluster.data_directory(), cluster.directory().join("away"));
    cluster.stop(StopMode::Fast)?;
    let lacks = |path: &Path, damages: &[String]| -> Result<()> {
        fs::rename(path, &away)?;
        let mut words: Vec<_> = damages.iter().map(|it| format!("damaged      {it}")).collect();
        words.push(format!("Damage found: {}.", damages.len()));
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        cluster.expect_verified(&data, 2, &words)?;
        Ok(fs::rename(&away, path)?)
    };
    let gone =
        |path: &str| format!("{path}: the directory is missing, and pg_database has its database");
    lacks(&data.join(&other), &[gone(&other)])?;
    for name in [format!("{other}/PG_VERSION"), "PG_VERSION".to_owned()] {
        lacks(&data.join(&name), &[format!("{name}: missing; a server needs it")])?;
    }
    lacks(&data.join("pg_xact/0000"), &["pg_xact/0000: missing".to_owned()])?;
    lacks(&data.join("pg_notify"), &["pg_notify: the directory is missing".to_owned()])?;
    let all = ["base/1", "base/4", "base/5", &other].map(gone);
    lacks(&data.join("base"), &[&["base: the directory".to_owned()][..], &all].concat())?;
    lacks(&data.join(&link), &[gone(&link)])?;
    let first = |path: &Path| Ok::<_, anyhow::Error>(fs::read_dir(path)?.next().transpose()?);
    let of_version = first(&space)?.context("the server's directory")?.path();
    lacks(&first(&of_version)?.context("a database")?.path(), &[link])?;

    // Before recovery, WAL has nothing about it.
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    cluster.kill()?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    lacks(&data.join(&other), &[gone(&other)])?;
    cluster.start_server()?;
    cluster.finish()
}

/// What WAL creates or removes need not be there yet, or any more.
#[test]
fn databases_that_recovery_makes_or_removes_need_not_be_there() -> Result<()> {
    let (cluster, _keys, other) = with_other()?;
    let lacks = |backup: Backup<'_>, directories: &[String]| -> Result<()> {
        let mut restored = backup.end()?;
        // Redo of `DROP DATABASE`.
        restored.allow_log("could not open directory");
        restored.allow_log("useless files may be left behind");
        let data = restored.data_directory();
        restored.expect_verified(&data, 0, &["No damage found."])?;
        for directory in directories {
            fs::remove_dir_all(data.join(directory))?;
        }
        restored.expect_verified(&data, 0, &["No damage found."])?;
        // Of WAL that is not there nothing is known.
        let (wal, away) = (data.join("pg_wal"), restored.directory().join("away"));
        fs::rename(&wal, &away)?;
        fs::create_dir(&wal)?;
        let unknown = directories.iter().map(|it| format!("unknown      {it}: the directory"));
        let unknown: Vec<_> = unknown.collect();
        let unknown: Vec<_> = unknown.iter().map(String::as_str).collect();
        restored.expect_verified(&data, 0, &unknown)?;
        fs::remove_dir(&wal)?;
        fs::rename(&away, &wal)?;
        restored.start_server()?;
        restored.finish()
    };
    let backup = Backup::begin(&cluster)?;
    for strategy in ["wal_log", "file_copy"] {
        cluster.sql(&format!("CREATE DATABASE {strategy} STRATEGY {strategy}"))?;
    }
    cluster.sql("CHECKPOINT")?;
    lacks(backup, &[directory_of(&cluster, "wal_log")?, directory_of(&cluster, "file_copy")?])?;
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("DROP DATABASE other")?;
    lacks(backup, &[other])?;
    cluster.finish()
}

/// Recovery would take the relation for an unlogged one, and empty it.
#[test]
fn an_init_fork_of_a_permanent_relation_is_damage() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("not properly shut down");
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    cluster.sql("INSERT INTO t (name) VALUES ('a')")?;
    cluster.sql("CREATE UNLOGGED TABLE u (id serial PRIMARY KEY, name text)")?;
    for table in ["t", "u"] {
        cluster.sql(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    cluster.sql("CHECKPOINT")?;
    let data = cluster.data_directory();
    let mut stray = Vec::new();
    for name in ["t", "t_pkey", "t_id_seq", "pg_class", "pg_database"] {
        stray.push((name, format!("{}_init", cluster.relation_path(name)?.display())));
    }
    let table = data.join(cluster.relation_path("t")?);
    for is_clean in [false, true] {
        if is_clean {
            cluster.start_server()?;
            cluster.stop(StopMode::Fast)?;
        } else {
            cluster.kill()?;
        }
        cluster.expect_verified(&data, 0, &["No damage found."])?;
        for (name, stray) in &stray {
            let whole = fs::read(&table)?;
            flip(&table, 8000)?;
            fs::write(data.join(stray), "")?;
            let damage = format!("damaged      {stray}: an init fork");
            cluster
                .expect_verified(&data, 2, &[&damage, " block 0: ", "Damage found: 2."])
                .with_context(|| format!("{name}, {is_clean}"))?;
            fs::remove_file(data.join(stray))?;
            fs::write(&table, &whole)?;
        }
    }
    cluster.start_server()?;
    ensure!(cluster.text("SELECT name FROM t")? == "a");
    cluster.finish()
}
