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
    /// the same statements on two tables of one server, one plaintext and one encrypted
    Tables,
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

    /// Whether the suite can compare two databases of an existing cluster.
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
            Suite::Tables => statements::tables(plan),
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

/// A cell to measure.
pub(crate) struct CellPlan {
    pub(crate) id: String,
    pub(crate) suite: String,
    /// The unit of work.
    pub(crate) unit: &'static str,
    pub(crate) parameters: BTreeMap<String, String>,
    /// Settings of the servers. Cells with equal settings in sequence save restarts.
    pub(crate) settings: ServerSettings,
    pub(crate) rounds: usize,
    /// Expected seconds of one round of one contender, to estimate the remaining time.
    pub(crate) seconds: f64,
    pub(crate) workload: Box<dyn Workload>,
}

/// The work of a cell.
pub(crate) trait Workload {
    /// Names of the contenders; the first is the baseline.
    fn contenders(&self, sides: &Sides) -> Vec<String> {
        sides.names()
    }

    /// Prepares the data, once; the servers have the cell's settings.
    fn load(&mut self, sides: &mut Sides) -> Result<()>;

    /// Runs one round of one contender.
    fn round(&mut self, sides: &mut Sides, contender: usize, round: usize) -> Result<Sample>;

    /// Notes on this cell for the report.
    fn notes(&self, _samples: &[Vec<Sample>]) -> Vec<String> {
        Vec::new()
    }
}

/// A map of parameters or settings.
pub(crate) fn named<const N: usize>(pairs: [(&str, String); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
