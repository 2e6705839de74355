//! Restoring where some providers are lost and others answer, one after the other, and beside a
//! server that is started.

use super::*;

/// A server is started while the new provider is asked. If it does not read the file now, it would
/// at a later start, when the keys may be elsewhere.
#[test]
fn nothing_is_restored_beside_a_server_that_was_started_meanwhile() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    cluster.stop(StopMode::Fast)?;
    let lock = cluster.data_directory().join("postmaster.pid");
    // While the new provider unwraps a key, a server starts.
    let options = cluster.key_program("program", &format!(": > '{}'", lock.display()))?;
    let before = keystore(&cluster)?;
    let mut command = open(&cluster, "restore", &bundle, &identity);
    command.args(["--provider-kind", "command", "--key", "new", "--options", &options]);
    let response = refused(&mut command)?;
    ensure!(response.contains("a server is running in the data directory"), "{response}");
    ensure!(lock.exists(), "the provider was not asked");
    ensure!(keystore(&cluster)? == before, "the keystore was changed");
    fs::remove_file(&lock)?;
    cluster.start_server()?;
    ensure!(cluster.text(ESCROW)? == "t 0");
    cluster.finish()
}
