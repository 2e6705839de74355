//! What is on disk in plaintext after statements that encryption of tables can miss: the same
//! statements on each server, and then a search of its files.
//!
//! Each scene has a text of its own, which no file of a server may have that encrypts everything.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::{holds, if_exists};

use crate::servers::{Side, Sides};
use crate::variants::Variant;

/// Statements, and what of them is looked for.
struct Scene {
    name: &'static str,
    /// `{text}` is the text, `{space}` a tablespace.
    statements: &'static str,
    place: Place,
}

/// Where the text of a scene is looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In all files but WAL and temporary ones, after a checkpoint.
    Files,
    /// In temporary files, while a cursor is open.
    TemporaryFiles,
    /// In WAL.
    Wal,
    /// In the difference of two copies of WAL, between which the text was written: a cipher that
    /// encrypts both by the same key stream discloses it.
    TwiceWrittenWal,
}

const fn scene(name: &'static str, place: Place, statements: &'static str) -> Scene {
    Scene { name, statements, place }
}

const SCENES: [Scene; 16] = [
    scene(
        "a table",
        Place::Files,
        "CREATE TABLE plain_scene AS SELECT '{text}' || i AS name FROM generate_series(1, 100) i",
    ),
    scene(
        "its TOAST table",
        Place::Files,
        "CREATE TABLE toasted (name text); ALTER TABLE toasted ALTER name SET STORAGE EXTERNAL;
         INSERT INTO toasted SELECT repeat('{text}', 300) FROM generate_series(1, 10)",
    ),
    scene(
        "CREATE SCHEMA with a table in it",
        Place::Files,
        "CREATE SCHEMA nested CREATE TABLE t (name text);
         INSERT INTO nested.t SELECT '{text}' || i FROM generate_series(1, 100) i",
    ),
    scene(
        "ATTACH PARTITION",
        Place::Files,
        "CREATE TABLE parted (id int, name text) PARTITION BY RANGE (id);
         CREATE TABLE part (LIKE parted);
         ALTER TABLE parted ATTACH PARTITION part FOR VALUES FROM (0) TO (1000);
         INSERT INTO parted SELECT i, '{text}' || i FROM generate_series(1, 100) i",
    ),
    scene(
        "indexes of each kind",
        Place::Files,
        "CREATE TABLE indexed AS SELECT i AS id FROM generate_series(1, 100) i;
         CREATE INDEX ON indexed ((('{text}' || id::text)));
         CREATE INDEX ON indexed USING gin ((ARRAY['{text}' || id::text]));
         CREATE INDEX ON indexed USING brin ((('{text}' || id::text)));
         CREATE INDEX ON indexed USING spgist ((('{text}' || id::text)))",
    ),
    scene(
        "ALTER INDEX SET TABLESPACE",
        Place::Files,
        "CREATE TABLE moving AS SELECT i AS id FROM generate_series(1, 100) i;
         CREATE INDEX moving_index ON moving ((('{text}' || id::text)));
         ALTER INDEX moving_index SET TABLESPACE {space}",
    ),
    scene(
        "ALTER TABLE SET TABLESPACE",
        Place::Files,
        "CREATE TABLE moved AS SELECT '{text}' || i AS name FROM generate_series(1, 100) i;
         ALTER TABLE moved SET TABLESPACE {space}",
    ),
    scene(
        "a materialized view, refreshed concurrently",
        Place::Files,
        "CREATE TABLE seen AS SELECT i AS id FROM generate_series(1, 100) i;
         CREATE MATERIALIZED VIEW sight AS SELECT id, '{text}' || id AS name FROM seen;
         CREATE UNIQUE INDEX ON sight (id); REFRESH MATERIALIZED VIEW CONCURRENTLY sight",
    ),
    scene(
        "an unlogged table",
        Place::Files,
        "CREATE UNLOGGED TABLE unlogged AS
             SELECT '{text}' || i AS name FROM generate_series(1, 100) i",
    ),
    scene(
        "statistics, by ANALYZE",
        Place::Files,
        "CREATE TABLE counted AS SELECT '{text}' || i % 5 AS name FROM generate_series(1, 500) i;
         ANALYZE counted",
    ),
    scene("a large object", Place::Files, "SELECT lo_from_bytea(0, '{text}')"),
    scene(
        "a table that a function makes",
        Place::Files,
        "DO $$ BEGIN EXECUTE 'CREATE TABLE made AS
             SELECT ''{text}'' || i AS name FROM generate_series(1, 9) i'; END $$",
    ),
    scene(
        "temporary files of a sort",
        Place::TemporaryFiles,
        "SET work_mem = '64kB'; BEGIN;
         DECLARE sorted CURSOR FOR
             SELECT '{text}' || i AS name FROM generate_series(1, 50000) i ORDER BY 1;
         FETCH 1 FROM sorted",
    ),
    scene(
        "temporary files of a hash join",
        Place::TemporaryFiles,
        "SET work_mem = '64kB'; SET enable_mergejoin = off; SET enable_nestloop = off; BEGIN;
         DECLARE joined CURSOR FOR
             SELECT a.name
               FROM (SELECT '{text}' || i AS name FROM generate_series(1, 50000) i OFFSET 0) a
               JOIN (SELECT '{text}' || i AS name FROM generate_series(1, 50000) i OFFSET 0) b
                    USING (name);
         FETCH 1 FROM joined",
    ),
    scene(
        "WAL",
        Place::Wal,
        "CREATE TABLE logged (name text);
         INSERT INTO logged SELECT '{text}' || i FROM generate_series(1, 100) i",
    ),
    scene(
        "two copies of WAL, XORed",
        Place::TwiceWrittenWal,
        "INSERT INTO twice SELECT '{text}' || i FROM generate_series(1, 30) i",
    ),
];

/// What became of a scene on a server.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Hidden,
    /// The number of files that have the text, and the name of one.
    Plaintext(usize, String),
    /// The server refused a statement.
    Refused(String),
    /// Nothing was written where the text is looked for.
    Nothing,
}

impl Outcome {
    fn shown(&self) -> String {
        match self {
            Outcome::Hidden => "hidden".into(),
            Outcome::Plaintext(1, name) => format!("**in plaintext**: `{name}`"),
            Outcome::Plaintext(count, name) => {
                format!("**in plaintext** in {count} files, such as `{name}`")
            }
            Outcome::Refused(why) => format!("refused: {why}"),
            Outcome::Nothing => "no such file".into(),
        }
    }
}

/// Plays all scenes on all servers. Returns a table in Markdown, and whether it is as it should be:
/// `stock` has everything in plaintext, or a scene shows nothing, and servers that encrypt
/// everything hide it. Nothing is known of servers of the user's.
pub(crate) fn compare(sides: &Sides) -> Result<(String, bool)> {
    let mut table = String::from("| |");
    for side in &sides.all {
        write!(table, " {} |", side.variant.name())?;
    }
    table.push_str("\n|---|");
    table.push_str(&"---|".repeat(sides.all.len()));
    table.push('\n');
    let outcomes: Vec<_> = sides.all.iter().map(play).collect::<Result<_>>()?;
    let mut is_well = true;
    for (at, scene) in SCENES.iter().enumerate() {
        write!(table, "| {} |", scene.name)?;
        for (side, outcomes) in sides.all.iter().zip(&outcomes) {
            write!(table, " {} |", outcomes[at].shown())?;
            is_well &= match side.variant {
                Variant::Stock => matches!(outcomes[at], Outcome::Plaintext(..)),
                variant => !variant.seals_wal() || outcomes[at] == Outcome::Hidden,
            };
        }
        table.push('\n');
    }
    Ok((table, is_well))
}

/// All scenes on one server.
fn play(side: &Side) -> Result<Vec<Outcome>> {
    let cluster = side.own_cluster()?;
    let space = cluster.directory().join("claims");
    fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    side.sql(&format!("CREATE TABLESPACE claims LOCATION '{}'", space.display()))?;
    side.sql("CREATE TABLE twice (name text); CHECKPOINT")?;
    let data = cluster.data_directory();
    let mut outcomes = BTreeMap::new();
    let mut in_files = Vec::new();
    for (at, scene) in SCENES.iter().enumerate() {
        let wanted = text_of(at);
        let statements = scene.statements.replace("{text}", &wanted).replace("{space}", "claims");
        let mut before = Vec::new();
        if scene.place == Place::TwiceWrittenWal {
            side.sql("INSERT INTO twice VALUES ('before')")?;
            before = wal(&data)?;
        }
        // The session stays until its temporary files were looked at.
        let mut client = side.client()?;
        if let Err(error) = run_sql(&mut client, &statements) {
            let why = format!("{error:#}");
            let why = why.lines().next().unwrap_or_default().replace('|', "/");
            outcomes.insert(at, Outcome::Refused(why));
            continue;
        }
        let outcome = match scene.place {
            Place::Files => {
                in_files.push((at, wanted));
                continue;
            }
            Place::TemporaryFiles => {
                let is_temporary = |path: &Path| path.to_string_lossy().contains("pgsql_tmp");
                search(&data, &data, &wanted, &is_temporary)?
            }
            Place::Wal => {
                text(&mut client, "SELECT pg_switch_wal()::text")?;
                let is_wal = |path: &Path| path.starts_with(data.join("pg_wal"));
                search(&data, &data, &wanted, &is_wal)?
            }
            Place::TwiceWrittenWal => difference(&before, &wal(&data)?, &wanted),
        };
        outcomes.insert(at, outcome);
    }
    // A checkpoint of a running server writes no unlogged tables.
    side.restart()?;
    let is_file = |path: &Path| {
        !path.starts_with(data.join("pg_wal")) && !path.to_string_lossy().contains("pgsql_tmp")
    };
    for (at, wanted) in in_files {
        let outcome = match search(&data, &data, &wanted, &is_file)? {
            Outcome::Hidden | Outcome::Nothing => search(&space, &space, &wanted, &|_| true)?,
            found => found,
        };
        outcomes.insert(at, outcome);
    }
    Ok(outcomes.into_values().collect())
}

/// The text of a scene: nothing else has it, and no compression shortens it.
fn text_of(at: usize) -> String {
    let letters = b"kestrelwhinchat";
    let mut text = String::from("claim");
    let mut state = at + 1;
    for _ in 0..12 {
        state = (state * 75 + 74) % 65_537;
        text.push(char::from(letters[state % letters.len()]));
    }
    text
}

/// Looks for a text in all files below a directory.
fn search(
    root: &Path,
    directory: &Path,
    wanted: &str,
    is_meant: &dyn Fn(&Path) -> bool,
) -> Result<Outcome> {
    let mut found = Vec::new();
    let mut looked = false;
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in if_exists(fs::read_dir(&directory))?.into_iter().flatten() {
            let path = entry?.path();
            // Links lead to tablespaces, which are searched by themselves.
            let Some(kind) = if_exists(path.symlink_metadata())? else { continue };
            if kind.is_dir() {
                left.push(path);
            } else if kind.is_file() && is_meant(&path) {
                looked = true;
                if if_exists(fs::read(&path))?.is_some_and(|bytes| holds(&bytes, wanted.as_bytes()))
                {
                    found.push(path.strip_prefix(root)?.display().to_string());
                }
            }
        }
    }
    found.sort();
    let count = found.len();
    Ok(match found.into_iter().next() {
        None if looked => Outcome::Hidden,
        None => Outcome::Nothing,
        Some(first) => Outcome::Plaintext(count, first),
    })
}

/// The files of `pg_wal`.
fn wal(data: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(data.join("pg_wal")).context("pg_wal")? {
        let path = entry?.path();
        if path.is_file()
            && let Some(bytes) = if_exists(fs::read(&path))?
        {
            files.push((path, bytes));
        }
    }
    Ok(files)
}

/// Looks for a text in the bytes that differ between two copies.
fn difference(
    before: &[(PathBuf, Vec<u8>)],
    after: &[(PathBuf, Vec<u8>)],
    wanted: &str,
) -> Outcome {
    let mut differs = false;
    for (path, new) in after {
        let Some((_, old)) = before.iter().find(|(known, _)| known == path) else { continue };
        let both: Vec<u8> = old.iter().zip(new).map(|(old, new)| old ^ new).collect();
        differs |= both.iter().any(|byte| *byte != 0);
        if holds(&both, wanted.as_bytes()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            return Outcome::Plaintext(1, format!("pg_wal/{name}"));
        }
    }
    if differs { Outcome::Hidden } else { Outcome::Nothing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scene_has_a_text_of_its_own() {
        let texts: std::collections::BTreeSet<_> = (0..SCENES.len()).map(text_of).collect();
        assert_eq!(texts.len(), SCENES.len(), "{texts:?}");
    }

    #[test]
    fn one_key_stream_is_found() {
        let stream: Vec<u8> = (0..100_u8).map(|at| at.wrapping_mul(37) ^ 0x5a).collect();
        let path = PathBuf::from("0001");
        let mut later = stream.clone();
        for (byte, letter) in later[20..].iter_mut().zip(b"claimed") {
            *byte ^= letter;
        }
        let copies = |bytes: Vec<u8>| vec![(path.clone(), bytes)];
        let (old, new) = (copies(stream.clone()), copies(later));
        assert!(matches!(difference(&old, &new, "claimed"), Outcome::Plaintext(..)));
        assert_eq!(difference(&old, &new, "another"), Outcome::Hidden);
        assert_eq!(difference(&old, &old, "claimed"), Outcome::Nothing);
    }
}
