//! What a locked group costs others, and what others see of it.

use pagevault_tests::backup::Backup;
use pagevault_tests::installation::run;
use pagevault_tests::standby::{allow_what_failovers_say, rewind};

use super::*;

/// A cursor of a standby is open on a relation that the primary moves into a group which is locked
/// to the standby. The standby is promoted, and does not wait for the cursor.
#[test]
fn a_promotion_waits_for_no_cursor() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    cluster.sql("CREATE TABLE public.w AS SELECT i AS id FROM generate_series(1, 100) i")?;
    cluster.sql("CREATE TABLE public.o (id int)")?;
    let mut standby = standby_of(&cluster, &[])?;
    for server in [&mut cluster, &mut standby] {
        allow_what_failovers_say(server);
        server.allow_log("key group");
        server.allow_log("could not");
    }
    standby.stop(StopMode::Fast)?;
    keys[1].take_away()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    let mut session = standby.client()?;
    run_sql(&mut session, "BEGIN; DECLARE c CURSOR FOR SELECT * FROM public.w; FETCH 1 FROM c")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE public.w IS 'encrypted key_group=acme'")?;
    wait_for(&standby, &cluster)?;
    cluster.kill()?;
    standby.promote()?;
    standby.sql("INSERT INTO public.o VALUES (1)")?;
    drop(session);
    is_locked(&standby, "public.w", "acme").or_else(|_| {
        // Without a text column.
        let error = standby.error("SELECT count(*) FROM public.w")?;
        ensure!(error.sqlstate == "55000", "{error}");
        Ok(())
    })?;
    keys[1].bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    ensure!(standby.text("SELECT count(*) FROM public.w")? == "100");
    no_marks(&standby)?;
    standby.finish()
}

/// Pages under interim keys that were overwritten have checksums that backup programs accept.
#[test]
fn a_base_backup_after_a_locked_group_was_shredded() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    cluster.allow_log("were destroyed");
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    ensure!(!interim_files(&cluster)?.is_empty(), "nothing is under an interim key");
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    cluster.sql("CHECKPOINT")?;
    cluster.base_backup_with(&cluster.directory().join("after"), &[])?;
    cluster.stop(StopMode::Fast)?;
    cluster.pg_checksums()?;
    cluster.start_server()?;
    cluster.finish()
}

/// Unlogged relations are rekeyed while another group is locked and has interim pages; and those of
/// the group when it is unlocked, whose pages have no LSN.
#[test]
fn unlogged_relations_are_rekeyed() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default().conf("autovacuum = off"))?;
    cluster.allow_log("key group");
    let rows = "SELECT i, repeat('plaintext secret', 9) FROM generate_series(1, 300) i";
    cluster.sql("CREATE UNLOGGED TABLE public.plain (id int PRIMARY KEY, name text)")?;
    cluster.sql("CREATE UNLOGGED TABLE umbrella.u (id int PRIMARY KEY, name text); CHECKPOINT")?;
    cluster.sql("CREATE UNLOGGED TABLE acme.u (id int PRIMARY KEY, name text)")?;
    cluster.sql("CREATE TABLE acme.logged (id int); INSERT INTO acme.logged VALUES (1)")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    for table in ["public.plain", "umbrella.u"] {
        cluster.sql(&format!("INSERT INTO {table} {rows}"))?;
    }
    // On disk, with what they have as LSN.
    cluster.restart()?;
    cluster
        .sql("SET pagevault.rekey_threshold = '1GB'; SELECT pagevault.encrypt('public.plain')")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('umbrella.u')")?;
    cluster.sql(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))?;
    cluster.sql("CHECKPOINT")?;
    for file in cluster.family_files("public.plain")? {
        ensure!(!file.contains_text("plaintext secret")?, "{}", file.path.display());
    }
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    no_marks(&cluster)?;
    cluster.sql(&format!("INSERT INTO acme.u {rows}"))?;
    ensure!(count(&cluster, "acme.u")? == count(&cluster, "umbrella.u")?);
    cluster.finish()
}

/// No row is put into a locked group, also where there is no page that could not be opened; and a
/// server that has lost its marks reads none.
#[test]
fn nobody_gets_in_without_marks() -> Result<()> {
    let (mut cluster, keys, all) = changed(&Settings::default())?;
    cluster.allow_log("could not");
    cluster.sql("CREATE TABLE acme.empty (name text)")?;
    cluster.stop(StopMode::Fast)?;
    keys[1].take_away()?;
    cluster.start_server()?;
    let insert = "INSERT INTO acme.empty VALUES ('secret')";
    let error = cluster.error(insert)?;
    ensure!(error.sqlstate == "55000", "{error}");
    cluster.kill()?;
    keys[1].bring_back()?;
    cluster.start_server()?;
    cluster.sql("UPDATE acme.t SET name = name")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    ensure!(!interim_files(&cluster)?.is_empty(), "nothing is under an interim key");
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir_all(cluster.data_directory().join("pagevault/interim"))?;
    cluster.start_server()?;
    for refused in [insert, "SELECT name FROM acme.t WHERE id = 1", "SELECT min(name) FROM acme.t"]
    {
        let error = cluster.error(refused)?;
        ensure!(error.sqlstate == "55000", "{refused}: {error}");
    }
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// The value of a sequence is not read from shared buffers of a standby, where redo has just put
/// its page.
#[test]
fn the_value_of_a_locked_sequence_is_not_shown() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    cluster.sql("CREATE SEQUENCE acme.s; SELECT nextval('acme.s')")?;
    let mut standby = standby_of(&cluster, &[])?;
    for server in [&mut cluster, &mut standby] {
        server.allow_log("key group");
        server.allow_log("could not");
        server.allow_log("terminating walreceiver");
    }
    standby.stop(StopMode::Fast)?;
    keys[1].take_away()?;
    standby.start_server()?;
    for _ in 0..10 {
        cluster.sql("SELECT max(nextval('acme.s')) FROM generate_series(1, 77)")?;
        wait_for(&standby, &cluster)?;
        let error = standby.error("SELECT pg_sequence_last_value('acme.s')")?;
        ensure!(error.sqlstate == "55000", "{error}");
    }
    keys[1].bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    ensure!(standby.text("SELECT pg_sequence_last_value('acme.s') > 770")? == "t");
    standby.finish()?;
    cluster.finish()
}

/// Bodies of pages of these files that are under interim keys.
fn left(files: &[DataFile]) -> Result<usize> {
    let mut left = 0;
    for file in files {
        for (block, state) in file.states()?.iter().enumerate() {
            let is_left = || -> Result<bool> {
                let page = file.read_page(block as u32)?;
                Ok(page[24..].iter().any(|byte| *byte != 0))
            };
            left += usize::from(is_interim(state) && is_left()?);
        }
    }
    Ok(left)
}

/// A base backup has copied pages while they were under interim keys, and the folder of marks when
/// there were none any more. Restored, it overwrites what was shredded after that.
#[test]
fn a_restored_server_overwrites_what_is_shredded() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    cluster.allow_log("were destroyed");
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    let backup = Backup::begin_with_files(&cluster)?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    rekeyed(&cluster)?;
    let paths = interim_paths(&cluster)?;
    let mut restored = backup.end()?;
    restored.allow_log("were destroyed");
    let files = |server: &Cluster| -> Vec<DataFile> {
        paths.iter().map(|path| DataFile { path: server.data_directory().join(path) }).collect()
    };
    ensure!(left(&files(&restored))? > 0, "the backup has no interim page");
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/pg_wal/%f %p'",
        cluster.data_directory().display()
    ))?;
    cluster.sql("SELECT pg_switch_wal()")?;
    let signal = restored.data_directory().join("recovery.signal");
    fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    let error = restored.error(&format!("{COUNT} acme.t"))?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    restored.sql("CHECKPOINT")?;
    let left = left(&files(&restored))?;
    ensure!(left == 0, "{left} interim pages are left");
    restored.finish()?;
    cluster.finish()
}

/// Of the tables of the group, below the data directory.
fn interim_paths(cluster: &Cluster) -> Result<Vec<std::path::PathBuf>> {
    let mut files = cluster.family_files("acme.t")?;
    files.extend(cluster.family_files("acme.born")?);
    let data = cluster.data_directory();
    files.iter().map(|file| Ok(file.path.strip_prefix(&data)?.to_owned())).collect()
}

/// A former primary has pages under interim keys, and is rewound to one that has shredded the
/// group.
#[test]
fn a_rewound_server_overwrites_what_its_source_has_shredded() -> Result<()> {
    let settings = Settings::default().conf("wal_log_hints = on\nwal_keep_size = 512MB");
    let (mut cluster, keys, _) = changed(&settings)?;
    let mut standby = standby_of(&cluster, &[])?;
    for server in [&mut cluster, &mut standby] {
        allow_what_failovers_say(server);
        server.allow_log("key group");
        server.allow_log("were destroyed");
        server.allow_log("could not");
    }
    cluster.without_witness("pg_rewind replaces its WAL");
    cluster.sql("UPDATE acme.t SET name = 'again ' || name WHERE id % 3 = 0")?;
    wait_for(&standby, &cluster)?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    let paths = interim_paths(&cluster)?;
    let files = |server: &Cluster| -> Vec<DataFile> {
        paths.iter().map(|path| DataFile { path: server.data_directory().join(path) }).collect()
    };
    ensure!(left(&files(&cluster))? > 0, "nothing is under an interim key");
    wait_for(&standby, &cluster)?;
    standby.promote()?;
    cluster.sql("INSERT INTO public.t (name) VALUES ('alone')")?;
    cluster.stop(StopMode::Fast)?;
    standby.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    standby.sql("CHECKPOINT")?;
    rewind(&cluster, &standby)?;
    wait_for(&cluster, &standby)?;
    let left = left(&files(&cluster))?;
    ensure!(left == 0, "{left} interim pages are left");
    cluster.finish()?;
    standby.finish()
}

/// A relation that was in a group once gets another data key while that group is locked, with marks
/// and without.
#[test]
fn a_former_group_locks_nobody_out() -> Result<()> {
    for is_crash in [false, true] {
        let (mut cluster, keys) = with_groups(&Settings::default().conf("autovacuum = off"))?;
        cluster.allow_log("key group");
        tables(&cluster)?;
        cluster.sql(
            "CREATE TABLE acme.moved AS SELECT * FROM acme.t; CREATE INDEX ON acme.moved (id);
             ALTER TABLE acme.moved SET SCHEMA umbrella",
        )?;
        let rotate = |cluster: &Cluster| -> Result<()> {
            let job = cluster.text("SELECT pagevault.rotate_data_key('umbrella.moved')")?;
            cluster.sql(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))
        };
        rotate(&cluster)?;
        let all = count(&cluster, "umbrella.moved")?;
        cluster.sql("CREATE TABLE acme.stays AS SELECT 1 AS id; CHECKPOINT")?;
        cluster.sql("INSERT INTO acme.stays VALUES (2)")?;
        if !is_crash {
            cluster.stop(StopMode::Fast)?;
        }
        keys[1].take_away()?;
        cluster.kill()?;
        cluster.start_server()?;
        let error = cluster.error("SELECT id FROM acme.stays")?;
        ensure!(error.sqlstate == "55000", "{error}");
        cluster.sql(
            "SET pagevault.rekey_threshold = 0; SELECT pagevault.rotate_data_key('umbrella.moved')",
        )?;
        ensure!(count(&cluster, "umbrella.moved")? == all);
        cluster.sql("SELECT pagevault.wait_for_rekey('umbrella.moved'::regclass, '60s')")?;
        ensure!(count(&cluster, "umbrella.moved")? == all);
        cluster.sql("VACUUM umbrella.moved")?;
        keys[1].bring_back()?;
        cluster.sql("SELECT pagevault.unlock()")?;
        cluster.finish()?;
    }
    Ok(())
}

/// pg_upgrade takes over pages as they are.
#[test]
fn an_upgraded_cluster_rekeys_its_interim_pages() -> Result<()> {
    let (cluster, keys, all) = changed(&Settings::default())?;
    cluster.without_witness("the new cluster is looked at");
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    ensure!(!interim_files(&cluster)?.is_empty(), "nothing is under an interim key");
    cluster.stop(StopMode::Fast)?;
    keys[1].bring_back()?;
    let new = Cluster::create(&Settings::default().conf("autovacuum = off"))?;
    run(&mut crate::upgrade::upgrading(&cluster, &new))?;
    new.start_server()?;
    rekeyed(&new)?;
    is_whole(&new, &all)?;
    new.finish()
}
