//! SQL functions for shredding. Their rows list what was destroyed, and what is left to do
//! elsewhere.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_keystore::RelFile;
use pgrx::pg_sys::{ForkNumber, Oid};
use pgrx::prelude::*;

use super::require_key_admin_unlocked;
use crate::audit::{self, Operation};
use crate::keys::provider::master_keys;
use crate::keys::store::persist;
use crate::keys::usage::destruction::{self, Outcome};
use crate::pg::report::{OrRaise, Report, Result};
use crate::pg::session::{self, Call};
use crate::pg::statistics::with_inherited_statistics;
use crate::pg::text::{ServerText, excerpt};
use crate::pg::{compat, process, relation, relation_files};
use crate::remnants::{Cleared, Key, State};
use crate::shred::{self, Shredded};

type Row = (String, String, Option<String>, Option<i32>, String);

/// Destroys the data keys of a relation and of those that follow it.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.shred(relation regclass, confirm text)
    RETURNS TABLE (item text, object text, file text, data_keys integer, detail text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn shred(
    relation: Oid,
    confirm: &[u8],
    call: Call,
) -> TableIterator<
    'static,
    (
        name!(item, String),
        name!(object, String),
        name!(file, Option<String>),
        name!(data_keys, Option<i32>),
        name!(detail, String),
    ),
> {
    rows("shred", confirm, call, || shred::relation("shred", relation, &shown(confirm))).or_raise()
}

/// Destroys the data keys of all relations in a schema.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.shred_schema(schema regnamespace, confirm text)
    RETURNS TABLE (item text, object text, file text, data_keys integer, detail text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn shred_schema(
    schema: Oid,
    confirm: &[u8],
    call: Call,
) -> TableIterator<
    'static,
    (
        name!(item, String),
        name!(object, String),
        name!(file, Option<String>),
        name!(data_keys, Option<i32>),
        name!(detail, String),
    ),
> {
    rows("shred_schema", confirm, call, || shred::schema("shred_schema", schema, &shown(confirm)))
        .or_raise()
}

/// Destroys all data keys of a database without sessions.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.shred_database(database text, confirm text)
    RETURNS TABLE (item text, object text, file text, data_keys integer, detail text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn shred_database(
    database: &[u8],
    confirm: &[u8],
    call: Call,
) -> TableIterator<
    'static,
    (
        name!(item, String),
        name!(object, String),
        name!(file, Option<String>),
        name!(data_keys, Option<i32>),
        name!(detail, String),
    ),
> {
    let database = ServerText::from_bytes(database);
    rows("shred_database", confirm, call, || {
        shred::database("shred_database", &database, &shown(confirm))
    })
    .or_raise()
}

/// Destroys a key group: its key, and the data keys of its relations.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.shred_key_group(key_group text, confirm text)
    RETURNS TABLE (item text, object text, file text, data_keys integer, detail text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn shred_key_group(
    key_group: &[u8],
    confirm: &[u8],
    call: Call,
) -> TableIterator<
    'static,
    (
        name!(item, String),
        name!(object, String),
        name!(file, Option<String>),
        name!(data_keys, Option<i32>),
        name!(detail, String),
    ),
> {
    rows("shred_key_group", confirm, call, || {
        shred::key_group::shred("shred_key_group", &shown(key_group), &shown(confirm))
    })
    .or_raise()
}

/// Destroys the data keys of files of this database that no longer exist.
#[pg_extern(sql = "
    CREATE FUNCTION pagevault.shred_former_files(confirm text)
    RETURNS TABLE (item text, object text, file text, data_keys integer, detail text)
    STRICT LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
")]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn shred_former_files(
    confirm: &[u8],
    call: Call,
) -> TableIterator<
    'static,
    (
        name!(item, String),
        name!(object, String),
        name!(file, Option<String>),
        name!(data_keys, Option<i32>),
        name!(detail, String),
    ),
> {
    rows("shred_former_files", confirm, call, || {
        shred::former_files("shred_former_files", &shown(confirm))
    })
    .or_raise()
}

/// A name as shown in messages. Arguments are bytes, because names need not be UTF-8.
fn shown(name: &[u8]) -> String {
    excerpt(name)
}

fn rows(
    function: &'static str,
    confirm: &[u8],
    call: Call,
    shred: impl FnOnce() -> Result<Shredded>,
) -> Result<TableIterator<'static, Row>> {
    let operation = Operation { action: "shred", ..Operation::function(function) };
    audit::audited(operation.on(shown(confirm)), || shredded(function, call, shred))
}

fn shredded(
    function: &str,
    call: Call,
    shred: impl FnOnce() -> Result<Shredded>,
) -> Result<TableIterator<'static, Row>> {
    require_key_admin_unlocked("destroy data keys")?;
    if !call.is_statement_of_its_own() {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION,
            format!("{function}() cannot run in a transaction block, a function, or as part of another statement"),
        )
        .detail("Destroyed keys do not come back when a transaction is rolled back.")
        .hint(format!("Use SELECT * FROM pagevault.{function}(...) as a statement of its own.")));
    }
    session::commit_after_this_statement();
    Ok(TableIterator::new(report_rows(&shred()?)?))
}

/// Rows for what was destroyed, which copies are left where, and what to do about them.
fn report_rows(shredded: &Shredded) -> Result<Vec<Row>> {
    let mut rows = destroyed(shredded);
    let note = |item: &str, object: &str, detail: String| -> Row {
        (item.to_owned(), object.to_owned(), None, None, detail)
    };
    if let Some(name) = &shredded.key_group {
        let detail = "The key of the group is destroyed, here and on standbys when they have replayed that. Base backups and WAL from before hold it wrapped by its master key: whoever disables or destroys that at its provider makes these copies useless. Labels that name the group stay, and nothing can be created where they apply: change them, or drop what has them.";
        rows.push(note("key group", name, detail.to_owned()));
    }
    rows.extend(statistics(shredded));
    if shredded.plaintext_files > 0 {
        rows.push(note(
            "not encrypted",
            "",
            format!(
                "{} relation files of the database are in plaintext and stay readable; system catalogs are, unless they were encrypted too; with them, where pagevault.data_catalog_encryption was off, sampled values.",
                shredded.plaintext_files
            ),
        ));
    }
    for file in &shredded.outcome.same_keys {
        let path = compat::relation_path(*file, ForkNumber::MAIN_FORKNUM);
        let whose = master_keys::scope_name(file.scope());
        let detail = "This file has the same key, as a raw copy made by CREATE DATABASE with the strategy file_copy or by ALTER DATABASE SET TABLESPACE: who can unwrap it can read what is left of the shredded file. Shred it too.";
        rows.push(("same key".to_owned(), whose, Some(path), None, detail.to_owned()));
    }
    let perhaps = &shredded.outcome.perhaps_same_keys;
    for scope in perhaps.iter().map(RelFile::scope).collect::<BTreeSet<_>>() {
        let files = perhaps.iter().filter(|file| file.scope() == scope).count();
        let detail = format!(
            "{files} files may have the same keys, as raw copies made by CREATE DATABASE with the strategy file_copy have: the keys are locked, so this cannot be told. Unlock them, and shred once more, which does no harm."
        );
        rows.push(note("same key", &master_keys::scope_name(scope), detail));
    }
    let is_here = |file: &destruction::Destroyed| file.file.database == process::my_database();
    let left = match shredded.outcome.files.iter().any(is_here) {
        true => shred::left_behind()?,
        false => Vec::new(),
    };
    // Of a dropped relation PostgreSQL keeps an empty file until the next checkpoint
    // (`mdunlinkfork`, md.c).
    for file in left.into_iter().filter(|file| !relation_files::is_empty(*file)) {
        let path = compat::relation_path(file, ForkNumber::MAIN_FORKNUM);
        let detail = "No relation has this file: a crash has left it, or a transaction that has not committed yet is making it. It may hold rows of what was shredded, and the keystore keeps its key. If no transaction has it, remove it while the server is down, then call shred_former_files().";
        rows.push(("leftover file".to_owned(), String::new(), Some(path), None, detail.to_owned()));
    }
    let gone = destruction::count_former_files(process::my_database())?;
    if gone > 0 {
        rows.push(note(
            "former files",
            "",
            format!(
                "The keystore keeps the keys of {gone} files of this database that are gone: of dropped relations, and of relations before they were rewritten, perhaps of this one. Backups of those files stay readable. shred_former_files() destroys these keys."
            ),
        ));
        if shredded.outcome.files.iter().any(is_here) {
            rows.extend(slots(&shredded.outcome)?);
        }
    }
    rows.extend(wal(shredded)?);
    rows.push(note(
        "backups",
        "",
        "Backups of the data directory, disk snapshots, and archived WAL from before now hold wrapped copies of the keys; so may freed blocks of the disk. Those from before a rotation of the database key or a move to another master key have them wrapped by the keys of that time. Delete them, or make the copies useless: see the rows \"master key\".".to_owned(),
    ));
    rows.extend(master_key_rows(shredded)?);
    rows.push(note(
        "sessions",
        "",
        "Server processes that have used the keys wipe them when they next use any key. Idle ones may keep them in memory until then, or until they end.".to_owned(),
    ));
    if !shredded.are_gone {
        rows.push(note(
            "next step",
            "",
            "DROP what was shredded, or TRUNCATE it to use it again. It cannot be vacuumed: left as it is, it holds back the age of the database until transactions are refused.".to_owned(),
        ));
    }
    Ok(rows)
}

fn destroyed(shredded: &Shredded) -> Vec<Row> {
    let names: BTreeMap<_, _> = shredded.names.iter().map(|(file, name)| (*file, name)).collect();
    let row = |file: &destruction::Destroyed| {
        let object = names.get(&file.file).map_or_else(String::new, |name| (*name).clone());
        let path = compat::relation_path(file.file, ForkNumber::MAIN_FORKNUM);
        let detail = match file.keys {
            0 => format!("Its keys through version {} were destroyed before.", file.through),
            _ => format!("Its keys through version {} are destroyed.", file.through),
        };
        let keys = i32::try_from(file.keys).unwrap_or(i32::MAX);
        ("destroyed".to_owned(), object, Some(path), Some(keys), detail)
    };
    shredded.outcome.files.iter().map(row).collect()
}

/// Rows about sampled values: what was deleted, and the files that were cleared.
fn statistics(shredded: &Shredded) -> Vec<Row> {
    let mut rows = Vec::new();
    if let Some(deleted) = shredded.statistics {
        let (object, file, keys) = (String::new(), None, None);
        let detail = format!(
            "{deleted} rows of sampled values were deleted, and that was committed before any key was destroyed."
        );
        rows.push(("statistics".to_owned(), object, file, keys, detail));
    }
    rows.extend(shredded.cleared.iter().map(|one| cleared(one, &shredded.outcome)));
    // Of files that were cleared, no other session has a lock that would be waited for.
    let is_locked = |one: &Cleared| matches!(one.state, State::Locked);
    if !shredded.cleared.is_empty() && !shredded.cleared.iter().any(is_locked) {
        rows.extend(of_former_children());
    }
    rows
}

/// A table without this child now may have sampled it when it was one. Nothing records that.
fn of_former_children() -> Option<Row> {
    const NAMED: usize = 5;
    let tables = with_inherited_statistics();
    // Without a lock: others may drop one, or hold it for long.
    let tables = tables.into_iter().filter_map(relation::facts);
    let mut names: Vec<_> = tables.map(|facts| relation::quoted_name(&facts)).collect();
    let object = if let [name] = &names[..] { name.clone() } else { String::new() };
    if names.len() > NAMED {
        let more = format!("{} more", names.len() - NAMED);
        names.truncate(NAMED);
        names.push(more);
    } else if names.is_empty() {
        return None;
    }
    let detail = format!(
        "Tables with sampled values of all their children, as of their last ANALYZE: {}. If anything shredded was a child of one then, and was detached or dropped since, its values are in there. ANALYZE that table. The next call that shreds anything clears what is left of the deleted rows.",
        names.join(", ")
    );
    Some(("statistics".to_owned(), object, None, None, detail))
}

/// Rows about slots whose readers may still be shown rows of former files.
fn slots(outcome: &Outcome) -> Result<Vec<Row>> {
    let lsn = outcome.lsn.to_string();
    let names = session::as_owner_of_the_cluster(|| {
        Spi::get_one_with_args::<Vec<String>>(
            "SELECT array_agg(slot_name::text ORDER BY slot_name) FROM pg_catalog.pg_replication_slots
              WHERE slot_type = 'logical' AND database = pg_catalog.current_database()
                AND confirmed_flush_lsn < $1::pg_lsn",
            &[lsn.as_str().into()],
        )
    })?;
    let row = |name: String| -> Row {
        let detail = "Its reader is still shown rows that WAL has of former files, such as those of a shredded relation before it was rewritten: the keystore keeps their keys. Call shred_former_files().";
        ("logical slot".to_owned(), name, None, None, detail.to_owned())
    };
    Ok(names.unwrap_or_default().into_iter().map(row).collect())
}

/// The row of one file of statistics.
fn cleared(one: &Cleared, outcome: &Outcome) -> Row {
    const AGAIN: &str = "Shred once more, which does no harm.";
    let former = outcome.former_keys.iter().find(|former| former.file == one.file);
    let detail = match &one.state {
        State::Locked => format!(
            "Nothing was looked at: other sessions had it locked, or a rekey job was rewriting it. Deleted rows may be in it, and in free space, with values of what was shredded. {AGAIN}"
        ),
        State::Destroyed => "Its keys were destroyed before.".to_owned(),
        State::Done { pages, left, key } => {
            let found = match *left {
                0 => format!(
                    "In all {pages} pages the values of rows deleted earlier, of any relation, and the free space are overwritten with zeros, in the file as well."
                ),
                _ => format!(
                    "In {pages} pages the free space is overwritten with zeros, but {left} deleted rows were in pages that other sessions kept in use, and still have values, perhaps of what was shredded. {AGAIN}"
                ),
            };
            let before = match key {
                Key::New(_) => "Older copies of the pages cannot be decrypted with the keystore any more: the keys that the file had before are destroyed.".to_owned(),
                Key::AsBefore(why) => format!("It has no new key: {why}. Older copies of the pages, in blocks that the disk has freed and in backups, can be decrypted with the present one. Remove the cause, then shred once more."),
                Key::None => "The file is in plaintext: older copies of the pages, in blocks that the disk has freed and in backups, stay readable.".to_owned(),
            };
            format!("{found} {before}")
        }
    };
    let path = compat::relation_path(one.file, ForkNumber::MAIN_FORKNUM);
    let keys = former.map(|former| i32::try_from(former.keys).unwrap_or(i32::MAX));
    ("statistics".to_owned(), one.name.clone(), Some(path), keys, detail)
}

/// Rows about wrapped keys in WAL, here and on standbys.
fn wal(shredded: &Shredded) -> Result<Vec<Row>> {
    let lsn = shredded.outcome.lsn.to_string();
    let counts = |query: &str| -> Result<i64> {
        let found = session::as_owner_of_the_cluster(|| {
            Spi::get_one_with_args::<i64>(query, &[lsn.as_str().into()])
        });
        Ok(found?.unwrap_or_default())
    };
    // The last 16 characters of a segment's name are its number, whatever its timeline.
    let old = counts(
        "SELECT count(*) FROM pg_catalog.pg_ls_waldir()
          WHERE name ~ '^[0-9A-F]{24}$' AND right(name, 16) <= right(pg_catalog.pg_walfile_name($1::pg_lsn), 16)",
    )?;
    let recycled = counts(
        "SELECT count(*) FROM pg_catalog.pg_ls_waldir()
          WHERE name ~ '^[0-9A-F]{24}$'
            AND right(name, 16) > right(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 16)
            AND $1 IS NOT NULL",
    )?;
    let replicas =
        counts("SELECT count(*) FROM pg_catalog.pg_stat_replication WHERE $1 IS NOT NULL")?;
    let mut rows = vec![(
        "wal".to_owned(),
        "pg_wal".to_owned(),
        None,
        None,
        format!(
            "Records before {lsn} hold wrapped copies of the keys, and changes of the data itself and of its statistics. {old} segments with such records are still in pg_wal, and {recycled} that keep old content until they are used again. Checkpoints remove them, once neither crash recovery, a standby nor a replication slot needs them."
        ),
    )];
    rows.push((
        "standbys".to_owned(),
        String::new(),
        None,
        None,
        format!("A standby destroys the keys when it has replayed {lsn}; {replicas} connected now. See pg_stat_replication.replay_lsn."),
    ));
    Ok(rows)
}

/// Rows about the master keys that protect remaining wrapped copies, and how to make these useless.
fn master_key_rows(shredded: &Shredded) -> Result<Vec<Row>> {
    let state = persist::current_cluster_state()?;
    let mut rows = Vec::new();
    for &(scope, version) in &shredded.outcome.wrapped_by {
        let Some(key) = state.database_key(scope, version) else { continue };
        for key in key.wrappings() {
            let kind = state.provider(&key.provider).map_or("", |provider| provider.kind.as_str());
            let then = match kind {
                "vault" => {
                    "in Vault raise min_decryption_version of the Transit key to the new version, and trim it"
                }
                "aws_kms" => {
                    "since KMS keeps all versions of a key, move to a new key and schedule the deletion of the old one"
                }
                "gcp_kms" => {
                    "in Cloud KMS destroy the version of the key that wrapped it, after all keys are wrapped by a newer one"
                }
                "azure_key_vault" => {
                    "since Key Vault keeps all versions of a key, move to a new key, then delete and purge the old one"
                }
                "file" => {
                    "move to a new key of the provider, and remove the old one from the key file and from its backups"
                }
                _ => "move to a new master key, and have the program's owner destroy the old one",
            };
            let whose = master_keys::scope_name(scope);
            let object = format!("{}/{}", key.provider, key.master_key);
            rows.push((
            "master key".to_owned(),
            object,
            None,
            None,
            format!(
                "Wrapped copies of the destroyed keys can be unwrapped with version {version} of the key of {whose}, which this master key wraps. To make those in backups useless: rotate the database key with pagevault.rotate_database_key(), rotate the master key, then {then}. Older backups that you want to keep are lost with it. This server keeps that version of the database key, under the new master key."
            ),
        ));
        }
    }
    Ok(rows)
}
