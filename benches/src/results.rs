//! The results of a run, as in the JSON file (docs/benchmarks.md describes the fields).

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::statistics::{Estimate, median, paired_ratio};

/// Incremented for each incompatible change of the file.
pub(crate) const SCHEMA: u32 = 1;

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    /// Version of pagevault-bench.
    pub(crate) program: String,
    /// Time of the server at the start, UTC.
    pub(crate) taken: String,
    /// The server's version string.
    pub(crate) postgres: String,
    /// Major version.
    pub(crate) major: u32,
    pub(crate) machine: Machine,
    pub(crate) profile: String,
    /// Notes for readers: reductions, failures, limits of this machine.
    pub(crate) notes: Vec<String>,
    /// Instructions per page, from callgrind, by operation.
    #[serde(default)]
    pub(crate) instructions: BTreeMap<String, f64>,
    pub(crate) cells: Vec<Cell>,
}

/// One workload at one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cell {
    /// Unique; suite and parameters, with slashes between them.
    pub(crate) id: String,
    pub(crate) suite: String,
    /// Unit of work: `transaction`, `MB` and so on.
    pub(crate) unit: String,
    pub(crate) parameters: BTreeMap<String, String>,
    /// The first is the baseline for the others.
    pub(crate) contenders: Vec<Contender>,
    #[serde(default)]
    pub(crate) notes: Vec<String>,
}

/// The measurements of one contender in a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Contender {
    pub(crate) name: String,
    /// Medians over the rounds, by name of the figure.
    pub(crate) figures: BTreeMap<String, f64>,
    /// Ratios to the baseline: `rate` (more is better), `cpu_us` and `instructions` (less is
    /// better).
    pub(crate) ratios: BTreeMap<String, Estimate>,
    /// One per round.
    pub(crate) rounds: Vec<Sample>,
}

/// One round of one contender.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Sample {
    /// Amount of work, in the cell's unit.
    pub(crate) work: f64,
    /// Elapsed time.
    pub(crate) seconds: f64,
    pub(crate) latency_ms: Option<f64>,
    pub(crate) p95_ms: Option<f64>,
    /// Processor time of all server processes, including the checkpoint afterwards.
    pub(crate) cpu_seconds: Option<f64>,
    /// Instructions of the same, where the processor's counters can be read.
    pub(crate) instructions: Option<f64>,
    /// Pages found in shared buffers, and pages not found there.
    pub(crate) blocks_hit: Option<f64>,
    pub(crate) blocks_read: Option<f64>,
    pub(crate) wal_bytes: Option<f64>,
    /// Disk traffic.
    pub(crate) read_bytes: Option<f64>,
    pub(crate) written_bytes: Option<f64>,
    /// The extension's counters by kind; `None` if unavailable.
    pub(crate) cipher: Option<BTreeMap<String, Counters>>,
}

/// Pages and bytes encrypted and decrypted: a row of `pagevault.stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counters {
    pub(crate) sealed: f64,
    pub(crate) opened: f64,
    pub(crate) bytes_sealed: f64,
    pub(crate) bytes_opened: f64,
    pub(crate) seal_ms: f64,
    pub(crate) open_ms: f64,
}

/// Name of a figure, and how it is computed from a sample. "Per unit" is per unit of work.
pub(crate) type Figure = (&'static str, fn(&Sample) -> Option<f64>);

/// All figures of a contender.
pub(crate) const FIGURES: [Figure; 15] = [
    ("rate", |sample| (sample.seconds > 0.0).then(|| sample.work / sample.seconds)),
    ("seconds", |sample| Some(sample.seconds)),
    ("latency_ms", |sample| sample.latency_ms),
    ("p95_ms", |sample| sample.p95_ms),
    ("cpu_us", |sample| sample.per_unit(sample.cpu_seconds? * 1e6)),
    ("instructions", |sample| sample.per_unit(sample.instructions?)),
    ("hit_ratio", |sample| {
        let accesses = sample.blocks_hit? + sample.blocks_read?;
        (accesses > 0.0).then_some(sample.blocks_hit? / accesses)
    }),
    ("blocks_read", |sample| sample.per_unit(sample.blocks_read?)),
    ("pages_sealed", |sample| sample.per_unit(sample.cipher_sum(|kind| kind.sealed)?)),
    ("pages_opened", |sample| sample.per_unit(sample.cipher_sum(|kind| kind.opened)?)),
    ("cipher_us", |sample| {
        sample.per_unit(sample.cipher_sum(|kind| kind.seal_ms + kind.open_ms)? * 1e3)
    }),
    ("cipher_bytes", |sample| {
        sample.per_unit(sample.cipher_sum(|kind| kind.bytes_sealed + kind.bytes_opened)?)
    }),
    ("wal_bytes", |sample| sample.per_unit(sample.wal_bytes?)),
    ("read_bytes", |sample| sample.per_unit(sample.read_bytes?)),
    ("written_bytes", |sample| sample.per_unit(sample.written_bytes?)),
];

/// The figures that ratios are computed for.
pub(crate) const COMPARED: [&str; 3] = ["rate", "cpu_us", "instructions"];

impl Sample {
    fn per_unit(&self, amount: f64) -> Option<f64> {
        (self.work > 0.0).then(|| amount / self.work)
    }

    fn cipher_sum(&self, of: impl Fn(&Counters) -> f64) -> Option<f64> {
        Some(self.cipher.as_ref()?.values().map(of).sum())
    }

    pub(crate) fn figure(&self, name: &str) -> Option<f64> {
        FIGURES.iter().find(|(known, _)| *known == name).and_then(|(_, of)| of(self))
    }
}

impl Contender {
    /// Computes medians, and ratios to the rounds of the baseline.
    pub(crate) fn new(name: &str, rounds: Vec<Sample>, baseline: &[Sample]) -> Contender {
        let figures = FIGURES
            .iter()
            .filter_map(|(name, of)| Some((*name, median(rounds.iter().filter_map(of))?)))
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let ratio = |figure: &str| {
            paired_ratio(
                baseline
                    .iter()
                    .zip(&rounds)
                    .filter_map(|(base, own)| base.figure(figure).zip(own.figure(figure))),
            )
        };
        let ratios = COMPARED
            .iter()
            .filter_map(|figure| Some(((*figure).to_owned(), ratio(figure)?)))
            .collect();
        Contender { name: name.to_owned(), figures, ratios, rounds }
    }

    pub(crate) fn figure(&self, name: &str) -> Option<f64> {
        self.figures.get(name).copied()
    }

    pub(crate) fn ratio(&self, name: &str) -> Option<Estimate> {
        self.ratios.get(name).copied()
    }
}

impl Cell {
    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }
}

impl Results {
    pub(crate) fn read(path: &Path) -> Result<Results> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        Results::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Results> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let version: Version = serde_json::from_str(text).context("not a result file")?;
        ensure!(
            version.schema == SCHEMA,
            "written in schema {}, this program reads {SCHEMA}",
            version.schema
        );
        serde_json::from_str(text).context("not a result file")
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two contenders, three rounds; the second has 90 % of the rate and 120 % of the processor
    /// time.
    pub(crate) fn example() -> Results {
        let sample = |rate: f64, cpu: f64| Sample {
            work: rate,
            seconds: 1.0,
            cpu_seconds: Some(cpu * rate / 1e6),
            blocks_hit: Some(99.0),
            blocks_read: Some(1.0),
            cipher: Some(BTreeMap::from([(
                "relation".to_owned(),
                Counters { opened: rate, open_ms: rate / 1000.0, ..Counters::default() },
            )])),
            ..Sample::default()
        };
        let stock: Vec<_> = [1000.0, 500.0, 800.0].map(|rate| sample(rate, 50.0)).into();
        let sealed: Vec<_> = [900.0, 450.0, 720.0].map(|rate| sample(rate, 60.0)).into();
        let contenders = vec![
            Contender::new("stock", stock.clone(), &stock),
            Contender::new("relations", sealed, &stock),
        ];
        Results {
            schema: SCHEMA,
            program: "0".into(),
            taken: "2030-01-01 00:00".into(),
            postgres: "PostgreSQL 18.1 <test>".into(),
            major: 18,
            machine: Machine::default(),
            profile: "quick".into(),
            notes: vec!["a note".into()],
            instructions: BTreeMap::from([("seal aes-256-xts".to_owned(), 9000.0)]),
            cells: vec![Cell {
                id: "readonly/s10/c4".into(),
                suite: "readonly".into(),
                unit: "transaction".into(),
                parameters: BTreeMap::from([
                    ("clients".into(), "4".into()),
                    ("scale".into(), "10".into()),
                ]),
                contenders,
                notes: Vec::new(),
            }],
        }
    }

    #[test]
    fn results_survive_writing_and_reading() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("results.json");
        example().write(&path).expect("written");
        assert_eq!(Results::read(&path).expect("read"), example());
    }

    #[test]
    fn another_schema_is_refused_by_number() {
        let mut other = example();
        other.schema = SCHEMA + 1;
        let text = serde_json::to_string(&other).expect("JSON");
        let error = Results::parse(&text).expect_err("refused").to_string();
        assert!(error.contains(&format!("schema {}", SCHEMA + 1)), "{error}");
    }

    #[test]
    fn figures_are_per_unit_of_work_and_ratios_pair_rounds() {
        let cells = example().cells;
        let relations = &cells[0].contenders[1];
        let near = |found: Option<f64>, wanted: f64| {
            assert!(found.is_some_and(|found| (found - wanted).abs() < 1e-9), "{found:?} {wanted}");
        };
        near(relations.figure("rate"), 720.0);
        near(relations.figure("cpu_us"), 60.0);
        near(relations.figure("hit_ratio"), 0.99);
        near(relations.figure("pages_opened"), 1.0);
        near(relations.figure("cipher_us"), 1.0);
        near(relations.ratio("rate").map(|estimate| estimate.ratio), 0.9);
        near(relations.ratio("cpu_us").map(|estimate| estimate.ratio), 1.2);
        near(cells[0].contenders[0].ratio("rate").map(|estimate| estimate.ratio), 1.0);
        assert_eq!(relations.figure("wal_bytes"), None);
    }
}
