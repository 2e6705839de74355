//! A database key that master keys of Vault, of a KMS and of a file wrap: whoever is left unlocks.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::kms::{Credentials, Emulator};
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::{Cluster, KeyFile, StopMode};

use crate::Test;
use crate::bench::{add_provider, cluster_on_vault, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    vec![Test {
        name: "several::whoever_is_left_unlocks",
        needs: &[Server::Vault, Server::Moto],
        run: whoever_is_left,
    }]
}

/// How Vault is out of order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Vaults {
    Answers,
    Killed,
    Frozen,
    Sealed,
}

/// Who answers when the server starts.
struct Case {
    vault: Vaults,
    kms: bool,
    file: bool,
}

fn start_with(
    cluster: &Cluster,
    (vault, kms, file): (&mut Vault, &Emulator, &KeyFile),
    case: &Case,
) -> Result<()> {
    match case.vault {
        Vaults::Answers => {}
        Vaults::Killed => vault.stop(),
        Vaults::Frozen => vault.freeze()?,
        Vaults::Sealed => vault.seal()?,
    }
    if !case.kms {
        kms.freeze()?;
    }
    if !case.file {
        file.take_away()?;
    }
    cluster.start_server()?;
    let state = cluster.text("SELECT state FROM pagevault.status")?;
    readable(cluster).with_context(|| format!("{state}: {:?} {}", case.vault, case.kms))?;
    match case.vault {
        Vaults::Answers => {}
        Vaults::Killed => vault.restart()?,
        Vaults::Frozen => vault.wake()?,
        Vaults::Sealed => vault.unseal()?,
    }
    if !case.kms {
        kms.wake()?;
    }
    if !case.file {
        file.bring_back()?;
    }
    Ok(())
}

fn whoever_is_left() -> Result<()> {
    let (mut cluster, mut vault) = cluster_on_vault(&impatient())?;
    for expected in ["could not unwrap", "could not revalidate"] {
        cluster.allow_log(expected);
    }
    let kms = Emulator::moto()?;
    let credentials = Credentials::root()?;
    let key = kms.create_key()?;
    let file = cluster.key_file("spare", "main")?;
    cluster.sql(&add_provider("kms", "aws_kms", &kms.provider(&credentials).options))?;
    cluster.sql(&file.add_provider("safe"))?;
    cluster.sql(&format!("SELECT pagevault.add_cluster_master_key('kms', '{key}')"))?;
    cluster.sql("SELECT pagevault.add_cluster_master_key('safe', 'main')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    use Vaults::{Answers, Frozen, Killed, Sealed};
    let cases = [
        Case { vault: Answers, kms: false, file: false },
        Case { vault: Killed, kms: true, file: false },
        Case { vault: Frozen, kms: true, file: false },
        Case { vault: Sealed, kms: false, file: true },
        Case { vault: Frozen, kms: false, file: true },
        Case { vault: Killed, kms: true, file: true },
    ];
    for (case, kills) in cases.iter().zip([false, true].into_iter().cycle()) {
        cluster.sql("UPDATE secret SET name = name")?;
        if kills {
            cluster.kill()?
        } else {
            cluster.stop(StopMode::Fast)?
        }
        start_with(&cluster, (&mut vault, &kms, &file), case)?;
    }
    // One is gone for good.
    vault.stop();
    cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.sql("SELECT pagevault.drop_cluster_master_key('vault', 'db-kek')")?;
    cluster.sql("SELECT pagevault.drop_provider('vault')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    let left = cluster.text(
        "SELECT string_agg(provider, ' ' ORDER BY preference) FROM pagevault.database_keys
          WHERE version = (SELECT max(version) FROM pagevault.database_keys)",
    )?;
    ensure!(left == "kms safe", "{left}");
    cluster.restart()?;
    readable(&cluster)
}
