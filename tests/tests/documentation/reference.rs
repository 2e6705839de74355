//! docs/reference.md is generated from docs/reference.md.in. The lines between `{{settings}}`,
//! `{{functions}}` or `{{views}}` and `{{end}}` name objects. They become a table of the server's
//! descriptions in this order, each followed by the text after the name. `{{errors}}` becomes the
//! golden errors of the cluster tests. All objects of the schema must be listed.
//! `PAGEVAULT_BLESS=1` rewrites the page.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::{Cluster, Settings};
use postgres::{Client, SimpleQueryMessage};

/// The committed page equals the one generated from template, server and golden errors.
pub(crate) fn is_up_to_date() -> Result<()> {
    let cluster = Cluster::start(&Settings::default())?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    let template = fs::read_to_string(crate::root().join("docs/reference.md.in"))?;
    let made = Server { client: cluster.client()? }.fill(&template)?;
    let page = crate::root().join("docs/reference.md");
    if std::env::var_os("PAGEVAULT_BLESS").is_some() {
        fs::write(&page, &made)?;
    }
    let committed = fs::read_to_string(&page)?;
    let first = made.lines().zip(committed.lines()).find(|(made, committed)| made != committed);
    ensure!(
        made == committed,
        "docs/reference.md is out of date; PAGEVAULT_BLESS=1 writes it anew. First difference: {first:#?}"
    );
    cluster.finish()
}

struct Server {
    client: Client,
}

/// A name in the template, and text to append to its description.
type Entry = (String, String);

impl Server {
    fn fill(&mut self, template: &str) -> Result<String> {
        let mut page = String::from(
            "<!-- made from reference.md.in by `cargo test --test documentation` -->\n",
        );
        let mut functions = BTreeSet::new();
        let mut lines = template.lines();
        while let Some(line) = lines.next() {
            match line {
                "{{settings}}" => page.push_str(&self.settings(&entries(&mut lines))?),
                "{{functions}}" => {
                    let entries = entries(&mut lines);
                    functions.extend(entries.iter().map(|(name, _)| name.clone()));
                    page.push_str(&self.functions(&entries)?);
                }
                "{{views}}" => page.push_str(&self.views(&entries(&mut lines))?),
                "{{errors}}" => page.push_str(&errors()?),
                line => {
                    page.push_str(line);
                    page.push('\n');
                }
            }
        }
        let there = self.rows(
            "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'pagevault'::regnamespace",
        )?;
        complete("functions", &functions, &there)?;
        Ok(page)
    }

    fn settings(&mut self, entries: &[Entry]) -> Result<String> {
        let rows = self.rows(
            "SELECT substr(name, 11),
                    CASE WHEN current_setting(name) = '' THEN 'empty' ELSE format('`%s`', current_setting(name)) END,
                    CASE vartype
                        WHEN 'enum' THEN (SELECT string_agg(format('`%s`', v), ', ') FROM unnest(enumvals) v)
                        WHEN 'integer' THEN format('%s to %s%s', min_val, max_val, CASE unit WHEN '8kB' THEN ' pages' ELSE ' ' || unit END)
                        WHEN 'bool' THEN '`on`, `off`'
                        ELSE 'text' END,
                    CASE context WHEN 'superuser' THEN 'superuser; any level'
                                 WHEN 'sighup' THEN 'configuration, reload'
                                 WHEN 'postmaster' THEN 'configuration, restart'
                                 ELSE context END,
                    concat_ws(' ', short_desc, nullif(extra_desc, ''))
               FROM pg_settings WHERE name LIKE 'pagevault.%' ORDER BY name",
        )?;
        let named = entries.iter().map(|(name, _)| name.clone()).collect();
        complete("settings", &named, &rows)?;
        let mut table = String::from(
            "| setting | default | values | changed by | meaning |\n|---|---|---|---|---|\n",
        );
        for (name, more) in entries {
            let row = row(&rows, name)?;
            let meaning = sentences(&row[4], more);
            table.push_str(&format!(
                "| `pagevault.{name}` | {} | {} | {} | {meaning} |\n",
                row[1],
                row[2].trim(),
                row[3]
            ));
        }
        Ok(table)
    }

    fn functions(&mut self, entries: &[Entry]) -> Result<String> {
        let mut table = String::from("| function | who | does |\n|---|---|---|\n");
        for (name, more) in entries {
            let overloads = self.rows(&format!(
                "SELECT p.oid, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
                        coalesce(obj_description(p.oid, 'pg_proc'), ''),
                        coalesce((SELECT string_agg(CASE grantee WHEN 0 THEN 'everyone' ELSE format('`%s`', grantee::regrole) END,
                                           ', ' ORDER BY grantee::regrole::text)
                           FROM aclexplode(proacl) WHERE grantee <> proowner), 'superuser')
                   FROM pg_proc p
                  WHERE pronamespace = 'pagevault'::regnamespace AND proname = '{name}' ORDER BY p.oid"
            ))?;
            ensure!(!overloads.is_empty(), "there is no function {name}");
            for (number, overload) in overloads.iter().enumerate() {
                let [_, arguments, result, description, who] = &overload[..] else {
                    bail!("columns")
                };
                ensure!(!description.is_empty(), "{name}({arguments}) has no COMMENT");
                let result = match result.as_str() {
                    "void" => String::new(),
                    result => format!(" → {}", result.replace("TABLE(", "setof (")),
                };
                let arguments =
                    arguments.replace("NULL::text", "NULL").replace("NULL::interval", "NULL");
                let more = if number == 0 { more } else { "" };
                table.push_str(&format!(
                    "| `{name}({arguments}){result}` | {who} | {} |\n",
                    sentences(description, more)
                ));
            }
        }
        Ok(table)
    }

    fn views(&mut self, entries: &[Entry]) -> Result<String> {
        let rows = self.rows(
            "SELECT relname, coalesce(obj_description(c.oid, 'pg_class'), ''),
                    coalesce((SELECT string_agg(CASE grantee WHEN 0 THEN 'everyone' ELSE format('`%s`', grantee::regrole) END,
                                       ', ' ORDER BY grantee::regrole::text)
                       FROM aclexplode(relacl) WHERE grantee <> relowner), 'superusers')
               FROM pg_class c WHERE relnamespace = 'pagevault'::regnamespace AND relkind = 'v'",
        )?;
        let named = entries.iter().map(|(name, _)| name.clone()).collect();
        complete("views", &named, &rows)?;
        let mut text = String::new();
        for (name, more) in entries {
            let row = row(&rows, name)?;
            ensure!(!row[1].is_empty(), "the view {name} has no COMMENT");
            let mut description = row[1].clone();
            if let Some(first) = description.get_mut(0..1) {
                first.make_ascii_uppercase();
            }
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&format!(
                "### `{name}`\n\n{} For {}.\n\n| column | type | meaning |\n|---|---|---|\n",
                sentences(&format!("{description}."), more),
                row[2]
            ));
            let columns = self.rows(&format!(
                "SELECT attname, format_type(atttypid, atttypmod), coalesce(col_description(attrelid, attnum), '')
                   FROM pg_attribute WHERE attrelid = 'pagevault.{name}'::regclass AND attnum > 0 ORDER BY attnum"
            ))?;
            for column in columns {
                ensure!(!column[2].is_empty(), "{name}.{} has no COMMENT", column[0]);
                text.push_str(&format!("| `{}` | {} | {} |\n", column[0], column[1], column[2]));
            }
        }
        Ok(text)
    }

    fn rows(&mut self, query: &str) -> Result<Vec<Vec<String>>> {
        let messages = self.client.simple_query(query).with_context(|| query.to_owned())?;
        Ok(messages
            .iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(
                    (0..row.len())
                        .map(|column| row.get(column).unwrap_or_default().replace('|', "\\|"))
                        .collect(),
                ),
                _ => None,
            })
            .collect())
    }
}

/// The names up to `{{end}}`.
fn entries<'line>(lines: &mut impl Iterator<Item = &'line str>) -> Vec<Entry> {
    lines
        .take_while(|line| *line != "{{end}}")
        .map(|line| match line.split_once(": ") {
            Some((name, more)) => (name.to_owned(), more.to_owned()),
            None => (line.to_owned(), String::new()),
        })
        .collect()
}

/// Fails unless named and existing objects are the same.
fn complete(what: &str, named: &BTreeSet<String>, there: &[Vec<String>]) -> Result<()> {
    let there: BTreeSet<String> = there.iter().map(|row| row[0].clone()).collect();
    let differing: Vec<_> = named.symmetric_difference(&there).collect();
    ensure!(differing.is_empty(), "{what} of either server or docs/reference.md.in: {differing:?}");
    Ok(())
}

fn row<'rows>(rows: &'rows [Vec<String>], name: &str) -> Result<&'rows Vec<String>> {
    rows.iter().find(|row| row[0] == name).with_context(|| format!("there is no {name}"))
}

fn sentences(description: &str, more: &str) -> String {
    match more {
        "" => description.to_owned(),
        more => format!("{description} {}.", more.trim_end_matches('.')),
    }
}

/// The golden errors as a table.
fn errors() -> Result<String> {
    let mut table = String::from("| SQLSTATE | message | hint |\n|---|---|---|\n");
    let mut hints = BTreeMap::new();
    for (error, hint) in golden()? {
        hints.entry(error).or_insert(hint);
    }
    for ((sqlstate, message), hint) in hints {
        let cell = |text: &str| text.replace('|', "\\|").replace('<', "&lt;");
        table.push_str(&format!("| {sqlstate} | {} | {} |\n", cell(&message), cell(&hint)));
    }
    Ok(table)
}

/// SQLSTATE and message of every golden error.
pub(crate) fn golden_errors() -> Result<BTreeSet<(String, String)>> {
    Ok(golden()?.into_iter().map(|(error, _)| error).collect())
}

type Error = (String, String);

/// The golden errors of the cluster tests, each with its hint.
fn golden() -> Result<Vec<(Error, String)>> {
    let directory = crate::root().join("tests/tests/cluster/errors");
    let mut files: Vec<_> =
        fs::read_dir(&directory)?.filter_map(Result::ok).map(|entry| entry.path()).collect();
    files.sort();
    let mut errors = Vec::new();
    for file in files {
        for case in fs::read_to_string(&file)?.split("\n\n") {
            let mut lines = case.lines().skip_while(|line| !is_error(line));
            let Some((sqlstate, message)) = lines.next().and_then(|line| line.split_once(": "))
            else {
                continue;
            };
            let hint = lines.find_map(|line| line.trim().strip_prefix("HINT: ")).unwrap_or("");
            errors.push(((sqlstate.to_owned(), message.to_owned()), hint.to_owned()));
        }
    }
    ensure!(!errors.is_empty(), "there are no golden errors");
    Ok(errors)
}

/// `42501: ...`
fn is_error(line: &str) -> bool {
    line.split_once(": ").is_some_and(|(sqlstate, _)| {
        sqlstate.len() == 5
            && sqlstate.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_uppercase())
    })
}
