//! Base backups whose manifest is sealed with the cluster's key.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_cipher::mac;
use pagevault_keystore::audit;
use pagevault_keystore::manifest_seal::OTHERS;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use crate::wal::{insert, sealing};

const SEAL: &str = "backup_manifest.pagevault";
const MANIFEST: &str = "backup_manifest";

fn back_up(cluster: &Cluster, name: &str, options: &[&str]) -> Result<PathBuf> {
    let backup = cluster.directory().join(name);
    cluster.base_backup_with(&backup, &[&["-X", "fetch"], options].concat())?;
    Ok(backup)
}

/// Runs a command of the helper; it must end with this code, and say these words.
fn helper(cluster: &Cluster, line: &[&str], at: &Path, code: i32, words: &[&str]) -> Result<()> {
    let output = cluster.program("pagevault-keyring").args(line).arg(at).output()?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(output.status.code() == Some(code), "{line:?}: {:?}: {said}", output.status);
    for word in words {
        ensure!(said.contains(word), "{line:?}: {word}: {said}");
    }
    Ok(())
}

const STRICT: &[&str] = &["verify", "--require-seal"];

/// Changes a file that is not encrypted, and the manifest so that it fits.
fn forge(backup: &Path) -> Result<()> {
    let path = backup.join("pg_hba.conf");
    let before = fs::read(&path)?;
    let mut after = before.clone();
    after[0] ^= 1;
    fs::write(&path, &after)?;
    let hex = |bytes: &[u8]| audit::hex(&mac::hash(bytes));
    let text = fs::read_to_string(backup.join(MANIFEST))?;
    let forged = text.replace(&hex(&before), &hex(&after));
    ensure!(forged != text, "pg_hba.conf is not in the manifest");
    rewrite(backup, &forged)
}

/// Replaces the manifest by one with this text, and the checksum that fits.
fn rewrite(backup: &Path, forged: &str) -> Result<()> {
    let last = forged.rfind("\"Manifest-Checksum\"").context("the last line")?;
    let (body, _) = forged.split_at(last);
    let own = audit::hex(&mac::hash(body.as_bytes()));
    Ok(fs::write(backup.join(MANIFEST), format!("{body}\"Manifest-Checksum\": \"{own}\"}}\n"))?)
}

#[test]
fn a_sealed_manifest_cannot_be_made_to_fit() -> Result<()> {
    let (cluster, keys) = sealing(&Settings::default().wal_segment_size(1))?;
    insert(&cluster, "drossel", 100)?;
    let sha = ["--manifest-checksums=SHA256"];
    let backup = back_up(&cluster, "backup", &sha)?;
    helper(&cluster, &["verify"], &backup, 0, &["seal         none"])?;
    helper(&cluster, STRICT, &backup, 2, &["there is no manifest with a valid seal"])?;
    helper(&cluster, &["seal-manifest"], &backup, 0, &["Sealed the manifest of", SEAL])?;
    helper(&cluster, STRICT, &backup, 0, &["seal         valid, made 2", "No damage found."])?;
    let ignore = format!("--ignore={SEAL}");
    run(cluster.program("pg_verifybackup").args(["--no-parse-wal", &ignore]).arg(&backup))?;

    let seal = fs::read(backup.join(SEAL))?;
    let manifest = fs::read(backup.join(MANIFEST))?;
    let hba = fs::read(backup.join("pg_hba.conf"))?;
    forge(&backup)?;
    let what = "backup_manifest.pagevault: backup_manifest is not as it was sealed";
    helper(&cluster, &["verify"], &backup, 2, &[what, "seal         not valid"])?;
    helper(&cluster, STRICT, &backup, 2, &[what])?;
    // Without the seal the forgery is complete.
    fs::remove_file(backup.join(SEAL))?;
    helper(&cluster, &["verify"], &backup, 0, &["seal         none", "No damage found."])?;
    helper(&cluster, STRICT, &backup, 2, &["there is no manifest with a valid seal"])?;
    fs::write(backup.join("pg_hba.conf"), &hba)?;
    fs::write(backup.join(MANIFEST), &manifest)?;
    fs::write(backup.join(SEAL), &seal)?;
    cluster.installation().give(&backup.join(SEAL))?;
    helper(&cluster, STRICT, &backup, 0, &["No damage found."])?;

    // The manifest is removed, or a server was started: nothing is compared.
    fs::rename(backup.join(MANIFEST), backup.join("away"))?;
    helper(&cluster, STRICT, &backup, 2, &["manifest     none", "no manifest with a valid seal"])?;
    helper(&cluster, &["seal-manifest"], &backup, 1, &["there is no \"backup_manifest\""])?;
    fs::rename(backup.join("away"), backup.join(MANIFEST))?;
    fs::write(backup.join("postmaster.opts"), "")?;
    let started = ["not compared: a server was started", "no manifest with a valid seal"];
    helper(&cluster, STRICT, &backup, 2, &started)?;
    helper(&cluster, &["verify"], &backup, 0, &started[..1])?;
    helper(&cluster, &["seal-manifest"], &backup, 1, &["a server was started in this directory"])?;
    fs::remove_file(backup.join("postmaster.opts"))?;

    // For programs.
    let line = ["verify", "--json", "--require-seal"];
    let output = cluster.program("pagevault-keyring").args(line).arg(&backup).output()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(output.status.success() && report["damage_found"] == false, "{report}");
    ensure!(report["manifest"]["state"] == "compared", "{report}");
    ensure!(report["manifest"]["seal"]["state"] == "yes", "{report}");
    ensure!(report["manifest"]["ranges"][0]["timeline"] == 1, "{report}");
    ensure!(report["wal"]["records"].as_u64() > Some(0), "{report}");

    // Without the key nothing is sealed or believed.
    keys.take_away()?;
    helper(&cluster, &["seal-manifest"], &backup, 1, &["does not exist"])?;
    helper(&cluster, STRICT, &backup, 1, &["does not exist"])?;
    keys.bring_back()?;
    cluster.finish()
}

/// They say what a restored server does, and `pg_verifybackup` ignores them.
#[test]
fn settings_of_recovery_are_sealed_too() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    let backup = back_up(&cluster, "backup", &["--manifest-checksums=SHA256"])?;
    let auto = backup.join("postgresql.auto.conf");
    let before = fs::read(&auto)?;
    let after = [&before, &b"restore_command = 'false'\n"[..]].concat();
    fs::write(&auto, &after)?;
    fs::write(backup.join("recovery.signal"), "")?;
    helper(&cluster, &["verify"], &backup, 0, &["No damage found."])?;
    fs::write(&auto, &before)?;
    fs::remove_file(backup.join("recovery.signal"))?;

    helper(&cluster, &["seal-manifest"], &backup, 0, &["Sealed"])?;
    helper(&cluster, STRICT, &backup, 0, &["No damage found."])?;
    fs::write(&auto, &after)?;
    let what = "pagevault/audit.tools, pagevault/anchor.accepted are as they were sealed";
    helper(&cluster, STRICT, &backup, 2, &[what])?;
    fs::remove_file(&auto)?;
    helper(&cluster, STRICT, &backup, 2, &[what])?;
    fs::write(&auto, &before)?;
    cluster.installation().give(&auto)?;
    // The others would not be read if they were empty.
    let whole = ["postgresql.auto.conf", "pagevault/restored"];
    for name in OTHERS.iter().filter(|name| !whole.contains(name)) {
        fs::write(backup.join(name), "")?;
        cluster.installation().give(&backup.join(name))?;
        helper(&cluster, STRICT, &backup, 2, &[what])?;
        fs::remove_file(backup.join(name))?;
    }
    helper(&cluster, STRICT, &backup, 0, &["No damage found."])?;

    // These are written after the manifest.
    let standby = back_up(&cluster, "standby", &["-R", "--manifest-checksums=SHA256"])?;
    helper(&cluster, &["seal-manifest"], &standby, 0, &["Sealed"])?;
    helper(&cluster, STRICT, &standby, 0, &["No damage found."])?;
    fs::remove_file(standby.join("standby.signal"))?;
    helper(&cluster, STRICT, &standby, 2, &[what])?;
    cluster.finish()
}

/// A standby is made from a sealed backup, and a backup from the standby.
#[test]
fn the_seal_of_an_earlier_backup_is_none() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    let sha = ["--manifest-checksums=SHA256"];
    let first = back_up(&cluster, "first", &sha)?;
    helper(&cluster, &["seal-manifest"], &first, 0, &["Sealed"])?;
    let place = cluster.data_directory().join(SEAL);
    fs::copy(first.join(SEAL), &place)?;
    cluster.installation().give(&place)?;
    let second = back_up(&cluster, "second", &sha)?;
    helper(&cluster, &["verify"], &second, 0, &["seal         none", "No damage found."])?;
    helper(&cluster, &["seal-manifest"], &second, 0, &["Sealed"])?;
    helper(&cluster, STRICT, &second, 0, &["seal         valid", "No damage found."])?;
    cluster.finish()
}

/// As `pg_combinebackup` makes it.
#[test]
fn a_manifest_that_lists_wal_is_sealed() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    let backup = back_up(&cluster, "backup", &["--manifest-checksums=SHA256"])?;
    let text = fs::read_to_string(backup.join(MANIFEST))?;
    let listed = |path: &str| {
        let file = format!("\n{{ \"Path\": \"{path}\", \"Size\": 1048576 }},\n");
        text.replacen("\"Files\": [\n", &format!("\"Files\": [{file}"), 1)
    };
    rewrite(&backup, &listed("a"))?;
    helper(&cluster, &["seal-manifest"], &backup, 1, &["no cryptographic checksums"])?;
    rewrite(&backup, &listed("pg_wal/000000010000000000000001"))?;
    helper(&cluster, &["seal-manifest"], &backup, 0, &["Sealed"])?;
    helper(&cluster, STRICT, &backup, 0, &["seal         valid", "No damage found."])?;
    cluster.finish()
}

#[test]
fn manifests_that_prove_nothing_are_not_sealed() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    for (name, option) in
        [("crc", "--manifest-checksums=CRC32C"), ("no", "--manifest-checksums=NONE")]
    {
        let backup = back_up(&cluster, name, &[option])?;
        let words = ["no cryptographic checksums", "--manifest-checksums=SHA256"];
        helper(&cluster, &["seal-manifest"], &backup, 1, &words)?;
        ensure!(!backup.join(SEAL).exists(), "sealed");
    }
    let tar = back_up(&cluster, "tar", &["--format=tar", "--manifest-checksums=SHA256"])?;
    for command in ["seal-manifest", "verify"] {
        helper(&cluster, &[command], &tar, 1, &["tar format", "Extract the archives"])?;
    }
    let mine = cluster.data_directory();
    helper(&cluster, &["seal-manifest"], &mine, 1, &["a server was started in this directory"])?;
    cluster.finish()
}
