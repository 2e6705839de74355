//! Who else is there when a server crashes: a standby that has followed it, a restore from before,
//! a restore from during. A crash test is not over before they agree: what the server does after
//! its crash must be what they are told. Only where there is no WAL to tell them (`wal_level =
//! minimal`), or nothing that they should know (unlogged and temporary tables), a crash is judged
//! by the server alone.

use anyhow::{Context, Result, ensure};

use crate::backup::Backup;
use crate::datafile::PageState;
use crate::standby::{ORDINARY, Standby, wait_for};
use crate::{Cluster, StopMode};

/// Servers that judge the crashes of another.
#[derive(Debug)]
pub struct Witnesses {
    follows: Cluster,
    /// As what backups are restored.
    standby: Standby,
    /// Base backups, whose servers are not started yet, and when each was taken.
    backups: Vec<(String, Cluster)>,
}

impl Witnesses {
    /// Attaches a standby to a server, and takes a base backup of it. It must keep its WAL
    /// (`wal_keep_size`) as long as they are to follow.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn of(server: &Cluster) -> Result<Witnesses> {
        Witnesses::with(server, &[])
    }

    /// As [`Witnesses::of`], with these lines in their configuration.
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

    /// Takes another base backup, `during` something, say. No process may stand where it holds the
    /// keystore's lock: a backup begins with a checkpoint.
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

    /// Has all of them hear of what has happened since. Each answers these queries as the server
    /// does, holds no page in plaintext of the families of these tables, crashes and answers again,
    /// and takes writes when it is promoted.
    ///
    /// # Errors
    /// When one of them does not agree.
    pub fn judge(self, server: &Cluster, queries: &[&str], sealed: &[&str]) -> Result<()> {
        self.judge_and(server, queries, sealed, |_| Ok(()))
    }

    /// As [`Witnesses::judge`]; `promoted` has something to say of each when it takes writes.
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
        // Where they make their restart points.
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
        // All at once: mostly each waits for its server.
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
        let plain = file.states()?.into_iter().position(|state| state == PageState::Plain);
        ensure!(
            plain.is_none(),
            "{table}: block {plain:?} of {} is plaintext",
            file.path.display()
        );
    }
    Ok(())
}
