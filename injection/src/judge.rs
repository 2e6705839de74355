//! What must be true of a server, whatever has failed.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, text};

use crate::injector::{Fault, Injection};
use crate::messages::{Documented, of_log};
use crate::server::Server;

/// Rows, by the heap and by indexes; no plaintext of encrypted relations on disk; keys unlocked.
pub(crate) fn contents(server: &Server, encrypted: bool) -> Result<()> {
    let mut client = server.cluster.client()?;
    let n = server.acknowledged;
    let sum = n * (n + 1) / 2;
    for how in [
        "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off; SET enable_seqscan = on",
        "SET enable_indexscan = on; SET enable_indexonlyscan = on; SET enable_seqscan = off",
    ] {
        client.batch_execute(how)?;
        let query = format!(
            "SELECT count(*) || ' ' || coalesce(sum(n), 0) FROM ledger WHERE n BETWEEN 1 AND {n}"
        );
        let found = text(&mut client, &query)?;
        ensure!(found == format!("{n} {sum}"), "ledger: {found} instead of {n} {sum} ({how})");
        let found = text(
            &mut client,
            "SELECT count(*) || ' ' || sum(v) FROM t WHERE id BETWEEN 1 AND 2000",
        )?;
        ensure!(found == "2000 2000", "t: {found} ({how})");
    }
    if !encrypted || server.stock {
        return Ok(());
    }
    let plain = column(
        &mut client,
        "SELECT v::text FROM unnest('{ledger,t}'::regclass[]) r, pagevault.verify(r) v
          WHERE v.state NOT IN ('encrypted', 'empty') AND v.pages > 0 AND v.fork = 'main'",
    )?;
    ensure!(plain.is_empty(), "plaintext on disk: {plain:?}");
    let state = text(&mut client, "SELECT state FROM pagevault.status")?;
    ensure!(state == "unlocked", "the state is {state}");
    Ok(())
}

/// Whether recovery has taken a failed read of WAL for the end of WAL. That is PostgreSQL itself
/// (`XLogPageRead`, `emode_for_corrupt_record`, xlogrecovery.c): a LOG message, and it goes on.
pub(crate) fn is_wal_cut_short(server: &Server, injection: &Injection, from: usize) -> bool {
    let log = server.cluster.log();
    let log = log.get(from..).unwrap_or_default();
    // 15, and later majors.
    let says = ["log", "WAL"].map(|kind| format!(" LOG:  could not read from {kind} segment "));
    injection.call.starts_with("read pg_wal/# startup") && says.iter().any(|s| log.contains(s))
}

/// Messages since `from`, an offset in the log, that are not in order after this fault.
pub(crate) fn log(
    server: &Server,
    documented: &Documented,
    fault: &Fault,
    from: usize,
) -> Result<Vec<String>> {
    let log = server.cluster.log();
    let log = log.get(from..).unwrap_or_default();
    let directory = server.cluster.directory().display().to_string();
    let complaints =
        of_log(log).filter_map(|message| documented.judge(&message, fault, &directory).err());
    let complaints = complaints.map(|error| error.to_string()).collect();
    ensure!(!log.contains("panicked at"), "a panic of Rust");
    // PostgreSQL itself: once a process has not been able to map the memory of the statistics
    // (`dsm_impl_posix`, dsm_impl.c; `pgstat_attach_shmem`, `pgstat_init_entry`, pgstat_shmem.c),
    // the next one may end so (`pgstat_relation_flush_cb`). See `crash-stock`.
    let is_stock = log.contains(":  could not map shared memory segment ");
    ensure!(is_stock || !log.contains("was terminated by signal 11"), "a segmentation fault");
    secrets(server, log)?;
    Ok(complaints)
}

/// Nothing of the key file is in the log.
fn secrets(server: &Server, log: &str) -> Result<()> {
    let keys = std::fs::read_to_string(server.keys.path())?;
    let secret = |word: &&str| word.len() >= 32;
    for word in keys.split(|c: char| c.is_whitespace() || "\"=:,".contains(c)).filter(secret) {
        ensure!(!log.contains(word), "a key is in the log");
    }
    Ok(())
}

/// The audit trail in the server's log is whole.
pub(crate) fn audit(Server { cluster, stock, .. }: &Server) -> Result<()> {
    // Whoever reads the log knows then that the trail cannot be whole.
    if *stock || cluster.log().contains("\"audit.state\"") {
        return Ok(());
    }
    let log = cluster.directory().join("log");
    let mut command = cluster.program("pagevault-keyring");
    let files: [&Path; 1] = [&log];
    command.args(["audit", "verify"]).args(files).arg("-D").arg(cluster.data_directory());
    let output = command.output().context("audit verify")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the audit trail: {said}");
    Ok(())
}
