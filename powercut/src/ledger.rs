//! What clients had been told when the power failed.
//!
//! Marks: `b CLIENT N` before transaction N begins, `c CLIENT N` after its commit was acknowledged,
//! `p CLIENT N XID` after PREPARE TRANSACTION was; `s STEP` before a step of the scenario, `d STEP`
//! after it, `f STEP` and facts before that; step `-` is what was before the first.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use postgres::Client;

use pagevault_tests::cluster::{column, run_sql, text};

use crate::facts::Facts;

/// Transactions of a client that end with ROLLBACK.
pub(crate) fn is_rolled_back(n: u64) -> bool {
    n % 7 == 3
}

/// Transactions of a client that are prepared first.
pub(crate) fn is_prepared(n: u64) -> bool {
    n % 5 == 1
}

type Transaction = (u64, u64);

/// What was begun and what was acknowledged, at a cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    begun: BTreeSet<Transaction>,
    committed: BTreeSet<Transaction>,
    /// With their xids.
    prepared: BTreeMap<Transaction, u64>,
    /// Steps of the scenario: those that were begun, and whether they were done.
    pub(crate) steps: BTreeMap<usize, bool>,
    /// Facts after the last step that was done.
    pub(crate) before: Facts,
    /// And after the one that was under way.
    pub(crate) after: Facts,
}

impl Ledger {
    /// Of a journal's marks, and the place of the cut.
    pub(crate) fn of<'m>(marks: impl Iterator<Item = (u64, &'m str)>, cut: u64) -> Ledger {
        let mut ledger = Ledger::default();
        let mut noted = BTreeMap::new();
        for (place, mark) in marks {
            if let Some((step, facts)) = mark.strip_prefix("f ").and_then(|f| f.split_once('\n')) {
                noted.insert(step.parse().ok(), facts);
                continue;
            }
            if place >= cut {
                continue;
            }
            let mut words = mark.split(' ');
            let kind = words.next();
            let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
            match (kind, numbers.as_slice()) {
                (Some("b"), [client, n]) => drop(ledger.begun.insert((*client, *n))),
                (Some("c"), [client, n]) => drop(ledger.committed.insert((*client, *n))),
                (Some("p"), [client, n, xid]) => {
                    let _ = ledger.prepared.insert((*client, *n), *xid);
                }
                (Some("s"), [step]) => drop(ledger.steps.insert(*step as usize, false)),
                (Some("d"), [step]) => drop(ledger.steps.insert(*step as usize, true)),
                _ => {}
            }
        }
        let facts = |step| noted.get(&step).map(|facts| Facts::read(facts)).unwrap_or_default();
        let last = |done| ledger.steps.iter().rfind(|step| *step.1 == done).map(|step| *step.0);
        (ledger.before, ledger.after) = (facts(last(true)), facts(last(false)));
        ledger
    }

    /// With prepared transactions left out that were lost by a defect of PostgreSQL.
    pub(crate) fn without(&self, lost: &BTreeSet<u64>) -> Ledger {
        let mut ledger = self.clone();
        ledger.prepared.retain(|_, xid| !lost.contains(xid));
        ledger
    }

    /// Whether a step was begun and not done.
    pub(crate) fn is_under_way(&self) -> bool {
        self.steps.values().any(|done| !done)
    }

    /// Ends prepared transactions, and compares what is there with what must be, and may be.
    pub(crate) fn judge(&self, client: &mut Client) -> Result<()> {
        let prepared = column(client, "SELECT gid FROM pg_prepared_xacts WHERE gid LIKE '%-%'")?;
        for gid in prepared {
            let transaction = parse(&gid, '-');
            ensure!(!self.committed.contains(&transaction), "{gid} is prepared, but was committed");
            ensure!(self.begun.contains(&transaction), "{gid} is prepared, but was never begun");
            run_sql(client, &format!("COMMIT PREPARED '{gid}'"))?;
        }
        if text(client, "SELECT to_regclass('ledger') IS NULL")? == "t" {
            ensure!(self.committed.is_empty(), "the ledger is lost");
            return Ok(());
        }
        let rows = column(client, "SELECT client || '-' || n FROM ledger")?;
        let found: BTreeSet<_> = rows.iter().map(|row| parse(row, '-')).collect();
        let lost: Vec<_> = self.committed.difference(&found).collect();
        ensure!(lost.is_empty(), "acknowledged commits are lost: {lost:?}");
        let lost: Vec<_> = self.prepared.keys().filter(|of| !found.contains(of)).collect();
        ensure!(lost.is_empty(), "acknowledged prepared transactions are lost: {lost:?}");
        let wrong: Vec<_> = found
            .iter()
            .filter(|transaction| {
                !self.begun.contains(transaction) || is_rolled_back(transaction.1)
            })
            .collect();
        ensure!(wrong.is_empty(), "transactions that were not committed are there: {wrong:?}");
        Ok(())
    }
}

fn parse(text: &str, between: char) -> Transaction {
    let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX);
    let mut words = text.split(between);
    (number(words.next()), number(words.next()))
}
