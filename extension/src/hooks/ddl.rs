//! Object access hook and label provider: report new and changed objects and labels to the policy.

use std::ffi::{CStr, c_char, c_int, c_void};

use pagevault_keystore::RelFile;
use pgrx::pg_guard;
use pgrx::pg_sys;

use crate::audit::statements;
use crate::backups;
use crate::commands::{altered, databases, labels, removal, storage};
use crate::keys::usage::dropped;
use crate::pg::inheritance;
use crate::pg::labels::{Object, PROVIDER};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::OrRaise;
use crate::pg::text::ServerText;
use crate::policy::label::require_short;
use crate::{policy, roles};

static PREVIOUS: ProcessLocal<pg_sys::object_access_hook_type> = ProcessLocal::new(None);

static PROVIDER_REGISTERED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked; the function lives as long as the
    // library, which is never unloaded.
    unsafe {
        PREVIOUS.set(pg_sys::object_access_hook);
        pg_sys::object_access_hook = Some(object_access);
    }
}

/// Registers the label provider in this session, when a statement names it for the first time. If
/// it were always registered, SECURITY LABEL without FOR would use it, or be ambiguous beside
/// another provider.
pub(super) fn register_label_provider() {
    if !PROVIDER_REGISTERED.get() {
        // SAFETY: stores a pointer to a function that lives as long as the process.
        unsafe { pg_sys::register_label_provider(PROVIDER.as_ptr(), Some(relabel)) };
        PROVIDER_REGISTERED.set(true);
    }
}

/// Whether SECURITY LABEL without FOR may use our provider in this session.
pub(super) fn label_provider_is_registered() -> bool {
    PROVIDER_REGISTERED.get()
}

/// Contract: called by the server after a catalog row was created, or before one is removed, in a
/// transaction, catalogs readable, not in a critical section; may raise errors. Also called for
/// each function in a query, of which one concerns us, and each search of a namespace; these cost
/// two or three tests here.
unsafe extern "C-unwind" fn object_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    sub_id: c_int,
    argument: *mut c_void,
) {
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: the previous hook, with the server's own arguments.
        unsafe { previous(access, class, object, sub_id, argument) };
    }
    use pg_sys::ObjectAccessType::{
        OAT_DROP, OAT_FUNCTION_EXECUTE, OAT_POST_ALTER, OAT_POST_CREATE,
    };
    if access == OAT_FUNCTION_EXECUTE {
        if backups::starts_a_backup(object) {
            // SAFETY: there are no values with destructors here.
            unsafe { pg_sys::panic::pgrx_extern_c_guard(backups::may_start) };
        }
        return;
    }
    if access == OAT_POST_CREATE
        && class == pg_sys::RelationRelationId
        && sub_id == 0
        && policy::is_idle()
    {
        storage::created_without_keys(object);
    }
    let changes = matches!(access, OAT_POST_CREATE | OAT_POST_ALTER);
    let is_role = changes && class == pg_sys::AuthIdRelationId;
    let drops = access == OAT_DROP
        && (class == pg_sys::ExtensionRelationId || class == pg_sys::TableSpaceRelationId);
    if (changes || drops)
        && sub_id == 0
        && (is_role || drops || !policy::is_idle())
        && process::runs_transactions()
    {
        // SAFETY: the guarded function has the hook's own contract, and there are no values with
        // destructors here.
        unsafe { guarded_access(access, class, object, argument) };
    }
}

/// [`object_access`] for objects that were created or changed, and for extensions and tablespaces
/// that are dropped.
#[pg_guard]
unsafe extern "C-unwind" fn guarded_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    argument: *mut c_void,
) {
    match (access, class) {
        (pg_sys::ObjectAccessType::OAT_POST_CREATE, pg_sys::DatabaseRelationId) => {
            databases::created(object).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_POST_ALTER, pg_sys::DatabaseRelationId) => {
            databases::altered(object).or_raise();
        }
        (
            pg_sys::ObjectAccessType::OAT_POST_CREATE | pg_sys::ObjectAccessType::OAT_POST_ALTER,
            pg_sys::AuthIdRelationId,
        ) => {
            let is_new = access == pg_sys::ObjectAccessType::OAT_POST_CREATE;
            roles::refuse_reserved(object, is_new).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_DROP, pg_sys::TableSpaceRelationId) => {
            dropped::require_none_moved_from(object.to_u32()).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_DROP, _) => {
            removal::dropping(object).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_POST_CREATE, pg_sys::RelationRelationId)
            if process::is_binary_upgrade() =>
        {
            storage::relation_reserved(object);
        }
        _ if !decides() => {}
        (pg_sys::ObjectAccessType::OAT_POST_CREATE, pg_sys::RelationRelationId) => {
            storage::relation_created(object).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_POST_ALTER, pg_sys::RelationRelationId) => {
            altered::relation_altered(object);
        }
        // StoreCatalogInheritance1 (tablecmds.c) passes the parent for new and attached relations;
        // RemoveInheritance for detached ones.
        (pg_sys::ObjectAccessType::OAT_POST_ALTER, inheritance::INHERITS) => {
            // SAFETY: this kind of access has an argument of this type.
            let parent =
                unsafe { (*argument.cast::<pg_sys::ObjectAccessPostAlter>()).auxiliary_id };
            altered::parent_changed(object, parent).or_raise();
        }
        _ => {}
    }
}

/// Called by the storage manager hook if [`decides`], before a file of a permanent relation is
/// created.
pub(super) fn creating_storage(file: RelFile) {
    storage::creating_storage(file).or_raise();
}

/// Whether this process decides about encryption. pg_upgrade creates files itself, and processes
/// without transactions only replay decisions.
pub(super) fn decides() -> bool {
    if policy::is_idle() {
        return false;
    }
    !process::is_binary_upgrade() && process::runs_transactions()
}

/// Contract: called by SECURITY LABEL (also from pg_restore) after the ownership check and before
/// the label is stored; may raise errors.
#[pg_guard]
unsafe extern "C-unwind" fn relabel(object: *const pg_sys::ObjectAddress, label: *const c_char) {
    // SAFETY: the server's own arguments; `label` is null or NUL-terminated.
    let (object, text) = unsafe { (*object, (!label.is_null()).then(|| CStr::from_ptr(label))) };
    let (of, column) = (Object { class: object.classId, oid: object.objectId }, object.objectSubId);
    let done = require_short(text.map_or(0, CStr::count_bytes)).and_then(|()| {
        // SAFETY: the server's own argument, null or NUL-terminated, which outlives this call.
        labels::relabelled(of, column, unsafe { ServerText::copied(label) })
    });
    if let Err(report) = &done {
        statements::refuse(report.code());
    }
    done.or_raise();
}
