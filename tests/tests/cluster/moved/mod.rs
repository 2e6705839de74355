//! Databases that were moved to another tablespace: as files, which keep their numbers. While the
//! library is not loaded, their keys stay where they were.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

mod leftovers;
mod numbers;

#[test]
fn a_database_that_was_moved_without_the_library_can_be_moved_back() -> Result<()> {
    moved_back(false)
}

/// The keys that are at the place already are in use again.
#[test]
fn a_database_that_was_moved_without_the_library_can_be_moved_back_with_it() -> Result<()> {
    moved_back(true)
}

fn move_app(cluster: &Cluster, space: &str) -> Result<()> {
    cluster.sql(&format!("ALTER DATABASE app SET TABLESPACE {space}"))
}

/// The same while the library is not loaded.
fn move_without(cluster: &Cluster, space: &str) -> Result<()> {
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    move_app(cluster, space)?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()
}

/// Files are copied then, and have another place than their keys.
fn moved_back(with_library: bool) -> Result<()> {
    let (cluster, _keys) = with_app_and(&["pagevault.keep_former_keys = 0"], &["space"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT 7 AS id")?;
    in_app("SELECT pagevault.encrypt('t'); CREATE TABLE empty (body text)")?;
    in_app("SELECT pagevault.encrypt('empty'); CREATE TABLE added (id int)")?;
    in_app("SELECT pagevault.encrypt('added')")?;
    move_without(&cluster, "space")?;
    cluster.sql("CREATE TABLE gone AS SELECT 1 AS id; SELECT pagevault.encrypt('gone')")?;
    let keys = || cluster.text("SELECT data_keys FROM pagevault.status");
    let before = keys()?;
    cluster.sql("DROP TABLE gone")?;
    cluster.eventually_that("the key of the dropped table is forgotten", || {
        cluster.sql("CHECKPOINT")?;
        ensure!(keys()? != before, "{before} keys");
        Ok(())
    })?;
    cluster.eventually_logs("may have been moved while pagevault was not loaded")?;
    // The keys that are gone are those of its pages.
    let mut client = cluster.client_to("app")?;
    let error = expect_error(&mut client, "SELECT * FROM pagevault.shred_former_files('app')")?;
    ensure!(error.message.contains("lacks its keys"), "{error}");
    ensure!(error.sqlstate == "55000", "{error}");
    drop(client);
    if with_library {
        in_app("INSERT INTO added VALUES (3)")?;
        move_app(&cluster, "pg_default")?;
    } else {
        move_without(&cluster, "pg_default")?;
    }
    let mut client = cluster.client_to("app")?;
    ensure!(text(&mut client, "SELECT id FROM t")? == "7", "the row is lost");
    if with_library {
        let added = "SELECT count(*) FILTER (WHERE relation = 'added'::regclass) FROM pagevault.drift(true)";
        ensure!(text(&mut client, added)? == "1", "what was added has no drift");
        ensure!(text(&mut client, "SELECT id FROM added")? == "3", "the row is lost");
        run_sql(&mut client, "INSERT INTO t SELECT 8")?;
        run_sql(&mut client, "CHECKPOINT")?;
    }
    // Its TOAST table was empty, too.
    let row =
        "INSERT INTO empty SELECT string_agg(md5(i::text), '') FROM generate_series(1, 999) i";
    run_sql(&mut client, row)?;
    for table in ["empty", "t"] {
        let sealed = format!("SELECT pagevault.is_encrypted('{table}')");
        ensure!(text(&mut client, &sealed)? == "t", "{table} has no key");
    }
    let plain = "SELECT string_agg(relation::text || ' is ' || actual, ', ')
        FROM pagevault.drift(true) WHERE relation::text ~ 'empty|toast'";
    ensure!(text(&mut client, &format!("SELECT coalesce(({plain}), '')"))?.is_empty(), "drift");
    drop(client);
    cluster.finish()
}

/// Both places have keys then, and those of the place that it comes back to are later.
#[test]
fn a_database_that_comes_back_to_later_keys_is_whole() -> Result<()> {
    let conf = ["pagevault.keep_former_keys = 0", "autovacuum = off"];
    let (cluster, _keys) = with_app_and(&conf, &["space"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT 7 AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    move_app(&cluster, "space")?;
    let rotate = "SET pagevault.rekey_threshold = 0; SELECT pagevault.rotate_data_key('t')";
    in_app(rotate)?;
    in_app("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    in_app("DELETE FROM t")?;
    in_app("VACUUM t")?;
    move_without(&cluster, "pg_default")?;
    let error = cluster.error("DROP TABLESPACE space")?;
    ensure!(error.message.contains("lacks its keys"), "{error}");
    in_app("INSERT INTO t SELECT generate_series(1, 1000)")?;
    // Makes keys of catalogs; what fails for want of keys must not be in the way.
    let _ = in_app("SET pagevault.default_encryption = on; CREATE TABLE n (id int)");
    move_app(&cluster, "space")?;
    let count = || text(&mut cluster.client_to("app")?, "SELECT count(*) FROM t");
    ensure!(count()? == "1000", "{} rows", count()?);
    for _ in 0..3 {
        cluster.sql("CHECKPOINT")?;
    }
    cluster.restart()?;
    ensure!(count()? == "1000", "{} rows", count()?);
    in_app(rotate)?;
    in_app("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    ensure!(count()? == "1000", "{} rows", count()?);
    cluster.finish()
}

/// Those of the place that it comes back to are the same, and not destroyed as former ones.
#[test]
fn the_keys_of_a_database_that_was_moved_are_kept() -> Result<()> {
    let (cluster, _keys) = with_app(&["space"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT 7 AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    move_app(&cluster, "space")?;
    let shred = "SELECT * FROM pagevault.shred_former_files('app')";
    let row = || text(&mut cluster.client_to("app")?, "SELECT id FROM t");
    for space in ["pg_default", "space"] {
        let error = expect_error(&mut cluster.client_to("app")?, shred)?;
        ensure!(error.message.contains("no keys of files that are gone"), "{error}");
        move_without(&cluster, space)?;
        ensure!(row()? == "7", "the row is lost");
    }
    cluster.finish()
}

/// Moved on from there, a database would get keys with numbers that it has elsewhere.
#[test]
fn a_database_without_its_keys_is_moved_back_only() -> Result<()> {
    let (cluster, _keys) = with_app(&["here", "there"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    let rotate = || -> Result<()> {
        in_app("SET pagevault.rekey_threshold = 0; SELECT pagevault.rotate_data_key('t')")?;
        in_app("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")
    };
    // Keys 1; 1 and 2; 1, 2 and 3.
    move_app(&cluster, "there")?;
    move_app(&cluster, "pg_default")?;
    rotate()?;
    move_app(&cluster, "here")?;
    rotate()?;
    move_without(&cluster, "there")?;
    let moving = "ALTER DATABASE app SET TABLESPACE pg_default";
    let copying = "CREATE DATABASE copied TEMPLATE app STRATEGY file_copy";
    for statement in [moving, copying] {
        let error = cluster.error(statement)?;
        ensure!(error.message.contains("lacks its keys"), "{statement}: {error}");
        ensure!(error.sqlstate == "55000", "{statement}: {error}");
    }
    let shred = "SELECT * FROM pagevault.shred_former_files('app')";
    let error = expect_error(&mut cluster.client_to("app")?, shred)?;
    ensure!(error.message.contains("lacks its keys"), "{error}");
    let error = cluster.error("DROP TABLESPACE here")?;
    ensure!(error.message.contains("lacks its keys"), "{error}");
    move_app(&cluster, "here")?;
    let count = text(&mut cluster.client_to("app")?, "SELECT count(*) FROM t")?;
    ensure!(count == "1000", "{count} rows");
    cluster.finish()
}

/// The same keys are recorded where the database was before.
#[test]
fn what_is_shredded_is_shredded_where_the_database_was_before() -> Result<()> {
    let (mut cluster, _keys) = with_app(&["here", "there"])?;
    cluster.allow_log("were destroyed");
    cluster.sql("CREATE DATABASE other")?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("SELECT pagevault.create_key_group('tenant')")?;
    in_app("SELECT pagevault.set_key_group_master_key('tenant', 'local', 'main')")?;
    in_app("CREATE SCHEMA tenant")?;
    in_app("SECURITY LABEL FOR pagevault ON SCHEMA tenant IS 'encrypted key_group=tenant'")?;
    for table in ["t", "decrypted", "kept", "tenant.t"] {
        in_app(&format!("CREATE TABLE {table} AS SELECT generate_series(1, 1000) AS id"))?;
        in_app(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    move_app(&cluster, "there")?;
    in_app("SELECT pagevault.decrypt('decrypted')")?;
    in_app("SELECT pagevault.wait_for_rekey('decrypted'::regclass, '60 s')")?;
    // Another key than that of before.
    in_app("SET pagevault.rekey_threshold = 0; SELECT pagevault.rotate_data_key('t')")?;
    in_app("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    let rows = column(
        &mut cluster.client_to("app")?,
        "SELECT file FROM pagevault.shred('public.t', 'public.t') WHERE item = 'destroyed' ORDER BY file",
    )?;
    ensure!(rows.len() == 2 && rows[0].starts_with("base/"), "{rows:?}");
    // Another tablespace, which has nothing of the database, is not mounted meanwhile.
    cluster.sql("CREATE TABLESPACE unrelated LOCATION ''")?;
    let unrelated = inside(&cluster, "unrelated")?;
    fs::remove_dir(&unrelated)?;
    let group =
        "SELECT detail FROM pagevault.shred_key_group('tenant', 'tenant') WHERE item = 'key group'";
    let ended = column(&mut cluster.client_to("app")?, group)?;
    ensure!(ended.len() == 1 && ended[0].contains("is destroyed"), "{ended:?}");
    fs::create_dir(&unrelated)?;
    cluster.installation().give(&unrelated)?;
    move_app(&cluster, "here")?;
    cluster.sql("DROP TABLESPACE there")?;
    let count = text(&mut cluster.client_to("app")?, "SELECT count(*) FROM kept, decrypted")?;
    ensure!(count == "1000000", "{count} rows");
    move_without(&cluster, "pg_default")?;
    let error = expect_error(&mut cluster.client_to("app")?, "SELECT * FROM t")?;
    ensure!(!error.message.is_empty(), "{error}");
    cluster.finish()
}

/// No database can have been moved to any of them.
#[test]
fn tablespaces_that_are_lost_together_can_be_dropped() -> Result<()> {
    let (mut cluster, _keys) = with_app(&[])?;
    cluster.allow_log("could not open directory");
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    let spaces = ["one", "two"].map(|name| (name, cluster.directory().join(name)));
    for (name, space) in &spaces {
        fs::create_dir(space)?;
        cluster.installation().give(space)?;
        cluster.sql(&format!("CREATE TABLESPACE {name} LOCATION '{}'", space.display()))?;
        in_app(&format!("CREATE TABLE {name} TABLESPACE {name} AS SELECT 7 AS id"))?;
        in_app(&format!("SELECT pagevault.encrypt('{name}')"))?;
    }
    cluster.stop(StopMode::Fast)?;
    for (_, space) in &spaces {
        fs::remove_dir_all(space)?;
    }
    cluster.start_server()?;
    for (name, _) in &spaces {
        in_app(&format!("DROP TABLE {name}"))?;
        cluster.sql(&format!("DROP TABLESPACE {name}"))?;
    }
    cluster.finish()
}

/// Where files are cannot be found out, or their place only seems to be there.
#[test]
fn keys_are_kept_if_it_is_not_known_where_files_are() -> Result<()> {
    let (mut cluster, _keys) = with_app(&["here", "there"])?;
    cluster.allow_log("could not read directory");
    cluster.allow_log("could not open directory");
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    move_app(&cluster, "here")?;
    in_app("CREATE TABLE t AS SELECT 7 AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    move_without(&cluster, "there")?;
    let spaces = cluster.data_directory().join("pg_tblspc");
    fs::set_permissions(&spaces, Permissions::from_mode(0o100))?;
    let shred = "SELECT * FROM pagevault.shred_former_files('app')";
    let error = expect_error(&mut cluster.client_to("app")?, shred)?;
    ensure!(error.message.contains("could not read directory"), "{error}");
    let error = cluster.error("DROP TABLESPACE here")?;
    ensure!(error.message.contains("lacks its keys"), "{error}");
    fs::set_permissions(&spaces, Permissions::from_mode(0o700))?;
    // Recovery makes such directories where a file system is not mounted.
    let app = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    let database = inside(&cluster, "there")?.join(app);
    let away = cluster.directory().join("away");
    fs::rename(&database, &away)?;
    fs::create_dir(&database)?;
    let error = cluster.error("DROP TABLESPACE here")?;
    ensure!(error.message.contains("does not exist"), "{error}");
    fs::remove_dir(&database)?;
    fs::rename(&away, &database)?;
    move_app(&cluster, "here")?;
    let row = text(&mut cluster.client_to("app")?, "SELECT id FROM t")?;
    ensure!(row == "7", "the row is lost");
    cluster.finish()
}

/// Redo of the backup may copy files from the former place.
#[test]
fn keys_of_former_places_are_kept_for_a_backup() -> Result<()> {
    let (cluster, _keys) = with_app(&["there"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT 7 AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    let mut backup = cluster.client()?;
    run_sql(&mut backup, "SELECT pg_backup_start('x', true)")?;
    move_app(&cluster, "there")?;
    in_app("VACUUM FULL t")?;
    let shred = "SELECT * FROM pagevault.shred_former_files('app')";
    let error = expect_error(&mut cluster.client_to("app")?, shred)?;
    ensure!(error.sqlstate == "55006", "{error}");
    run_sql(&mut backup, "SELECT * FROM pg_backup_stop()")?;
    drop(backup);
    in_app(shred)?;
    cluster.finish()
}

/// There is nothing to miss.
#[test]
fn a_decrypted_database_can_be_moved_on() -> Result<()> {
    let (cluster, _keys) = with_app(&["here", "there"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    in_app("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    in_app("SELECT pagevault.decrypt('t')")?;
    in_app("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    move_without(&cluster, "here")?;
    cluster.sql("CREATE DATABASE copied TEMPLATE app STRATEGY file_copy")?;
    move_app(&cluster, "there")?;
    let count = text(&mut cluster.client_to("copied")?, "SELECT count(*) FROM t")?;
    ensure!(count == "1000", "{count} rows");
    cluster.finish()
}

/// Redo makes changes at the former place again, and copies the files from there again.
#[test]
fn a_standby_replays_moves_after_former_files_were_shredded() -> Result<()> {
    let conf = ["pagevault.keep_former_keys = -1", "autovacuum = off"];
    let (mut cluster, _keys) = with_app_and(&conf, &[])?;
    cluster.allow_log("were destroyed");
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    for table in ["t", "dropped"] {
        in_app(&format!("CREATE TABLE {table} AS SELECT generate_series(1, 1000) AS id"))?;
        in_app(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    cluster.sql("CHECKPOINT")?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("were destroyed");
    standby.allow_log("found in pg_tblspc");
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    move_app(&cluster, "there")?;
    in_app("UPDATE t SET id = -id; DROP TABLE dropped")?;
    move_app(&cluster, "pg_default")?;
    let shred = "SELECT file FROM pagevault.shred_former_files('app') WHERE item = 'destroyed'";
    let files = column(&mut cluster.client_to("app")?, shred)?;
    ensure!(files.len() >= 2, "{files:?}");
    let again = expect_error(&mut cluster.client_to("app")?, shred)?;
    ensure!(again.message.contains("no keys of files that are gone"), "{again}");
    wait_for(&standby, &cluster)?;
    standby.crash()?;
    wait_for(&standby, &cluster)?;
    let sum = |server: &Cluster| text(&mut server.client_to("app")?, "SELECT sum(id) FROM t");
    ensure!(sum(&standby)? == sum(&cluster)?, "rows are lost");
    standby.promote()?;
    run_sql(&mut standby.client_to("app")?, "VACUUM FULL t")?;
    standby.finish()?;
    cluster.finish()
}

/// The server records the copying in WAL before it knows that the keys cannot be copied.
#[test]
fn a_move_that_is_refused_leaves_nothing_on_a_standby() -> Result<()> {
    let (mut cluster, keys) = with_app(&[])?;
    cluster.allow_log("server starts with encrypted relations locked");
    let own = with_own_key(&cluster)?;
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    own.take_away()?;
    cluster.restart()?;
    let error = cluster.error("ALTER DATABASE app SET TABLESPACE there")?;
    ensure!(error.message.contains("locked"), "{error}");
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    let app = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    for server in [&cluster, &standby] {
        ensure!(!inside(server, "there")?.join(&app).exists(), "files were copied");
    }
    // Whoever may not move it hears that.
    cluster.sql("CREATE ROLE somebody")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET ROLE somebody")?;
    let error = expect_error(&mut client, "ALTER DATABASE app SET TABLESPACE there")?;
    ensure!(error.sqlstate == "42501", "{error}");
    own.bring_back()?;
    drop(keys);
    standby.finish()?;
    cluster.finish()
}

/// The sampled values, too.
#[test]
fn statistics_are_shredded_where_the_database_was_before() -> Result<()> {
    let conf = ["pagevault.keep_former_keys = -1", "autovacuum = off"];
    let (mut cluster, _keys) = with_app_and(&conf, &["there"])?;
    cluster.allow_log("were destroyed");
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "CREATE TABLE t AS SELECT md5('a') AS name FROM generate_series(1, 999)")?;
    run_sql(&mut client, "SELECT pagevault.encrypt('t')")?;
    run_sql(&mut client, "ANALYZE t")?;
    drop(client);
    move_app(&cluster, "there")?;
    let shred = "SELECT item || ' ' || coalesce(file, '') FROM pagevault.shred('t', 'public.t')";
    let rows = column(&mut cluster.client_to("app")?, shred)?;
    let has = |item: &str| rows.iter().any(|row| row.starts_with(item));
    ensure!(has("statistics pg_tblspc") && !has("same key"), "{rows:?}");
    cluster.finish()
}

/// With its key locked, it cannot be told which raw copies a database has.
#[test]
fn raw_copies_of_a_locked_database_are_named() -> Result<()> {
    let (mut cluster, _keys) = with_app(&[])?;
    cluster.allow_log("server starts with encrypted relations locked");
    let own = with_own_key(&cluster)?;
    cluster.sql("CREATE DATABASE copied TEMPLATE app STRATEGY file_copy")?;
    own.take_away()?;
    cluster.restart()?;
    let shred = "SELECT object || ': ' || detail FROM pagevault.shred_database('app', 'app')
        WHERE item = 'same key'";
    let rows = column(&mut cluster.client()?, shred)?;
    ensure!(rows.len() == 1, "{rows:?}");
    ensure!(rows[0].starts_with("database \"copied\": 1 files may"), "{rows:?}");
    own.bring_back()?;
    cluster.finish()
}

/// Its key is not asked for while its directory is away.
#[test]
fn a_database_is_unlocked_when_its_tablespace_is_mounted() -> Result<()> {
    let (mut cluster, _keys) = with_app(&["there"])?;
    cluster.allow_log("could not open directory");
    cluster.allow_log("database \"app\" does not exist");
    let _own = with_own_key(&cluster)?;
    move_app(&cluster, "there")?;
    let app = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    let database = inside(&cluster, "there")?.join(app);
    let away = cluster.directory().join("away");
    cluster.stop(StopMode::Fast)?;
    fs::rename(&database, &away)?;
    cluster.start_server()?;
    fs::rename(&away, &database)?;
    cluster.eventually_that("the database is unlocked", || {
        let row = text(&mut cluster.client_to("app")?, "SELECT id FROM t")?;
        ensure!(row == "7", "{row}");
        Ok(())
    })?;
    cluster.finish()
}

/// The directory of this major version in a tablespace.
fn inside(cluster: &Cluster, tablespace: &str) -> Result<PathBuf> {
    let oid = "SELECT oid FROM pg_tablespace WHERE spcname =";
    let oid = cluster.text(&format!("{oid} '{tablespace}'"))?;
    let mut entries = fs::read_dir(cluster.data_directory().join("pg_tblspc").join(oid))?;
    Ok(entries.next().context("a directory of a version")??.path())
}

/// A cluster with these tablespaces, and a database `app`, which forgets nothing.
fn with_app(tablespaces: &[&str]) -> Result<(Cluster, KeyFile)> {
    let conf = [
        "pagevault.keep_former_keys = -1",
        "pagevault.data_catalog_encryption = off",
        "autovacuum = off",
    ];
    with_app_and(&conf, tablespaces)
}

/// Gives the database `app` a master key of its own, and an encrypted table with one row.
fn with_own_key(cluster: &Cluster) -> Result<KeyFile> {
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    let own = cluster.key_file("own", "main")?;
    in_app(&own.add_provider("own"))?;
    in_app("SELECT pagevault.set_database_master_key('own', 'main')")?;
    in_app("CREATE TABLE t AS SELECT 7 AS id")?;
    in_app("SELECT pagevault.encrypt('t')")?;
    Ok(own)
}

/// The same with these settings.
fn with_app_and(conf: &[&str], tablespaces: &[&str]) -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default().conf("allow_in_place_tablespaces = on");
    let settings = conf.iter().fold(settings, |settings, line| settings.conf(line));
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.without_witness("files are copied without WAL that pagevault sees");
    cluster.allow_log("lacks its keys");
    for tablespace in tablespaces {
        cluster.sql(&format!("CREATE TABLESPACE {tablespace} LOCATION ''"))?;
    }
    cluster.sql("CREATE DATABASE app")?;
    run_sql(&mut cluster.client_to("app")?, "CREATE EXTENSION pagevault")?;
    Ok((cluster, keys))
}
