//! The leak test: canaries of every type along every path, then a search of every byte of the data
//! directory, tablespace, WAL archive and base backup: during work, after a crash, and after
//! recovery.
//!
//! The same runs with encryption off, where every canary must be found at its expected place.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Hit, Scanner, report};
use pagevault_tests::{Cluster, Settings, StopMode};
use postgres::Client;

use super::workload::{Place, Workload};
use super::{paths, values};

type Found = BTreeMap<PathBuf, Vec<Hit>>;

#[test]
fn no_canary_is_found_anywhere() -> Result<()> {
    let scene = Scene::start(true)?;
    for (moment, found) in scene.play()? {
        ensure!(found.is_empty(), "{moment}:\n{}", report(&found));
    }
    Ok(())
}

#[test]
fn every_canary_is_found_without_encryption() -> Result<()> {
    let scene = Scene::start(false)?;
    let places = scene.places()?;
    let mut unseen = BTreeSet::new();
    for (moment, found) in scene.play()? {
        if moment == "after recovery" {
            continue; // recovery removes temporary files
        }
        for (canary, place) in &places {
            let seen = found.iter().any(|(path, hits)| {
                path.to_string_lossy().contains(place)
                    && hits.iter().any(|hit| hit.canary == *canary)
            });
            if !seen {
                unseen.insert(format!("{canary} in {place}, {moment}"));
            }
        }
        for place in ["/pg_wal/", "/archive/", "/backup/"] {
            ensure!(
                moment != "under way"
                    || found.keys().any(|path| path.to_string_lossy().contains(place)),
                "nothing is seen in {place}"
            );
        }
    }
    ensure!(unseen.is_empty(), "not seen: {unseen:#?}");
    Ok(())
}

/// A server after the workload, with sessions that hold temporary files.
struct Scene {
    cluster: Cluster,
    work: Workload,
    sessions: Vec<Client>,
    receiver: Child,
}

impl Scene {
    fn start(encrypted: bool) -> Result<Scene> {
        // Small segments, because every byte is searched.
        let settings = Settings::default()
            .wal_segment_size(1)
            .conf("wal_level = logical")
            .conf("max_prepared_transactions = 5")
            .conf("logical_decoding_work_mem = '64kB'")
            .conf("temp_buffers = '800kB'")
            .conf("remove_temp_files_after_crash = off")
            .conf("archive_mode = on")
            .conf("archive_command = 'test ! -d ../archive || cp %p ../archive/%f'");
        let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
        cluster.allow_log("could not open"); // sockets of killed processes
        for directory in ["space", "archive", "backup"] {
            let path = cluster.directory().join(directory);
            fs::create_dir(&path)?;
            cluster.installation().give(&path)?;
        }
        let place = cluster.directory().display().to_string();
        if !encrypted {
            cluster.set(&[("pagevault.temp_encryption", "off")])?;
            cluster.restart()?;
        }
        cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{place}/space'"))?;
        cluster.sql("CREATE DATABASE birds")?;
        if encrypted {
            encrypt_everything(&cluster)?;
        }
        let mut work = Workload::default();
        values::add(&mut work);
        paths::add(&mut work);
        let mut client = cluster.client_to("birds")?;
        // Created now, because later it would wait for the prepared transaction.
        run_sql(&mut client, "CREATE TABLE changes (t text)")?;
        run_sql(&mut client, "CREATE PUBLICATION everything FOR TABLE changes")?;
        run_sql(&mut client, "SELECT pg_create_logical_replication_slot('decoder', 'pgoutput')")?;
        for statement in &work.statements {
            run_sql(&mut client, statement)?;
        }
        copy(&mut client, &work.text("copied", Place::Relation("copied")))?;
        let mut sessions = vec![
            temporary_table(&cluster, &mut work)?,
            sort(&cluster, &mut work)?,
            hash(&cluster, &mut work)?,
            held_cursor(&cluster, &mut work)?,
        ];
        sessions.extend(notify(&cluster, &mut work)?);
        let (session, receiver) = decode(&cluster, &mut work)?;
        sessions.push(session);
        Ok(Scene { cluster, work, sessions, receiver })
    }

    /// The expected place of each canary without encryption: a part of a path.
    fn places(&self) -> Result<Vec<(String, String)>> {
        let mut client = self.cluster.client_to("birds")?;
        let mut path = |relation: &str| {
            let query = format!("SELECT pg_relation_filepath({relation})");
            pagevault_tests::cluster::text(&mut client, &query).map(|path| format!("data/{path}"))
        };
        let mut places = Vec::new();
        for (canary, place) in &self.work.canaries {
            let place = match place {
                Place::Relation(relation) => path(&format!("'{relation}'::regclass"))?,
                Place::Toast(relation) => path(&format!(
                    "(SELECT reltoastrelid FROM pg_class WHERE oid = '{relation}'::regclass)"
                ))?,
                Place::Below(directory) => format!("data/{directory}/"),
                Place::Path(part) => (*part).to_owned(),
            };
            places.push((canary.name.clone(), place));
        }
        Ok(places)
    }

    /// Searches at each of several moments.
    fn play(mut self) -> Result<Vec<(&'static str, Found)>> {
        let scanner = Scanner::new(self.work.canaries.iter().map(|(canary, _)| canary));
        let directory = self.cluster.directory().to_owned();
        let all = ["data", "space", "archive", "backup"].map(|root| directory.join(root));
        let all: Vec<_> = all.iter().map(PathBuf::as_path).collect();
        let still_written = &all[..3];
        let mut moments = Vec::new();

        self.cluster.sql("CHECKPOINT")?;
        self.archive()?;
        self.back_up(&directory.join("backup"))?;
        moments.push(("under way", scanner.scan_trees(&all)?));

        self.cluster.kill()?;
        self.receiver.kill()?;
        self.receiver.wait()?;
        self.sessions.clear();
        moments.push(("after a crash", scanner.scan_trees(still_written)?));

        self.cluster.start_server()?;
        self.cluster.client_to("birds")?.batch_execute("COMMIT PREPARED 'p'")?;
        self.cluster.stop(StopMode::Fast)?;
        moments.push(("after recovery", scanner.scan_trees(still_written)?));
        self.cluster.finish()?;
        Ok(moments)
    }

    fn archive(&self) -> Result<()> {
        let segment = self.cluster.text("SELECT pg_walfile_name(pg_switch_wal())")?;
        let archived = format!("SELECT last_archived_wal >= '{segment}' FROM pg_stat_archiver");
        self.cluster.eventually(&archived, "t")
    }

    /// As tar files, which include the tablespace and contain files unchanged.
    fn back_up(&self, target: &Path) -> Result<()> {
        let mut program = self.cluster.program("pg_basebackup");
        program.args(["--checkpoint=fast", "-Ft", "-Xfetch", "-D"]).arg(target);
        run(&mut program).map(drop)
    }
}

/// WAL, the database with its catalogs, and the shared catalogs.
fn encrypt_everything(cluster: &Cluster) -> Result<()> {
    cluster.set(&[
        ("pagevault.wal_encryption", "on"),
        ("pagevault.shared_catalog_encryption", "on"),
    ])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let mut client = cluster.client_to("birds")?;
    for statement in [
        "CREATE EXTENSION pagevault",
        "SECURITY LABEL FOR pagevault ON DATABASE birds IS 'encrypted'",
        "SELECT pagevault.encrypt_catalogs()",
    ] {
        run_sql(&mut client, statement)?;
    }
    Ok(())
}

fn copy(client: &mut Client, text: &str) -> Result<()> {
    run_sql(client, "CREATE TABLE copied (t text)")?;
    let mut transaction = client.transaction()?;
    transaction.batch_execute("TRUNCATE copied")?;
    let mut writer = transaction.copy_in("COPY copied FROM STDIN (FREEZE)")?;
    writeln!(writer, "{text}")?;
    writer.finish()?;
    Ok(transaction.commit()?)
}

/// A temporary table that is larger than the session's buffers.
fn temporary_table(cluster: &Cluster, work: &mut Workload) -> Result<Client> {
    let mut client = cluster.client_to("birds")?;
    let text = work.text("temporary table", Place::Below("base"));
    run_sql(
        &mut client,
        &format!(
            "CREATE TEMP TABLE fleeting AS
             SELECT '{text}' || i t FROM generate_series(1, 30000) i;
             CREATE INDEX ON fleeting (t)"
        ),
    )?;
    Ok(client)
}

/// An unfinished sort, whose temporary file still exists.
fn sort(cluster: &Cluster, work: &mut Workload) -> Result<Client> {
    let text = work.text("sort", Place::Below("base/pgsql_tmp"));
    let query = format!("SELECT '{text}' || i FROM generate_series(1, 9000) i ORDER BY 1");
    unfinished(cluster, &query)
}

/// A hash join with several batches.
fn hash(cluster: &Cluster, work: &mut Workload) -> Result<Client> {
    let text = work.text("hash", Place::Below("base/pgsql_tmp"));
    let side = format!("(SELECT i, '{text}' || i t FROM generate_series(1, 9000) i OFFSET 0)");
    unfinished(cluster, &format!("SELECT a.t FROM {side} a JOIN {side} b ON a.t = b.t"))
}

fn unfinished(cluster: &Cluster, query: &str) -> Result<Client> {
    let mut client = cluster.client_to("birds")?;
    run_sql(
        &mut client,
        &format!(
            "SET work_mem = '64kB'; SET hash_mem_multiplier = 1; SET enable_mergejoin = off;
             BEGIN; DECLARE c CURSOR FOR {query}; FETCH 5 FROM c"
        ),
    )?;
    Ok(client)
}

fn held_cursor(cluster: &Cluster, work: &mut Workload) -> Result<Client> {
    let mut client = cluster.client_to("birds")?;
    let text = work.text("held cursor", Place::Below("base/pgsql_tmp"));
    run_sql(
        &mut client,
        &format!(
            "SET work_mem = '64kB'; BEGIN;
             DECLARE c CURSOR WITH HOLD FOR SELECT '{text}' || i FROM generate_series(1, 9000) i;
             COMMIT"
        ),
    )?;
    Ok(client)
}

/// A listener that is busy, so that the queue grows.
fn notify(cluster: &Cluster, work: &mut Workload) -> Result<Vec<Client>> {
    let mut listener = cluster.client_to("birds")?;
    run_sql(&mut listener, "LISTEN birds")?;
    run_sql(&mut listener, "BEGIN")?;
    let text = work.text("notification", Place::Below("pg_notify"));
    let mut client = cluster.client_to("birds")?;
    run_sql(
        &mut client,
        &format!(
            "DO $$ BEGIN FOR i IN 1 .. 200 LOOP
                 PERFORM pg_notify('birds', i || repeat(' {text}', 200));
             END LOOP; END $$"
        ),
    )?;
    Ok(vec![listener, client])
}

/// A large unfinished transaction, which a logical decoder spills to files.
fn decode(cluster: &Cluster, work: &mut Workload) -> Result<(Client, Child)> {
    let mut client = cluster.client_to("birds")?;
    let mut program = cluster.program("pg_recvlogical");
    program.args(["-d", "birds", "--slot=decoder", "--start", "--no-loop", "-f", "/dev/null"]);
    program.args(["-o", "proto_version=1", "-o", "publication_names=everything"]);
    let receiver = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let spilled = work.text("spilled change", Place::Below("pg_replslot"));
    let message = work.text("logical message", Place::Below("pg_wal"));
    run_sql(&mut client, "BEGIN")?;
    run_sql(
        &mut client,
        &format!(
            "INSERT INTO changes SELECT '{spilled}' || i FROM generate_series(1, 5000) i;
             SELECT pg_logical_emit_message(true, 'birds', '{message}')"
        ),
    )?;
    let slot = cluster.data_directory().join("pg_replslot/decoder");
    cluster.eventually_that("spill files", || {
        let mut files = fs::read_dir(&slot)?.filter_map(Result::ok);
        let spill = files.any(|file| file.path().extension().is_some_and(|e| e == "spill"));
        ensure!(spill, "there is none");
        Ok(())
    })?;
    Ok((client, receiver))
}
