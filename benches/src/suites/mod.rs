//! Suites: lists of cells, each a workload at one setting.

mod backup;
mod keys;
mod pgbench;
mod presets;
mod recovery;
mod rekey;
mod statements;
mod sysbench;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::ValueEnum;

use crate::plan::Plan;
use crate::results::Sample;
use crate::servers::{ServerSettings, Sides};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// pgbench -S: strata, clients, scale, shared_buffers
    Readonly,
    /// pgbench TPC-B: strata, clients, scale, synchronous_commit
    Readwrite,
    /// single statements: INSERT, UPDATE, SELECT, COPY, CREATE INDEX, VACUUM FULL, CTAS, spilling
    /// sort and hash
    Statements,
    /// sysbench OLTP, threads swept
    Sysbench,
    /// encrypting, new data keys and decrypting beside VACUUM FULL; pgbench beside a job
    Rekey,
    /// server start with few and with many keys
    Startup,
    /// CREATE TABLE with few and with many keys
    Ddl,
    /// crash recovery and replay of an archive
    Recovery,
    /// pg_basebackup
    Backup,
    /// published: scale 10, 4 clients, read-only, shared_buffers swept
    PresetBuffers,
    /// published: scales 50, 500, 5000 with 12 to 48 clients, read-only and TPC-B
    PresetScales,
    /// published: scale 100, 100 clients, 10,000 transactions each
    PresetHundred,
    /// what the regression gate measures
    #[value(skip)]
    Gate,
}

impl Suite {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(|| "gate".into(), |value| value.get_name().to_owned())
    }

    /// Whether it can be measured between two databases of an existing cluster.
    pub(crate) fn fits_existing(self) -> bool {
        matches!(
            self,
            Suite::Readonly
                | Suite::Readwrite
                | Suite::Statements
                | Suite::Sysbench
                | Suite::PresetScales
                | Suite::PresetHundred
        )
    }

    pub(crate) fn cells(self, plan: &mut Plan) -> Vec<CellPlan> {
        match self {
            Suite::Readonly => pgbench::readonly(plan),
            Suite::Readwrite => pgbench::readwrite(plan),
            Suite::Statements => statements::cells(plan),
            Suite::Sysbench => sysbench::cells(plan),
            Suite::Rekey => rekey::cells(plan),
            Suite::Startup => keys::startup(plan),
            Suite::Ddl => keys::ddl(plan),
            Suite::Recovery => recovery::cells(plan),
            Suite::Backup => backup::cells(plan),
            Suite::PresetBuffers => presets::buffers(plan),
            Suite::PresetScales => presets::scales(plan),
            Suite::PresetHundred => presets::hundred(plan),
            Suite::Gate => pgbench::gate(plan),
        }
    }
}

/// A cell to be measured.
pub(crate) struct CellPlan {
    pub(crate) id: String,
    pub(crate) suite: String,
    /// What is counted as work.
    pub(crate) unit: &'static str,
    pub(crate) parameters: BTreeMap<String, String>,
    /// Settings of the servers; equal ones one after the other save restarts.
    pub(crate) settings: ServerSettings,
    pub(crate) rounds: usize,
    /// What one round of one contender is expected to take, for the time left.
    pub(crate) seconds: f64,
    pub(crate) workload: Box<dyn Workload>,
}

/// What a cell does.
pub(crate) trait Workload {
    /// Names of what is compared; the first is the yardstick.
    fn contenders(&self, sides: &Sides) -> Vec<String> {
        sides.names()
    }

    /// Makes ready, once; the servers have the cell's settings.
    fn load(&mut self, sides: &mut Sides) -> Result<()>;

    /// One round of one contender.
    fn round(&mut self, sides: &mut Sides, contender: usize, round: usize) -> Result<Sample>;

    /// What the report must say of this cell.
    fn notes(&self, _samples: &[Vec<Sample>]) -> Vec<String> {
        Vec::new()
    }
}

/// Parameters or settings from pairs.
pub(crate) fn named<const N: usize>(pairs: [(&str, String); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
