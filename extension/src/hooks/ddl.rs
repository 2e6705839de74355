//! Object access hook and label provider: where the policy hears of new relations and labels.

use std::ffi::{c_char, c_int, c_void};

use pagevault_keystore::RelFile;
use pgrx::pg_guard;
use pgrx::pg_sys;

use crate::audit::statements;
use crate::commands::{altered, databases, labels, removal, storage};
use crate::pg::labels::{Object, PROVIDER};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation;
use crate::pg::report::OrRaise;
use crate::pg::text::ServerText;
use crate::{policy, roles};

static PREVIOUS: ProcessLocal<pg_sys::object_access_hook_type> = ProcessLocal::new(None);

static PROVIDER_REGISTERED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before anything is forked; the function lives as long as the
    // library, which is never unloaded.
    unsafe {
        PREVIOUS.set(pg_sys::object_access_hook);
        pg_sys::object_access_hook = Some(object_access);
    }
}

/// Makes the label provider known to this session, once it is named. Were it known from the start,
/// SECURITY LABEL without FOR would mean us, or be ambiguous beside another provider.
pub(super) fn register_label_provider() {
    if !PROVIDER_REGISTERED.get() {
        // SAFETY: stores a pointer to a function that lives as long as the process.
        unsafe { pg_sys::register_label_provider(PROVIDER.as_ptr(), Some(relabel)) };
        PROVIDER_REGISTERED.set(true);
    }
}

/// Whether SECURITY LABEL without FOR may mean us in this session.
pub(super) fn label_provider_is_registered() -> bool {
    PROVIDER_REGISTERED.get()
}

/// Contract: called by the server after a catalog row was made, or before one is removed, in a
/// transaction, catalogs readable, not in a critical section; may raise. Also called for each
/// function that a query uses and for each look along the search path, which concern us not: these
/// cost two tests.
unsafe extern "C-unwind" fn object_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    sub_id: c_int,
    argument: *mut c_void,
) {
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: the earlier hook, with the server's own arguments.
        unsafe { previous(access, class, object, sub_id, argument) };
    }
    use pg_sys::ObjectAccessType::{OAT_DROP, OAT_POST_ALTER, OAT_POST_CREATE};
    let changes = matches!(access, OAT_POST_CREATE | OAT_POST_ALTER);
    let is_role = changes && class == pg_sys::AuthIdRelationId;
    let drops_extension = access == OAT_DROP && class == pg_sys::ExtensionRelationId;
    if (changes || drops_extension)
        && sub_id == 0
        && (is_role || drops_extension || !policy::is_idle())
        && process::runs_transactions()
    {
        // SAFETY: the guarded function has the hook's own contract, and nothing here has a
        // destructor.
        unsafe { guarded_access(access, class, object, argument) };
    }
}

/// [`object_access`] for what was made or changed, and for extensions that are dropped.
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
        (pg_sys::ObjectAccessType::OAT_DROP, _) => {
            removal::dropping(object).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_POST_CREATE, pg_sys::RelationRelationId)
            if process::is_binary_upgrade() =>
        {
            storage::relation_announced(object);
        }
        _ if !decides() => {}
        (pg_sys::ObjectAccessType::OAT_POST_CREATE, pg_sys::RelationRelationId) => {
            storage::relation_created(object).or_raise();
        }
        (pg_sys::ObjectAccessType::OAT_POST_ALTER, pg_sys::RelationRelationId) => {
            altered::relation_altered(object);
        }
        // StoreCatalogInheritance1 (tablecmds.c) relays the parent so, for new and
        // attached relations; RemoveInheritance for detached ones.
        (pg_sys::ObjectAccessType::OAT_POST_ALTER, relation::INHERITS) => {
            // SAFETY: this kind of access comes with this argument.
            let parent =
                unsafe { (*argument.cast::<pg_sys::ObjectAccessPostAlter>()).auxiliary_id };
            altered::parent_changed(object, parent).or_raise();
        }
        _ => {}
    }
}

/// A file for a permanent relation is about to be created; called by the storage manager hook if
/// [`decides`].
pub(super) fn creating_storage(file: RelFile) {
    storage::creating_storage(file).or_raise();
}

/// pg_upgrade lays out files itself, and processes without transactions only replay decisions.
pub(super) fn decides() -> bool {
    if policy::is_idle() {
        return false;
    }
    !process::is_binary_upgrade() && process::runs_transactions()
}

/// Contract: called by SECURITY LABEL (and pg_restore's) after the ownership check and before the
/// label is stored; may raise.
#[pg_guard]
unsafe extern "C-unwind" fn relabel(object: *const pg_sys::ObjectAddress, label: *const c_char) {
    // SAFETY: the server's own arguments; `label` is null or NUL-terminated.
    let (object, label) = unsafe { (*object, ServerText::copied(label)) };
    let (of, column) = (Object { class: object.classId, oid: object.objectId }, object.objectSubId);
    let done = labels::relabelled(of, column, label);
    if let Err(report) = &done {
        statements::refuse(report.code());
    }
    done.or_raise();
}
