//! The amount of work: defaults of the profile, options of the command line, limits of the machine.

use crate::machine::Machine;

/// Bytes of a pgbench database per unit of scale: heap and primary key of 100,000 accounts, MB.
const MB_PER_SCALE: u64 = 15;

/// Where the pages of a workload are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Stratum {
    /// All in shared buffers.
    Shared,
    /// Few in shared buffers, all in the kernel's page cache.
    Cache,
    /// Few in shared buffers; they are dropped from the page cache before each round.
    Disk,
    /// Unknown: wherever an existing cluster has them.
    #[value(skip)]
    AsIs,
}

impl Stratum {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stratum::Shared => "shared",
            Stratum::Cache => "cache",
            Stratum::Disk => "disk",
            Stratum::AsIs => "as-is",
        }
    }

    /// `shared_buffers` in MB that produces this stratum for this much data.
    pub(crate) fn shared_buffers(self, data_mb: u64) -> u64 {
        match self {
            Stratum::Shared => data_mb * 13 / 10 + 64,
            Stratum::Cache | Stratum::Disk | Stratum::AsIs => (data_mb / 8).max(16),
        }
    }
}

/// Length of a run of pgbench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Seconds(u32),
    /// Per client.
    Transactions(u32),
}

/// When a cell is measured well enough, after its least number of rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Enough {
    /// When the interval of each ratio of processor time reaches no further than this from the
    /// ratio; 0.01 is one per cent.
    pub(crate) precision: f64,
    /// Or when the cell has taken this many seconds. With 0, after the least number of rounds.
    pub(crate) budget: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Profile {
    /// Some minutes: few cells, short rounds.
    Quick,
    /// An hour or two: sweeps of clients and scale.
    Standard,
    /// A night, on a dedicated machine.
    Full,
}

/// All parameters of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The least number of rounds of a cell.
    pub(crate) rounds: usize,
    /// When a cell has had enough of them.
    pub(crate) enough: Enough,
    pub(crate) length: Length,
    pub(crate) scales: Vec<u32>,
    pub(crate) clients: Vec<u32>,
    pub(crate) strata: Vec<Stratum>,
    /// The same for `readwrite`.
    pub(crate) write_strata: Vec<Stratum>,
    /// Sweep of `shared_buffers` at the first scale and number of clients, MB.
    pub(crate) shared_buffers: Vec<u64>,
    /// Rows of the table of `statements`, and single INSERTs.
    pub(crate) rows: u64,
    pub(crate) inserts: u32,
    /// All statements, also cold, instead of a selection.
    pub(crate) all_statements: bool,
    /// Numbers of encrypted relations in `startup` and `ddl`.
    pub(crate) keys: Vec<u32>,
    /// Size of the table of `rekey`.
    pub(crate) rekey_mb: u64,
    /// Number of transactions to recover.
    pub(crate) recovery: u32,
    /// Rows of each of sysbench's four tables.
    pub(crate) sysbench_rows: u64,
    /// pgbench's `-M`.
    pub(crate) protocol: String,
    /// Number of servers that hold the same data at the same time.
    pub(crate) sides: u64,
    /// The cluster was not created by this program. Its settings cannot be changed, so sweeps of
    /// settings are left out.
    pub(crate) existing: bool,
    pub(crate) machine: Machine,
    /// Reductions, for the report.
    pub(crate) notes: Vec<String>,
}

impl Plan {
    pub(crate) fn new(profile: Profile, sides: usize, machine: &Machine) -> Plan {
        let all = vec![Stratum::Shared, Stratum::Cache, Stratum::Disk];
        let common = Plan {
            rounds: 6,
            enough: Enough { precision: 0.01, budget: 60.0 },
            length: Length::Seconds(2),
            scales: vec![10],
            clients: vec![4],
            strata: all.clone(),
            write_strata: all,
            shared_buffers: Vec::new(),
            rows: 100_000,
            inserts: 1000,
            all_statements: true,
            keys: vec![10, 2000],
            rekey_mb: 128,
            recovery: 5000,
            sysbench_rows: 50_000,
            protocol: "simple".into(),
            sides: sides as u64,
            existing: false,
            machine: machine.clone(),
            notes: Vec::new(),
        };
        let cores = u32::try_from(machine.cores).unwrap_or(1);
        let mut clients = vec![1, cores, 4 * cores, 16 * cores];
        clients.dedup();
        match profile {
            Profile::Quick => {
                Plan { write_strata: vec![Stratum::Cache], all_statements: false, ..common }
            }
            Profile::Standard => Plan {
                rounds: 8,
                enough: Enough { budget: 300.0, ..common.enough },
                length: Length::Seconds(3),
                scales: vec![10, 100],
                clients: clients[..clients.len() - 1].to_vec(),
                shared_buffers: vec![16, 64, 256],
                rows: 1_000_000,
                inserts: 10_000,
                keys: vec![10, 100_000],
                rekey_mb: 512,
                recovery: 50_000,
                sysbench_rows: 250_000,
                ..common
            },
            Profile::Full => Plan {
                rounds: 10,
                enough: Enough { budget: 1200.0, ..common.enough },
                length: Length::Seconds(5),
                scales: vec![10, 100, 1000],
                clients,
                shared_buffers: vec![16, 32, 64, 128, 256, 512],
                rows: 10_000_000,
                inserts: 10_000,
                keys: vec![10, 100_000],
                rekey_mb: 4096,
                recovery: 500_000,
                sysbench_rows: 1_000_000,
                ..common
            },
        }
    }

    /// Expected duration of one round of pgbench in seconds, to estimate the remaining time.
    pub(crate) fn round_seconds(&self) -> f64 {
        match self.length {
            Length::Seconds(seconds) => f64::from(seconds),
            Length::Transactions(transactions) => f64::from(transactions) / 100.0,
        }
    }

    /// Reduces a scale to one that all servers together can hold, and notes it in the plan.
    pub(crate) fn capped_scale(&mut self, wanted: u32, stratum: Stratum) -> u32 {
        let most = most_scale(&self.machine, self.sides, stratum);
        if u64::from(wanted) <= most {
            return wanted;
        }
        let note = format!(
            "scale {wanted}, {}: this machine holds scale {most} for {} servers ({} MB of memory, {} MB of disk \
             free); measured at that",
            stratum.name(),
            self.sides,
            self.machine.available_mb,
            self.machine.disk_mb,
        );
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
        u32::try_from(most).unwrap_or(wanted)
    }
}

pub(crate) fn scale_mb(scale: u32) -> u64 {
    u64::from(scale) * MB_PER_SCALE
}

/// The largest scale that this many servers can hold: on disk including WAL, and, if the stratum
/// needs it, in memory (shared buffers and the page cache).
fn most_scale(machine: &Machine, sides: u64, stratum: Stratum) -> u64 {
    const WAL_MB: u64 = 1024;
    let room = (machine.disk_mb * 8 / 10).saturating_sub(sides * WAL_MB);
    let on_disk = room / (sides * MB_PER_SCALE * 13 / 10);
    let tenths = match stratum {
        Stratum::Shared => 23,
        Stratum::Cache => 12,
        Stratum::Disk | Stratum::AsIs => 2,
    };
    let in_memory = machine.available_mb * 7 / (sides * MB_PER_SCALE * tenths);
    on_disk.min(in_memory).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(available_mb: u64, disk_mb: u64) -> Machine {
        Machine { available_mb, disk_mb, cores: 2, ..Machine::default() }
    }

    #[test]
    fn a_scale_that_fits_is_not_capped() {
        let mut plan = Plan::new(Profile::Quick, 4, &machine(24_000, 100_000));
        assert_eq!(plan.capped_scale(100, Stratum::Shared), 100);
        assert!(plan.notes.is_empty());
    }

    #[test]
    fn a_cap_leaves_room_in_memory_and_is_noted_once() {
        let mut plan = Plan::new(Profile::Quick, 4, &machine(24_000, 1_000_000));
        let scale = plan.capped_scale(5000, Stratum::Shared);
        let data = 4 * scale_mb(scale);
        let shared = 4 * Stratum::Shared.shared_buffers(scale_mb(scale));
        assert!(data + shared < 24_000 && data + shared > 24_000 / 2, "{scale}");
        assert_eq!(plan.capped_scale(5000, Stratum::Shared), scale);
        assert_eq!(plan.notes.len(), 1, "{:?}", plan.notes);
        assert!(plan.notes[0].contains("5000") && plan.notes[0].contains(&scale.to_string()));
    }

    #[test]
    fn the_disk_stratum_is_capped_by_the_disk() {
        let mut plan = Plan::new(Profile::Quick, 4, &machine(1_000_000, 30_000));
        let scale = plan.capped_scale(5000, Stratum::Disk);
        assert!(4 * (scale_mb(scale) + 1024) < 30_000, "{scale}");
        assert!(scale > 100, "{scale}");
    }

    #[test]
    fn a_tiny_machine_still_measures_something() {
        let mut plan = Plan::new(Profile::Quick, 4, &machine(100, 100));
        assert_eq!(plan.capped_scale(50, Stratum::Shared), 1);
    }
}
