//! The NOTIFY queue: larger than memory, read by a listener that was busy.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings};
use postgres::fallible_iterator::FallibleIterator;

use super::{CANARY, check, files_below};

/// Each has nearly 8000 bytes.
const NOTIFICATIONS: i32 = 300;

#[test]
fn the_notify_queue_is_sealed_from_the_start() -> Result<()> {
    // Without any key: the queue does not need one.
    let cluster = Cluster::start(&Settings::default())?;
    for sealed in [true, false] {
        let setting = if sealed { "auto" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        // Empties the queue, because an existing segment keeps its state.
        cluster.restart()?;
        let mut listener = cluster.client()?;
        run_sql(&mut listener, "LISTEN birds")?;
        run_sql(&mut listener, "BEGIN")?;
        cluster.sql(&format!(
            "DO $$ BEGIN FOR i IN 1 .. {NOTIFICATIONS} LOOP
                 PERFORM pg_notify('birds', i || repeat(' {CANARY}', 340));
             END LOOP; END $$"
        ))?;
        check(&files_below(&cluster.data_directory().join("pg_notify")), sealed)
            .with_context(|| setting)?;
        run_sql(&mut listener, "COMMIT; SELECT 1")?;
        let heard: Vec<_> = listener.notifications().iter().collect()?;
        ensure!(heard.len() == NOTIFICATIONS as usize, "{setting}: {} were heard", heard.len());
        for (number, heard) in (1..).zip(&heard) {
            let expected = format!("{number}{}", format!(" {CANARY}").repeat(340));
            ensure!(heard.payload() == expected, "{setting}: number {number} says something else");
        }
    }
    cluster.finish()
}
