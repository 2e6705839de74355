//! Files written by a later version of pagevault are refused as a whole, and not changed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

/// Converts the bytes of a key file to those of a later version.
type Change = fn(&[u8]) -> Vec<u8>;

/// Possible changes by a later version to a key file (see docs/formats.md), with the expected
/// message.
const CHANGES: [(&str, Change); 4] = [
    ("unknown format version 2, of a later pagevault, at byte 0", |old| {
        let mut new = old.to_vec();
        new[8] = 2;
        let checksum = crc32c::crc32c(&new[..36]);
        new[36..40].copy_from_slice(&checksum.to_le_bytes());
        new
    }),
    ("unknown format version 2, of a later pagevault, at byte", |old| {
        [old, &batch(2, &[])].concat()
    }),
    ("unknown record type 200, of a later pagevault, at byte", |old| {
        [old, &batch(1, &[200, 1, 0, 0, 0, 0])].concat()
    }),
    ("unknown version 9 of record type 1, of a later pagevault, at byte", |old| {
        [old, &batch(1, &[1, 9, 0, 0, 0, 0])].concat()
    }),
];

const HINT: &str =
    "Install the version of pagevault that this data directory was used with last, or a later one.";

fn batch(version: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xDB, b'p', b'v', 0xB1, version, 0, 0, 0];
    bytes.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(crc32c::crc32c(body).to_le_bytes());
    bytes.extend([0; 16]);
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// Replaces the contents of a file, keeping its owner and mode.
fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

#[test]
fn key_files_of_a_later_version_are_refused() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    let database = cluster.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?;
    cluster.allow_log("key file");
    cluster.allow_log("pagevault");
    for file in ["cluster.keys".to_owned(), format!("{database}.keys")] {
        let path = cluster.data_directory().join("pagevault").join(&file);
        for (response, change) in CHANGES {
            cluster.stop(StopMode::Fast)?;
            let right = fs::read(&path)?;
            let later = change(&right);
            put(&path, &later)?;
            let what = format!("{file}, {response}");
            match cluster.start_server() {
                Err(error) => {
                    let reported = format!("{error:#}");
                    ensure!(
                        reported.contains(response) && reported.contains(HINT),
                        "{what}: {reported}"
                    );
                }
                Ok(()) => {
                    let error = cluster.error("SELECT id FROM t")?;
                    let reported = error.text();
                    ensure!(
                        reported.contains(response) && reported.contains(HINT),
                        "{what}: {reported}"
                    );
                    ensure!(
                        cluster.sql("SELECT pagevault.rotate_data_key('t')").is_err(),
                        "{what}"
                    );
                    cluster.stop(StopMode::Fast)?;
                }
            }
            ensure!(fs::read(&path)? == later, "{what}: the file was changed");
            for offline in ["verify", "inspect"] {
                let mut tool = cluster.installation().command("pagevault-keyring");
                let output = tool.arg(offline).arg(cluster.data_directory()).output()?;
                let reported =
                    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
                ensure!(reported.contains(response), "{what}: {offline} says {reported}");
                let content = output.status.success();
                ensure!(content == (offline == "inspect"), "{what}: {offline}: {}", output.status);
            }
            put(&path, &right)?;
            cluster.start_server()?;
            ensure!(cluster.text("SELECT id FROM t")? == "7", "{what}: the row is lost");
        }
    }
    cluster.finish()
}
