//! Refuses queries on relations of a locked scope, or with destroyed keys, even if their pages are
//! in shared buffers.
//!
//! Pages that must be read from disk are refused by the storage manager; this covers the others,
//! and has a better message.

use pgrx::PgList;
use pgrx::pg_sys;

use super::naming;
use crate::keys::store::directory;
use crate::keys::usage::{cache, closing, refused};
use crate::pg::compat::{self, CheckPerms, SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::pg::relation::{self, Facts};
use crate::{page, shmem};

static PREVIOUS: ProcessLocal<Option<CheckPerms>> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked.
    unsafe {
        PREVIOUS.set(pg_sys::ExecutorCheckPerms_hook);
        pg_sys::ExecutorCheckPerms_hook = Some(check_perms);
    }
}

compat::check_perms_hook!(check_perms, check, PREVIOUS);

/// Contract: called at the start of every query and of COPY, in a transaction, with the relations
/// locked; may raise errors. While nothing is refused it tests four words.
///
/// # Safety
/// `range_table` is a list of RangeTblEntry or NIL. No frame between here and the server's call has
/// values with destructors.
#[inline]
unsafe fn check(range_table: *mut pg_sys::List) {
    if naming::is_needed() || closing::any() {
        // SAFETY: our caller has no values with destructors, so an ERROR from the guard may skip
        // its frame; the range table is the server's.
        unsafe {
            pg_sys::panic::pgrx_extern_c_guard(|| {
                closing::refuse_session();
                naming::note_all(relations_of(range_table));
                if shmem::any_key_refused()
                    || shmem::anything_destroyed()
                    || page::access::shows_locked()
                {
                    refuse_locked(range_table);
                }
            })
        }
    }
}

/// # Safety
/// `range_table` is the range table of a query, as passed to `check`.
#[cold]
unsafe fn refuse_locked(range_table: *mut pg_sys::List) {
    cache::forget_destroyed();
    // SAFETY: the range table is the server's, as passed to `check`.
    for oid in unsafe { relations_of(range_table) } {
        if let Some(facts) = relation::facts(oid)
            && facts.is_stored()
            && directory::is_destroyed(facts.file)
        {
            page::errors::destroyed(&format!("relation \"{}\"", facts.name), "").raise();
        }
        if !shmem::any_key_refused() && !page::access::shows_locked() {
            continue;
        }
        // The partition of an inserted row is determined later, so all partitions are checked.
        for facts in relation::with_partitions(oid).into_iter().filter(Facts::is_stored) {
            if let Some(scope) = directory::refused_scope(facts.file) {
                refused::refuses(&format!("relation \"{}\"", facts.name), "", scope).raise();
            }
            if let Err(fault) =
                page::access::check_access(SmgrFile { file: facts.file, backend: SHARED_BACKEND })
            {
                page::errors::report(fault, 0).raise();
            }
        }
    }
}

/// # Safety
/// `range_table` is the range table of a query, as passed to `check`.
unsafe fn relations_of(range_table: *mut pg_sys::List) -> Vec<pg_sys::Oid> {
    // SAFETY: a list of the server, of range table entries, which live as long as their query.
    unsafe {
        let entries = PgList::<pg_sys::RangeTblEntry>::from_pg(range_table);
        let is_relation =
            |entry: &*mut pg_sys::RangeTblEntry| (**entry).rtekind == pg_sys::RTEKind::RTE_RELATION;
        entries.iter_ptr().filter(is_relation).map(|entry| (*entry).relid).collect()
    }
}
