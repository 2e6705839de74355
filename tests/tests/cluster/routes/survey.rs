//! Files on disk: every file of the data directory, with its relation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::{PageState, if_exists};
use pagevault_tests::{Cluster, DataFile};

use super::driver::SECRET;

/// The required state of a relation's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Expected {
    Sealed,
    Plain,
    /// Plaintext, with values of an encrypted relation, because its encryption was not requested.
    PlainCopy,
    /// Plaintext or sealed, with such values.
    Either,
}

/// One relation with storage.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    schema: String,
    /// The table, view or sequence that it belongs to, which may be itself.
    root: String,
    name: String,
    is_toast: bool,
}

/// Relations with the table they belong to. A sequence belongs to the table that owns it.
const MEMBERS: &str = "
    SELECT concat_ws('|', pg_relation_filepath(c.oid), n.nspname, root.relname, c.relname, c.relkind)
    FROM pg_class c
    LEFT JOIN pg_index i ON i.indexrelid = c.oid
    LEFT JOIN pg_class toasted ON toasted.reltoastrelid = coalesce(i.indrelid, c.oid)
    LEFT JOIN pg_depend d ON c.relkind = 'S' AND d.classid = 'pg_class'::regclass
        AND d.objid = c.oid AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
    JOIN pg_class root ON root.oid = coalesce(toasted.oid, i.indrelid, d.refobjid, c.oid)
    JOIN pg_namespace n ON n.oid = root.relnamespace
    WHERE pg_relation_filepath(c.oid) IS NOT NULL";

/// The relations of the database `postgres` by their first file, relative to the data directory.
fn members(cluster: &Cluster) -> Result<BTreeMap<PathBuf, Member>> {
    let lines = column(&mut cluster.client()?, MEMBERS)?;
    let member = |line: &String| {
        let parts: Vec<_> = line.split('|').collect();
        let [path, schema, root, name, kind] = parts[..] else {
            anyhow::bail!("not understood: {line}")
        };
        let (schema, root, name) = (schema.to_owned(), root.to_owned(), name.to_owned());
        Ok((PathBuf::from(path), Member { schema, root, name, is_toast: kind == "t" }))
    };
    lines.iter().map(member).collect()
}

/// All files below a directory, including tablespaces.
fn files_below(directory: &Path, found: &mut Vec<DataFile>) -> Result<()> {
    for entry in if_exists(std::fs::read_dir(directory))?.into_iter().flatten() {
        let path = entry?.path();
        if path.is_dir() {
            files_below(&path, found)?;
        } else {
            found.push(DataFile { path });
        }
    }
    Ok(())
}

/// The files that contain `text`, relative to the data directory, without WAL, which contains all
/// changes.
pub(super) fn files_with(cluster: &Cluster, text: &str) -> Result<Vec<PathBuf>> {
    let data = cluster.data_directory();
    let mut files = Vec::new();
    files_below(&data, &mut files)?;
    let mut found = Vec::new();
    for file in files {
        let path = file.path.strip_prefix(&data)?.to_owned();
        if !path.starts_with("pg_wal") && if_exists(file.contains_text(text))? == Some(true) {
            found.push(path);
        }
    }
    Ok(found)
}

/// The path of the first file of the relation: without fork and segment.
fn first_file(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = name.split(['_', '.']).next().unwrap_or_default();
    path.with_file_name(stem)
}

/// Catalogs with values of user tables.
const CATALOGS_WITH_VALUES: [&str; 3] = ["pg_statistic", "pg_statistic_ext_data", "pg_largeobject"];

/// Reads all files: checks that every page of every relation has the required state, and that the
/// canary is only where it is expected.
///
/// `expect` returns the required state of the relations in a schema that belong to a table, view or
/// sequence, with a name for messages; `None` for unrelated ones. With `all_used`, each of them
/// must have a page.
pub(crate) fn check(
    cluster: &Cluster,
    expect: impl Fn(&str, &str) -> Option<(String, Expected)>,
    all_used: bool,
) -> Result<()> {
    let members = members(cluster)?;
    let mut wrong = Vec::new();
    let mut used = BTreeSet::new();
    let data = cluster.data_directory();
    let mut files = Vec::new();
    files_below(&data, &mut files)?;
    for file in files {
        let path = file.path.strip_prefix(&data)?;
        if path.starts_with("pg_wal") || path.components().any(|c| c.as_os_str() == "pgsql_tmp") {
            continue;
        }
        let member = members.get(&first_file(path));
        let (name, expected) = match member {
            Some(member) => match expect(&member.schema, &member.root) {
                Some((of, expected)) => {
                    let Member { root, name, .. } = member;
                    (format!("{of}: {name} of {root}, {}", path.display()), expected)
                }
                None if CATALOGS_WITH_VALUES.contains(&member.root.as_str()) => {
                    (format!("{}, {}", member.name, path.display()), Expected::Sealed)
                }
                None => (format!("{}.{}", member.schema, member.name), Expected::Plain),
            },
            None => (path.display().to_string(), Expected::Sealed),
        };
        if let Some(member) = member {
            let states = if_exists(file.states())?.unwrap_or_default();
            let count =
                |is: fn(&PageState) -> bool| states.iter().filter(|state| is(state)).count();
            let sealed = count(|state| matches!(state, PageState::Sealed(_)));
            let plain = count(|state| *state == PageState::Plaintext);
            if sealed + plain > 0 {
                used.insert(member.clone());
            }
            let unexpected = match expected {
                Expected::Sealed => plain,
                Expected::Plain | Expected::PlainCopy => sealed,
                Expected::Either => 0,
            };
            if unexpected > 0 {
                wrong.push(format!(
                    "{name}: must be {expected:?}, has {sealed} sealed and {plain} plain pages"
                ));
            }
        }
        let may_hold_it = matches!(expected, Expected::PlainCopy | Expected::Either);
        if !may_hold_it && if_exists(file.contains_text(SECRET))? == Some(true) {
            wrong.push(format!("{name}: holds the canary"));
        }
    }
    for member in members.values().filter(|member| all_used && !member.is_toast) {
        if let Some((of, _)) = expect(&member.schema, &member.root)
            && !used.contains(member)
        {
            wrong.push(format!("{of}: {} has no page at all", member.name));
        }
    }
    wrong.sort();
    let shown: Vec<_> = wrong.iter().take(60).map(String::as_str).collect();
    ensure!(wrong.is_empty(), "{} findings:\n{}", wrong.len(), shown.join("\n"));
    Ok(())
}
