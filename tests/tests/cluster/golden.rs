//! This version opens the data directories of former versions of pagevault, which are kept in
//! `tests/golden`. `tools/golden` creates them once for each version and major; they are never
//! changed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_keystore::log::{Log, Trust};
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{Record, Scope};
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

#[test]
fn data_directories_of_former_versions_open() -> Result<()> {
    let ending = format!("-pg{}.tar.xz", Installation::get()?.major);
    let mut opened = 0;
    for entry in fs::read_dir(directory())? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(&ending) {
            open(&path).with_context(|| path.display().to_string())?;
            opened += 1;
        }
    }
    // Kept for the oldest and the newest major; the others have the same formats.
    let kept = matches!(Installation::get()?.major, 15 | 18);
    ensure!(opened > 0 || !kept, "there is none in {}", directory().display());
    Ok(())
}

fn open(archive: &Path) -> Result<()> {
    let unpack = |data: &Path| -> Result<()> {
        // Read as the test's user, because the server's user may lack permission.
        let place = data.parent().context("a parent")?;
        let bytes = place.join("golden.tar.xz");
        fs::copy(archive, &bytes)?;
        let mut tar = Installation::get()?.command("/bin/tar");
        run(tar.arg("-xJf").arg(&bytes).arg("-C").arg(place))?;
        // The key file has another path now, as after alter_provider().
        let storage = FileStorage::new(&data.join("pagevault"))?;
        let (mut log, _) =
            Log::open(&storage, Scope::CLUSTER, Trust::All)?.context("cluster.keys")?;
        let keys = place.join("keys");
        log.append(&[Record::Provider {
            name: "local".to_owned(),
            kind: "file".to_owned(),
            options: format!("{{\"path\": \"{}\"}}", keys.display()),
            programs: false,
        }])?;
        log.append_settled(&log.position())?;
        Ok(())
    };
    let mut cluster = Cluster::from_files(unpack)?;
    cluster.allow_log("page verification failed");
    verify(&cluster)?;
    cluster.start_server()?;
    check(&cluster)?;
    cluster.sql(
        "INSERT INTO t (v) VALUES ('new'); DELETE FROM t WHERE v = 'new';
         CREATE TABLE later AS SELECT 1 AS id; SELECT pagevault.encrypt('later')",
    )?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    cluster.crash()?;
    check(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    verify(&cluster)?;
    cluster.finish()
}

fn verify(cluster: &Cluster) -> Result<()> {
    let mut command = cluster.installation().command("pagevault-keyring");
    let output = run(command.arg("verify").arg(cluster.data_directory()))?;
    ensure!(output.contains("No damage found."), "{output}");
    Ok(())
}

const CONTENT: &str = "
    CREATE TABLE plain AS SELECT generate_series(1, 10) AS id;
    CREATE TABLE t (id serial PRIMARY KEY, v text);
    INSERT INTO t (v) SELECT 'v ' || i FROM generate_series(1, 500) i;
    SELECT pagevault.encrypt('t');
    CREATE TABLE other (v text);
    SELECT pagevault.encrypt('other', 'aes-128-xts');
    ALTER TABLE other ALTER v SET STORAGE EXTERNAL;
    INSERT INTO other SELECT repeat(md5(i::text), 100) FROM generate_series(1, 5) i;
    CREATE TABLE was (id int);
    SELECT pagevault.encrypt('was');
    INSERT INTO was SELECT generate_series(1, 500);
    SELECT lo_from_bytea(4711, 'a large object')";

fn check(cluster: &Cluster) -> Result<()> {
    let answers = column(
        &mut cluster.client()?,
        "SELECT count(*) || ' ' || sum(id) FROM plain
         UNION ALL SELECT count(*) || ' ' || max(v) FROM t
         UNION ALL SELECT count(*) || ' ' || sum(length(v)) FROM other
         UNION ALL SELECT count(*) || ' ' || sum(id) FROM was
         UNION ALL SELECT encode(lo_get(4711), 'escape')
         UNION ALL SELECT pagevault.is_encrypted('t')::text || pagevault.is_encrypted('other') || pagevault.is_encrypted('was')
         UNION ALL SELECT wal_encrypted::text FROM pagevault.status",
    )?;
    let expected =
        ["10 55", "500 v 99", "5 16000", "500 125250", "a large object", "truetruefalse", "true"];
    ensure!(answers == expected, "{answers:?}");
    Ok(())
}

/// Creates the archive of this version and major; `PAGEVAULT_GOLDEN` is its path.
#[test]
#[ignore = "run by tools/golden"]
fn make() -> Result<()> {
    let archive = std::env::var_os("PAGEVAULT_GOLDEN").context("PAGEVAULT_GOLDEN is not set")?;
    let settings = Settings::default().wal_segment_size(1).conf("min_wal_size = '2MB'");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    run_sql(&mut cluster.client()?, CONTENT)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.sql("SELECT pagevault.decrypt('was')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('was'::regclass, '60 s')")?;
    cluster.sql("UPDATE pg_database SET datistemplate = false")?;
    cluster.sql("DROP DATABASE template0")?;
    cluster.sql("DROP DATABASE template1")?;
    check(&cluster)?;
    cluster.sql("SELECT pg_switch_wal(); CHECKPOINT")?;
    cluster.restart()?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    keep_one_segment(&cluster)?;
    let mut tar = cluster.installation().command("/bin/tar");
    let made = cluster.directory().join("golden.tar.xz");
    run(tar
        .env("XZ_OPT", "-9e")
        .arg("-cJf")
        .arg(&made)
        .arg("-C")
        .arg(cluster.directory())
        .args(["data", "keys"]))?;
    fs::copy(&made, archive)?;
    cluster.finish()
}

/// After a clean shutdown no other segment is needed, and sealed WAL does not compress.
fn keep_one_segment(cluster: &Cluster) -> Result<()> {
    let data = cluster.data_directory();
    let mut controldata = cluster.installation().command("pg_controldata");
    let output = run(controldata.arg("-D").arg(&data))?;
    let line = output.lines().find(|line| line.contains("REDO WAL file"));
    let needed = line.and_then(|line| line.split_whitespace().last()).context("the segment")?;
    for entry in fs::read_dir(data.join("pg_wal"))? {
        let path = entry?.path();
        if path.is_file() && !path.ends_with(needed) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}
