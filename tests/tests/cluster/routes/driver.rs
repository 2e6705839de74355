//! Runs rows in all modes and checks the results.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Installation, KeyFile, Settings};
use postgres::Client;

use super::survey::{self, Expected};
use super::{Role, Row};
use crate::labels::expect_no_drift;

/// Occurs in every row of an encrypted relation, and nowhere else.
pub(crate) const SECRET: &str = "kanarienvogel-secret";
/// The same in the plaintext twin; of the same length, so that both have the same pages.
pub(crate) const OPEN: &str = "kanarienvogel-public";

/// The reason why relations are encrypted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Object {
    Labelled,
    ByDefault,
}

/// Division of the statements into transactions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Transactions {
    /// Each statement in its own.
    Each,
    /// All in one, including the statements before the route.
    One,
    /// The route inside a savepoint that is rolled back, then a subtransaction that creates and
    /// drops a table, then the route again.
    Savepoint,
}

/// The end of the server after the routes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Stop,
    Crash,
}

/// A way to run a row.
#[derive(Clone, Copy)]
struct Mode {
    object: Object,
    role: Role,
    transactions: Transactions,
    end: End,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object = if self.object == Object::Labelled { "label" } else { "default" };
        let role = if self.role == Role::Owner { "owner" } else { "superuser" };
        let transactions = match self.transactions {
            Transactions::Each => "each",
            Transactions::One => "one",
            Transactions::Savepoint => "savepoint",
        };
        let end = if self.end == End::Stop { "stop" } else { "crash" };
        write!(f, "{object}_{role}_{transactions}_{end}")
    }
}

impl Mode {
    /// Every object, role and division into transactions. Half of these modes end with a stop and
    /// half with a crash, so that each pair of choices occurs.
    fn all(end: End) -> impl Iterator<Item = Mode> {
        [Object::Labelled, Object::ByDefault].into_iter().flat_map(move |object| {
            let role = match (object, end) {
                (Object::Labelled, End::Stop) | (Object::ByDefault, End::Crash) => Role::Owner,
                (Object::Labelled, End::Crash) | (Object::ByDefault, End::Stop) => Role::Superuser,
            };
            [Transactions::Each, Transactions::One, Transactions::Savepoint]
                .map(|transactions| Mode { object, role, transactions, end })
        })
    }

    fn suits(&self, row: &Row) -> bool {
        Installation::get().is_ok_and(|installation| installation.major >= row.since)
            && (self.role == Role::Superuser || row.role == Role::Owner)
            && (self.transactions == Transactions::Each || row.in_transaction)
    }
}

/// One row, run in one mode: a schema that must be sealed, and its twin.
struct RowRun<'rows> {
    row: &'rows Row,
    mode: Mode,
    secret: String,
    open: String,
}

impl RowRun<'_> {
    /// The required state of the relations of `root` in the secret schema.
    fn expected(&self, root: &str) -> Expected {
        let follows = !self.row.new.contains(&root);
        match (self.mode.object, self.mode.transactions) {
            (Object::ByDefault, _) => Expected::Sealed,
            (Object::Labelled, _) if follows => Expected::Sealed,
            // While the transaction has locked an encrypted relation, new storage is sealed.
            (Object::Labelled, Transactions::One) => Expected::Either,
            (Object::Labelled, _) => Expected::PlainCopy,
        }
    }
}

impl fmt::Display for RowRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.row.name, self.mode)
    }
}

/// Runs all rows in all suitable modes on one server, and checks the results.
pub(super) fn run_rows(rows: &[Row]) -> Result<()> {
    run_rows_with(&Settings::default(), rows)
}

/// Like [`run_rows`], on a server with these settings.
pub(super) fn run_rows_with(settings: &Settings, rows: &[Row]) -> Result<()> {
    let (cluster, _keys) = start(settings)?;
    let mut runs = Vec::new();
    for end in [End::Stop, End::Crash] {
        for mode in Mode::all(end) {
            runs.extend(session(&cluster, rows, mode)?);
        }
        match end {
            End::Stop => cluster.restart()?,
            End::Crash => cluster.crash()?,
        }
        compare(&cluster, &runs, end)?;
        // A shutdown writes unlogged relations.
        cluster.restart()?;
        check(&cluster, &runs, end)?;
        expect_no_drift(&cluster)?;
    }
    let triggers = cluster.text("SELECT count(*) FROM pg_event_trigger")?;
    ensure!(triggers == "0", "pagevault needs no event trigger, and there are {triggers}");
    cluster.finish()
}

/// Reads all files.
fn check(cluster: &Cluster, runs: &[RowRun<'_>], end: End) -> Result<()> {
    let mut pairs = BTreeMap::new();
    for pair in runs {
        for inner in ["", "_inner"] {
            pairs.insert(format!("{}{inner}", pair.secret), (pair, true));
            pairs.insert(format!("{}{inner}", pair.open), (pair, false));
        }
    }
    let expect = |schema: &str, root: &str| match pairs.get(schema)? {
        (pair, true) => Some((pair.to_string(), pair.expected(root))),
        (pair, false) => Some((format!("{pair}, the twin"), Expected::Plain)),
    };
    // After a crash, unlogged relations are empty.
    survey::check(cluster, expect, end == End::Stop)
}

/// A server with the objects that rows require.
pub(crate) fn start(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(settings)?;
    cluster.make_tablespace("space")?;
    cluster.sql(
        "CREATE ROLE owner;
         GRANT CREATE ON DATABASE postgres TO owner;
         GRANT CREATE ON TABLESPACE space TO owner;
         GRANT SET ON PARAMETER pagevault.default_encryption TO owner;
         CREATE ACCESS METHOD heap_too TYPE TABLE HANDLER heap_tableam_handler;",
    )?;
    cluster.sql(LABEL_ALL)?;
    cluster.sql(CONTENTS)?;
    Ok((cluster, keys))
}

/// Labels every relation of the current schema that can have a label.
const LABEL_ALL: &str = "CREATE FUNCTION public.label_all() RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        relation record;
    BEGIN
        FOR relation IN
            SELECT c.oid::regclass AS name,
                   CASE relkind WHEN 'r' THEN 'TABLE' WHEN 'm' THEN 'MATERIALIZED VIEW'
                                ELSE 'SEQUENCE' END AS kind
            FROM pg_class c
            WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'm', 'S')
              AND NOT EXISTS (SELECT FROM pg_depend
                              WHERE relkind = 'S' AND classid = 'pg_class'::regclass AND objid = c.oid
                                AND refclassid = 'pg_class'::regclass AND deptype IN ('a', 'i'))
        LOOP
            EXECUTE format('SECURITY LABEL FOR pagevault ON %s %s IS ''encrypted''',
                           relation.kind, relation.name);
        END LOOP;
    END $$";

/// A digest of every row of every relation of a schema; the two canaries count as equal.
const CONTENTS: &str = "CREATE FUNCTION public.contents(
        schema text, secret text, open text, sequence text)
    RETURNS text LANGUAGE plpgsql AS $$
    DECLARE
        relation record;
        digest text;
        told text := '';
    BEGIN
        FOR relation IN
            SELECT c.oid::regclass AS name, relname,
                   CASE relkind WHEN 'S' THEN sequence ELSE '*' END AS columns
            FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
            WHERE nspname IN (schema, schema || '_inner') AND relkind IN ('r', 'm', 'S')
            ORDER BY relname
        LOOP
            EXECUTE format('SELECT count(*) || '' '' || coalesce(md5(string_agg(line, '','' ORDER BY line)), ''-'')
                            FROM (SELECT replace(r::text, %L, %L) AS line FROM (SELECT %s FROM %s) r) lines',
                           secret, open, relation.columns, relation.name) INTO digest;
            told := told || relation.relname || ' ' || digest || E'\\n';
        END LOOP;
        RETURN told;
    END $$";

/// Runs all rows in one mode, in one session.
fn session<'rows>(cluster: &Cluster, rows: &'rows [Row], mode: Mode) -> Result<Vec<RowRun<'rows>>> {
    let mut client = cluster.client()?;
    if mode.role == Role::Owner {
        run_sql(&mut client, "SET SESSION AUTHORIZATION owner")?;
    }
    let mut runs = Vec::new();
    for (number, row) in rows.iter().enumerate().filter(|(_, row)| mode.suits(row)) {
        let name = format!("r{number}_{mode}");
        let pair = RowRun { row, mode, secret: name.clone(), open: format!("{name}_twin") };
        let on = mode.object == Object::ByDefault;
        run_sql(&mut client, &format!("SET pagevault.default_encryption = {on}"))?;
        let label = mode.object == Object::Labelled;
        route(&mut client, &pair, &pair.secret, SECRET, label).with_context(|| pair.to_string())?;
        run_sql(&mut client, "SET pagevault.default_encryption = off")?;
        route(&mut client, &pair, &pair.open, OPEN, false)
            .with_context(|| format!("{pair}, the twin"))?;
        runs.push(pair);
    }
    Ok(runs)
}

/// Runs a row in one schema.
fn route(
    client: &mut Client,
    pair: &RowRun<'_>,
    schema: &str,
    canary: &str,
    label: bool,
) -> Result<()> {
    let row = pair.row;
    run_sql(client, &format!("CREATE SCHEMA {schema}; SET search_path = {schema}, public"))?;
    let label: &[&str] = if label { &["SELECT label_all()"] } else { &[] };
    let before = [row.setup, label, row.data].concat();
    let statements = match pair.mode.transactions {
        Transactions::Each => [&before[..], row.route].concat(),
        Transactions::One => [&["BEGIN"], &before[..], row.route, &["COMMIT"]].concat(),
        Transactions::Savepoint => [
            &before[..],
            &["BEGIN", "SAVEPOINT undone"],
            row.route,
            &["ROLLBACK TO undone", "SAVEPOINT passing"],
            &["CREATE TABLE passing (id serial PRIMARY KEY, name text)"],
            &["INSERT INTO passing (name) VALUES ('{canary}')"],
            &["TRUNCATE passing", "DROP TABLE passing", "RELEASE passing"],
            row.route,
            &["COMMIT"],
        ]
        .concat(),
    };
    for statement in statements {
        run_sql(client, &statement.replace("{schema}", schema).replace("{canary}", canary))?;
    }
    Ok(())
}

/// Fails unless both schemas of each pair have equal contents.
fn compare(cluster: &Cluster, runs: &[RowRun<'_>], end: End) -> Result<()> {
    // After a crash, sequences have skipped values, not all equally many.
    let sequence = if end == End::Stop { "last_value, is_called" } else { "is_called" };
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET enable_seqscan = off")?;
    for pair in runs {
        let mut contents = |schema: &str, canary: &str| -> Result<String> {
            let reads = pair.row.reads.replace("{schema}", schema).replace("{canary}", canary);
            run_sql(&mut client, &format!("SET search_path = {schema}, public"))?;
            let by_index = text(&mut client, &reads)?;
            let all = format!("SELECT contents('{schema}', '{SECRET}', '{OPEN}', '{sequence}')");
            Ok(format!("{}by index: {by_index}", text(&mut client, &all)?))
        };
        let secret = contents(&pair.secret, SECRET).with_context(|| pair.to_string())?;
        let open = contents(&pair.open, OPEN).with_context(|| format!("{pair}, the twin"))?;
        ensure!(secret == open, "{pair}: encrypted\n{secret}\nbut plain\n{open}");
    }
    Ok(())
}
