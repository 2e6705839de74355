//! Notes which relations the files of a statement belong to, so that a page error can name them:
//! [`crate::page::names`].
//!
//! Even the planner reads pages (`get_relation_info` in plancat.c makes btree read the first page
//! of each index), and commands like VACUUM use neither planner nor executor. So this is done in
//! three places: before planning, when permissions are checked, and before a utility command. If a
//! page belongs to a relation that none of them knows, because a function looks it up while it
//! runs, the error contains only the path, and says how to find the relation.
//!
//! Relations of locked scopes are not refused here, unlike revoked and destroyed ones in
//! [`super::access`]: a statement may name relations without reading pages of them, as with pruned
//! partitions and empty tables.

use pgrx::PgList;
use pgrx::pg_sys::{self, NodeTag, Oid};

use crate::commands::catalogs;
use crate::keys::store::directory;
use crate::page::names::{self, Name};
use crate::pg::compat;
use crate::pg::inheritance;
use crate::pg::process::ProcessLocal;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::shmem;

static PREVIOUS: ProcessLocal<pg_sys::planner_hook_type> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked.
    unsafe {
        PREVIOUS.set(pg_sys::planner_hook);
        pg_sys::planner_hook = Some(plan);
    }
}

/// Whether any page may be refused at present. Three loads.
#[inline]
pub(super) fn is_needed() -> bool {
    shmem::any_key_unusable() || shmem::anything_destroyed()
}

/// Contract: called to plan a query, in a transaction, with its relations locked; may raise errors.
/// While nothing is refused it tests three words.
unsafe fn before_planning(query: *mut pg_sys::Query) {
    if is_needed() {
        // SAFETY: the server's own argument; an ERROR is raised when our frames are gone.
        unsafe { pg_sys::panic::pgrx_extern_c_guard(|| note_all(relations_of(query))) }
    }
}
compat::planner_hook!(plan, before_planning, PREVIOUS);

/// The relations of a query and its subqueries, including those in constants: `nextval('numbers')`.
///
/// # Safety
/// `query` is a query before planning.
unsafe fn relations_of(query: *mut pg_sys::Query) -> Vec<Oid> {
    let (mut oids, mut items, mut row_security) =
        (std::ptr::null_mut(), std::ptr::null_mut(), false);
    // SAFETY: it only reads the query, as the plan cache calls it before planning; all results are
    // written.
    unsafe {
        pg_sys::extract_query_dependencies(
            query.cast(),
            &raw mut oids,
            &raw mut items,
            &raw mut row_security,
        );
        PgList::<Oid>::from_pg(oids).iter_oid().collect()
    }
}

/// Notes the relations of a utility command that reads pages itself. True if they are to be
/// forgotten when the command has ended.
///
/// # Safety
/// `statement` is a parse tree node, about to be executed.
#[cold]
pub(super) unsafe fn note_command(statement: *mut pg_sys::Node) -> bool {
    // SAFETY: the tag says which node it is; what it points to has the form that the grammar
    // (gram.y) produces.
    let (named, commits) = unsafe {
        match (*statement).type_ {
            NodeTag::T_VacuumStmt => {
                let relations = (*statement.cast::<pg_sys::VacuumStmt>()).rels;
                let relations = PgList::<pg_sys::VacuumRelation>::from_pg(relations);
                (relations.iter_ptr().map(|relation| (*relation).relation).collect(), true)
            }
            compat::T_REPACK => (vec![compat::repacked_table(statement)], true),
            NodeTag::T_ReindexStmt => {
                (vec![(*statement.cast::<pg_sys::ReindexStmt>()).relation], true)
            }
            NodeTag::T_IndexStmt => (vec![(*statement.cast::<pg_sys::IndexStmt>()).relation], true),
            NodeTag::T_TruncateStmt => {
                let relations = (*statement.cast::<pg_sys::TruncateStmt>()).relations;
                let relations = PgList::<pg_sys::RangeVar>::from_pg(relations);
                (relations.iter_ptr().collect(), false)
            }
            NodeTag::T_AlterTableStmt => {
                (vec![(*statement.cast::<pg_sys::AlterTableStmt>()).relation], false)
            }
            NodeTag::T_RefreshMatViewStmt => {
                (vec![(*statement.cast::<pg_sys::RefreshMatViewStmt>()).relation], false)
            }
            NodeTag::T_DropStmt => (Vec::new(), false), // reads pg_statistic
            _ => return false,
        }
    };
    // SAFETY: names that the grammar made for this statement, which lives until it has ended.
    note_all(named.into_iter().filter_map(|name| unsafe { find(name) }).collect());
    if commits {
        names::keep_for_command();
    }
    commits
}

/// The relation of this name, if it exists. Not locked, because the result is only used in
/// messages.
///
/// # Safety
/// `name` is null or produced by the grammar.
pub(super) unsafe fn find(name: *const pg_sys::RangeVar) -> Option<Oid> {
    if name.is_null() {
        return None;
    }
    // SAFETY: a catalog look-up in a transaction; without a lock it has no callback. It raises the
    // errors that the command itself would raise.
    let oid = unsafe {
        pg_sys::RangeVarGetRelidExtended(
            name,
            pg_sys::NoLock as pg_sys::LOCKMODE,
            pg_sys::RVROption::RVR_MISSING_OK,
            None,
            std::ptr::null_mut(),
        )
    };
    (oid != Oid::INVALID).then_some(oid)
}

/// The catalogs that are read to find and open the relations that belong to a relation.
const CATALOGS_READ: [u32; 9] = [
    1259, // pg_class
    1249, // pg_attribute
    2610, // pg_index
    2608, // pg_depend
    2611, // pg_inherits
    2604, // pg_attrdef
    2606, // pg_constraint
    2620, // pg_trigger
    3256, // pg_policy
];

/// Whether any of them has or may have encrypted pages, even with an available key.
fn are_catalogs_encrypted() -> bool {
    CATALOGS_READ.into_iter().any(|oid| {
        let writing = |facts: Facts| directory::writing(facts.file);
        relation::facts(oid.into())
            .is_none_or(|facts| writing(facts).is_some_and(|w| w.current.is_some() || w.mixed))
    })
}

/// Notes relations with all that belong to them, because a statement also reads relations that it
/// does not name.
///
/// If a key is locked or refused and any of these catalogs is encrypted, nothing is noted: reading
/// the catalogs could be refused although the statement is not. All of them are checked, because
/// encrypting them one by one may have been interrupted.
#[cold]
pub(super) fn note_all(oids: Vec<Oid>) {
    // Destroyed keys stay destroyed, and then this code runs for every statement: so it reads only
    // relation cache entries.
    let whole = shmem::any_key_unusable();
    if whole && are_catalogs_encrypted() {
        return;
    }
    if whole {
        catalogs::WITH_VALUES.into_iter().for_each(note_family);
    }
    for oid in oids {
        let Some(facts) = relation::facts(oid) else { continue };
        let table = facts.indexed_table.unwrap_or(oid);
        if !whole {
            if facts.is_stored() && directory::is_destroyed(facts.file) {
                note_family(table);
            }
            continue;
        }
        note_family(table);
        if names::is_new(table, None) {
            inheritance::inheritors(table).into_iter().for_each(note_family);
        }
    }
}

/// Notes a relation with its indexes, TOAST table and sequences.
fn note_family(oid: Oid) {
    let Some(leader) = relation::facts(oid) else { return };
    if !leader.is_stored() || !names::is_new(oid, Some(leader.file)) {
        return;
    }
    for member in relation::family_unlocked(oid) {
        if member.is_stored() && directory::is_known(member.file) {
            let part = if member.oid == oid { None } else { Some(part(&member)) };
            names::note(member.file, Name { relation: leader.name.to_string(), part });
        }
    }
}

/// Description of a relation that belongs to another, for messages.
fn part(member: &Facts) -> String {
    let name = &member.name;
    match member.kind {
        RelationKind::Toast => "TOAST table".to_owned(),
        RelationKind::Sequence => format!("sequence \"{name}\""),
        _ => format!("index \"{name}\""),
    }
}
