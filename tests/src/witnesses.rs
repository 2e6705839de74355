//! Who else is there when a server crashes: a standby that has followed it, a restore from before, a restore from during.
//! A crash test is not over before they agree: what the server does after its crash must be what they are told.

use anyhow::{Context, Result, ensure};

use crate::datafile::PageState;
use crate::standby::{Standby, standby_of, wait_for};
use crate::{Cluster, StopMode};

/// Servers that judge the crashes of another.
#[derive(Debug)]
pub struct Witnesses {
    follows: Cluster,
    /// Base backups, whose servers are not started yet, and when each was taken.
    backups: Vec<(String, Cluster)>,
}

impl Witnesses {
    /// Attaches a standby to a server, and takes a base backup of it. It must keep its WAL (`wal_keep_size`) as long as
    /// they are to follow.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn of(server: &Cluster) -> Result<Witnesses> {
        let mut witnesses = Witnesses { follows: standby_of(server, &[])?, backups: Vec::new() };
        witnesses.back_up(server, "before")?;
        Ok(witnesses)
    }

    /// Takes another base backup, `during` something, say. No process may stand where it holds the keystore's lock:
    /// a backup begins with a checkpoint.
    ///
    /// # Errors
    /// When the backup fails.
    pub fn back_up(&mut self, server: &Cluster, during: &str) -> Result<()> {
        self.backups.push((during.to_owned(), Standby::default().create(server)?));
        Ok(())
    }

    /// Has all of them hear of what has happened since. Each answers these queries as the server does, holds no page
    /// in plaintext of the families of these tables, crashes and answers again, and takes writes when it is promoted.
    ///
    /// # Errors
    /// When one of them does not agree.
    pub fn judge(self, server: &Cluster, queries: &[&str], sealed: &[&str]) -> Result<()> {
        let wanted: Vec<_> =
            queries.iter().map(|query| server.text(query)).collect::<Result<_>>()?;
        // Where they make their restart points.
        server.sql("CHECKPOINT")?;
        for (_, backup) in &self.backups {
            backup.start_server()?;
        }
        let follows = [("all the time".to_owned(), self.follows)];
        for (since, mut witness) in follows.into_iter().chain(self.backups) {
            witness.allow_log("could not");
            let judge = |witness: &Cluster| -> Result<()> {
                wait_for(witness, server)?;
                agrees(witness, queries, &wanted)?;
                witness.sql("CHECKPOINT")?;
                for table in sealed {
                    is_sealed(witness, table)?;
                }
                witness.stop(StopMode::Immediate)?;
                witness.start_server()?;
                agrees(witness, queries, &wanted)?;
                witness.promote()?;
                agrees(witness, queries, &wanted)?;
                witness.sql("CREATE TABLE promoted AS SELECT 1 AS id; CHECKPOINT")
            };
            judge(&witness).with_context(|| format!("a standby since: {since}"))?;
            witness.finish()?;
        }
        Ok(())
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
