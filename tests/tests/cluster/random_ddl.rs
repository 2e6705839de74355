//! Random schedules of DDL in several sessions, interrupted by kills. Each encrypted table must
//! finally be sealed and have the same contents as its plaintext twin.
//!
//! A schedule is determined by its seed, PAGEVAULT_SEED, else always the same; where kills
//! interrupt it is not. PAGEVAULT_RANDOM_DDL_SECONDS is the duration.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::Random;
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

use crate::routes::driver::{OPEN, SECRET, start};
use crate::routes::survey::{self, Expected};

const SESSIONS: u64 = 3;
const TABLES: u64 = 3;
const SCHEMAS: [(&str, &str); 2] = [("secret", SECRET), ("open", OPEN)];

const CREATE: &str = "DROP TABLE IF EXISTS {t} CASCADE;
    CREATE TABLE {t} (id int PRIMARY KEY, number serial, flag int, name text, wide text);
    ALTER TABLE {t} ALTER wide SET STORAGE EXTERNAL;
    DROP TABLE IF EXISTS {t}_parts, {t}_low CASCADE;
    CREATE TABLE {t}_parts (id int, number int) PARTITION BY RANGE (id);
    SELECT encrypt('{t}_parts');
    CREATE TABLE {t}_low PARTITION OF {t}_parts FOR VALUES FROM (0) TO (1000000)";
const INSERT: &str = "INSERT INTO {t} (id, name, wide)
    SELECT {n} * 100 + i, '{canary}-' || i, CASE WHEN i % 10 = 0 THEN repeat('{canary}', 150) END
    FROM generate_series(1, 50) i";

/// Steps that create relations, for which the setting decides.
const MAKING: [&str; 3] = [
    CREATE,
    "DROP TABLE IF EXISTS {t}_copy; CREATE TABLE {t}_copy AS SELECT * FROM {t}",
    "DROP MATERIALIZED VIEW IF EXISTS {t}_view;
     CREATE MATERIALIZED VIEW {t}_view AS SELECT id, name, wide FROM {t};
     CREATE UNIQUE INDEX ON {t}_view (id);
     REFRESH MATERIALIZED VIEW CONCURRENTLY {t}_view",
];

/// A partition, which has neither an index nor a TOAST table, leaves its table and comes back.
const REATTACH: &str = "ALTER TABLE {t}_parts DETACH PARTITION {t}_low;
    ALTER TABLE {t}_parts ATTACH PARTITION {t}_low FOR VALUES FROM (0) TO (1000000)";

/// Steps that change relations or replace their files.
const CHANGING: [&str; 30] = [
    INSERT,
    INSERT,
    INSERT,
    "UPDATE {t} SET wide = repeat('{canary}', 150) WHERE id % 7 = {n} % 7",
    "DELETE FROM {t} WHERE id % 5 = {n} % 5",
    "TRUNCATE {t}",
    "TRUNCATE {t} RESTART IDENTITY",
    "CREATE INDEX ON {t} (name)",
    "CREATE INDEX ON {t} USING hash (name)",
    "CREATE INDEX ON {t} USING gin ((ARRAY[name]))",
    "CREATE INDEX ON {t} USING spgist (name)",
    "CREATE INDEX ON {t} USING brin (name)",
    "REINDEX TABLE {t}",
    "REINDEX (TABLESPACE space) TABLE {t}",
    "CLUSTER {t} USING {t}_pkey",
    "ALTER TABLE {t} ADD COLUMN c{n} boolean DEFAULT clock_timestamp() > '2000-01-01'",
    "ALTER TABLE {t} ADD COLUMN s{n} serial",
    "ALTER TABLE {t} ALTER flag TYPE bigint; ALTER TABLE {t} ALTER flag TYPE int",
    "ALTER TABLE {t} SET UNLOGGED; ALTER TABLE {t} SET LOGGED",
    "ALTER TABLE {t} SET TABLESPACE space",
    "ALTER TABLE {t} SET TABLESPACE pg_default",
    "ALTER TABLE {t} RENAME TO {t}_renamed; TRUNCATE {t}_renamed;
     ALTER TABLE {t}_renamed RENAME TO {t}",
    "ALTER SEQUENCE {t}_number_seq OWNED BY NONE; ALTER SEQUENCE {t}_number_seq RESTART;
     ALTER SEQUENCE {t}_number_seq OWNED BY {t}.number",
    "INSERT INTO {t}_parts SELECT i, i FROM generate_series(1, 50) i",
    "TRUNCATE {t}_parts",
    REATTACH,
    REATTACH,
    // Created beside the table or below it.
    "DROP TABLE {t}_low; CREATE TABLE {t}_low (id int, number int);
     ALTER TABLE {t}_parts ATTACH PARTITION {t}_low FOR VALUES FROM (0) TO (1000000)",
    "DROP TABLE {t}_low;
     CREATE TABLE {t}_low PARTITION OF {t}_parts FOR VALUES FROM (0) TO (1000000);
     ALTER TABLE {t}_parts DETACH PARTITION {t}_low;
     ALTER TABLE {t}_parts ATTACH PARTITION {t}_low FOR VALUES FROM (0) TO (1000000)",
    "DROP TABLE {t}_low; CREATE TABLE {t}_low (id int, number int) PARTITION BY RANGE (id);
     CREATE TABLE {t}_lower PARTITION OF {t}_low FOR VALUES FROM (0) TO (1000000);
     ALTER TABLE {t}_parts ATTACH PARTITION {t}_low FOR VALUES FROM (0) TO (1000000);
     TRUNCATE {t}_lower",
];

/// Steps that PostgreSQL refuses within a transaction block; they change no rows.
const ALONE: [&str; 5] = [
    "VACUUM FULL {t}",
    "VACUUM {t}",
    "REINDEX TABLE CONCURRENTLY {t}",
    "REINDEX (TABLESPACE space) TABLE CONCURRENTLY {t}",
    "CREATE INDEX CONCURRENTLY ON {t} (name, id)",
];

/// One step of a session.
#[derive(Clone, Debug)]
struct Step {
    session: u64,
    number: u64,
    table: String,
    statements: &'static str,
    makes: bool,
    alone: bool,
    /// Encrypted by a label, not by the setting.
    labelled: bool,
    /// Also run before, inside a savepoint that is rolled back.
    twice: bool,
}

impl Step {
    fn draw(random: &mut Random, session: u64, number: u64) -> Step {
        // The first steps create the tables.
        let first = number < TABLES;
        let table = if first { number } else { random.below(TABLES) };
        let (statements, makes, alone) = match random.below(10) {
            _ if first => (CREATE, true, false),
            0 => (random.one_of(&MAKING), true, false),
            1 | 2 => (random.one_of(&ALONE), false, true),
            _ => (random.one_of(&CHANGING), false, false),
        };
        Step {
            session,
            number,
            table: format!("t{session}_{table}"),
            statements,
            makes,
            alone,
            labelled: statements == CREATE && random.below(2) == 0,
            twice: random.below(3) == 0,
        }
    }

    /// Runs the step in one schema, unless the journal says that it is done.
    fn perform(&self, client: &mut Client, schema: &str, canary: &str) -> Result<()> {
        let Step { session, number, table, .. } = self;
        let done = text(
            client,
            &format!(
                "SELECT coalesce(max(step), -1) FROM journal
                 WHERE schema = '{schema}' AND session = {session}"
            ),
        )?;
        if done.parse::<i64>()? >= i64::try_from(*number)? {
            return Ok(());
        }
        let secret = schema == "secret";
        let encrypts = secret && self.makes && !self.labelled;
        run_sql(
            client,
            &format!(
                "SET search_path = {schema}, public; SET pagevault.default_encryption = {encrypts}"
            ),
        )?;
        let statements = self
            .statements
            .replace("{t}", table)
            .replace("{n}", &number.to_string())
            .replace("{canary}", canary);
        let label = if secret && self.labelled {
            format!("SECURITY LABEL FOR pagevault ON TABLE {table} IS 'encrypted'")
        } else {
            String::new()
        };
        let journal = format!("INSERT INTO journal VALUES ('{schema}', {session}, {number})");
        if self.alone {
            run_sql(client, &statements)?;
            return run_sql(client, &journal);
        }
        let undone = if self.twice {
            format!("SAVEPOINT undone; {statements}; {label}; ROLLBACK TO undone;")
        } else {
            String::new()
        };
        run_sql(client, &format!("BEGIN; {undone} {statements}; {label}; {journal}; COMMIT"))
    }
}

/// A session's schedule: drawn step by step. A step is kept until it is known to be done.
struct Session {
    random: Random,
    number: u64,
    next: u64,
    current: Option<Step>,
}

impl Session {
    /// Runs steps in both schemas until the server stops.
    fn perform(
        &mut self,
        cluster: &Cluster,
        progress: &AtomicU64,
        killed: &AtomicBool,
    ) -> Result<()> {
        let outcome = cluster.client().and_then(|mut client| {
            loop {
                let step = self.draw();
                for (schema, canary) in SCHEMAS {
                    step.perform(&mut client, schema, canary)
                        .with_context(|| format!("{schema}: {step:?}"))?;
                }
                self.current = None;
                progress.fetch_add(1, Ordering::Relaxed);
            }
        });
        if killed.load(Ordering::SeqCst) { Ok(()) } else { outcome }
    }

    /// The interrupted step, or a new one.
    fn draw(&mut self) -> Step {
        let Session { random, number, next, current } = self;
        let step = current.get_or_insert_with(|| {
            *next += 1;
            Step::draw(random, *number, *next - 1)
        });
        step.clone()
    }

    /// Finishes the step that a kill interrupted, in the schema where it was not done.
    fn finish(&mut self, client: &mut Client) -> Result<()> {
        let Some(step) = self.current.take() else { return Ok(()) };
        for (schema, canary) in SCHEMAS {
            step.perform(client, schema, canary).with_context(|| format!("{schema}: {step:?}"))?;
        }
        Ok(())
    }
}

fn setting<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_ddl_leaves_nothing_in_plaintext() -> Result<()> {
    let seed = setting("PAGEVAULT_SEED").unwrap_or(1);
    let seconds = setting("PAGEVAULT_RANDOM_DDL_SECONDS").unwrap_or(25);
    run(seed, Duration::from_secs(seconds)).with_context(|| format!("PAGEVAULT_SEED={seed}"))
}

fn run(seed: u64, duration: Duration) -> Result<()> {
    let (mut cluster, _keys) = start(&Settings::default())?;
    // A kill leaves such indexes of REINDEX CONCURRENTLY.
    cluster.allow_log("reindex of invalid index");
    cluster.allow_log("cannot reindex invalid index");
    cluster.sql(
        "CREATE SCHEMA secret; CREATE SCHEMA open;
         CREATE FUNCTION secret.encrypt(name text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
             EXECUTE format('SECURITY LABEL FOR pagevault ON TABLE %I IS %L', name, 'encrypted');
         END $$;
         CREATE FUNCTION open.encrypt(text) RETURNS void LANGUAGE sql AS '';
         CREATE TABLE journal (schema text, session int, step int)",
    )?;
    let mut random = Random::new(seed);
    let mut sessions: Vec<_> = (0..SESSIONS)
        .map(|number| Session {
            random: Random::new(seed ^ (number + 1)),
            number,
            next: 0,
            current: None,
        })
        .collect();
    let end = Instant::now() + duration;
    while Instant::now() < end {
        let steps = 50 + random.below(100);
        let (progress, killed) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| -> Result<()> {
            let (progress, killed, cluster) = (&progress, &killed, &cluster);
            let threads: Vec<_> = sessions
                .iter_mut()
                .map(|session| scope.spawn(move || session.perform(cluster, progress, killed)))
                .collect();
            while progress.load(Ordering::Relaxed) < steps
                && !threads.iter().any(|thread| thread.is_finished())
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            let failed = threads.iter().any(|thread| thread.is_finished());
            killed.store(!failed, Ordering::SeqCst);
            cluster.kill()?;
            for thread in threads {
                thread.join().map_err(|_| anyhow::anyhow!("a session panicked"))??;
            }
            Ok(())
        })?;
        cluster.start_after_crash()?;
        let mut client = cluster.client()?;
        for session in &mut sessions {
            session.finish(&mut client)?;
        }
        drop(client);
        check(&cluster)?;
    }
    let steps: Vec<_> = sessions.iter().map(|session| session.next).collect();
    eprintln!("seed {seed}: {steps:?} steps");
    cluster.finish()
}

fn check(cluster: &Cluster) -> Result<()> {
    let mut client = cluster.client()?;
    for session in 0..SESSIONS {
        for table in 0..TABLES {
            for suffix in ["", "_copy", "_view", "_parts"] {
                let name = format!("t{session}_{table}{suffix}");
                let values = if suffix == "_parts" { "number" } else { "name, wide" };
                let mut contents = |schema: &str| -> Result<String> {
                    let exists = format!("SELECT to_regclass('{schema}.{name}')");
                    if text(&mut client, &exists)?.is_empty() {
                        return Ok("nothing".into());
                    }
                    text(
                        &mut client,
                        &format!(
                            "SELECT count(*) || ' ' || coalesce(md5(string_agg(
                                 replace(concat(id, {values}), '{SECRET}', '{OPEN}'), ','
                                 ORDER BY id)), '') FROM {schema}.{name}"
                        ),
                    )
                };
                let (secret, open) = (contents("secret")?, contents("open")?);
                ensure!(secret == open, "{name} is {secret}, its twin {open}");
            }
        }
    }
    cluster.sql("CHECKPOINT")?;
    let expect = |schema: &str, _: &str| match schema {
        "secret" => Some(("secret".to_owned(), Expected::Sealed)),
        "open" => Some(("open".to_owned(), Expected::Plain)),
        _ => None,
    };
    survey::check(cluster, expect, false)
}
