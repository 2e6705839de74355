//! Pages under interim keys in a tablespace that is not mounted.

use std::os::unix::fs::PermissionsExt;

use pagevault_tests::Standby;

use super::left::{SHRED, allow_what_is_said, bodies, bodies_of, shred_stops};
use super::*;

/// A tablespace that is not mounted delays no job for files that are there.
#[test]
fn an_unmounted_tablespace_holds_up_nobody_else() -> Result<()> {
    let (mut cluster, keys, all) = changed(&Settings::default())?;
    for text in ["key group", "tablespace", "under an interim key"] {
        cluster.allow_log(text);
    }
    let place = cluster.make_tablespace("elsewhere")?;
    cluster.sql(
        "CREATE TABLE umbrella.elsewhere (id int) TABLESPACE elsewhere;
         INSERT INTO umbrella.elsewhere VALUES (7); CHECKPOINT;
         UPDATE acme.t SET name = name",
    )?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    ensure!(bodies(&cluster)? > 0, "nothing is under an interim key");
    cluster.stop(StopMode::Fast)?;
    // As of a server that was restored: other files may have such pages as well.
    let any = cluster.data_directory().join("pagevault/interim/any");
    fs::write(&any, "")?;
    cluster.installation().give(&any)?;
    let away = place.with_extension("away");
    fs::rename(&place, &away)?;
    cluster.start_server()?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.eventually(
        "SELECT count(*) > 0 FROM pagevault.rekey_jobs
          WHERE relation = 'acme.t'::regclass AND state = 'done'",
        "t",
    )?;
    cluster.eventually_logs("may have pages under an interim key")?;
    ensure!(any.exists(), "it was not looked at all files");
    cluster.stop(StopMode::Fast)?;
    fs::rename(&away, &place)?;
    cluster.start_server()?;
    rekeyed(&cluster)?;
    is_whole(&cluster, &all)?;
    ensure!(cluster.text("SELECT id FROM umbrella.elsewhere")? == "7", "another tablespace");
    cluster.finish()
}

/// Nor does a group end while the tablespace of such a file is not mounted.
#[test]
fn a_group_with_pages_in_an_unmounted_tablespace_does_not_end() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    allow_what_is_said(&mut cluster);
    let place = cluster.make_tablespace("elsewhere")?;
    cluster.sql("ALTER TABLE acme.t SET TABLESPACE elsewhere; CHECKPOINT")?;
    cluster.sql("UPDATE acme.t SET name = name")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    let file = cluster.data_directory().join(cluster.relation_path("acme.t")?);
    let file = DataFile::find(&file)?.swap_remove(0);
    ensure!(bodies_of(&file)? > 0, "nothing is under an interim key");
    let allow = |mode| fs::set_permissions(&file.path, fs::Permissions::from_mode(mode));
    shred_stops(&cluster, || Ok(allow(0o400)?))?;
    allow(0o600)?;
    let away = place.with_extension("away");
    fs::rename(&place, &away)?;
    let error = cluster.error(SHRED)?;
    ensure!(error.hint.contains("Mount it") && error.sqlstate == "55000", "{error}");
    fs::rename(&away, &place)?;
    ensure!(bodies_of(&file)? > 0, "the test shows nothing");
    cluster.sql(SHRED)?;
    ensure!(bodies_of(&file)? == 0, "{} pages are left", bodies_of(&file)?);
    no_marks(&cluster)?;
    cluster.finish()
}

/// But one that was in no group, and was shredded, holds up no group, even where nobody knows that.
#[test]
fn a_shredded_relation_in_an_unmounted_tablespace_holds_up_no_group() -> Result<()> {
    let (mut cluster, _keys, _) = changed(&Settings::default())?;
    for text in ["were destroyed", "tablespace", "under an interim key"] {
        cluster.allow_log(text);
    }
    let place = cluster.make_tablespace("elsewhere")?;
    cluster.sql("CREATE TABLE other TABLESPACE elsewhere AS SELECT 7 AS id")?;
    cluster.sql("SELECT pagevault.encrypt('other')")?;
    cluster.sql("SELECT * FROM pagevault.shred('other', 'public.other')")?;
    cluster.stop(StopMode::Fast)?;
    let any = cluster.data_directory().join("pagevault/interim/any");
    fs::create_dir_all(any.with_file_name(""))?;
    cluster.installation().give(&any.with_file_name(""))?;
    fs::write(&any, "")?;
    cluster.installation().give(&any)?;
    let away = place.with_extension("away");
    fs::rename(&place, &away)?;
    cluster.start_server()?;
    cluster.sql(SHRED)?;
    cluster.stop(StopMode::Fast)?;
    fs::rename(&away, &place)?;
    cluster.start_server()?;
    cluster.finish()
}

/// A standby replays the end of a group while a tablespace is not mounted. When it is, pages are
/// overwritten: by a standby that is restarted, or by one that was promoted meanwhile.
#[test]
fn a_standby_with_an_unmounted_tablespace_overwrites_them_later() -> Result<()> {
    for is_promoted in [false, true] {
        let (mut cluster, keys, _) = changed(&Settings::default())?;
        cluster.allow_log("key group");
        let place = cluster.make_tablespace("elsewhere")?;
        cluster.sql("ALTER TABLE acme.t SET TABLESPACE elsewhere")?;
        let its = cluster.directory().join("of-standby");
        let mapping = format!("--tablespace-mapping={}={}", place.display(), its.display());
        let mut standby = Standby::default().backup(&mapping).start(&cluster)?;
        allow_what_is_said(&mut standby);
        standby.allow_log("under an interim key");
        standby.stop(StopMode::Fast)?;
        keys[1].take_away()?;
        // Only a server that may have pages in files that are not marked looks at all files.
        let any = standby.data_directory().join("pagevault/interim/any");
        if !is_promoted {
            fs::remove_file(&any)?;
        }
        standby.start_server()?;
        cluster.sql("UPDATE acme.t SET name = name")?;
        wait_for(&standby, &cluster)?;
        standby.sql("CHECKPOINT")?;
        let file = standby.data_directory().join(cluster.relation_path("acme.t")?);
        let file = DataFile::find(&file)?.swap_remove(0);
        ensure!(bodies_of(&file)? > 0, "nothing is under an interim key");
        let away = its.with_extension("away");
        fs::rename(&its, &away)?;
        cluster.sql(SHRED)?;
        wait_for(&standby, &cluster)?;
        standby.sql("CHECKPOINT")?;
        if is_promoted {
            // As after pg_rewind, which has no marks of this server.
            for mark in fs::read_dir(any.with_file_name(""))? {
                let mark = mark?.path();
                if mark != any {
                    fs::remove_file(mark)?;
                }
            }
            standby.promote()?;
            standby.eventually_logs("may have pages under an interim key")?;
        }
        fs::rename(&away, &its)?;
        ensure!(bodies_of(&file)? > 0, "the test shows nothing");
        if !is_promoted {
            // One that cannot be written does not keep the server from starting.
            fs::set_permissions(&file.path, fs::Permissions::from_mode(0o400))?;
            standby.restart()?;
            fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600))?;
            standby.restart()?;
        }
        standby.eventually_that("they are overwritten", || {
            let left = bodies_of(&file)?;
            ensure!(left == 0, "{left} pages are left");
            Ok(())
        })?;
        standby.finish()?;
        cluster.finish()?;
    }
    Ok(())
}
