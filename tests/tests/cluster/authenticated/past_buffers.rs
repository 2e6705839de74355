//! Pages that are read past shared buffers (`pg_prewarm` in mode `read`), while another process is
//! writing them: what is read then is not authentic, and no damage.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::text;

use super::{CIPHERS, cluster, ensure_refused};

const FAILURES: &str = "SELECT decrypt_failures FROM pagevault.stats WHERE kind = 'relation'";

fn read(fork: &str) -> String {
    format!("SELECT pg_prewarm('t', 'read', '{fork}', 0, 0)")
}

#[test]
fn a_page_that_is_read_while_it_is_written_is_read_again() -> Result<()> {
    let (cluster, _keys) = cluster(CIPHERS[0])?;
    cluster.sql("CREATE EXTENSION pg_prewarm; CHECKPOINT")?;
    let point = format!("page.not_authentic {}", cluster.text("SELECT pg_relation_filenode('t')")?);
    let files = cluster.files("t")?;
    let forks: Vec<_> = files.iter().zip(["main", "fsm", "vm"]).collect();
    ensure!(forks.len() == 3, "{files:?}");
    let half = |page: &[u8]| {
        let mut page = page.to_vec();
        page[4096..].reverse();
        page
    };
    for (file, fork) in &forks {
        ensure!(*fork == "main" || file.path.to_string_lossy().ends_with(*fork), "{file:?}");
        let whole = file.read_page(0)?;
        file.write_page(0, &half(&whole))?;
        cluster.stop_at(&point)?;
        let (mut client, query) = (cluster.client()?, read(fork));
        let reading = std::thread::spawn(move || text(&mut client, &query));
        cluster.stopped_at(&point)?;
        file.write_page(0, &whole)?;
        cluster.resume();
        let pages = reading.join().expect("the session's thread")?;
        ensure!(pages == "1" && cluster.text(FAILURES)? == "0", "{fork}: {pages}");
    }
    // What stays so is refused, and counted once.
    for ((file, fork), failures) in forks.into_iter().zip(["1", "2", "3"]) {
        let whole = file.read_page(0)?;
        file.write_page(0, &half(&whole))?;
        match fork {
            "main" => ensure_refused(&cluster.error(&read(fork))?, fork)?,
            _ => ensure!(cluster.text(&read(fork))? == "1", "{fork}"),
        }
        file.write_page(0, &whole)?;
        ensure!(cluster.text(FAILURES)? == failures, "{fork}: {}", cluster.text(FAILURES)?);
    }
    cluster.finish()
}
