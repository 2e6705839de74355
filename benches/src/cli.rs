//! The command line.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use pagevault_tests::Installation;

use crate::machine::Machine;
use crate::others::{self, Argument, Other};
use crate::plan::{Length, Plan, Profile, Stratum};
use crate::results::Results;
use crate::runner::{self, Request, Target};
use crate::servers::Sides;
use crate::suites::Suite;
use crate::variants::Variant;
use crate::{callgrind, claims, diff, gate, report, statements};

/// The cost of pagevault's encryption, measured against stock PostgreSQL on this machine.
#[derive(Parser)]
#[command(version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Measure, and write a JSON file, Markdown and an HTML report
    #[command(visible_alias = "compare")]
    Run(Box<RunArguments>),
    /// Look for plaintext in the files of servers, after statements that encryption can miss
    Claims(ClaimsArguments),
    /// Write the reports of result files anew; several make one report, e.g. of several versions
    Report(ReportArguments),
    /// Set two result files side by side
    Diff(DiffArguments),
    /// Fail when a figure leaves its band in the baseline
    Gate(GateArguments),
}

/// The PostgreSQL to measure.
#[derive(Args)]
pub(crate) struct ServerArguments {
    /// Its pg_config; pagevault must be installed there
    #[arg(long, env = "PAGEVAULT_PG_CONFIG", default_value = "pg_config")]
    pg_config: PathBuf,
    /// Who runs the servers when this program is run by root; default: pagevault or postgres
    #[arg(long, env = "PAGEVAULT_SERVER_USER")]
    server_user: Option<String>,
    /// Where data directories are made; default: the system's directory for temporary files
    #[arg(long)]
    directory: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// What to measure
    #[arg(value_enum, default_values = ["readonly", "readwrite", "statements"])]
    suites: Vec<Suite>,
    #[command(flatten)]
    server: ServerArguments,
    /// Measure in this running cluster instead (`host=... user=... dbname=...`), between two
    /// databases that are made there and dropped again; the user must be a superuser, and the
    /// cluster have a master key
    #[arg(long, value_name = "CONNINFO", conflicts_with = "variants")]
    connect: Option<String>,
    /// How much
    #[arg(long, value_enum, default_value = "quick")]
    profile: Profile,
    /// What to compare; the first is the baseline
    #[arg(long, value_enum, value_delimiter = ',')]
    variants: Option<Vec<Variant>>,
    /// Another server beside these: `NAME=PG_CONFIG[,SCRIPT...]`. psql runs the scripts, with a
    /// restart after each. Can be repeated
    #[arg(long, value_name = "VARIANT", conflicts_with = "connect")]
    variant: Vec<Argument>,
    /// Rounds of each cell, as many and no more; 6 or more for an interval of 95 %
    #[arg(long)]
    rounds: Option<usize>,
    /// Measure each cell until the intervals of processor time reach no further than this, in per
    /// cent of the ratio
    #[arg(long, value_name = "PERCENT", conflicts_with = "rounds")]
    precision: Option<f64>,
    /// ... or until the cell has taken this many seconds
    #[arg(long, value_name = "SECONDS", conflicts_with = "rounds")]
    budget: Option<f64>,
    /// Length of a round of pgbench or sysbench
    #[arg(long)]
    seconds: Option<u32>,
    /// Transactions of each client in a round of pgbench, instead of a time
    #[arg(long, conflicts_with = "seconds")]
    transactions: Option<u32>,
    /// Scales of pgbench
    #[arg(long, value_delimiter = ',')]
    scale: Option<Vec<u32>>,
    /// Numbers of clients, or of sysbench's threads
    #[arg(long, value_delimiter = ',')]
    clients: Option<Vec<u32>>,
    /// Where the pages are
    #[arg(long, value_enum, value_delimiter = ',')]
    strata: Option<Vec<Stratum>>,
    /// Sweep of shared_buffers at the first scale, MB (readonly)
    #[arg(long, value_delimiter = ',')]
    shared_buffers: Option<Vec<u64>>,
    /// Rows of the table of `statements`
    #[arg(long)]
    rows: Option<u64>,
    /// All statements, cold as well, in the profile `quick` too
    #[arg(long)]
    all_statements: bool,
    /// Numbers of keys (startup, ddl), e.g. 10,100000
    #[arg(long, value_delimiter = ',')]
    keys: Option<Vec<u32>>,
    /// Size of the table of `rekey`, MB
    #[arg(long)]
    rekey_mb: Option<u64>,
    /// pgbench's -M: simple, extended or prepared
    #[arg(long)]
    protocol: Option<String>,
    /// Where the results go: results.json, report.md, report.html
    #[arg(long, default_value = "pagevault-bench-results")]
    output: PathBuf,
}

#[derive(Args)]
pub(crate) struct ClaimsArguments {
    #[command(flatten)]
    server: ServerArguments,
    /// Servers of this PostgreSQL
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["stock", "everything"])]
    variants: Vec<Variant>,
    /// Another server beside these, as for `run`; its scripts have all that is new encrypted
    #[arg(long, value_name = "VARIANT")]
    variant: Vec<Argument>,
}

#[derive(Args)]
pub(crate) struct ReportArguments {
    /// Result files of `run`
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Where report.md and report.html go
    #[arg(long, default_value = ".")]
    output: PathBuf,
}

#[derive(Args)]
pub(crate) struct DiffArguments {
    before: PathBuf,
    after: PathBuf,
}

#[derive(Args)]
pub(crate) struct GateArguments {
    #[command(flatten)]
    server: ServerArguments,
    /// The bands
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/baseline.json"))]
    baseline: PathBuf,
    /// Judge this result file instead of measuring
    #[arg(long)]
    results: Option<PathBuf>,
    /// Write what was measured to this file as well
    #[arg(long)]
    json: Option<PathBuf>,
    /// Count the instructions of this program, pagevault-page-path, and those of statements, with
    /// valgrind
    #[arg(long)]
    page_path: Option<PathBuf>,
    /// Write a new baseline around what is measured, instead of judging
    #[arg(long)]
    bless: bool,
}

impl Command {
    pub(crate) fn execute(self) -> Result<ExitCode> {
        match self {
            Command::Run(arguments) => arguments.execute(),
            Command::Claims(arguments) => arguments.execute(),
            Command::Report(arguments) => arguments.execute(),
            Command::Diff(arguments) => {
                let before = Results::read(&arguments.before)?;
                let after = Results::read(&arguments.after)?;
                print(&diff::table(&before, &after));
                Ok(ExitCode::SUCCESS)
            }
            Command::Gate(arguments) => arguments.execute(),
        }
    }
}

/// A closed pipe is no error.
#[allow(clippy::print_stdout, reason = "what the program is for")]
fn print(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

impl ServerArguments {
    fn installation(&self) -> Result<&'static Installation> {
        let user = match &self.server_user {
            Some(user) => user.clone(),
            None => ["pagevault", "postgres"]
                .into_iter()
                .find(|user| user_exists(user))
                .unwrap_or("pagevault")
                .to_owned(),
        };
        Installation::select(&self.pg_config, &user).with_context(|| {
            format!("{} does not lead to a PostgreSQL (--pg-config)", self.pg_config.display())
        })
    }

    fn directory(&self) -> PathBuf {
        self.directory.clone().unwrap_or_else(std::env::temp_dir)
    }
}

fn user_exists(name: &str) -> bool {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    users.lines().any(|line| line.split(':').next() == Some(name))
}

/// These variants, and the user's.
fn with_others(
    mut variants: Vec<Variant>,
    others: &[Argument],
    notes: &mut Vec<String>,
) -> Result<Vec<Variant>> {
    for argument in others {
        let other = Other::open(argument)?;
        ensure!(
            variants.iter().all(|variant| variant.name() != other.name),
            "there are two variants {}",
            other.name
        );
        notes.push(others::note(other));
        variants.push(Variant::Other(other));
    }
    Ok(variants)
}

impl ClaimsArguments {
    fn execute(&self) -> Result<ExitCode> {
        let mut notes = Vec::new();
        // Servers of the user's have their own programs.
        self.server.installation()?;
        let variants = with_others(self.variants.clone(), &self.variant, &mut notes)?;
        let sides = Sides::own(&variants, &self.server.directory(), |name| {
            eprintln!("pagevault-bench: starting {name}");
        })?;
        let (table, is_well) = claims::compare(&sides)?;
        for note in notes {
            eprintln!("{note}");
        }
        for complaint in sides.finish() {
            eprintln!("{complaint}");
        }
        print(&table);
        Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

impl RunArguments {
    fn plan(&self, sides: usize, machine: &Machine) -> Result<Plan> {
        fn replace<T: Clone>(own: &mut T, wanted: Option<&T>) {
            if let Some(wanted) = wanted {
                own.clone_from(wanted);
            }
        }
        let mut plan = Plan::new(self.profile, sides, machine);
        if let Some(rounds) = self.rounds {
            (plan.rounds, plan.enough.budget) = (rounds, 0.0);
        }
        replace(&mut plan.enough.precision, self.precision.map(|percent| percent / 100.0).as_ref());
        replace(&mut plan.enough.budget, self.budget.as_ref());
        replace(&mut plan.scales, self.scale.as_ref());
        replace(&mut plan.clients, self.clients.as_ref());
        replace(&mut plan.strata, self.strata.as_ref());
        replace(&mut plan.write_strata, self.strata.as_ref());
        plan.all_statements |= self.all_statements;
        if self.connect.is_some() {
            plan.existing = true;
            plan.strata = vec![Stratum::AsIs];
            plan.write_strata = vec![Stratum::AsIs];
            plan.shared_buffers.clear();
        }
        replace(&mut plan.shared_buffers, self.shared_buffers.as_ref());
        replace(&mut plan.rows, self.rows.as_ref());
        replace(&mut plan.keys, self.keys.as_ref());
        replace(&mut plan.rekey_mb, self.rekey_mb.as_ref());
        replace(&mut plan.protocol, self.protocol.as_ref());
        if let Some(seconds) = self.seconds {
            plan.length = Length::Seconds(seconds);
        }
        if let Some(transactions) = self.transactions {
            plan.length = Length::Transactions(transactions);
        }
        ensure!(plan.rounds > 0, "no rounds, no results (--rounds)");
        ensure!(plan.clients.iter().all(|clients| (1..=150).contains(clients)), "1 to 150 clients");
        Ok(plan)
    }

    fn execute(&self) -> Result<ExitCode> {
        let directory = self.server.directory();
        let machine = Machine::here(&directory);
        let mut notes = Vec::new();
        let target = match &self.connect {
            Some(connection) => Target::Existing {
                connection: connection.clone(),
                // Only its client programs are needed; without it, those in PATH are used.
                installation: self.server.installation().ok(),
            },
            None => Target::Own {
                installation: self.server.installation()?,
                variants: with_others(
                    self.variants.clone().unwrap_or_else(|| Variant::OWN.into()),
                    &self.variant,
                    &mut notes,
                )?,
            },
        };
        let sides = match &target {
            Target::Own { variants, .. } => variants.len(),
            Target::Existing { .. } => 2,
        };
        std::fs::create_dir_all(&self.output)
            .with_context(|| format!("make {}", self.output.display()))?;
        let json = self.output.join("results.json");
        let mut plan = self.plan(sides, &machine)?;
        plan.notes.extend(notes);
        let results = runner::run(Request {
            target,
            suites: self.suites.clone(),
            plan,
            profile: format!("{:?}", self.profile).to_lowercase(),
            directory,
            json: Some(json.clone()),
        })?;
        results.write(&json)?;
        print(&report::terminal::table(&results));
        report::write(std::slice::from_ref(&results), &self.output)?;
        eprintln!(
            "pagevault-bench: results.json, report.md and report.html are in {}",
            self.output.display()
        );
        let failed = results.notes.iter().any(|note| note.contains("FAILED"));
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

impl ReportArguments {
    fn execute(&self) -> Result<ExitCode> {
        let results: Vec<Results> =
            self.files.iter().map(|file| Results::read(file)).collect::<Result<_>>()?;
        report::write(&results, &self.output)?;
        for results in &results {
            print(&report::terminal::table(results));
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl GateArguments {
    fn measured(&self) -> Result<Results> {
        if let Some(file) = &self.results {
            return Results::read(file);
        }
        let directory = self.server.directory();
        let machine = Machine::here(&directory);
        let mut plan = Plan::new(Profile::Quick, Variant::OWN.len(), &machine);
        (plan.rounds, plan.enough.budget) = (3, 0.0);
        let mut instructions = match &self.page_path {
            Some(program) => callgrind::instructions(program)?,
            None => BTreeMap::new(),
        };
        let installation = self.server.installation()?;
        if self.page_path.is_some() {
            instructions.extend(statements::instructions(&directory)?);
        }
        let mut results = runner::run(Request {
            target: Target::Own { installation, variants: Variant::OWN.into() },
            suites: vec![Suite::Gate],
            plan,
            profile: "gate".into(),
            directory,
            json: None,
        })?;
        results.instructions = instructions;
        Ok(results)
    }

    fn execute(&self) -> Result<ExitCode> {
        let results = self.measured()?;
        if let Some(json) = &self.json {
            results.write(json)?;
        }
        if self.bless {
            gate::Baseline::around(&results).write(&self.baseline)?;
            return Ok(ExitCode::SUCCESS);
        }
        let verdict = gate::Baseline::read(&self.baseline)?.judge(&results);
        print(&verdict.text);
        Ok(if verdict.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
