//! The first start of a server that was made by `pg_basebackup -X stream`: its WAL is plaintext,
//! and is sealed then. Whatever a power cut leaves, the next start finds all of the WAL.

use anyhow::{Context, Result, ensure};
use pagevault_powercut::recording::{Cut, Recorded, Recording};
use pagevault_powercut_disk::Survival;
use pagevault_tests::datafile::holds_numbered;
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, KeyFile, Settings};

const ROWS: &str = "SELECT count(*) FROM t";

/// Records the first start of a backup, and says how many rows it has.
fn first_start() -> Result<(Cluster, Recorded, KeyFile, String)> {
    let settings = Settings::default().wal_segment_size(1).conf("fsync = on");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    // A transaction that is open while the backup is made, and what it has written: WAL in several
    // segments.
    let insert = "INSERT INTO t (name) SELECT 'drossel-' || i || repeat('.', 100) FROM generate_series(1, 20000) i";
    let restored = std::thread::scope(|scope| -> Result<Cluster> {
        let load = scope.spawn(|| (0..4).try_for_each(|_| cluster.sql(insert)));
        let restored = Cluster::from_files(|target| {
            cluster.base_backup_with(target, &["-X", "stream", "--checkpoint=fast"])
        });
        load.join().map_err(|_| anyhow::anyhow!("the load has panicked"))??;
        restored
    })?;
    let plain = Segment::all(&restored.data_directory().join("pg_wal"))?;
    ensure!(
        plain.iter().any(|segment| holds_numbered(&segment.bytes, "drossel")),
        "the backup has no plaintext WAL: nothing is tested"
    );
    let recording = Recording::begin(restored)?;
    let rows = recording.cluster().text(ROWS)?;
    ensure!(recording.cluster().log().contains("WAL segments of the base backup"));
    Ok((cluster, recording.end()?, keys, rows))
}

/// Starts the server on what a cut leaves: it has all rows, and no plaintext WAL.
fn judge(recorded: &Recorded, cut: Cut, ignore: Option<&'static [u8]>, rows: &str) -> Result<()> {
    let mut cluster = recorded.cluster_after(cut, ignore)?;
    cluster.keep_quiet();
    cluster.start_server()?;
    let found = cluster.text(ROWS)?;
    ensure!(found == rows, "{found} rows instead of {rows}");
    for segment in Segment::all(&cluster.data_directory().join("pg_wal"))? {
        ensure!(!segment.pages()?.contains(&WalPage::Plain), "{}", segment.path.display());
    }
    cluster.kill()
}

fn cuts(recorded: &Recorded, survival: Option<Survival>) -> Vec<Cut> {
    let places = recorded.places_at(b"pg_wal");
    // Around each step, and between.
    let step = places.len().div_ceil(24).max(1);
    let places = places.into_iter().step_by(step);
    let cut = |(seed, place)| Cut { place, seed, survival, twice: false };
    (0..).zip(places).map(cut).collect()
}

#[test]
fn sealing_wal_of_a_backup_survives_power_cuts() -> Result<()> {
    let (cluster, recorded, _keys, rows) = first_start()?;
    let cuts = [cuts(&recorded, None), cuts(&recorded, Some(Survival::Nothing))].concat();
    ensure!(cuts.len() > 20, "{} places", cuts.len());
    for cut in cuts {
        let judged = judge(&recorded, cut, None, &rows);
        judged.with_context(|| format!("{cut}\n{}", recorded.around(cut.place)))?;
    }
    cluster.finish()
}

/// If directories and files of WAL were not synced, rows would be lost: this would be noticed.
#[test]
fn wal_that_is_not_synced_before_it_is_replaced_is_caught() -> Result<()> {
    let (cluster, recorded, _keys, rows) = first_start()?;
    let cuts = cuts(&recorded, Some(Survival::Nothing));
    let is_bad = |cut: &Cut| judge(&recorded, *cut, Some(b"pg_wal"), &rows).is_err();
    ensure!(cuts.iter().any(is_bad), "nothing was noticed");
    cluster.finish()
}
