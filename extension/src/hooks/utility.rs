//! Utility commands that concern us before they are carried out.
//!
//! Commands that copy a database's files below the storage manager are refused while it has sealed
//! files: the copies would stand where no key is known for them. And SECURITY LABEL FOR pagevault makes
//! the label provider known to the session.

use std::ffi::{CStr, c_char};

use pgrx::pg_sys::{self, DefElem};
use pgrx::{PgList, PgSqlErrorCode};

use super::ddl;
use crate::keys::shared;
use crate::pg::labels::PROVIDER;
use crate::pg::process::ProcessLocal;
use crate::pg::report::{OrRaise, Report, Result};
use crate::policy;

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
///
/// The command itself runs outside of any guard of pgrx: passing through one, its errors would lose
/// their cursor position and context. Nothing with a destructor is alive across that call.
#[allow(clippy::too_many_arguments, reason = "the server's signature")]
unsafe extern "C-unwind" fn process_utility(
    statement: *mut pg_sys::PlannedStmt,
    query: *const c_char,
    read_only: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    destination: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    // SAFETY: the server's own arguments, forwarded as received.
    unsafe {
        let node = (*statement).utilityStmt;
        if concerns_us((*node).type_) {
            let top_level = context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL;
            LABEL_AT_TOP_LEVEL.with(|flag| *flag = top_level);
            pg_sys::panic::pgrx_extern_c_guard(|| check(node).or_raise());
        }
        let next = PREVIOUS.with(|previous| *previous).unwrap_or(raw::standard_ProcessUtility);
        next(statement, query, read_only, context, params, environment, destination, completion);
        if policy::altered::any() {
            pg_sys::panic::pgrx_extern_c_guard(|| policy::altered::follow().or_raise());
        }
    }
}

/// Whether the last command that concerned us was the client's own, not part of a function.
static LABEL_AT_TOP_LEVEL: ProcessLocal<bool> = ProcessLocal::new(false);

/// True if the command being carried out can still be rolled back together with others.
pub(crate) fn in_transaction_block() -> bool {
    // SAFETY: looks at this process's transaction state.
    let block = unsafe { pg_sys::IsTransactionBlock() || pg_sys::IsSubTransaction() };
    block || !LABEL_AT_TOP_LEVEL.with(|flag| *flag)
}

/// Declared here because pgrx's declaration has a guard around it.
mod raw {
    use super::{c_char, pg_sys};

    unsafe extern "C-unwind" {
        /// utility.c
        pub(super) fn standard_ProcessUtility(
            statement: *mut pg_sys::PlannedStmt,
            query: *const c_char,
            read_only: bool,
            context: pg_sys::ProcessUtilityContext::Type,
            params: pg_sys::ParamListInfo,
            environment: *mut pg_sys::QueryEnvironment,
            destination: *mut pg_sys::DestReceiver,
            completion: *mut pg_sys::QueryCompletion,
        );
    }
}

fn concerns_us(tag: pg_sys::NodeTag) -> bool {
    use pg_sys::NodeTag::{T_AlterDatabaseStmt, T_CreatedbStmt, T_SecLabelStmt};
    matches!(tag, T_CreatedbStmt | T_AlterDatabaseStmt | T_SecLabelStmt)
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
            pg_sys::NodeTag::T_SecLabelStmt => {
                let provider = (*statement.cast::<pg_sys::SecLabelStmt>()).provider;
                if !provider.is_null() && CStr::from_ptr(provider) == PROVIDER {
                    ddl::register_label_provider();
                }
                Ok(())
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
