//! Whether a server is as the model says.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use postgres::Client;

use super::database::{Database, Kind, Label, SCHEMAS, SECRET, Table};
use super::statement::Context as Surroundings;
use super::world::{World, database_name};
use crate::cluster::{column, expect_error, run_sql, text};
use crate::datafile::PageState;
use crate::{Cluster, DataFile};

/// In what state a server is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Primary,
    /// Without unlogged tables.
    Standby,
}

pub(super) const SEARCH_PATH: &str = "SET search_path = open, vault, public; \
    SET lock_timeout = '20s'; SET statement_timeout = '60s'";

/// Looks at everything, on disk too.
pub(super) fn judge(cluster: &Cluster, world: &World, server: Server) -> Result<()> {
    for (number, database) in &world.databases {
        let name = database_name(*number);
        let held = |table: u8| world.is_held(*number, table);
        if world.locked && database.catalogs {
            continue;
        }
        let mut client = connect(cluster, &name)?;
        if world.locked {
            refuses(&mut client, database).with_context(|| name.clone())?;
            continue;
        }
        agrees(&mut client, database, &world.context, server, &held)
            .with_context(|| name.clone())?;
        run_sql(&mut client, "CHECKPOINT")?;
        seals(cluster, &mut client, database, server, &held).with_context(|| name.clone())?;
        if server == Server::Primary && world.is_quiet() {
            claims(&mut client, database, world).with_context(|| name.clone())?;
        }
    }
    Ok(())
}

/// A session as the player has it.
pub(super) fn connect(cluster: &Cluster, database: &str) -> Result<Client> {
    let mut client = cluster.client_to(database)?;
    run_sql(&mut client, SEARCH_PATH)?;
    Ok(client)
}

/// What the server says of a table: where it is, whether it is logged, and its label.
const TABLES: &str =
    "SELECT concat_ws(' ', relname, nspname, relkind, relpersistence, coalesce(spcname, '-'),
        coalesce(label, '-'))
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    LEFT JOIN pg_tablespace s ON s.oid = reltablespace
    LEFT JOIN pg_seclabel l ON objoid = c.oid AND classoid = 'pg_class'::regclass
        AND objsubid = 0 AND provider = 'pagevault'
    WHERE relname ~ '^t[0-9]+$' AND relkind IN ('r', 'p', 'm')";

/// What a table must answer: rows, sums, and whether each row is what its number says.
fn contents(number: u8, table: &Table) -> String {
    let marker = table.marker();
    let marks = match table.kind {
        Kind::Partitioned => "true".to_owned(),
        Kind::Heap | Kind::View(_) => format!(
            "coalesce(bool_and(mark = '{marker}-' || id AND \
             (wide = repeat('{marker}', 150)) IS NOT DISTINCT FROM (CASE WHEN id % 10 = 0 THEN true END)), true)"
        ),
    };
    format!(
        "SELECT concat_ws(' ', count(*), coalesce(sum(id), 0), coalesce(sum(n), 0), \
         coalesce(sum(id * n), 0), {marks}) FROM t{number} WHERE id > 0"
    )
}

fn expected(rows: &BTreeMap<i64, i64>) -> String {
    let ids: i64 = rows.keys().sum();
    let numbers: i64 = rows.values().sum();
    let products: i64 = rows.iter().map(|(id, n)| id * n).sum();
    format!("{} {ids} {numbers} {products} t", rows.len())
}

/// Whether the tables, their places, labels and rows are those of the model. Tables that are `held`
/// cannot be read.
pub(super) fn agrees(
    client: &mut Client,
    database: &Database,
    context: &Surroundings,
    server: Server,
    held: &dyn Fn(u8) -> bool,
) -> Result<()> {
    let found = column(client, TABLES)?;
    for line in &found {
        let number = line.split(' ').next().and_then(|name| name[1..].parse().ok());
        let known =
            number.is_some_and(|number| held(number) || database.tables.contains_key(&number));
        ensure!(known, "there is {line}, and should not be");
    }
    for (number, table) in &database.tables {
        if held(*number) {
            continue;
        }
        let kind = match table.kind {
            Kind::Heap => "r",
            Kind::Partitioned => "p",
            Kind::View(_) => "m",
        };
        let label = context.label(*number, table.label).unwrap_or_else(|| "-".to_owned());
        let logged = if table.logged { "p" } else { "u" };
        let space = match table.in_other_space {
            None => "-",
            Some(true) => "space",
            Some(false) => "pg_default",
        };
        let schema = SCHEMAS[table.schema];
        let wanted = format!("t{number} {schema} {kind} {logged} {space} {label}");
        ensure!(found.contains(&wanted), "{wanted} is not there, but {found:?}");
        if database.partitions(*number).any(held) {
            continue;
        }
        let unlogged = !table.logged
            || database
                .partitions(*number)
                .any(|partition| database.tables.get(&partition).is_some_and(|t| !t.logged));
        if server == Server::Standby && unlogged {
            continue;
        }
        let query = contents(*number, table);
        if database.is_shredded(*number) {
            let error = expect_error(client, &query)?;
            let destroyed = error.sqlstate == "55000" && error.text().contains("were destroyed");
            ensure!(destroyed, "t{number} is shredded, and the server says {error}");
            continue;
        }
        let wanted = expected(&database.rows(*number));
        for setting in ["SET enable_seqscan = on", "SET enable_seqscan = off"] {
            run_sql(client, setting)?;
            let found = text(client, &query)?;
            ensure!(found == wanted, "t{number} holds {found} instead of {wanted} ({setting})");
        }
    }
    let objects = "SELECT count(*) || ' ' || coalesce(sum(length(lo_get(oid))), 0) FROM pg_largeobject_metadata";
    let bytes: usize = database.objects.iter().map(|oid| object_length(*oid)).sum();
    let wanted = format!("{} {bytes}", database.objects.len());
    let found = text(client, objects)?;
    ensure!(found == wanted, "large objects: {found} instead of {wanted}");
    Ok(())
}

fn object_length(oid: u32) -> usize {
    format!("object {} ", oid - 900_000).len() * 1000
}

/// Whether a locked server refuses what is encrypted, and tells the rest. Keys of key groups have
/// another provider, which is not away: their tables are refused only if the planner reads
/// statistics. A table whose label is removed stays in its group.
fn refuses(client: &mut Client, database: &Database) -> Result<()> {
    for (number, table) in &database.tables {
        let partitioned = table.kind == Kind::Partitioned;
        if !table.sealed || partitioned || table.shredded || table.rows.is_empty() {
            continue;
        }
        let group = format!(
            "SELECT coalesce(max(key_group), '') FROM pagevault.relation_rows() WHERE relation = 't{number}'::regclass"
        );
        if !text(client, &group)?.is_empty() {
            continue;
        }
        let error = expect_error(client, &contents(*number, table))?;
        let locked = error.sqlstate == "55000" && error.text().contains("locked");
        ensure!(locked, "t{number} is locked, and the server says {error}");
    }
    Ok(())
}

/// First files of all that belongs to a table, with its number.
const FAMILIES: &str =
    "SELECT concat_ws(' ', substr(root.relname, 2), pg_relation_filepath(c.oid), c.relname)
    FROM pg_class c
    LEFT JOIN pg_index i ON i.indexrelid = c.oid
    LEFT JOIN pg_class toasted ON toasted.reltoastrelid = coalesce(i.indrelid, c.oid)
    JOIN pg_class root ON root.oid = coalesce(toasted.oid, i.indrelid, c.oid)
    WHERE root.relname ~ '^t[0-9]+$' AND pg_relation_filepath(c.oid) IS NOT NULL";

/// Whether no page on disk of what must be encrypted is plaintext.
fn seals(
    cluster: &Cluster,
    client: &mut Client,
    database: &Database,
    server: Server,
    held: &dyn Fn(u8) -> bool,
) -> Result<()> {
    for line in column(client, FAMILIES)? {
        let mut parts = line.split(' ');
        let (Some(number), Some(path), Some(name)) = (parts.next(), parts.next(), parts.next())
        else {
            bail!("not understood: {line}");
        };
        let number: u8 = number.parse()?;
        let sealed = database.tables.get(&number).is_some_and(|table| {
            let there = server == Server::Primary || table.logged;
            table.sealed && table.job.is_none() && there
        });
        if !sealed || held(number) {
            continue;
        }
        for file in DataFile::find(&cluster.data_directory().join(path))? {
            let plain = file.states()?.iter().position(|state| *state == PageState::Plaintext);
            ensure!(
                plain.is_none(),
                "block {plain:?} of {name} of t{number} is plaintext: {file:?}"
            );
        }
    }
    Ok(())
}

const DRIFT: &str = "SELECT relation::text || ' is ' || actual FROM pagevault.drift(true)
    WHERE relation::text ~ '^(open.|vault.)?t[0-9]'";

/// What pagevault says is to be done about a table and its TOAST table and indexes.
fn fixes(table: &str) -> String {
    format!(
        "SELECT DISTINCT fix FROM pagevault.drift(true) JOIN pg_class c ON c.oid = relation
          WHERE relname ~ '^{table}(_|$)' OR relname = 'pg_toast_' || '{table}'::regclass::oid"
    )
}

/// Whether pagevault itself says so.
fn claims(client: &mut Client, database: &Database, world: &World) -> Result<()> {
    let drift = column(client, DRIFT)?;
    for (number, table) in &database.tables {
        if table.kind == Kind::Partitioned || table.shredded || table.job.is_some() {
            continue;
        }
        if table.sealed {
            let says = text(client, &format!("SELECT pagevault.is_encrypted('t{number}')"))?;
            ensure!(says == "t", "is_encrypted('t{number}') says {says:?}");
        }
        let as_wanted = table.sealed && database.wants(table, world.context.default);
        if as_wanted || table.label == Some(Label::Plaintext) {
            let name = format!("t{number}");
            let drifts = |line: &&String| {
                let rest = line.trim_start_matches("open.").trim_start_matches("vault.");
                rest.strip_prefix(&name).is_some_and(|rest| rest.starts_with([' ', '_']))
            };
            let mut found = drift.iter().find(drifts).cloned();
            // A table follows the label of another one into its key group when it is told to.
            if found.is_some() && (table.in_doubt || world.setup.key_groups) {
                if world.crawling || world.paused || world.keys_away {
                    continue;
                }
                // One may make another superfluous, which is refused then.
                while let Some(fix) = column(client, &fixes(&name))?.first() {
                    run_sql(client, fix)?;
                    let wait = format!("SELECT pagevault.wait_for_rekey('{name}'::regclass)");
                    run_sql(client, &wait)?;
                }
                found = column(client, DRIFT)?.iter().find(drifts).cloned();
            }
            ensure!(found.is_none(), "drift of {name}: {found:?}");
        }
    }
    Ok(())
}

/// Whether no secret stands in any file below the data directory; in WAL, if that is encrypted
/// from the beginning.
pub(super) fn hides(cluster: &Cluster, wal: bool) -> Result<()> {
    let mut grep = Command::new("grep");
    grep.args(["--recursive", "--files-with-matches", "--no-messages", "--fixed-strings"]);
    grep.arg("--binary-files=text");
    if !wal {
        grep.arg("--exclude-dir=pg_wal");
    }
    let output = grep.arg(SECRET).arg(cluster.data_directory()).output()?;
    let found = String::from_utf8_lossy(&output.stdout);
    ensure!(found.is_empty(), "a secret is in plaintext in\n{found}");
    Ok(())
}
