//! Utility commands that concern us before they are carried out.
//!
//! CREATE DATABASE tells here whether it copies files below the storage manager, and from where: the object
//! access hook hears of the new database only. And SECURITY LABEL FOR pagevault makes the label provider
//! known to the session.

use std::ffi::{CStr, c_char};

use pgrx::PgList;
use pgrx::pg_sys::{self, DefElem};

use super::ddl;
use crate::pg::labels::PROVIDER;
use crate::pg::process::ProcessLocal;
use crate::pg::report::OrRaise;
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
            pg_sys::panic::pgrx_extern_c_guard(|| prepare(node));
        }
        let next = PREVIOUS.with(|previous| *previous).unwrap_or(raw::standard_ProcessUtility);
        next(statement, query, read_only, context, params, environment, destination, completion);
        if policy::altered::any() {
            pg_sys::panic::pgrx_extern_c_guard(|| policy::altered::follow().or_raise());
        }
        if policy::catalogs::any() {
            pg_sys::panic::pgrx_extern_c_guard(|| policy::catalogs::follow().or_raise());
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
    use pg_sys::NodeTag::{T_CreatedbStmt, T_SecLabelStmt};
    matches!(tag, T_CreatedbStmt | T_SecLabelStmt)
}

/// # Safety
/// `statement` is a parse tree node.
unsafe fn prepare(statement: *mut pg_sys::Node) {
    // SAFETY: the tag says which node it is.
    unsafe {
        match (*statement).type_ {
            pg_sys::NodeTag::T_CreatedbStmt => {
                let options = (*statement.cast::<pg_sys::CreatedbStmt>()).options;
                let file_copy = option(options, c"strategy")
                    .is_some_and(|strategy| strategy.eq_ignore_ascii_case("file_copy"));
                let template =
                    option(options, c"template").unwrap_or_else(|| "template1".to_owned());
                policy::databases::creating(template, file_copy);
            }
            pg_sys::NodeTag::T_SecLabelStmt => {
                let provider = (*statement.cast::<pg_sys::SecLabelStmt>()).provider;
                if !provider.is_null() && CStr::from_ptr(provider) == PROVIDER {
                    ddl::register_label_provider();
                }
            }
            _ => {}
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
