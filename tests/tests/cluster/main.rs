//! Cluster tests: what pagevault promises, each promise on a real server.
//!
//! One file per promise, one server per test. `make test` runs them with a release build of the
//! extension in the PostgreSQL that `PAGEVAULT_PG_CONFIG` names.

mod audit;
mod checkpoints;
mod crash;
mod damage;
mod databases;
mod ddl;
mod drift;
mod errors;
mod health;
mod hygiene;
mod io_methods;
mod keys;
mod labels;
mod leaks;
mod limits;
mod preload;
mod random_ddl;
mod rekey;
mod reuse;
mod revalidate;
mod rotation;
mod rotation_crashes;
mod routes;
mod segments;
mod shred;
mod stock_tools;
mod unlock;

use anyhow::{Result, ensure};
use pagevault_tests::DataFile;
use pagevault_tests::datafile::PageState;

/// Fails unless every page of these files is sealed or zero, and at least one is sealed.
fn assert_sealed(files: &[DataFile]) -> Result<()> {
    let mut sealed = 0;
    for file in files {
        for (block, state) in file.states()?.into_iter().enumerate() {
            match state {
                PageState::Sealed(_) => sealed += 1,
                PageState::Zero => {}
                PageState::Plain => {
                    anyhow::bail!("block {block} of {} is not sealed", file.path.display())
                }
            }
        }
    }
    ensure!(sealed > 0, "no page at all in {files:?}");
    Ok(())
}

/// Fails unless no page of these files is sealed and at least one holds something.
fn assert_plain(files: &[DataFile]) -> Result<()> {
    let mut plain = 0;
    for file in files {
        for (block, state) in file.states()?.into_iter().enumerate() {
            match state {
                PageState::Plain => plain += 1,
                PageState::Zero => {}
                PageState::Sealed(epoch) => {
                    anyhow::bail!("block {block} of {}: epoch {epoch}", file.path.display())
                }
            }
        }
    }
    ensure!(plain > 0, "no page at all in {files:?}");
    Ok(())
}
