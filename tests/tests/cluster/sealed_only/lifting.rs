//! The keystore says that a file contains encrypted pages only from its creation until it is written
//! in plaintext: never of a file that had plaintext pages before.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

use super::{HONEST, cluster, file, is_sealed_only, read_again};

fn wait(cluster: &Cluster, statement: &str) -> Result<()> {
    let job = cluster.text(statement)?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '1min')"))? == "t");
    Ok(())
}

#[test]
fn decryption_ends_it_and_a_new_file_begins_it() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    let is = |expected: bool, when: &str| -> Result<()> {
        ensure!(is_sealed_only(&cluster, "t")? == expected, "{when}");
        ensure!(cluster.text(HONEST)? == "1000", "{when}: rows");
        read_again(&cluster)?;
        ensure!(is_sealed_only(&cluster, "t")? == expected, "{when}, after a restart");
        ensure!(cluster.text(HONEST)? == "1000", "{when}: rows after a restart");
        cluster.crash()?;
        ensure!(is_sealed_only(&cluster, "t")? == expected, "{when}, after a crash");
        ensure!(cluster.text(HONEST)? == "1000", "{when}: rows after a crash");
        Ok(())
    };
    is(true, "created")?;
    wait(&cluster, "SELECT pagevault.rotate_data_key('t')")?;
    is(true, "rotated")?;
    wait(&cluster, "SELECT pagevault.decrypt('t')")?;
    is(false, "decrypted")?;
    wait(&cluster, "SELECT pagevault.encrypt('t')")?;
    is(false, "encrypted again")?;
    cluster.sql("VACUUM FULL t")?;
    is(true, "in a new file")?;
    wait(&cluster, "SELECT pagevault.encrypt('forged')")?;
    ensure!(!is_sealed_only(&cluster, "forged")?, "it had pages in plaintext");
    cluster.finish()
}
