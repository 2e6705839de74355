//! Permissions of pagevault's files in the data directory: the same as those of the rest. `initdb
//! --allow-group-access` permits backups by another user in the server's group, and a backup
//! without keys would be useless.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use age::x25519::Identity;
use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

#[test]
fn the_keystore_has_the_modes_of_the_data_directory() -> Result<()> {
    for (directory, file) in [(0o700, 0o600), (0o750, 0o640)] {
        let cluster = Cluster::create(&Settings::default())?;
        let data = cluster.data_directory();
        // The server uses this mode, as after `initdb --allow-group-access`.
        fs::set_permissions(&data, PermissionsExt::from_mode(directory))?;
        cluster.start_server()?;
        let keys = cluster.key_file("keys", "main")?;
        cluster.sql("CREATE EXTENSION pagevault")?;
        cluster.sql(&keys.add_provider("local"))?;
        cluster.sql(
            "SELECT pagevault.set_cluster_master_key('local', 'main');
             SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT 1 AS id",
        )?;
        // A crash rewrites every key log.
        cluster.crash()?;
        // The helper makes files there, too.
        let recipient = Identity::generate().to_public().to_string();
        let mut export = cluster.program("pagevault-keyring");
        export.args(["escrow", "export", "--recipient", &recipient]).arg(&data).arg("--output");
        run(export.arg(cluster.directory().join("bundle")))?;
        for name in ["escrow", "audit.tools"] {
            ensure!(data.join("pagevault").join(name).exists(), "{name}");
        }
        let keystore = data.join("pagevault");
        let mode = |path| -> Result<u32> { Ok(fs::metadata(path)?.permissions().mode() & 0o777) };
        let found = mode(keystore.clone())?;
        ensure!(found == directory, "directory: {found:o} where PGDATA is {directory:o}");
        let mut files = 0;
        for entry in fs::read_dir(&keystore)? {
            let entry = entry?;
            let found = mode(entry.path())?;
            ensure!(
                found == file,
                "{:?}: {found:o} where PGDATA is {directory:o}",
                entry.file_name()
            );
            files += 1;
        }
        ensure!(files >= 2, "only {files} files in the keystore");
        cluster.finish()?;
    }
    Ok(())
}
