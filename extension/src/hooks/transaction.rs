//! Callbacks at the end of transactions: pending work before a commit, and cleanup of marks and
//! notes after an ERROR.

use std::ffi::c_void;

use pgrx::prelude::PgLogLevel;
use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};

use super::{commit_times, proof};
use crate::audit::statements;
use crate::backups;
use crate::commands::{altered, catalogs, labels, storage};
use crate::keys::usage::wal_switch;
use crate::page::names;
use crate::pg::locks;
use crate::pg::nesting::{Mark, Notes};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{OrRaise, Report};
use crate::policy::pending;
use crate::writers::{self, Activity};

/// The server has started, in single-user mode.
static STARTED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Installs the callbacks; from `_PG_init`. Processes inherit them.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked; the functions live as long as the
    // library.
    unsafe {
        pg_sys::RegisterXactCallback(Some(transaction_event), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(subtransaction_event), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(resources_released), std::ptr::null_mut());
    }
}

/// Contract: called in each phase in which resources are released; must not raise errors. At the
/// end of a transaction, its locks are released after `AtEOXact_Inval` has told other sessions what
/// it has changed in catalogs (`CommitTransaction`, xact.c, the same in 15 to 18), while
/// `transaction_event` is called before that.
unsafe extern "C-unwind" fn resources_released(
    phase: pg_sys::ResourceReleasePhase::Type,
    _is_commit: bool,
    is_top_level: bool,
    _argument: *mut c_void,
) {
    if is_top_level && phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_LOCKS {
        labels::invalidations_sent();
    }
}

/// Contract: called at the beginning and the end of a subtransaction; must not raise errors when it
/// is rolled back.
unsafe extern "C-unwind" fn subtransaction_event(
    event: pg_sys::SubXactEvent::Type,
    own: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _argument: *mut c_void,
) {
    use pg_sys::SubXactEvent::{SUBXACT_EVENT_ABORT_SUB, SUBXACT_EVENT_COMMIT_SUB};
    match event {
        SUBXACT_EVENT_ABORT_SUB => {
            writers::end_all();
            labels::with_notes(Notes::subtransaction_aborts);
            altered::with_notes(Notes::subtransaction_aborts);
            storage::with_notes(Notes::subtransaction_aborts);
            storage::with_commands(Notes::subtransaction_aborts);
            statements::subtransaction_aborted(own);
        }
        SUBXACT_EVENT_COMMIT_SUB => {
            labels::with_notes(Notes::subtransaction_commits);
            altered::with_notes(Notes::subtransaction_commits);
            storage::with_notes(Notes::subtransaction_commits);
            storage::with_commands(Notes::subtransaction_commits);
            statements::subtransaction_ended(own, parent);
        }
        _ => {}
    }
}

/// Contract: called at several points at the end of a transaction. Before it commits or is
/// prepared, catalogs may be read and written, and errors roll it back; when it is rolled back,
/// errors must not be raised.
unsafe extern "C-unwind" fn transaction_event(
    event: pg_sys::XactEvent::Type,
    _argument: *mut c_void,
) {
    use pg_sys::XactEvent::{
        XACT_EVENT_ABORT, XACT_EVENT_COMMIT, XACT_EVENT_PARALLEL_ABORT, XACT_EVENT_PRE_COMMIT,
        XACT_EVENT_PRE_PREPARE, XACT_EVENT_PREPARE,
    };
    match event {
        XACT_EVENT_COMMIT => {
            commit_times::committed();
            statements::transaction_ended("ok");
        }
        XACT_EVENT_PREPARE => statements::transaction_ended("prepared"),
        XACT_EVENT_ABORT => statements::transaction_ended("rolled_back"),
        _ => {}
    }
    if matches!(event, XACT_EVENT_ABORT | XACT_EVENT_PARALLEL_ABORT) {
        writers::end_all();
        labels::with_notes(Notes::clear);
        altered::rolled_back();
        storage::with_commands(Notes::clear);
    }
    if event == XACT_EVENT_COMMIT {
        writers::end(Activity::Creating);
    }
    if matches!(event, XACT_EVENT_COMMIT | XACT_EVENT_PREPARE | XACT_EVENT_ABORT) {
        storage::with_notes(Notes::clear);
        labels::transaction_ended(event == XACT_EVENT_COMMIT);
        backups::transaction_ended();
    }
    if event == XACT_EVENT_PRE_COMMIT && process::is_single_user() {
        // SAFETY: the guarded function has the callback's own contract.
        unsafe { check_single_user_server() }
    }
    if event == XACT_EVENT_PRE_PREPARE {
        // SAFETY: the guarded function has the callback's own contract.
        unsafe { before_prepare() }
    }
    match event {
        XACT_EVENT_PRE_COMMIT | XACT_EVENT_PRE_PREPARE
            if pending::any()
                || altered::any_since(Mark::START)
                || altered::detaches()
                || storage::must_reconsider() =>
        {
            // SAFETY: the guarded function has the callback's own contract.
            unsafe { before_commit() }
        }
        XACT_EVENT_ABORT => {
            commit_times::forget();
            pending::forget();
            names::forget();
        }
        _ => {}
    }
    if event == XACT_EVENT_PRE_COMMIT {
        commit_times::commits();
    }
}

/// In single-user mode no session is authenticated. The first transaction is that in which the
/// server starts (`InitPostgres`, postinit.c), before it reads a command.
#[pg_guard]
unsafe extern "C-unwind" fn check_single_user_server() {
    if proof::is_due_in_single_user_mode() {
        proof::require_of_server();
    }
    if !STARTED.replace(true)
        && let Err(report) = wal_switch::replace_lost_switch()
    {
        report.send(PgLogLevel::WARNING);
    }
}

/// A prepared transaction keeps its locks, across restarts. Changes of keys have taken effect by
/// now, and a rollback would not undo them.
#[pg_guard]
unsafe extern "C-unwind" fn before_prepare() {
    if locks::holds_key_management() {
        Report::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "cannot PREPARE a transaction that has called a function that changes keys",
        )
        .detail("It would hold up all later changes of keys until it ends. What the function has done stays done.")
        .hint("Call functions that change keys in a transaction of their own, and commit that.")
        .raise();
    }
}

/// Pending work of commands that do not call the utility hook: TRUNCATE by logical replication,
/// commands run by C functions, and commands that commit in between.
#[pg_guard]
unsafe extern "C-unwind" fn before_commit() {
    altered::follow(Mark::START, None).or_raise();
    altered::before_commit().or_raise();
    storage::reconsider().or_raise();
    catalogs::follow().or_raise();
}
