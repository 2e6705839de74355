//! What a group has under interim keys is destroyed, dropped or replaced.

use std::io::Write;

use super::*;

/// What a group leaves under interim keys is destroyed with it, on a standby as well.
#[test]
fn a_locked_group_is_shredded() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    let mut standby = standby_of(&cluster, &[])?;
    for server in [&mut cluster, &mut standby] {
        for text in ["key group", "were destroyed", "could not", "terminating walreceiver"] {
            server.allow_log(text);
        }
    }
    standby.kill()?;
    cluster.sql("UPDATE acme.t SET name = 'again ' || name")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    let all = others(&cluster)?;
    for server in [&cluster, &standby] {
        are_locked(server, &all)?;
        ensure!(!interim_files(server)?.is_empty(), "nothing is under an interim key");
    }
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    wait_for(&standby, &cluster)?;
    for server in [&cluster, &standby] {
        for file in interim_files(server)? {
            for (block, state) in file.states()?.into_iter().enumerate() {
                let page = file.read_page(block as u32)?;
                ensure!(
                    !is_interim(&state) || page[16..].iter().all(|byte| *byte == 0),
                    "block {block} is left"
                );
            }
        }
        let error = server.error(&format!("{COUNT} acme.t"))?;
        ensure!(error.text().contains("were destroyed"), "{error}");
        ensure!(others(server)? == all);
    }
    no_marks(&cluster)?;
    keys[1].bring_back()?;
    cluster.crash()?;
    cluster.sql("DROP TABLE acme.t, acme.born")?;
    wait_for(&standby, &cluster)?;
    standby.finish()?;
    cluster.finish()
}

/// Also a part of a page is overwritten, which a full disk leaves at the end of a file.
#[test]
fn a_part_of_a_page_is_destroyed() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    for text in ["key group", "were destroyed", "could not"] {
        cluster.allow_log(text);
    }
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    let path = cluster.relation_path("acme.t")?;
    let files = interim_files(&cluster)?;
    let file = files.into_iter().find(|file| file.path.file_name() == path.file_name());
    let Some(file) = file else { anyhow::bail!("the table has no interim page") };
    let block = file.states()?.iter().position(is_interim).unwrap_or_default() as u32;
    let page = file.read_page(block)?;
    let all = fs::metadata(&file.path)?.len();
    fs::File::options().append(true).open(&file.path)?.write_all(&page[..4096])?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    let after = fs::read(&file.path)?;
    ensure!(after.len() as u64 == all + 4096, "the file has {} bytes", after.len());
    ensure!(page[24..].iter().any(|byte| *byte != 0), "the test shows nothing");
    ensure!(after[all as usize..].iter().all(|byte| *byte == 0), "a part is left");
    cluster.finish()
}

/// The group is shredded while it is locked to a standby that has interim pages in shared buffers
/// and on disk, and that starts again before a restart point.
#[test]
fn a_standby_starts_again_after_a_shred() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    let mut standby = standby_of(&cluster, &["shared_buffers = 1MB"])?;
    for server in [&mut cluster, &mut standby] {
        for text in ["key group", "were destroyed", "could not", "terminating walreceiver"] {
            server.allow_log(text);
        }
    }
    standby.kill()?;
    keys[1].take_away()?;
    standby.start_server()?;
    cluster.sql("CHECKPOINT; UPDATE acme.t SET name = repeat('again', 20) || name")?;
    cluster.sql("UPDATE acme.t SET name = 'and ' || name WHERE id % 2 = 0")?;
    wait_for(&standby, &cluster)?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    wait_for(&standby, &cluster)?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    ensure!(others(&standby)? == others(&cluster)?);
    standby.finish()?;
    cluster.finish()
}

/// An interim page that is put back after the file has another data key is refused, as one under a
/// former key.
#[test]
fn an_old_interim_page_is_refused() -> Result<()> {
    let (mut cluster, keys, all) = changed(&Settings::default())?;
    cluster.allow_log("former key");
    cluster.without_witness("an old page is put back");
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    let files = interim_files(&cluster)?;
    let path = cluster.relation_path("acme.t")?;
    let file = files.into_iter().find(|file| file.path.file_name() == path.file_name());
    let Some(file) = file else { anyhow::bail!("the table has no interim page") };
    let states = file.states()?;
    let block = states.iter().position(is_interim).unwrap_or_default() as u32;
    let page = file.read_page(block)?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    rekeyed(&cluster)?;
    is_whole(&cluster, &all)?;
    cluster.stop(StopMode::Fast)?;
    file.write_page(block, &page)?;
    cluster.start_server()?;
    let error = cluster.error("SELECT sum(length(name)) FROM acme.t")?;
    ensure!(error.text().contains("former key"), "{error}");
    cluster.finish()
}

/// Killed before the group has ended. Its relations have interim keys still.
#[test]
fn a_shred_is_killed_before_the_group_ends() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    cluster.allow_log("were destroyed");
    cluster.stop_at("key_group.files_destroyed")?;
    std::thread::scope(|scope| -> Result<()> {
        let shred = scope
            .spawn(|| cluster.error("SELECT * FROM pagevault.shred_key_group('acme', 'acme')"));
        cluster.stopped_at("key_group.files_destroyed")?;
        cluster.kill()?;
        let _ = shred.join();
        Ok(())
    })?;
    cluster.resume();
    cluster.start_server()?;
    cluster.sql(
        "CREATE TABLE acme.next AS SELECT i AS id, 'x' AS name FROM generate_series(1, 900) i",
    )?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    is_locked(&cluster, "acme.next", "acme")?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(count(&cluster, "acme.next")? == "900 900");
    cluster.finish()
}

/// Relations of a locked group are dropped and truncated.
#[test]
fn relations_with_interim_pages_are_dropped() -> Result<()> {
    let (cluster, keys, _) = changed(&Settings::default())?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("DROP TABLE acme.born; CHECKPOINT")?;
    cluster.crash()?;
    let error = cluster.error("TRUNCATE acme.t")?;
    ensure!(error.sqlstate == "55000", "{error}");
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.sql("TRUNCATE acme.t; INSERT INTO acme.t (name) VALUES ('x')")?;
    no_marks(&cluster)?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT string_agg(name, ',') FROM acme.t")? == "x");
    cluster.finish()
}
