//! The cluster to upgrade: relations of every kind in two databases and a tablespace, and checks of
//! them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::leaks::Canary;
use pagevault_tests::{Cluster, Installation, KeyFile, StopMode};
use postgres::Client;

use super::old_cluster;

/// Text that occurs in rows, statistics and large objects, and nowhere else.
fn canary() -> Canary {
    Canary::text("what pg_upgrade carries")
}

/// A stopped cluster with data of all kinds.
pub(super) struct Scene {
    pub(super) old: Cluster,
    _keys: KeyFile,
    /// Results of queries, before the upgrade and after.
    answers: Vec<(&'static str, String, String)>,
}

/// Queries whose results do not change, by database.
const QUERIES: [(&str, &str); 10] = [
    ("postgres", "SELECT count(*) || md5(string_agg(t::text, '' ORDER BY id)) FROM app.t t"),
    ("postgres", "SET enable_seqscan = off; SELECT id FROM app.t WHERE name = 'name 77'"),
    (
        "postgres",
        "SELECT string_agg(p::text, '|' ORDER BY id) FROM app.parted p WHERE id % 100 = 0",
    ),
    ("postgres", "SELECT sum(length(body)) || md5(string_agg(body, '')) FROM app.toasted"),
    ("postgres", "SELECT n || ' ' || s FROM app.mv"),
    ("postgres", "SELECT count(*) || max(v) FROM elsewhere.spaced"),
    ("postgres", "SELECT encode(lo_get(4711), 'escape')"),
    ("postgres", "SELECT string_agg(id::text, ',') FROM plain"),
    ("birds", "SELECT encode(lo_get(oid), 'escape') || lomowner FROM pg_largeobject_metadata"),
    ("birds", "SELECT count(*) || md5(string_agg(b::text, '' ORDER BY id)) FROM bird b"),
];

/// Encrypted relations in `postgres`; policy demands no others.
const ENCRYPTED: [&str; 12] = [
    "app.t",
    "app.t_pkey",
    "app.t_name",
    "app.t_id_seq",
    "app.parted_1",
    "app.parted_2",
    "app.toasted",
    "app.mv",
    "app.unlogged",
    "elsewhere.spaced",
    "pg_largeobject",
    "pg_largeobject_loid_pn_index",
];

/// A catalog that is encrypted before the upgrade. From 16 to 19, `pg_upgrade` transfers its file.
const METADATA: &str = "pg_largeobject_metadata";

impl Scene {
    pub(super) fn make() -> Result<Scene> {
        let (mut old, keys) = old_cluster("")?;
        old.allow_log("pg_upgrade alone would leave");
        let space = old.directory().join("space");
        fs::create_dir(&space)?;
        old.installation().give(&space)?;
        let canary = canary();
        let canary = canary.as_str();
        old.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
        // In one tablespace both would have the same directory, which pg_upgrade refuses.
        let same = old.installation().major == Installation::get()?.major;
        if same {
            old.sql("DROP TABLESPACE space")?;
        }
        let in_space = if same { "" } else { "TABLESPACE space" };
        old.sql("CREATE DATABASE birds")?;
        old.sql(&format!(
            "CREATE TABLE plain AS SELECT 7 AS id;
             CREATE SCHEMA app;
             SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted';
             CREATE TABLE app.t (id serial PRIMARY KEY, name text, secret text);
             INSERT INTO app.t (name, secret) SELECT 'name ' || i, '{canary}' FROM generate_series(1, 3000) i;
             CREATE INDEX t_name ON app.t (name);
             DELETE FROM app.t WHERE id % 10 = 0;
             CREATE TABLE app.parted (id int, v text) PARTITION BY RANGE (id);
             CREATE TABLE app.parted_1 PARTITION OF app.parted FOR VALUES FROM (0) TO (500);
             CREATE TABLE app.parted_2 PARTITION OF app.parted FOR VALUES FROM (500) TO (1001);
             INSERT INTO app.parted SELECT i, 'v ' || i FROM generate_series(1, 1000) i;
             CREATE TABLE app.toasted (body text);
             ALTER TABLE app.toasted ALTER body SET STORAGE EXTERNAL;
             INSERT INTO app.toasted SELECT repeat('{canary}', 1000) FROM generate_series(1, 3);
             CREATE MATERIALIZED VIEW app.mv AS SELECT count(*) AS n, sum(id) AS s FROM app.parted;
             CREATE UNLOGGED TABLE app.unlogged AS SELECT generate_series(1, 100) AS id;
             CREATE SCHEMA elsewhere;
             CREATE TABLE elsewhere.spaced (v text) {in_space};
             SECURITY LABEL FOR pagevault ON TABLE elsewhere.spaced IS 'encrypted aes-128-xts';
             INSERT INTO elsewhere.spaced SELECT '{canary}' FROM generate_series(1, 100);
             SELECT lo_from_bytea(4711, '{canary}');
             SELECT setval('app.t_id_seq', 5000)"
        ))?;
        old.sql("VACUUM ANALYZE")?;
        // Files of various kinds: rewritten, rotated, and a statistics catalog with another
        // relfilenumber than initdb assigned.
        old.sql("SELECT pagevault.rotate_data_key('app.t')")?;
        old.sql("SELECT pagevault.wait_for_rekey('app.t'::regclass, '60 s')")?;
        old.sql("VACUUM FULL app.parted_1")?;
        old.sql("VACUUM FULL pg_statistic")?;
        old.sql("VACUUM FULL pg_largeobject")?;
        old.sql(&format!("SELECT pagevault.encrypt('{METADATA}')"))?;
        old.sql(&format!("SELECT pagevault.wait_for_rekey('{METADATA}'::regclass, '60 s')"))?;
        let mut birds = old.client_to("birds")?;
        run_sql(&mut birds, "CREATE EXTENSION pagevault")?;
        run_sql(&mut birds, "SELECT pagevault.set_database_master_key('local', 'main')")?;
        run_sql(&mut birds, "SECURITY LABEL FOR pagevault ON DATABASE birds IS 'encrypted'")?;
        run_sql(
            &mut birds,
            &format!(
                "CREATE TABLE bird AS SELECT i AS id, '{canary}'::text AS song FROM generate_series(1, 500) i; ANALYZE;
                 SELECT lo_from_bytea(4712, '{canary}')"
            ),
        )?;
        drop(birds);
        let answers = answers(&old)?;
        old.stop(StopMode::Fast)?;
        Ok(Scene { old, _keys: keys, answers })
    }

    /// Checks that everything exists, including data that a crash would have reset.
    pub(super) fn check_all(&self, cluster: &Cluster) -> Result<()> {
        ensure!(cluster.text("SELECT count(*) FROM app.unlogged")? == "100", "the unlogged table");
        self.check(cluster)
    }

    /// Checks that everything exists, is encrypted, and works.
    pub(super) fn check(&self, cluster: &Cluster) -> Result<()> {
        let now = answers(cluster)?;
        ensure!(now == self.answers, "{now:#?}\nbut it was {:#?}", self.answers);
        let mut client = cluster.client()?;
        for relation in ENCRYPTED {
            let encrypted =
                text(&mut client, &format!("SELECT pagevault.is_encrypted('{relation}')"))?;
            ensure!(encrypted == "t", "{relation} is not encrypted");
        }
        ensure!(text(&mut client, "SELECT pagevault.is_encrypted('plain')")? == "f", "plain");
        let is_carried = self.old.installation().major >= 16 && cluster.installation().major >= 19;
        let encrypted = text(&mut client, &format!("SELECT pagevault.is_encrypted('{METADATA}')"))?;
        ensure!((encrypted == "t") == is_carried, "{METADATA} is encrypted: {encrypted}");
        let cipher =
            "SELECT cipher FROM pagevault.relations WHERE relation = 'elsewhere.spaced'::regclass";
        ensure!(text(&mut client, cipher)? == "aes-128-xts", "{}", text(&mut client, cipher)?);
        for relation in ["pg_statistic", "pg_statistic_ext_data"] {
            let encrypted = format!("SELECT pagevault.is_encrypted('{relation}')");
            ensure!(text(&mut client, &encrypted)? == "t", "{relation} is not encrypted");
        }
        let drift = "SELECT relation::text || ' ' || fix FROM pagevault.drift";
        ensure!(column(&mut client, drift)?.is_empty(), "{:?}", column(&mut client, drift)?);
        let mut birds = cluster.client_to("birds")?;
        ensure!(column(&mut birds, drift)?.is_empty(), "birds: {:?}", column(&mut birds, drift)?);
        ensure!(
            text(&mut birds, "SELECT pagevault.is_encrypted('pg_proc')")? == "t",
            "pg_proc of birds"
        );
        cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")
    }

    /// Checks that the cluster can be used: writes, rotations, restart after a crash.
    pub(super) fn use_it(&self, cluster: &Cluster) -> Result<()> {
        ensure!(
            cluster.text("INSERT INTO app.t (name) VALUES ('new') RETURNING id")? == "5001",
            "the sequence"
        );
        cluster.sql("DELETE FROM app.t WHERE name = 'new'")?;
        cluster.sql("SELECT setval('app.t_id_seq', 5000)")?;
        cluster.sql("SELECT pagevault.rotate_data_key('app.t')")?;
        cluster.sql("SELECT pagevault.wait_for_rekey('app.t'::regclass, '60 s')")?;
        cluster.sql("SELECT pagevault.rotate_wal_key(); SELECT pagevault.rotate_cluster_master_key(); SELECT pagevault.rotate_database_key()")?;
        cluster.sql("CREATE TABLE app.later AS SELECT generate_series(1, 10) AS id")?;
        ensure!(cluster.text("SELECT pagevault.is_encrypted('app.later')")? == "t", "a new table");
        cluster.sql("ANALYZE; REINDEX TABLE app.t; DROP TABLE app.later")?;
        cluster.sql("VACUUM FULL app.mv")?;
        cluster.crash()
    }

    /// Checks that no value occurs in the files of a stopped cluster, and that all files open.
    pub(super) fn look_at_files(&self, cluster: &Cluster) -> Result<()> {
        let canary = canary();
        for file in files_below(&cluster.data_directory())? {
            let found = pagevault_tests::datafile::holds(&fs::read(&file)?, &canary.bytes);
            ensure!(!found, "{} holds a value", file.display());
        }
        cluster.pg_checksums()?;
        let verified = pagevault_tests::installation::run(
            cluster
                .installation()
                .command("pagevault-keyring")
                .arg("verify")
                .arg(cluster.data_directory()),
        )?;
        ensure!(verified.contains("No damage found."), "{verified}");
        Ok(())
    }

    /// Removes the files of an attempt from the tablespace.
    pub(super) fn clear_tablespace(&self, new: &Cluster) -> Result<()> {
        let version = format!("PG_{}_", new.installation().major);
        for entry in fs::read_dir(self.old.directory().join("space"))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with(&version) {
                fs::remove_dir_all(path)?;
            }
        }
        Ok(())
    }

    /// Checks that the old cluster is unchanged.
    pub(super) fn check_old(&self) -> Result<()> {
        self.old.start_server().context("the old server")?;
        let now = answers(&self.old)?;
        ensure!(
            now == self.answers,
            "the old cluster answers {now:#?}\nand not {:#?}",
            self.answers
        );
        self.old.stop(StopMode::Fast)
    }
}

fn answers(cluster: &Cluster) -> Result<Vec<(&'static str, String, String)>> {
    let mut answers = Vec::new();
    for (database, query) in QUERIES {
        let mut client: Client = cluster.client_to(database)?;
        answers.push((
            database,
            query.to_owned(),
            text(&mut client, query).with_context(|| query)?,
        ));
    }
    Ok(answers)
}

/// All regular files below a directory, following tablespaces; none if the directory does not
/// exist.
pub(super) fn files_below(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !directory.exists() {
        return Ok(found);
    }
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files_below(&path)?);
        } else if path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}
