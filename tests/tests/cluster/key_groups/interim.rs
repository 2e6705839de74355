//! Recovery while the key of a group is locked: pages are written under interim keys.

use std::fs;

use pagevault_cipher::DataKeyVersion;
use pagevault_tests::backup::Backup;
use pagevault_tests::datafile::{DataFile, PageState};

use super::*;

mod absent;
mod copies;
mod destroyed;
mod left;
mod older;
mod others;
mod standbys;

/// More than `shared_buffers`, so that redo writes pages while it runs.
const CHANGES: &str = "INSERT INTO acme.t (name) SELECT name || 'late' FROM generate_series(1, 20), (SELECT name FROM acme.t LIMIT 300) x;
    UPDATE acme.t SET name = 'changed ' || name WHERE id % 7 = 0;
    DELETE FROM acme.t WHERE id % 11 = 0;
    CREATE TABLE acme.born AS SELECT * FROM acme.t; CREATE INDEX ON acme.born USING hash (id);
    CREATE INDEX ON acme.born USING gin (string_to_array(name, 'a'));
    VACUUM acme.t;
    INSERT INTO umbrella.t (name) SELECT 'late'; INSERT INTO public.t (name) SELECT 'late'";

/// By heap and by index.
const LOOKS: [&str; 3] = [
    "SELECT count(*) || ' ' || sum(hashtext(name)) FROM acme.t",
    "SET enable_seqscan = off; SET enable_bitmapscan = off; SELECT count(id) || ' ' || sum(id) FROM acme.t WHERE id > 0",
    "SELECT count(*) || ' ' || sum(hashtext(name)) FROM acme.born",
];

fn looks(cluster: &Cluster) -> Result<Vec<String>> {
    LOOKS.iter().map(|query| cluster.text(query)).collect()
}

fn changed(settings: &Settings) -> Result<(Cluster, [KeyFile; 3], Vec<String>)> {
    let settings = settings.clone().conf("shared_buffers = 1MB");
    let (mut cluster, keys) = with_groups(&settings.conf("autovacuum = off"))?;
    cluster.allow_log("key group");
    tables(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    for change in CHANGES.split(';') {
        cluster.sql(change)?;
    }
    let all = looks(&cluster)?;
    Ok((cluster, keys, all))
}

/// Files of the group with pages under interim keys.
fn interim_files(cluster: &Cluster) -> Result<Vec<DataFile>> {
    let mut files = cluster.family_files("acme.t")?;
    files.extend(cluster.family_files("acme.born")?);
    let mut found = Vec::new();
    for file in files {
        if file.states()?.iter().any(is_interim) {
            found.push(file);
        }
    }
    Ok(found)
}

fn is_interim(state: &PageState) -> bool {
    let last = DataKeyVersion::LAST_OF_FILE.get();
    matches!(state, PageState::Sealed(version) if *version > last)
}

fn are_locked(cluster: &Cluster, all: &[String; 2]) -> Result<()> {
    is_locked(cluster, "acme.t", "acme")?;
    is_locked(cluster, "acme.born", "acme")?;
    ensure!(others(cluster)? == *all, "{:?}, not {all:?}", others(cluster)?);
    Ok(())
}

fn others(cluster: &Cluster) -> Result<[String; 2]> {
    Ok([count(cluster, "umbrella.t")?, count(cluster, "public.t")?])
}

/// The key is back, and nothing is lost.
fn is_whole(cluster: &Cluster, all: &[String]) -> Result<()> {
    let found = looks(cluster)?;
    ensure!(found == all, "{found:?}, not {all:?}");
    Ok(())
}

/// Waits until nothing is under interim keys any more, and no file is marked.
fn rekeyed(cluster: &Cluster) -> Result<()> {
    no_marks(cluster)?;
    ensure!(interim_files(cluster)?.is_empty());
    Ok(())
}

#[test]
fn a_crash_while_the_provider_of_a_group_is_away() -> Result<()> {
    let (cluster, keys, all) = changed(&Settings::default())?;
    let others = others(&cluster)?;
    keys[1].take_away()?;
    cluster.kill()?;
    for _ in 0..2 {
        cluster.start_server()?;
        are_locked(&cluster, &others)?;
        ensure!(!interim_files(&cluster)?.is_empty(), "nothing is under an interim key");
        for file in cluster.family_files("acme.t")? {
            ensure!(!file.contains_text("changed")?, "{}", file.path.display());
        }
        for refused in [
            "VACUUM acme.t",
            "ANALYZE acme.t",
            "REINDEX TABLE acme.t",
            "INSERT INTO acme.t (name) VALUES ('x')",
            "SELECT id FROM acme.t WHERE id = 1",
        ] {
            let error = cluster.error(refused)?;
            ensure!(error.sqlstate == "55000", "{refused}: {error}");
        }
        cluster.sql("CHECKPOINT")?;
        cluster.kill()?;
    }
    cluster.start_server()?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    is_whole(&cluster, &all)?;
    rekeyed(&cluster)?;
    is_whole(&cluster, &all)?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// Killed in recovery, wherever that is: when it marks a file, when all WAL is replayed, and when
/// files are rekeyed. Programs read such pages as well.
#[test]
fn it_is_killed_at_each_step() -> Result<()> {
    let (cluster, keys, all) = changed(&Settings::default())?;
    let others = others(&cluster)?;
    keys[1].take_away()?;
    cluster.kill()?;
    for point in ["interim.marked", "interim.redone"] {
        cluster.stop_at(point)?;
        std::thread::scope(|scope| {
            let start = scope.spawn(|| cluster.start_server());
            cluster.stopped_at(point)?;
            cluster.kill()?;
            ensure!(start.join().is_ok_and(|started| started.is_err()), "{point}: it has started");
            anyhow::Ok(())
        })?;
        cluster.resume();
    }
    cluster.start_server()?;
    are_locked(&cluster, &others)?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    keys[1].bring_back()?;
    cluster.expect_verified(&cluster.data_directory(), 0, &["No damage found."])?;
    cluster.stop_at("rekey.batch_done")?;
    cluster.start_server()?;
    is_whole(&cluster, &all)?;
    cluster.stopped_at("rekey.batch_done")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.resume();
    cluster.start_server()?;
    are_locked(&cluster, &others)?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    is_whole(&cluster, &all)?;
    rekeyed(&cluster)?;
    cluster.crash()?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// Rows that leave the group by decryption have its key still, and the file none.
#[test]
fn a_crash_during_a_decryption() -> Result<()> {
    let (cluster, keys, all) = changed(&Settings::default())?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop_at("rekey.batch_done")?;
    cluster.sql("SELECT pagevault.decrypt('acme.t')")?;
    cluster.stopped_at("rekey.batch_done")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.resume();
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    is_whole(&cluster, &all)?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// A process in single-user mode reads for a user.
#[test]
fn single_user_mode_is_refused() -> Result<()> {
    let (cluster, keys, _) = changed(&Settings::default())?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.stop(StopMode::Fast)?;
    let mut server = cluster.program("postgres");
    server.arg("--single").arg("-D").arg(cluster.data_directory()).arg("postgres");
    let script = cluster.script("query", "echo 'SELECT name FROM acme.t' | exec \"$@\"")?;
    let mut command = cluster.installation().command(&script);
    command.arg(server.get_program()).args(server.get_args());
    let output = command.output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(said.contains("locked") && !said.contains("late"), "{said}");
    keys[1].bring_back()?;
    cluster.start_server()?;
    cluster.finish()
}

/// WAL has an image of each page of a visibility map that recovery has emptied, for incremental
/// backups.
#[test]
fn emptied_maps_are_in_wal() -> Result<()> {
    let (cluster, keys, _) = changed(&Settings::default())?;
    cluster.sql("VACUUM acme.t")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("UPDATE acme.t SET name = 'x' || name WHERE id % 3 = 0")?;
    let before = cluster.text("SELECT pg_current_wal_lsn()")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.eventually_that("images of the map", || {
        let marks = fs::read_dir(cluster.data_directory().join("pagevault/interim"))?;
        let mut names = marks.filter_map(|mark| mark.ok()?.file_name().into_string().ok());
        ensure!(!names.any(|name| name.ends_with("_vm")), "a map is marked");
        Ok(())
    })?;
    // Where records name the page of the map, WAL has an image of that, and nothing was emptied.
    let files = cluster.files("acme.t")?;
    let map = files.iter().find(|file| file.path.to_string_lossy().ends_with("_vm"));
    let states = map.map(DataFile::states).transpose()?.unwrap_or_default();
    if states.iter().all(|state| *state != PageState::Zero) {
        keys[1].bring_back()?;
        cluster.sql("SELECT pagevault.unlock()")?;
        return cluster.finish();
    }
    let end = cluster.text("SELECT pg_current_wal_flush_lsn()")?;
    let mut dump = cluster.program("pg_waldump");
    dump.arg("--path").arg(cluster.data_directory().join("pg_wal"));
    dump.args(["--start", &before, "--end", &end, "--rmgr", "XLOG"]);
    let output = String::from_utf8_lossy(&dump.output()?.stdout).into_owned();
    ensure!(output.contains("FPI") && output.contains("fork vm"), "{output}");
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.finish()
}

/// A backup of a server with interim pages, which are rekeyed before it ends.
#[test]
fn a_backup_with_interim_pages() -> Result<()> {
    for files_first in [true, false] {
        let (cluster, keys, all) = changed(&Settings::default())?;
        let others = others(&cluster)?;
        keys[1].take_away()?;
        cluster.kill()?;
        cluster.start_server()?;
        let backup = match files_first {
            true => Backup::begin_with_files(&cluster)?,
            false => Backup::begin(&cluster)?,
        };
        keys[1].bring_back()?;
        cluster.sql("SELECT pagevault.unlock()")?;
        rekeyed(&cluster)?;
        is_whole(&cluster, &all)?;
        let mut restored = backup.end()?;
        restored.allow_log("key group");
        keys[1].take_away()?;
        restored.start_server()?;
        are_locked(&restored, &others)?;
        keys[1].bring_back()?;
        restored.sql("SELECT pagevault.unlock()")?;
        is_whole(&restored, &all)?;
        restored.finish()?;
        cluster.finish()?;
    }
    Ok(())
}

/// Without checksums and `wal_log_hints`, WAL has no image of pages that VACUUM marks. Recovery
/// ends there, says why, and loses nothing.
#[test]
fn recovery_ends_at_a_page_of_which_wal_has_no_image() -> Result<()> {
    let settings = Settings::default().without_checksums().conf("autovacuum = off");
    let (mut cluster, keys) = with_groups(&settings)?;
    for text in ["key group", "FATAL", "startup process"] {
        cluster.allow_log(text);
    }
    tables(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("VACUUM acme.t")?;
    // It flushes no WAL by itself.
    cluster.sql("INSERT INTO public.t (name) VALUES ('late')")?;
    let all = count(&cluster, "acme.t")?;
    cluster.kill()?;
    keys[1].take_away()?;
    ensure!(cluster.start_server().is_err(), "it has started without the key");
    ensure!(cluster.log().contains("key group \"acme\""), "the log does not name the group");
    ensure!(cluster.log().contains("no image"), "the log does not say why");
    keys[1].bring_back()?;
    cluster.start_server()?;
    ensure!(count(&cluster, "acme.t")? == all);
    cluster.finish()
}
