//! Without checksums and `wal_log_hints`, pages with changed hint bits only are written without
//! WAL. If such a page were written under another key during rekeying and torn, its parts would
//! have two keys, and nothing in WAL would repair it.

use anyhow::{Result, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, Settings};

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(name)::bigint + id) FROM h";

/// Power fails after writes use the other key and before any page is rewritten.
fn torn(make: &str, rewrite: &str, done: impl Fn(PageState) -> bool) -> Result<()> {
    let settings = Settings::default().without_checksums().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    // Encrypts the catalogs that are encrypted together with the first relation.
    cluster.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
    cluster.sql(make)?;
    cluster.sql("INSERT INTO h SELECT i, md5(i::text) FROM generate_series(1, 60000) i")?;
    cluster.sql("CHECKPOINT")?;
    let file = cluster.files("h")?.remove(0);
    let before = file.bytes()?;
    cluster.stop_at("rekey.switched")?;
    cluster.sql(rewrite)?;
    cluster.stopped_at("rekey.switched")?;
    let wanted = cluster.text(SUM)?;
    cluster.sql("CHECKPOINT")?;
    let after = file.bytes()?;
    cluster.kill()?;
    cluster.resume();
    let mut torn = 0;
    for block in 0..(before.len() / 8192) as u32 {
        let at = block as usize * 8192;
        let (old, new) = (&before[at..at + 8192], &after[at..at + 8192]);
        if old != new && old[..8] == new[..8] {
            let mut page = new.to_vec();
            page[4096..].copy_from_slice(&old[4096..]);
            file.write_page(block, &page)?;
            torn += 1;
        }
    }
    ensure!(torn > 0, "no page has only got hints");
    cluster.start_server()?;
    let found = cluster.text(SUM)?;
    ensure!(found == wanted, "{torn} torn pages: {found} instead of {wanted}");
    ensure!(
        cluster.text("SELECT pagevault.wait_for_rekey('h'::regclass)")? == "t",
        "the job was not done"
    );
    ensure!(cluster.text(SUM)? == wanted, "rows after the job");
    ensure!(file.states()?.into_iter().all(&done), "pages are written as before");
    cluster.restart()?;
    ensure!(cluster.text(SUM)? == wanted, "rows after a restart");
    cluster.finish()
}

#[test]
fn torn_under_a_new_key() -> Result<()> {
    torn(
        "CREATE TABLE h (id int, name text); SELECT pagevault.encrypt('h')",
        "SELECT pagevault.rotate_data_key('h')",
        |state| {
            matches!(state, PageState::Sealed(version) if version > 1) || state == PageState::Zero
        },
    )
}

#[test]
fn torn_when_it_is_encrypted() -> Result<()> {
    torn("CREATE TABLE h (id int, name text)", "SELECT pagevault.encrypt('h')", |state| {
        matches!(state, PageState::Sealed(_) | PageState::Zero)
    })
}

#[test]
fn torn_when_it_is_decrypted() -> Result<()> {
    torn(
        "CREATE TABLE h (id int, name text); SELECT pagevault.encrypt('h')",
        "SELECT pagevault.decrypt('h')",
        |state| matches!(state, PageState::Plaintext | PageState::Zero),
    )
}
