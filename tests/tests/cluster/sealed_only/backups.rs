//! Base backups that are taken while a file begins, or ceases, to contain encrypted pages only.

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::{Cluster, Settings};

use super::{HONEST, cluster, file, is_sealed_only, plant, read_again, wait};

fn settings() -> Settings {
    Settings::default().conf("pagevault.rekey_threshold = 0").conf("autovacuum = off")
}

/// The file of `relation` of `cluster` in a copy of its data directory.
pub(super) fn of_copy(cluster: &Cluster, relation: &str, copy: &Cluster) -> Result<DataFile> {
    let path = file(cluster, relation)?.path;
    let path = path.strip_prefix(cluster.data_directory())?;
    Ok(DataFile { path: copy.data_directory().join(path) })
}

/// The backup has the keystore as of before the decryption, and pages as of after it.
#[test]
fn a_backup_during_decryption() -> Result<()> {
    let (primary, _keys) = cluster(&settings())?;
    let backup = Backup::begin(&primary)?;
    wait(&primary, "SELECT pagevault.decrypt('t')")?;
    primary.sql("UPDATE t SET id = id + 1 WHERE id = 1")?;
    let restored = backup.end()?;
    let t = of_copy(&primary, "t", &restored)?;
    ensure!(t.states()?.contains(&PageState::Plaintext), "the test shows nothing");
    let (text, code) = restored.verify_offline(&restored.data_directory())?;
    ensure!(code == Some(0), "{text}");
    restored.start_server()?;
    for _ in 0..2 {
        ensure!(restored.text(HONEST)? == "1000");
        ensure!(!is_sealed_only(&restored, "t")?);
        read_again(&restored)?;
    }
    restored.finish()?;
    primary.finish()
}

/// The backup has pages as of before the encryption, and the keystore as of after its proof.
#[test]
fn a_backup_during_encryption() -> Result<()> {
    let (primary, _keys) = cluster(&settings())?;
    primary.sql("CREATE TABLE v AS SELECT * FROM t; UPDATE v SET id = id")?;
    let backup = Backup::begin_with_files(&primary)?;
    primary.sql("UPDATE v SET id = id + 1 WHERE id % 7 = 0")?;
    wait(&primary, "SELECT pagevault.encrypt('v')")?;
    primary.sql("CHECKPOINT")?;
    ensure!(is_sealed_only(&primary, "v")?);
    let restored = backup.end()?;
    let v = of_copy(&primary, "v", &restored)?;
    ensure!(v.states()?.contains(&PageState::Plaintext), "the test shows nothing");
    let (text, code) = restored.verify_offline(&restored.data_directory())?;
    ensure!(code == Some(0), "{text}");
    restored.start_server()?;
    for _ in 0..2 {
        ensure!(restored.text("SELECT count(*) FROM v WHERE name = 'honest'")? == "1000");
        ensure!(is_sealed_only(&restored, "v")?);
        ensure!(restored.text("SELECT pagevault.is_encrypted('v')")? == "t");
        read_again(&restored)?;
    }
    restored.finish()?;
    primary.finish()
}

/// What WAL of the backup does not explain is damage.
#[test]
fn a_forged_page_in_a_backup_is_found() -> Result<()> {
    let (primary, _keys) = cluster(&settings())?;
    primary.sql("SET pagevault.default_encryption = on; CREATE TABLE u AS SELECT * FROM t")?;
    let backup = Backup::begin(&primary)?;
    wait(&primary, "SELECT pagevault.decrypt('u')")?;
    let restored = backup.end()?;
    let (forged, t) = (of_copy(&primary, "forged", &restored)?, of_copy(&primary, "t", &restored)?);
    plant(&forged, &t)?;
    let (text, code) = restored.verify_offline(&restored.data_directory())?;
    ensure!(code == Some(2), "{text}");
    let path = t.path.strip_prefix(restored.data_directory())?.display().to_string();
    let found = text.lines().filter(|line| line.contains("in plaintext, and the file"));
    let found: Vec<_> = found.collect();
    ensure!(found.len() == 1 && found[0].contains(&path), "{text}");
    drop(restored);
    primary.finish().context("the primary")
}
