//! The cost of many keys: server start, and CREATE TABLE. Stock PostgreSQL has the same number of
//! tables.

use std::time::Instant;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};

use super::{CellPlan, Workload, named};
use crate::accounts::since_start;
use crate::meter::{Meter, Outcome};
use crate::plan::Plan;
use crate::results::Sample;
use crate::servers::{Side, Sides};

#[derive(Clone, Copy, PartialEq)]
enum Work {
    Start,
    CreateTable,
}

struct Keys {
    work: Work,
    keys: u32,
}

pub(super) fn startup(plan: &mut Plan) -> Vec<CellPlan> {
    cells(plan, Work::Start)
}

pub(super) fn ddl(plan: &mut Plan) -> Vec<CellPlan> {
    cells(plan, Work::CreateTable)
}

fn cells(plan: &Plan, work: Work) -> Vec<CellPlan> {
    let (suite, unit) = match work {
        Work::Start => ("startup", "start"),
        Work::CreateTable => ("ddl", "table"),
    };
    let cell = |&keys: &u32| CellPlan {
        id: format!("{suite}/k{keys}"),
        suite: suite.into(),
        unit,
        parameters: named([("keys", keys.to_string())]),
        settings: named([("shared_buffers", "128MB".into())]),
        rounds: plan.rounds,
        seconds: 1.5,
        workload: Box::new(Keys { work, keys }) as Box<dyn Workload>,
    };
    plan.keys.iter().map(cell).collect()
}

/// Creates tables without columns that need an index or TOAST table: one file and one key each.
fn make_tables(side: &Side, number: u32) -> Result<()> {
    side.sql(&format!(
        "CREATE OR REPLACE PROCEDURE public.make() LANGUAGE plpgsql AS $$ BEGIN
            SET synchronous_commit = off;
            FOR i IN 1..{number} LOOP
                EXECUTE format('CREATE TABLE many_%s (id int)', i);
                EXECUTE format('INSERT INTO many_%s VALUES (%s)', i, i);
                IF i % 500 = 0 THEN COMMIT; END IF;
            END LOOP; END $$"
    ))?;
    side.sql("CALL public.make()")
}

impl Workload for Keys {
    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        for side in &mut sides.all {
            side.own_cluster()?;
            side.dataset(&format!("keys {}", self.keys), "many_1", |side| {
                make_tables(side, self.keys)
            })?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, _round: usize) -> Result<Sample> {
        let side = &sides.all[contender];
        match self.work {
            Work::CreateTable => create_tables(side),
            Work::Start => start(side, self.keys),
        }
    }
}

fn create_tables(side: &Side) -> Result<Sample> {
    const TABLES: u32 = 100;
    let mut client = side.client()?;
    let meter = Meter::start(side)?;
    let started = Instant::now();
    for number in 0..TABLES {
        run_sql(&mut client, &format!("CREATE TABLE timed_{number} (id int)"))?;
    }
    let seconds = started.elapsed().as_secs_f64();
    run_sql(&mut client, "SELECT pg_stat_force_next_flush()")?;
    let sample =
        meter.finish(side, Outcome { work: f64::from(TABLES), seconds, ..Outcome::default() })?;
    let names: Vec<_> = (0..TABLES).map(|number| format!("timed_{number}")).collect();
    run_sql(&mut client, &format!("DROP TABLE {}", names.join(", ")))?;
    Ok(sample)
}

/// Measures until the server accepts a connection and has read one row of one of the tables.
fn start(side: &Side, keys: u32) -> Result<Sample> {
    let cluster = side.own_cluster()?;
    cluster.stop(pagevault_tests::StopMode::Fast)?;
    let started = Instant::now();
    cluster.start_server()?;
    let mut client = side.client()?;
    let id = text(&mut client, &format!("SELECT id FROM many_{keys}"))?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(id == keys.to_string(), "many_{keys} holds {id}");
    let cpu_seconds = side.postmaster().and_then(since_start);
    Ok(Sample { work: 1.0, seconds, cpu_seconds, ..Sample::default() })
}
