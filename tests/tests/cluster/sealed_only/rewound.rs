//! `pg_rewind` of a former primary, when one of two timelines has said of a file that it contains
//! encrypted pages only, or that it does not any more, or of which keys.

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, Standby, StopMode};

use super::{cluster, is_sealed_only, read_again, wait};

/// Encrypted in place, decrypted, or rotated, by one of the two servers after their timelines have
/// parted.
const TABLES: [&str; 6] =
    ["proven_here", "proven_there", "lifted_here", "lifted_there", "rotated_here", "rotated_there"];

fn change(cluster: &Cluster) -> Result<()> {
    for table in TABLES {
        cluster.sql(&format!(
            "UPDATE {table} SET id = id + 1 WHERE id % 50 = 0;
             INSERT INTO {table} SELECT i, 'honest' FROM generate_series(1, 500) i"
        ))?;
    }
    Ok(())
}

#[test]
fn a_former_primary_follows() -> Result<()> {
    let settings =
        Settings::default().conf("pagevault.rekey_threshold = 0").conf("wal_keep_size = 1GB");
    let (mut a, _keys) = cluster(&settings)?;
    for table in TABLES {
        let encryption = if table.starts_with("proven") { "off" } else { "on" };
        a.sql(&format!(
            "SET pagevault.default_encryption = {encryption};
             CREATE TABLE {table} AS SELECT i AS id, 'honest' AS name FROM generate_series(1, 2000) i"
        ))?;
    }
    let mut b = standby_of(&a, &[])?;
    for cluster in [&mut a, &mut b] {
        for text in ["could not", "terminating walreceiver", "connection to client lost"] {
            cluster.allow_log(text);
        }
    }
    change(&a)?;
    wait_for(&b, &a)?;
    b.promote()?;
    b.sql("CHECKPOINT")?;
    // `here` is what becomes of history, `there` what is rewound.
    for (cluster, place) in [(&b, "here"), (&a, "there")] {
        change(cluster)?;
        wait(cluster, &format!("SELECT pagevault.encrypt('proven_{place}')"))?;
        wait(cluster, &format!("SELECT pagevault.decrypt('lifted_{place}')"))?;
        wait(cluster, &format!("SELECT pagevault.rotate_data_key('rotated_{place}')"))?;
        change(cluster)?;
        ensure!(is_sealed_only(cluster, &format!("proven_{place}"))?);
        ensure!(!is_sealed_only(cluster, &format!("lifted_{place}"))?);
    }
    a.without_witness("pg_rewind takes its WAL away");
    a.stop(StopMode::Fast)?;
    let mut rewind = a.program("pg_rewind");
    rewind.arg("--target-pgdata").arg(a.data_directory());
    rewind.arg(format!(
        "--source-server=host={} user=postgres dbname=postgres",
        b.directory().display()
    ));
    run(&mut rewind)?;
    Standby::default().follow(&a, &b)?;
    a.start_server()?;
    let agree = |round: &str| -> Result<()> {
        wait_for(&a, &b)?;
        for table in TABLES {
            let query = format!("SELECT count(*) || ' ' || sum(id) FROM {table}");
            ensure!(a.text(&query)? == b.text(&query)?, "{round}: {table}");
            let expected =
                matches!(table, "proven_here" | "lifted_there") || table.starts_with("rotated");
            ensure!(is_sealed_only(&b, table)? == expected, "{round}: {table}");
            ensure!(is_sealed_only(&a, table)? == expected, "{round}: {table}, rewound");
        }
        Ok(())
    };
    agree("rewound")?;
    change(&b)?;
    agree("changed")?;
    a.crash()?;
    agree("crashed")?;
    b.sql("CHECKPOINT")?;
    wait_for(&a, &b)?;
    a.sql("CHECKPOINT")?;
    // Everything from disk.
    read_again(&a)?;
    agree("read again")?;
    a.finish()?;
    b.finish()
}
