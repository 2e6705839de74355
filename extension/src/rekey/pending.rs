//! Which jobs are to be run, for the launcher of workers.

use std::collections::BTreeMap;

use pagevault_core::rekey::life::{self, Load};
use pagevault_keystore::{Record, Scope};

use super::jobs::{now_seconds, settle, table};
use super::scheduled;
use crate::keys::store::persist::append;
use crate::pg::catalog;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::Result;

/// Jobs as seen by the launcher.
#[derive(Default)]
pub(crate) struct Pending {
    /// Databases with jobs to run.
    pub(crate) databases: BTreeMap<u32, Load>,
    /// There are jobs that may become runnable soon without a notification.
    pub(crate) soon: bool,
}

/// Updates the table and returns what is to be run. In a transaction of the launcher.
pub(crate) fn pending() -> Result<Pending> {
    let jobs = {
        let _lock = KeystoreLock::acquire();
        table()?.select(|_| true)
    };
    if jobs.is_empty() {
        return Ok(Pending::default());
    }
    // Read after the jobs, so that the database of each job existed before.
    let databases = catalog::all_databases();
    let gone: Vec<u32> = {
        let mut gone: Vec<u32> = jobs.iter().map(|known| known.job.database).collect();
        gone.dedup();
        gone.retain(|database| !databases.contains(&(*database).into()));
        gone
    };
    for database in gone {
        forget_database(database)?;
    }
    let unsettled = settle(&jobs)?;
    let _lock = KeystoreLock::acquire();
    let table = table()?;
    let (databases, soon) = life::loads(&table, now_seconds(), scheduled::held(&table));
    Ok(Pending { databases, soon: soon || unsettled })
}

/// Forgets the jobs of a dropped database.
fn forget_database(database: u32) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let through = table()?.next_number(database) - 1;
    let record = Record::JobsForgotten { database, through, all: true };
    append(&lock, Scope::database(database), &[record]).map(|_| ())
}
