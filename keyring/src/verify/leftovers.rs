//! Files that belong to no relation, because the transaction that created them did not commit
//! before a crash.
//!
//! Recovery does not remove them, and they may be incomplete: their pages may have been written
//! before the key was flushed with WAL. PostgreSQL never reads them again. Only if something is
//! wrong with a file, `pg_class` of its database is read, with all row versions that were not
//! removed yet, to find out whether the file is a leftover.
//!
//! All files of a database that is not in `pg_database` are leftovers, too. A power cut may bring
//! names back that `DROP DATABASE` has removed, without what was not synced any more. That is asked
//! only after a clean shutdown.
//!
//! Before recovery, and in a base backup, WAL decides too. What was done before its redo pointer is
//! in the files (`CheckPointGuts`, xlog.c); `pg_class` may be a mixture of what it was since. So a
//! file is a leftover if WAL does not concern it, and if no row there, nor one that WAL brings
//! ([`NewRows`]), has its number. A transaction in progress may still be committed.
//!
//! Of WAL that is not there, as that to come from a standby's primary, nothing is known: its rows
//! may name a file that was made before the redo pointer by a transaction that is still open.
//!
//! In doubt a file counts as needed: if `pg_class` cannot be read, or rows of it may be missing, if
//! WAL from the redo pointer on is not there, or if WAL replaces `pg_class` or the database.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};

use pagevault_keystore::RelFile;

use super::Context;
use super::catalogs::{Catalog, Catalogs, Transactions};
use super::maps::{OID, PG_DATABASE};
use super::new_rows::{FILE, NewRows};
use super::pages::Files;
use super::referenced::Referenced;

/// `RelationRelationId`, `ClassOidIndexId`
pub(super) const PG_CLASS: Catalog = Catalog { table: 1259, index: 2662 };

/// The files that relations need, for each database that was examined.
pub(super) struct Leftovers<'a> {
    context: &'a Context<'a>,
    files: &'a Files,
    /// What WAL says about files; `None` before it is read.
    wal: Option<Referenced>,
    /// Numbers of files that belong or may belong to a relation; `None` if unknown.
    needed: HashMap<u32, Option<HashSet<u32>>>,
    /// Databases that exist or may exist; `None` if unknown.
    databases: OnceCell<Option<HashSet<u32>>>,
}

impl<'a> Leftovers<'a> {
    pub(super) fn new(context: &'a Context<'a>, files: &'a Files) -> Self {
        Self { context, files, wal: None, needed: HashMap::new(), databases: OnceCell::new() }
    }

    /// To find out which of these files are named by rows that WAL brings.
    pub(super) fn new_rows(&self, suspects: &HashSet<RelFile>) -> NewRows {
        let mut by_database: HashMap<u32, HashSet<u32>> = HashMap::new();
        for file in suspects {
            by_database.entry(file.database).or_default().insert(file.relation);
        }
        let with_catalog = |(database, files)| {
            let catalogs = Catalogs::of(self.context, self.files, database)?;
            Some(((database, catalogs.file_of(PG_CLASS.table)?), files))
        };
        NewRows::of(by_database.into_iter().filter_map(with_catalog).collect())
    }

    /// WAL is read from the redo pointer on. `referenced`: what it says, if that was asked.
    pub(super) fn wal_is_read(&mut self, referenced: Option<Referenced>) {
        self.wal = referenced;
    }

    /// True if certainly no relation has this file.
    pub(super) fn includes(&mut self, file: RelFile) -> bool {
        let (context, files) = (self.context, self.files);
        let wal = match &self.wal {
            _ if context.control.ended => None,
            Some(wal) if !wal.includes(file) => Some(wal),
            _ => return false,
        };
        if context.control.ended && file.database != 0 {
            let existing = self.databases.get_or_init(|| databases(context, files));
            if existing.as_ref().is_some_and(|existing| !existing.contains(&file.database)) {
                return true;
            }
        }
        let needed = self
            .needed
            .entry(file.database)
            .or_insert_with(|| needed(context, files, file.database, wal));
        needed.as_ref().is_some_and(|needed| !needed.contains(&file.relation))
    }
}

/// Databases that exist or may exist.
fn databases(context: &Context<'_>, files: &Files) -> Option<HashSet<u32>> {
    let transactions = Transactions::of(context).ok()?;
    let mut found = HashSet::new();
    Catalogs::of(context, files, 0)?.rows(&PG_DATABASE, |row| {
        if row.may_exist(&transactions)? && !row.is_removed()? {
            found.insert(row.column(OID)?);
        }
        Some(())
    })?;
    Some(found)
}

/// Numbers of files of a database that belong or may belong to a relation.
fn needed(
    context: &Context<'_>,
    files: &Files,
    database: u32,
    wal: Option<&Referenced>,
) -> Option<HashSet<u32>> {
    // Each database has rows of shared relations.
    if database == 0 {
        return None;
    }
    let transactions = Transactions::of(context).ok()?;
    let catalogs = Catalogs::of(context, files, database)?;
    let mut needed: HashSet<u32> = catalogs.mapped().collect();
    catalogs.rows(&PG_CLASS, |row| {
        if row.may_exist(&transactions)? {
            match wal {
                None => needed.extend([row.column(FILE)?]),
                // WAL may make other rows of parts of this one.
                Some(wal) => needed.extend(row.numbers()?.filter(|it| wal.asks_for(database, *it))),
            }
        }
        Some(())
    })?;
    Some(needed)
}
