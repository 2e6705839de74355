//! Somebody who changes keys, tables and databases all the time, on whatever server accepts it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use pagevault_tests::Random;
use pagevault_tests::errors::SqlError;
use postgres::{Client, NoTls};

use super::super::CANARY;
use super::super::nodes::Group;

/// Tables of each kind, and databases.
const TABLES: u64 = 5;
const DATABASES: u64 = 3;

/// What may be refused to a client of servers that fail, are busy, or have no provider.
const EXPECTED: &[&str] = &[
    "08", // the connection ends
    "25006", "25P02", // a standby
    "40P01", "55P03", "55006", // somebody else is faster, or in the way
    "3D000", "42P01", "42P04", "42P07", // the table or database is gone, or there already
    "57P0",  // the server stops, or was killed
    "53300",
];

/// The same, of keys and jobs, by what the message contains.
const EXPECTED_MESSAGES: &[&str] = &[
    "ermission denied",
    "is not encrypted",
    "has no job",
    "is done",
    "could not be read",
    "is already",
];

/// Changes keys until it is dropped.
pub(super) struct Keeper {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    end: AtomicBool,
    paused: AtomicBool,
    is_idle: AtomicBool,
    /// How often each change was made, and how often it was not.
    counts: Mutex<BTreeMap<&'static str, (u64, u64)>>,
    unexpected: Mutex<Vec<String>>,
}

impl Keeper {
    pub(super) fn start(group: &Group, random: Random) -> Keeper {
        let state = Arc::new(State::default());
        let (own, servers) = (Arc::clone(&state), group.writable());
        std::thread::spawn(move || keep(&own, &servers, random));
        Keeper { state }
    }

    /// Nothing is changed from now on, until `resume`.
    pub(super) fn pause(&self, group: &Group) -> Result<()> {
        self.state.paused.store(true, Ordering::Release);
        group.eventually("changes of keys pause", |_| {
            ensure!(self.state.is_idle.load(Ordering::Acquire), "one is under way");
            Ok(())
        })
    }

    /// Whether all that was refused is what servers that fail may refuse.
    pub(super) fn end(self) -> Result<()> {
        let unexpected = self.state.unexpected.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(unexpected.is_empty(), "{}", unexpected.join("\n"));
        Ok(())
    }

    pub(super) fn resume(&self) {
        self.state.is_idle.store(false, Ordering::Relaxed);
        self.state.paused.store(false, Ordering::Release);
    }

    /// Changes, with how often they were made and refused.
    pub(super) fn told(&self) -> String {
        let counts = self.state.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let one =
            |(name, (done, refused)): (&&str, &(u64, u64))| format!("{name} {done}+{refused}");
        counts.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.state.end.store(true, Ordering::Relaxed);
    }
}

fn keep(state: &State, servers: &postgres::Config, mut random: Random) {
    let mut client = None;
    while !state.end.load(Ordering::Relaxed) {
        if state.paused.load(Ordering::Acquire) {
            client = None;
            state.is_idle.store(true, Ordering::Release);
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        let (name, database, statements) = change(&mut random);
        let done = in_database(servers, &mut client, database.as_deref(), &statements);
        let mut counts = state.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(name).or_default();
        match done {
            Ok(()) => count.0 += 1,
            Err(error) => {
                count.1 += 1;
                client = client.filter(|client: &Client| !client.is_closed());
                if let Some(error) = unexpected(&error) {
                    let told = format!("{}: {error}", statements.join("; "));
                    eprintln!("  unexpected: {told}");
                    state.unexpected.lock().unwrap_or_else(PoisonError::into_inner).push(told);
                }
            }
        }
        drop(counts);
        std::thread::sleep(Duration::from_millis(random.below(300)));
    }
}

fn unexpected(error: &postgres::Error) -> Option<String> {
    let error = SqlError::of(error)?;
    let is_expected = EXPECTED.iter().any(|state| error.sqlstate.starts_with(state))
        || EXPECTED_MESSAGES.iter().any(|text| error.message.contains(text));
    (!is_expected).then(|| error.to_string())
}

/// Runs statements one by one: some do not run in a transaction. In the database that all nodes
/// have the connection is kept.
fn in_database(
    servers: &postgres::Config,
    kept: &mut Option<Client>,
    database: Option<&str>,
    statements: &[String],
) -> Result<(), postgres::Error> {
    let mut servers = servers.clone();
    let mut other;
    let client = match (database, kept) {
        (Some(database), _) => {
            other = servers.dbname(database).connect(NoTls)?;
            &mut other
        }
        (None, kept) => match kept {
            Some(client) => client,
            none => none.insert(servers.connect(NoTls)?),
        },
    };
    client.batch_execute("SET lock_timeout = '20s'")?;
    statements.iter().try_for_each(|statement| client.batch_execute(statement))
}

/// Its name, its database unless it is the first one, and its statements.
fn change(random: &mut Random) -> (&'static str, Option<String>, Vec<String>) {
    let number = random.below(TABLES);
    // Values of the first must never be in plaintext. The others may be decrypted.
    let (secret, open) = (format!("secret.t{number}"), format!("open.t{number}"));
    let table = if random.percent(50) { &secret } else { &open };
    let call = |function: &str, table: &str| {
        format!("SELECT pagevault.{function}(oid) FROM pg_class WHERE oid = to_regclass('{table}')")
    };
    let threshold = format!("SET pagevault.rekey_threshold = '{}'", random.one_of(&["0", "8MB"]));
    let with_threshold = |statement: String| vec![threshold.clone(), statement];
    let rows = 200 + random.below(3000);
    let number = random.below(DATABASES);
    let database = format!("other{number}");
    let here = |name, statements| (name, None, statements);
    match random.below(100) {
        0..8 => here("master key", vec!["SELECT pagevault.rotate_cluster_master_key()".into()]),
        8..16 => here("database key", vec!["SELECT pagevault.rotate_database_key()".into()]),
        16..24 => here("WAL key", vec!["SELECT pagevault.rotate_wal_key()".into()]),
        24..34 => here("data key", with_threshold(call("rotate_data_key", table))),
        34..36 => here(
            "all data keys",
            with_threshold("SELECT count(*) FROM pagevault.rotate_all_data_keys()".into()),
        ),
        36..38 => here("data key of the ledger", vec![call("rotate_data_key", "ledger")]),
        38..50 => here(
            "new table",
            vec![format!(
                "CREATE TABLE {table} AS SELECT i, {} || i AS name, md5(i::text) AS digest
                 FROM generate_series(1, {rows}) i;
                 ALTER TABLE {table} ADD PRIMARY KEY (i)",
                if *table == secret { format!("'{CANARY}'") } else { "'open'".into() }
            )],
        ),
        50..56 => here("dropped table", vec![format!("DROP TABLE {table}")]),
        56..60 => here(
            "changed rows",
            vec![format!("UPDATE {table} SET name = name || '.' WHERE i % 3 = 0")],
        ),
        60..63 => here("VACUUM FULL", vec![format!("VACUUM FULL {table}")]),
        63..66 => here("truncated table", vec![format!("TRUNCATE {table}")]),
        66..72 => here("decryption", with_threshold(call("decrypt", &open))),
        72..78 => here("encryption", with_threshold(call("encrypt", &open))),
        78..82 => here(
            "cancelled or paused job",
            vec![format!(
                "SELECT pagevault.{}_rekey(job) FROM pagevault.rekey_jobs
                 WHERE state IN ('waiting', 'running') ORDER BY random() LIMIT 1",
                random.one_of(&["cancel", "pause"])
            )],
        ),
        82..85 => here("checkpoint", vec!["CHECKPOINT".into()]),
        85..90 => here(
            "new database",
            vec![format!(
                "CREATE DATABASE {database} TEMPLATE {} STRATEGY {}",
                random.one_of(&["template0", "original"]),
                random.one_of(&["wal_log", "file_copy"])
            )],
        ),
        90..92 => here("dropped database", vec![format!("DROP DATABASE {database} WITH (FORCE)")]),
        92..95 => (
            "table in another database",
            Some(database),
            vec![format!(
                "CREATE TABLE IF NOT EXISTS t (i serial, name text);
                 INSERT INTO t (name) SELECT '{CANARY}' || i FROM generate_series(1, {rows}) i"
            )],
        ),
        95..97 => (
            "database key of another database",
            Some(database),
            vec![
                "CREATE EXTENSION IF NOT EXISTS pagevault".into(),
                "SELECT pagevault.set_database_master_key('keys', 'main')".into(),
                "SELECT pagevault.rotate_database_key()".into(),
            ],
        ),
        _ => (
            "data keys of another database",
            Some(database),
            vec![
                "CREATE EXTENSION IF NOT EXISTS pagevault".into(),
                "SELECT count(*) FROM pagevault.rotate_all_data_keys()".into(),
            ],
        ),
    }
}
