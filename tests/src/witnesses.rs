//! Other servers that verify a crash test: a standby that has followed the server, and restores of
//! backups from before and during the crash. A crash test must also pass on these: the state after
//! the crash must agree with the WAL that the server wrote. Only without such WAL (`wal_level =
//! minimal`), or for data that WAL does not contain (unlogged and temporary tables), a test checks
//! the server alone.

use anyhow::{Context, Result, ensure};

use crate::backup::Backup;
use crate::datafile::PageState;
use crate::standby::{ORDINARY, Standby, wait_for};
use crate::{Cluster, StopMode};

/// Servers that verify the crashes of another.
#[derive(Debug)]
pub struct Witnesses {
    follows: Cluster,
    /// Configuration for restored backups.
    standby: Standby,
    /// Base backups with the moment of each; their servers are not started yet.
    backups: Vec<(String, Cluster)>,
}

impl Witnesses {
    /// Attaches a standby to a server, and takes a base backup of it. The server must keep its WAL
    /// for both (`wal_keep_size`).
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn of(server: &Cluster) -> Result<Witnesses> {
        Witnesses::with(server, &[])
    }

    /// Like [`Witnesses::of`], with these lines in their configuration.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn with(server: &Cluster, conf: &[&str]) -> Result<Witnesses> {
        let standby = conf.iter().fold(Standby::default(), |standby, line| standby.conf(line));
        let mut witnesses =
            Witnesses { follows: standby.start(server)?, standby, backups: Vec::new() };
        witnesses.back_up(server, "before")?;
        Ok(witnesses)
    }

    /// Takes another base backup; `during` describes the moment. No stopped process may hold the
    /// keystore's lock, because a backup begins with a checkpoint.
    ///
    /// # Errors
    /// When the backup fails.
    pub fn back_up(&mut self, server: &Cluster, during: &str) -> Result<()> {
        let mut backup = Backup::begin(server)?.end()?;
        self.standby.follow(&backup, server)?;
        for text in ORDINARY {
            backup.allow_log(text);
        }
        self.backups.push((during.to_owned(), backup));
        Ok(())
    }

    /// Lets all witnesses replay the WAL so far. Each must return the same results for these
    /// queries as the server, contain no plaintext page in these tables and their indexes and TOAST
    /// tables, return the same after a crash, and accept writes after promotion.
    ///
    /// # Errors
    /// When one of them does not agree.
    pub fn judge(self, server: &Cluster, queries: &[&str], sealed: &[&str]) -> Result<()> {
        self.judge_and(server, queries, sealed, |_| Ok(()))
    }

    /// Like [`Witnesses::judge`]; `promoted` runs on each after its promotion.
    ///
    /// # Errors
    /// When one of them does not agree.
    pub fn judge_and(
        self,
        server: &Cluster,
        queries: &[&str],
        sealed: &[&str],
        promoted: impl Fn(&Cluster) -> Result<()> + Sync,
    ) -> Result<()> {
        let wanted: Vec<_> =
            queries.iter().map(|query| server.text(query)).collect::<Result<_>>()?;
        // The witnesses make restart points at this checkpoint.
        server.sql("CHECKPOINT")?;
        for (_, backup) in &self.backups {
            backup.start_server()?;
        }
        let judge = |mut witness: Cluster| -> Result<()> {
            witness.allow_log("could not");
            wait_for(&witness, server)?;
            agrees(&witness, queries, &wanted)?;
            witness.sql("CHECKPOINT")?;
            for table in sealed {
                is_sealed(&witness, table)?;
            }
            witness.stop(StopMode::Immediate)?;
            witness.start_server()?;
            agrees(&witness, queries, &wanted)?;
            witness.promote()?;
            agrees(&witness, queries, &wanted)?;
            witness.sql("CREATE TABLE promoted AS SELECT 1 AS id; CHECKPOINT")?;
            promoted(&witness)?;
            witness.finish()
        };
        // In parallel, because each mostly waits for its server.
        std::thread::scope(|scope| {
            let follows = [("all the time".to_owned(), self.follows)];
            let witnesses: Vec<_> = follows
                .into_iter()
                .chain(self.backups)
                .map(|(since, witness)| (since, scope.spawn(|| judge(witness))))
                .collect();
            let verdicts = witnesses.into_iter().map(|(since, witness)| {
                let verdict = witness.join().map_err(|_| anyhow::anyhow!("panic"))?;
                verdict.with_context(|| format!("a standby since: {since}"))
            });
            verdicts.collect()
        })
    }
}

fn agrees(witness: &Cluster, queries: &[&str], wanted: &[String]) -> Result<()> {
    for (query, wanted) in queries.iter().zip(wanted) {
        let found = witness.text(query)?;
        ensure!(found == *wanted, "{query}: {found} instead of {wanted}");
    }
    Ok(())
}

fn is_sealed(witness: &Cluster, table: &str) -> Result<()> {
    for file in witness.family_files(table)? {
        let plain = file.states()?.into_iter().position(|state| state == PageState::Plaintext);
        ensure!(
            plain.is_none(),
            "{table}: block {plain:?} of {} is plaintext",
            file.path.display()
        );
    }
    Ok(())
}
