//! Minor releases: what an upgrade of packages does to a server, and its reversal.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

/// The oldest and the newest release of each major among builds that have the same name otherwise.
pub(crate) fn pairs(names: &[&str]) -> Vec<[String; 2]> {
    let mut families: BTreeMap<(&str, u32), BTreeMap<Vec<u32>, &str>> = BTreeMap::new();
    for name in names {
        let Some((family, version)) = name.rsplit_once('-') else { continue };
        let numbers: Option<Vec<u32>> = version.split('.').map(|part| part.parse().ok()).collect();
        let Some(numbers) = numbers.filter(|numbers| numbers.len() > 1) else { continue };
        families.entry((family, numbers[0])).or_default().insert(numbers, *name);
    }
    let ends =
        families.into_values().filter(|releases| releases.len() > 1).filter_map(|releases| {
            let (first, last) = (releases.first_key_value()?, releases.last_key_value()?);
            Some([first.1.to_string(), last.1.to_string()])
        });
    ends.collect()
}

/// The newer server recovers what the older one has written until it was killed. Then the older one
/// continues, and the newer one again. Sessions write all the time.
pub(crate) fn take_turns(older: &Path, newer: &Path) -> Result<()> {
    let older = Installation::of_prefix(older)?;
    let newer = Installation::of_prefix(newer)?;
    let settings = Settings::default().on(older).conf("pagevault.default_encryption = on");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let canary = Canary::text("of a minor release");
    cluster.sql(&format!(
        "CREATE TABLE t (id bigserial PRIMARY KEY, note text);
         INSERT INTO t (note) SELECT '{0}' || i FROM generate_series(1, 5000) i;
         CREATE INDEX ON t (note); CHECKPOINT",
        canary.as_str()
    ))?;
    for (server, is_killed) in [(newer, true), (older, false), (newer, false)] {
        let acknowledged = while_writing(&cluster, canary.as_str(), || match is_killed {
            true => cluster.kill(),
            false => cluster.stop(StopMode::Fast),
        })?;
        cluster.run_by(server);
        cluster.start_server().with_context(|| format!("by {}", server.version))?;
        let is = cluster.text("SHOW server_version")?;
        ensure!(server.version.contains(is.split(' ').next().unwrap_or(&is)), "it is {is}");
        let found = "SELECT count(*) FROM t WHERE id = ANY";
        let ids: Vec<String> = acknowledged.iter().map(ToString::to_string).collect();
        let found = cluster.text(&format!("{found} ('{{{}}}')", ids.join(",")))?;
        ensure!(found == acknowledged.len().to_string(), "{found} of {}", acknowledged.len());
        ensure!(acknowledged.len() > 10, "only {} rows were written", acknowledged.len());
        for statement in [
            "SELECT pagevault.rotate_data_key('t')",
            "SELECT pagevault.wait_for_rekey('t'::regclass)",
            "UPDATE t SET note = note || '.' WHERE id % 9 = 0",
            "CHECKPOINT",
        ] {
            cluster.sql(statement)?;
        }
        assert_sealed(&cluster.family_files("t")?)?;
        ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    }
    cluster.end()?;
    let found = Scanner::new([&canary]).scan_trees(&[cluster.data_directory().as_path()])?;
    ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
    cluster.keep_quiet();
    Ok(())
}

/// Has a session insert rows one by one while `end` ends the server. Returns those that were
/// acknowledged.
fn while_writing(
    cluster: &Cluster,
    note: &str,
    end: impl FnOnce() -> Result<()>,
) -> Result<Vec<i64>> {
    let insert = format!("INSERT INTO t (note) VALUES ('{note}') RETURNING id");
    let mut client = cluster.client()?;
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut acknowledged = Vec::new();
            while let Ok(ids) = column(&mut client, &insert) {
                acknowledged.extend(ids.iter().filter_map(|id| id.parse::<i64>().ok()));
                enough.store(acknowledged.len() > 100, Relaxed);
            }
            enough.store(true, Relaxed);
            acknowledged
        });
        while !enough.load(Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        end()?;
        writing.join().map_err(|_| anyhow::anyhow!("the session panicked"))
    })
}
