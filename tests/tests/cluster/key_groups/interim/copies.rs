//! Pages under interim keys in other databases: copied by the server, or by somebody else.

use super::*;

const COPY: &str = "CREATE DATABASE copied TEMPLATE postgres STRATEGY file_copy";

/// All rows, in a database that is a copy.
fn are_in(cluster: &Cluster, database: &str, all: &[String]) -> Result<()> {
    let mut client = cluster.client_to(database)?;
    for (query, expected) in LOOKS.iter().zip(all) {
        let found = text(&mut client, query)?;
        ensure!(found == *expected, "{query}: {found}, not {expected}");
    }
    Ok(())
}

/// The main fork of `acme.t` in a database.
fn table_in(cluster: &Cluster, database: &str) -> Result<DataFile> {
    let path = text(&mut cluster.client_to(database)?, "SELECT pg_relation_filepath('acme.t')")?;
    Ok(DataFile::find(&cluster.data_directory().join(path))?.swap_remove(0))
}

/// A relation with the same number and the same version of its data key, but another data key.
/// Neither while its namesake has interim pages, nor later.
#[test]
fn an_interim_page_is_refused_in_another_database() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    cluster.allow_log("is not as it was encrypted");
    cluster.without_witness("pages are put into another file");
    let create = "CREATE DATABASE other TEMPLATE postgres STRATEGY wal_log";
    run_sql(&mut cluster.client_to("template1")?, create)?;
    let (file, other) = (table_in(&cluster, "postgres")?, table_in(&cluster, "other")?);
    ensure!(file.path.file_name() == other.path.file_name(), "they have different numbers");
    let own = count(&cluster, "acme.t")?;
    let version =
        "SELECT data_key_version FROM pagevault.relations WHERE relation = 'acme.t'::regclass";
    let wanted = cluster.text(version)?;
    let mut client = cluster.client_to("other")?;
    while text(&mut client, version)? != wanted {
        run_sql(&mut client, "SELECT pagevault.rotate_data_key('acme.t')")?;
        run_sql(&mut client, "SELECT pagevault.wait_for_rekey('acme.t'::regclass, '60s')")?;
    }
    drop(client);
    cluster.sql("CHECKPOINT")?;
    cluster.sql("UPDATE acme.t SET name = 'a secret of postgres ' || name")?;
    let all = looks(&cluster)?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    let states = file.states()?;
    let pages = file.states()?.len().min(other.states()?.len());
    let Some(block) = states[..pages].iter().position(is_interim) else {
        anyhow::bail!("the table has no interim page: {states:?}")
    };
    let (block, page) = (block as u32, file.read_page(block as u32)?);
    let right = other.read_page(block)?;
    keys[1].bring_back()?;

    // A server would rekey the other file as well, and the right page be one under a former key.
    let is_refused = || -> Result<()> {
        let found = "the page is not as it was sealed";
        other.write_page(block, &page)?;
        cluster.expect_verified(&cluster.data_directory(), 2, &[found, "Damage found: 1."])?;
        other.write_page(block, &right)
    };
    is_refused()?;
    cluster.start_server()?;
    rekeyed(&cluster)?;
    is_whole(&cluster, &all)?;
    cluster.stop(StopMode::Fast)?;
    is_refused()?;
    other.write_page(block, &page)?;
    cluster.start_server()?;
    let look = format!("{COUNT} acme.t");
    let error = expect_error(&mut cluster.client_to("other")?, &look)?;
    ensure!(error.text().contains("is not as it was encrypted"), "{error}");
    cluster.stop(StopMode::Fast)?;
    other.write_page(block, &right)?;
    cluster.start_server()?;
    let found = text(&mut cluster.client_to("other")?, &look)?;
    ensure!(found == own, "{found}, not {own}");
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// The copy would be unreadable. A database that is moved keeps its interim pages.
#[test]
fn a_raw_copy_of_interim_pages_is_refused() -> Result<()> {
    let (mut cluster, keys, all) = changed(&Settings::default())?;
    cluster.allow_log("relations in database \"app\"");
    let mut elsewhere = cluster.client_to("template1")?;
    run_sql(&mut elsewhere, "CREATE DATABASE app TEMPLATE postgres")?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, "CHECKPOINT")?;
    run_sql(&mut app, "UPDATE acme.t SET name = name; UPDATE acme.born SET name = name")?;
    drop(app);
    run_sql(&mut elsewhere, "ALTER DATABASE app ALLOW_CONNECTIONS false")?;
    drop(elsewhere);
    cluster.make_tablespace("there")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.eventually_logs("relations in database \"app\" have pages")?;
    let copy = "CREATE DATABASE copied TEMPLATE app STRATEGY file_copy";
    let error = cluster.error(copy)?;
    ensure!(error.message.contains("has pages under an interim key"), "{error}");
    ensure!(error.sqlstate == "55000", "{error}");
    cluster.sql("CREATE DATABASE logged TEMPLATE app STRATEGY wal_log")?;
    are_in(&cluster, "logged", &all)?;
    cluster.sql("ALTER DATABASE app SET TABLESPACE there")?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    ensure!(cluster.error(copy)?.message.contains("has pages under an interim key"));
    cluster.sql("ALTER DATABASE app ALLOW_CONNECTIONS true")?;
    are_in(&cluster, "app", &all)?;
    rekeyed(&cluster)?;
    cluster.sql(copy)?;
    are_in(&cluster, "copied", &all)?;
    are_in(&cluster, "app", &all)?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// A standby with pages under interim keys, which its primary does not have.
fn behind() -> Result<(Cluster, Cluster, [KeyFile; 3], Vec<String>)> {
    let (cluster, keys, all) = changed(&Settings::default())?;
    let mut standby = standby_of(&cluster, &[])?;
    for text in ["key group", "could not", "terminating walreceiver", "another server process"] {
        standby.allow_log(text);
    }
    standby.kill()?;
    cluster.sql("UPDATE acme.t SET name = name")?;
    keys[1].take_away()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    ensure!(!interim_files(&standby)?.is_empty(), "nothing is under an interim key");
    Ok((cluster, standby, keys, all))
}

/// It replays the copying: the pages of the copy are sealed again.
#[test]
fn a_standby_copies_a_database_with_interim_pages() -> Result<()> {
    let (cluster, standby, keys, all) = behind()?;
    run_sql(&mut cluster.client_to("template1")?, COPY)?;
    wait_for(&standby, &cluster)?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    keys[1].bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    are_in(&standby, "copied", &all)?;
    is_whole(&standby, &all)?;
    standby.finish()?;
    cluster.finish()
}

/// It is killed when some of them are, and promoted later.
#[test]
fn a_standby_is_killed_while_it_copies_a_database() -> Result<()> {
    let (cluster, standby, keys, all) = behind()?;
    standby.stop_at("interim.copied")?;
    run_sql(&mut cluster.client_to("template1")?, COPY)?;
    standby.stopped_at("interim.copied")?;
    standby.kill()?;
    standby.resume();
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    cluster.kill()?;
    standby.promote()?;
    keys[1].bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    are_in(&standby, "copied", &all)?;
    rekeyed(&standby)?;
    are_in(&standby, "copied", &all)?;
    is_whole(&standby, &all)?;
    let mut client = standby.client_to("copied")?;
    let versions = "SELECT count(*) FROM pg_class c, LATERAL pagevault.verify(c.oid) v
         WHERE c.relname IN ('t', 'born') AND v.data_key_version > 7167";
    ensure!(text(&mut client, versions)? == "0", "interim pages are left");
    drop(client);
    standby.finish()
}
