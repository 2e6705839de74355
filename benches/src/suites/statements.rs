//! Single statements on one table, cold and warm: on one server for each variant, or on two tables
//! of one server, of which one is encrypted. Clusters also differ in where their files are, and in
//! plans that statistics lead to; two tables of one server do not.

use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use postgres::Client;

use super::{CellPlan, Workload, backup, named};
use crate::meter::{Meter, Outcome};
use crate::page_cache;
use crate::plan::Plan;
use crate::results::Sample;
use crate::servers::{Side, Sides};

/// One kind of statement: the unmeasured preparation, and the measured statement.
struct Kind {
    name: &'static str,
    before: &'static str,
    work: Work,
    /// Also measured after a restart and with an empty page cache.
    cold: bool,
    /// Part of the profile `quick`.
    quick: bool,
}

enum Work {
    Sql(&'static str),
    /// INSERTs, each in its own transaction.
    Inserts,
    CopyIn,
}

const KINDS: [Kind; 10] = [
    Kind {
        name: "insert",
        before: "DROP TABLE IF EXISTS inserted; CREATE TABLE inserted (id int PRIMARY KEY, body text)",
        work: Work::Inserts,
        cold: false,
        quick: false,
    },
    Kind {
        name: "copy-in",
        before: "DROP TABLE IF EXISTS copied; CREATE TABLE copied (LIKE t)",
        work: Work::CopyIn,
        cold: false,
        quick: true,
    },
    Kind {
        name: "select-all",
        before: "",
        work: Work::Sql("SELECT count(body) FROM t"),
        cold: true,
        quick: true,
    },
    Kind {
        name: "create-index",
        before: "DROP INDEX IF EXISTS t_body",
        work: Work::Sql("CREATE INDEX t_body ON t (body)"),
        cold: true,
        quick: true,
    },
    Kind {
        name: "create-table-as",
        before: "DROP TABLE IF EXISTS made",
        work: Work::Sql("CREATE TABLE made AS SELECT * FROM t"),
        cold: false,
        quick: false,
    },
    Kind {
        name: "spilling-sort",
        before: "",
        work: Work::Sql(
            "SET work_mem = '1MB'; SELECT count(*) FROM (SELECT * FROM t ORDER BY body OFFSET 0) s",
        ),
        cold: false,
        quick: false,
    },
    Kind {
        name: "spilling-hash",
        before: "",
        work: Work::Sql(
            "SET work_mem = '1MB'; SET hash_mem_multiplier = 1; SET enable_mergejoin = off;
             SET enable_nestloop = off; SELECT count(*) FROM t a JOIN t b USING (body)",
        ),
        cold: false,
        quick: false,
    },
    Kind {
        name: "update-all",
        before: "DROP INDEX IF EXISTS t_body; VACUUM FULL t",
        work: Work::Sql("UPDATE t SET number = number + 1"),
        cold: false,
        quick: true,
    },
    Kind {
        name: "vacuum-full",
        before: "DROP INDEX IF EXISTS t_body",
        work: Work::Sql("VACUUM FULL t"),
        cold: false,
        quick: false,
    },
    Kind { name: "analyze", before: "", work: Work::Sql("ANALYZE t"), cold: false, quick: false },
];

struct Statement {
    kind: &'static Kind,
    rows: u64,
    inserts: u32,
    cold: bool,
    tables: Tables,
}

/// What is compared.
#[derive(Clone, Copy, PartialEq)]
enum Tables {
    /// The same table on each server.
    OfEachServer,
    /// The tables of [`SCHEMAS`], on the server whose relations are encrypted.
    OfOneServer,
}

/// Schemas, with the labels that decide about the tables in them.
const SCHEMAS: [&str; 2] = ["plaintext", "encrypted"];

/// The suite `statements`.
pub(super) fn cells(plan: &mut Plan) -> Vec<CellPlan> {
    let mut cells = kinds(plan, "statements", Tables::OfEachServer);
    if !plan.all_statements || plan.existing {
        return cells;
    }
    cells.extend(backup::cells(plan).into_iter().map(|mut cell| {
        cell.id = cell.id.replacen("backup/", "statements/", 1);
        cell.suite = "statements".into();
        cell
    }));
    cells
}

/// The suite `tables`.
pub(super) fn tables(plan: &mut Plan) -> Vec<CellPlan> {
    kinds(plan, "tables", Tables::OfOneServer)
}

fn kinds(plan: &mut Plan, suite: &str, tables: Tables) -> Vec<CellPlan> {
    static ALL: [Kind; KINDS.len()] = KINDS;
    // A row takes some 150 bytes; an eighth of the table is in shared buffers.
    let buffers = (plan.rows * 150 / 8 / 1_000_000).max(16);
    let settings = named([("shared_buffers", format!("{buffers}MB"))]);
    let mut cells = Vec::new();
    if !plan.all_statements {
        plan.notes.push("profile quick: only some of the statements, and those warm".into());
    }
    for kind in ALL.iter().filter(|kind| plan.all_statements || kind.quick) {
        for cold in [false, true] {
            if cold && !(kind.cold && plan.all_statements) {
                continue;
            }
            let temperature = if cold { "cold" } else { "warm" };
            let (rows, inserts) = (plan.rows, plan.inserts);
            cells.push(CellPlan {
                id: format!("{suite}/{}/{temperature}", kind.name),
                suite: suite.into(),
                unit: if matches!(kind.work, Work::Inserts) { "statement" } else { "row" },
                parameters: named([
                    ("statement", kind.name.to_owned()),
                    ("temperature", temperature.to_owned()),
                    ("rows", rows.to_string()),
                    ("shared_buffers_mb", buffers.to_string()),
                ]),
                settings: settings.clone(),
                rounds: plan.rounds,
                seconds: 0.5 + rows as f64 / 400_000.0 + if cold { 1.0 } else { 0.0 },
                workload: Box::new(Statement { kind, rows, inserts, cold, tables }),
            });
        }
    }
    cells
}

/// Creates the table `t` in the current schema.
fn make_table(client: &mut Client, rows: u64) -> Result<()> {
    run_sql(
        client,
        &format!(
            "CREATE TABLE t (id int, number int, body text);
             INSERT INTO t SELECT i, i, md5(i::text) || md5((i + 1)::text) || md5((i + 2)::text)
             FROM generate_series(1, {rows}) i"
        ),
    )?;
    run_sql(client, "VACUUM ANALYZE t")
}

fn make_schemas(side: &Side, rows: u64) -> Result<()> {
    for schema in SCHEMAS {
        side.sql(&format!(
            "DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema};
             SECURITY LABEL FOR pagevault ON SCHEMA {schema} IS '{schema}'"
        ))?;
        let mut client = side.client()?;
        run_sql(&mut client, &format!("SET search_path = {schema}"))?;
        make_table(&mut client, rows)?;
        let sealed = side.text(&format!("SELECT pagevault.is_encrypted('{schema}.t')"))? == "t";
        ensure!(sealed == (schema == "encrypted"), "{schema}.t is not what its name says");
    }
    Ok(())
}

impl Workload for Statement {
    fn contenders(&self, sides: &Sides) -> Vec<String> {
        match self.tables {
            Tables::OfEachServer => sides.names(),
            Tables::OfOneServer => SCHEMAS.map(str::to_owned).into(),
        }
    }

    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        let rows = self.rows;
        if self.tables == Tables::OfOneServer {
            let side = sides.sealing()?;
            side.dataset(&format!("tables {rows}"), "", |side| make_schemas(side, rows))?;
            return page_cache::fill(&side.own_cluster()?.data_directory());
        }
        for side in &mut sides.all {
            side.dataset(&format!("statements {rows}"), "t", |side| {
                make_table(&mut side.client()?, rows)
            })?;
            if let Some(cluster) = side.cluster() {
                page_cache::fill(&cluster.data_directory())?;
            }
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, _round: usize) -> Result<Sample> {
        let (side, schema) = match self.tables {
            Tables::OfEachServer => (&mut sides.all[contender], "public"),
            Tables::OfOneServer => (sides.sealing()?, SCHEMAS[contender]),
        };
        let search_path = format!("SET search_path = {schema}");
        let mut preparing = side.client()?;
        run_sql(&mut preparing, &search_path)?;
        for statement in self.kind.before.split("; ").filter(|statement| !statement.is_empty()) {
            run_sql(&mut preparing, statement)?;
        }
        drop(preparing);
        side.sql("CHECKPOINT")?;
        if self.cold && side.cluster().is_some() {
            // The restart empties shared buffers; then the page cache is emptied.
            side.restart()?;
            page_cache::empty(&side.own_cluster()?.data_directory())?;
        }
        let mut client = side.client()?;
        run_sql(&mut client, &search_path)?;
        let input = match self.kind.work {
            Work::CopyIn => copy_out(&mut client)?,
            _ => Vec::new(),
        };
        let mut meter = Meter::start(side)?;
        let started = Instant::now();
        let work = match self.kind.work {
            Work::Sql(statements) => {
                for statement in statements.split(';') {
                    run_sql(&mut client, statement)?;
                }
                self.rows as f64
            }
            Work::Inserts => {
                let insert = client.prepare("INSERT INTO inserted VALUES ($1, $2)")?;
                let body = "x".repeat(100);
                for id in 0..i32::try_from(self.inserts)? {
                    client.execute(&insert, &[&id, &body])?;
                }
                f64::from(self.inserts)
            }
            Work::CopyIn => {
                let mut writer = client.copy_in("COPY copied FROM STDIN (FORMAT binary)")?;
                writer.write_all(&input)?;
                writer.finish()?;
                self.rows as f64
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        run_sql(&mut client, "SELECT pg_stat_force_next_flush()")?;
        meter.checkpoint()?;
        meter.finish(side, Outcome { work, seconds, ..Outcome::default() })
    }

    fn notes(&self, samples: &[Vec<Sample>]) -> Vec<String> {
        let read: f64 = samples.iter().flatten().filter_map(|sample| sample.read_bytes).sum();
        if self.cold && read == 0.0 {
            vec!["nothing came from disk: cold means an empty page cache only where the machine allows it".into()]
        } else {
            Vec::new()
        }
    }
}

fn copy_out(client: &mut Client) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    client.copy_out("COPY t TO STDOUT (FORMAT binary)")?.read_to_end(&mut data)?;
    Ok(data)
}
