//! Unlogged relations: those with an init fork. After a crash and in a backup their other files may
//! contain anything, and recovery replaces them by that fork (`ResetUnloggedRelations`, reinit.c).
//!
//! Recovery does so with every relation beside which there is a file of such a name, and asks
//! nobody. So a file like that beside a permanent relation is damage, and its relation is verified.
//! Whether a relation is logged says its row in `pg_class`; with another answer it has other files
//! (`ATPrepChangePersistence`, `ATRewriteTables`, tablecmds.c). A row that is not certain says
//! nothing.

use std::collections::{BTreeMap, HashSet};

use pagevault_cipher::Fork;
use pagevault_keystore::RelFile;

use super::catalogs::{Catalogs, Transactions};
use super::leftovers::PG_CLASS;
use super::new_rows::FILE;
use super::pages::Files;
use super::{Context, Findings};
use crate::tablespaces;

/// Offset of `reltablespace` in FormData_pg_class (pg_class.h), the same in 15 to 19.
const TABLESPACE: usize = 92;
/// `RELPERSISTENCE_PERMANENT`
const PERMANENT: u8 = b'p';

/// Offset of `relpersistence`. Since 18 there is `relallfrozen` before it.
fn persistence(major: u32) -> usize {
    if major < 18 { 114 } else { 118 }
}

/// Reports init forks of permanent relations, and removes files of unlogged ones from the list,
/// except init forks, where recovery replaces them.
pub(super) fn take_out(context: &Context<'_>, files: &mut Files, findings: &mut Findings) {
    let init = files.whole.iter().filter(|file| file.fork == Fork::Init);
    let mut unlogged: BTreeMap<u32, HashSet<RelFile>> = BTreeMap::new();
    for file in init.map(|it| it.file) {
        unlogged.entry(file.database).or_default().insert(file);
    }
    for (database, relations) in &mut unlogged {
        let permanent = match permanent(context, files, *database, relations) {
            Some(permanent) => permanent,
            None if !files.incremental.is_empty() => continue,
            None => {
                findings.unknown.push(format!(
                    "pg_class of database {database} cannot be read: whether its relations with an init fork are unlogged was not checked"
                ));
                continue;
            }
        };
        relations.retain(|file| !permanent.contains(file));
        let is_stray = |it: &&super::pages::RelationFile| {
            it.fork == Fork::Init && permanent.contains(&it.file)
        };
        for stray in files.whole.iter().filter(is_stray) {
            let what = "an init fork, and the relation is permanent: recovery would empty it";
            findings.damage(format!("{}: {what}", context.show(&stray.path)));
        }
    }
    if !context.control.ended {
        let before = files.whole.len();
        let is_unlogged = |file: RelFile| {
            unlogged.get(&file.database).is_some_and(|relations| relations.contains(&file))
        };
        files.whole.retain(|file| file.fork == Fork::Init || !is_unlogged(file.file));
        findings.skipped = (before - files.whole.len()) as u64;
    }
}

/// Those of these relations of a database that are certainly permanent. `None` if that is unknown.
fn permanent(
    context: &Context<'_>,
    files: &Files,
    database: u32,
    relations: &HashSet<RelFile>,
) -> Option<HashSet<RelFile>> {
    // No shared relation is unlogged.
    if database == 0 {
        return Some(relations.clone());
    }
    let major = tablespaces::major(context.keystore.data_directory())?;
    let catalogs = Catalogs::of(context, files, database)?;
    // The catalog is in the tablespace of its database.
    let class = catalogs.file_of(PG_CLASS.table)?;
    let is_class = |it: &&super::pages::RelationFile| {
        (it.file.database, it.file.relation) == (database, class) && it.fork == Fork::Main
    };
    let own = files.whole.iter().find(is_class)?.file.tablespace;
    let mapped: HashSet<u32> = catalogs.mapped().collect();
    let is_mapped = |file: &&RelFile| file.tablespace == own && mapped.contains(&file.relation);
    let mut permanent: HashSet<RelFile> = relations.iter().filter(is_mapped).copied().collect();
    let transactions = Transactions::of(context).ok()?;
    catalogs.rows(&PG_CLASS, |row| {
        if row.byte(persistence(major))? == PERMANENT && row.exists(&transactions)? {
            let tablespace = Some(row.column(TABLESPACE)?).filter(|it| *it != 0).unwrap_or(own);
            let file = RelFile { tablespace, database, relation: row.column(FILE)? };
            permanent.extend(relations.get(&file));
        }
        Some(())
    })?;
    Some(permanent)
}
