//! After `pg_resetwal`, whatever it guesses, keys are found and WAL stays sealed.

use anyhow::{Result, ensure};
use pagevault_tests::Settings;
use pagevault_tests::installation::run;
use pagevault_tests::wal::WalPage;

use super::complaints;
use crate::life::{CONTENT, each, everything};
use crate::wal::{assert_hidden, insert, segments};

/// Remaining files of a server after the accident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    All,
    NoControlFile,
    /// Neither control file nor WAL; the operator specifies where WAL is to begin.
    DataAlone,
}

fn forced(left: Left, by_exec: bool) -> Result<()> {
    let (mut cluster, _keys) = everything(Settings::default().wal_segment_size(1))?;
    if left != Left::All {
        // The new control file says that the cluster has no data checksums.
        cluster.allow_log("authenticated pages that a crash tears would be lost");
    }
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "drossel", 1000)?;
    each(&cluster, &["VACUUM FREEZE", "CHECKPOINT"])?;
    let content = cluster.text(CONTENT)?;
    insert(&cluster, "verloren", 1)?;
    let next_xid = cluster.text("SELECT pg_current_xact_id()::text::bigint + 1000")?;
    let next_segment = cluster.text("SELECT pg_walfile_name(pg_current_wal_lsn() + 67108864)")?;
    let data = cluster.data_directory();
    cluster.kill()?;
    let refused = complaints(cluster.program("pg_resetwal").arg("-D").arg(&data))?;
    ensure!(refused.contains("-f"), "{refused}");
    if left != Left::All {
        std::fs::write(data.join("global/pg_control"), "")?;
    }
    if left == Left::DataAlone {
        for entry in std::fs::read_dir(data.join("pg_wal"))? {
            let path = entry?.path();
            if path.is_file() {
                std::fs::remove_file(path)?;
            }
        }
    }
    let mut reset = match by_exec {
        true => cluster.program("pagevault-keyring"),
        false => cluster.program("pg_resetwal"),
    };
    if by_exec {
        reset.args(["exec", "--", "pg_resetwal"]);
    }
    reset.arg("-f").arg("-D").arg(&data);
    if left != Left::All {
        reset.args(["-x", &next_xid, "--wal-segsize=1"]);
    }
    if left == Left::DataAlone {
        reset.args(["-l", &next_segment]);
    }
    run(&mut reset)?;
    cluster.start_server()?;
    ensure!(cluster.text(CONTENT)? == content, "rows");
    insert(&cluster, "zeisig", 1000)?;
    let content = cluster.text(CONTENT)?;
    ensure!(cluster.text("SELECT wal_encrypted FROM pagevault.status")? == "t", "WAL");
    // A page that begins as plaintext continues as plaintext. Without keys the program can only
    // write plaintext.
    let mut plain = Vec::new();
    for segment in segments(&cluster)? {
        let pages = segment.pages()?;
        plain.extend((0..).zip(pages).filter(|(_, page)| *page == WalPage::Plain));
    }
    ensure!(
        plain.len() == usize::from(!by_exec) && plain.iter().all(|(at, _)| *at == 0),
        "{plain:?}"
    );
    cluster.crash()?;
    ensure!(cluster.text(CONTENT)? == content, "rows after recovery");
    each(
        &cluster,
        &["SELECT pagevault.rotate_wal_key()", "SELECT pagevault.rotate_database_key()"],
    )?;
    insert(&cluster, "star", 1000)?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM t WHERE name LIKE 'star-%'")? == "1000", "star");
    assert_hidden(&cluster, "star")?;
    cluster.without_witness("pg_resetwal begins other WAL");
    cluster.finish()
}

#[test]
fn after_a_crash() -> Result<()> {
    forced(Left::All, false)
}

#[test]
fn after_a_crash_by_exec() -> Result<()> {
    forced(Left::All, true)
}

#[test]
fn without_a_control_file() -> Result<()> {
    forced(Left::NoControlFile, false)
}

#[test]
fn without_a_control_file_by_exec() -> Result<()> {
    forced(Left::NoControlFile, true)
}

#[test]
fn without_control_file_and_wal() -> Result<()> {
    forced(Left::DataAlone, false)
}
