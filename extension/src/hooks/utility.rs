//! Commands that copy a database's files below the storage manager are refused while it has sealed
//! files: the copies would stand where no key is known for them.

use std::ffi::CStr;

use pgrx::pg_sys::{self, DefElem};
use pgrx::{PgList, PgSqlErrorCode, pg_guard};

use crate::keys::shared;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{OrRaise, Report, Result};

static PREVIOUS: ProcessLocal<pg_sys::ProcessUtility_hook_type> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before anything is forked.
    unsafe {
        PREVIOUS.with(|previous| *previous = pg_sys::ProcessUtility_hook);
        pg_sys::ProcessUtility_hook = Some(process_utility);
    }
}

/// Contract: called for every utility command, in a backend, before it is carried out; may raise.
#[pg_guard]
#[allow(clippy::too_many_arguments, reason = "the server's signature")]
unsafe extern "C-unwind" fn process_utility(
    statement: *mut pg_sys::PlannedStmt,
    query: *const std::ffi::c_char,
    read_only: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    destination: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    if shared::anything_sealed() {
        // SAFETY: the server's own statement.
        unsafe { check((*statement).utilityStmt) }.or_raise();
    }
    // SAFETY: forwarded as received.
    unsafe {
        match PREVIOUS.with(|previous| *previous) {
            Some(previous) => previous(
                statement,
                query,
                read_only,
                context,
                params,
                environment,
                destination,
                completion,
            ),
            None => pg_sys::standard_ProcessUtility(
                statement,
                query,
                read_only,
                context,
                params,
                environment,
                destination,
                completion,
            ),
        }
    }
}

/// # Safety
/// `statement` is a parse tree node.
unsafe fn check(statement: *mut pg_sys::Node) -> Result<()> {
    // SAFETY: the tag says which node it is.
    unsafe {
        match (*statement).type_ {
            pg_sys::NodeTag::T_CreatedbStmt => {
                let options = (*statement.cast::<pg_sys::CreatedbStmt>()).options;
                let file_copy = option(options, c"strategy")
                    .is_some_and(|strategy| strategy.eq_ignore_ascii_case("file_copy"));
                let template =
                    option(options, c"template").unwrap_or_else(|| "template1".to_owned());
                if file_copy { refuse_if_sealed(&template, create_refused) } else { Ok(()) }
            }
            pg_sys::NodeTag::T_AlterDatabaseStmt => {
                let statement = &*statement.cast::<pg_sys::AlterDatabaseStmt>();
                let name = CStr::from_ptr(statement.dbname).to_string_lossy();
                if option(statement.options, c"tablespace").is_some() {
                    refuse_if_sealed(&name, move_refused)
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }
}

/// The text of an option of a command.
///
/// # Safety
/// `options` is a list of DefElem or NIL.
unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<String> {
    // SAFETY: by contract.
    unsafe {
        PgList::<DefElem>::from_pg(options)
            .iter_ptr()
            .find(|option| CStr::from_ptr((**option).defname) == name)
            .map(|option| {
                let text = pg_sys::defGetString(option);
                CStr::from_ptr(text).to_string_lossy().into_owned()
            })
    }
}

fn refuse_if_sealed(database: &str, refusal: fn(&str) -> Report) -> Result<()> {
    let Ok(name) = std::ffi::CString::new(database) else { return Ok(()) };
    // SAFETY: a catalog look-up by name; a missing database is the command's to report.
    let oid = unsafe { pg_sys::get_database_oid(name.as_ptr(), true) };
    if shared::database_has_sealed_files(oid.to_u32()) { Err(refusal(database)) } else { Ok(()) }
}

fn create_refused(template: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!(
            "cannot copy the files of template database \"{template}\": it has encrypted relations"
        ),
    )
    .detail("Strategy file_copy copies sealed files to where their keys are not known.")
    .hint("Use CREATE DATABASE ... STRATEGY wal_log.")
}

fn move_refused(database: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("cannot move database \"{database}\": it has encrypted relations"),
    )
    .detail("The command copies sealed files to where their keys are not known.")
    .hint("Move relations with ALTER TABLE ... SET TABLESPACE or ALTER TABLE ALL IN TABLESPACE.")
}
