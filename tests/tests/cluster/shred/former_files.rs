//! Keys of files that no longer exist, and reuse of their relfilenumbers.

use std::os::unix::fs::PermissionsExt;

use pagevault_tests::DataFile;

use super::*;

/// A relfilenumber that is used again continues after the destroyed versions.
#[test]
fn a_reused_file_number_is_not_destroyed() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    let numbers = "SELECT string_agg(pg_relation_filenode(n)::text, ',') FROM unnest(ARRAY['t', 't_pkey', 't_name']::regclass[]) n";
    let numbers = cluster.text(numbers)?;
    cluster.sql(SHRED)?;
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.sql("VACUUM pg_class")?; // dead rows count as well
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    // OIDs wrap around.
    let first = numbers.split(',').next().unwrap_or_default();
    let mut reset = cluster.installation().command("pg_resetwal");
    let output = reset.args(["-o", first, "-D"]).arg(cluster.data_directory()).output()?;
    ensure!(output.status.success(), "{output:?}");
    cluster.start_server()?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         DO $$ BEGIN FOR i IN 1..20 LOOP
             EXECUTE format('CREATE TABLE again_%s AS SELECT 1 AS id', i);
         END LOOP; END $$",
    )?;
    cluster.sql("CHECKPOINT")?;
    let query = format!(
        "SELECT relname FROM pg_class WHERE relname LIKE 'again%' AND relfilenode IN ({numbers})"
    );
    let again = column(&mut cluster.client()?, &query)?;
    ensure!(!again.is_empty(), "no file number was used again");
    for name in &again {
        let states = cluster.files(name)?.remove(0).states()?;
        ensure!(states == [PageState::Sealed(2)], "{name}: {states:?}");
    }
    cluster.crash()?;
    cluster.restart()?;
    for name in &again {
        ensure!(cluster.text(&format!("SELECT id FROM {name}"))? == "1", "the new table");
    }
    cluster.without_witness("pg_resetwal begins other WAL");
    cluster.finish()
}

const FORMER: &str = "SELECT * FROM pagevault.shred_former_files(confirm => 'postgres')";

/// TRUNCATE, VACUUM FULL and DROP leave keys of files that exist only in backups.
#[test]
fn former_files_lose_their_keys() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("CHECKPOINT")?;
    let mut old = wrapped_keys(&cluster, "postgres", "t")?;
    old.extend(wrapped_keys(&cluster, "postgres", "u")?);
    let error = cluster.error("SELECT * FROM pagevault.shred_former_files('other')")?;
    ensure!(error.sqlstate == "22023", "{error}");
    cluster.sql("CREATE TABLE gone AS SELECT * FROM u")?;
    for statement in ["VACUUM FULL u", "TRUNCATE t", "DROP TABLE gone"] {
        cluster.sql(statement)?;
    }
    let before = cluster.text(U)?;
    ensure!(
        old.len() == 2 && old.iter().all(|key| holds(&keystore(&cluster).unwrap_or_default(), key))
    );
    let items = column(&mut cluster.client()?, &FORMER.replace('*', "item"))?;
    // The table with TOAST and three indexes, the other table with its index.
    ensure!(items.iter().filter(|item| *item == "destroyed").count() >= 6, "{items:?}");
    ensure!(!items.iter().any(|item| item == "next step" || item == "same key"), "{items:?}");
    let kept = keystore(&cluster)?;
    ensure!(!old.iter().any(|key| holds(&kept, key)), "the keystore holds a key of a former file");
    let error = cluster.error(FORMER)?;
    ensure!(
        error.sqlstate == "55000" && error.message.contains("no keys of files that are gone"),
        "{error}"
    );
    for _ in 0..2 {
        ensure!(cluster.text(U)? == before, "another table");
        cluster.sql("INSERT INTO t (name) VALUES ('amsel')")?;
        cluster.crash()?;
    }
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2", "rows are lost");
    cluster.finish()
}

/// A key is created just before its file.
#[test]
fn a_file_about_to_be_created_counts_as_existing() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("TRUNCATE u")?;
    cluster.stop_at("storage.decided 0")?;
    let mut maker = cluster.client()?;
    let maker = std::thread::spawn(move || {
        run_sql(
            &mut maker,
            "SET pagevault.default_encryption = on; CREATE TABLE n AS SELECT 17 AS id",
        )
    });
    cluster.stopped_at("storage.decided 0")?;
    let mut shredder = cluster.client()?;
    let shredder = std::thread::spawn(move || run_sql(&mut shredder, FORMER));
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'Extension' AND query LIKE '%shred_former_files%'
            AND backend_type = 'client backend'",
        "1",
    )?;
    cluster.resume();
    maker.join().map_err(|_| anyhow::anyhow!("panic"))??;
    shredder.join().map_err(|_| anyhow::anyhow!("panic"))??;
    ensure!(cluster.text("SELECT id FROM n")? == "17");
    cluster.crash()?;
    ensure!(cluster.text("SELECT id FROM n")? == "17", "after a crash");
    cluster.finish()
}

/// A file in an inaccessible directory counts as existing.
#[test]
fn inaccessible_files_count_as_existing() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.make_tablespace("space")?;
    cluster.sql(
        "SET pagevault.default_encryption = on; CREATE TABLE far TABLESPACE space AS SELECT 17 AS id;
         TRUNCATE u; CHECKPOINT",
    )?;
    let path = cluster.text("SELECT pg_relation_filepath('far')")?;
    let path = cluster.data_directory().join(path);
    let directory = path.parent().context("a directory")?;
    let mode = |mode| std::fs::set_permissions(directory, PermissionsExt::from_mode(mode));
    mode(0)?;
    let error = cluster.error(FORMER);
    mode(0o700)?;
    ensure!(cluster.text("SELECT id FROM far")? == "17");
    let error = error?;
    ensure!(error.sqlstate == "58030" && error.text().contains("Permission denied"), "{error}");
    cluster.sql(FORMER)?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT id FROM far")? == "17");
    cluster.finish()
}

/// PostgreSQL leaves the files of a transaction that a crash interrupted; they may contain copies
/// of rows.
#[test]
fn files_left_by_a_crash_are_reported() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    let mut copier = cluster.client()?;
    run_sql(
        &mut copier,
        "SET pagevault.default_encryption = on; BEGIN; CREATE TABLE copy AS SELECT * FROM t",
    )?;
    let path = text(&mut copier, "SELECT pg_relation_filepath('copy')")?;
    let left = "SELECT string_agg(file, ' ') FROM pagevault.shred('t', 'public.t') WHERE item = 'leftover file'";
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    let states = DataFile::find(&cluster.data_directory().join(&path))?.remove(0).states()?;
    ensure!(states.contains(&PageState::Sealed(1)), "{states:?}");
    let named = cluster.text(left)?;
    ensure!(named.split(' ').any(|file| file == path), "{path} is not in {named:?}");
    cluster.stop(StopMode::Fast)?;
    for file in named.split(' ') {
        std::fs::remove_file(cluster.data_directory().join(file))?;
    }
    cluster.start_server()?;
    cluster.sql(FORMER)?;
    ensure!(cluster.text(left)?.is_empty(), "{}", cluster.text(left)?);
    cluster.finish()
}

/// PostgreSQL keeps the first file of what was dropped until the next checkpoint, without a page.
#[test]
fn files_without_pages_are_not_reported() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("CREATE TABLE gone AS SELECT * FROM t; TRUNCATE gone; DROP TABLE gone")?;
    let left = "SELECT count(*) FROM pagevault.shred('t', 'public.t') WHERE item = 'leftover file'";
    ensure!(cluster.text(left)? == "0", "a file without pages is reported");
    cluster.finish()
}

/// Those that were rewritten since the last checkpoint are gone as well, but not those that are
/// being made.
#[test]
fn former_files_are_counted_before_the_next_checkpoint() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("CHECKPOINT")?;
    let mut maker = cluster.client()?;
    run_sql(
        &mut maker,
        "SET pagevault.default_encryption = on; BEGIN; CREATE TABLE n (id int, name text)",
    )?;
    cluster.sql("VACUUM FULL t")?;
    let number = "SELECT coalesce(max(substring(detail FROM 'keys of ([0-9]+) files')), '0')
        FROM pagevault.shred('t', 'public.t') WHERE item = 'former files'";
    let before = cluster.text(number)?;
    cluster.sql("CHECKPOINT")?;
    let after = cluster.text(number)?;
    ensure!(before == after && before == "5", "{before} files, then {after}");
    run_sql(&mut maker, "COMMIT")?;
    cluster.finish()
}

/// Who has locked a catalog may wait for the keystore: shredding must not wait for it while it
/// keeps the keystore locked, for no detector would see that.
#[test]
fn a_locked_catalog_is_not_waited_for_with_the_keystore_locked() -> Result<()> {
    let settings = Settings::default()
        .conf("allow_in_place_tablespaces = on")
        .conf("pagevault.keep_former_keys = -1")
        .conf("autovacuum = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    cluster.sql("CREATE DATABASE app")?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "CREATE EXTENSION pagevault")?;
    for table in ["t", "dropped"] {
        run_sql(&mut client, &format!("CREATE TABLE {table} AS SELECT md5('a') AS name"))?;
        run_sql(&mut client, &format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    run_sql(&mut client, "ANALYZE")?;
    drop(client);
    cluster.sql("ALTER DATABASE app SET TABLESPACE there")?;
    let mut locking = cluster.client_to("app")?;
    run_sql(&mut locking, "DROP TABLE dropped")?;
    cluster.stop_at("remnants.cleared")?;
    let mut shredding = cluster.client_to("app")?;
    let shredding = std::thread::spawn(move || {
        run_sql(&mut shredding, "SELECT * FROM pagevault.shred_former_files('app')")
    });
    cluster.stopped_at("remnants.cleared")?;
    run_sql(&mut locking, "BEGIN; LOCK TABLE pg_class")?;
    cluster.resume();
    cluster.eventually(
        "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 1259",
        "t",
    )?;
    run_sql(&mut locking, "SET pagevault.default_encryption = on; CREATE TABLE n (id int)")?;
    run_sql(&mut locking, "COMMIT")?;
    shredding.join().map_err(|_| anyhow::anyhow!("panic"))??;
    cluster.finish()
}
