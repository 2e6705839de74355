//! Utility commands that concern us before they are carried out.
//!
//! CREATE DATABASE tells here whether it copies files below the storage manager, and from where:
//! the object access hook hears of the new database only. And SECURITY LABEL FOR pagevault makes
//! the label provider known to the session. Commands run within commands: functions run them, and
//! event triggers.

use std::ffi::{CStr, c_char};

use pgrx::PgList;
use pgrx::pg_sys::{self, DefElem};

use super::{audited, ddl, granted, naming};
use crate::audit;
use crate::commands::{altered, catalogs, databases, labels};
use crate::page;
use crate::pg::externs;
use crate::pg::labels::PROVIDER;
use crate::pg::process::ProcessLocal;
use crate::pg::report::OrRaise;
use crate::pg::text::ServerText;
use crate::policy;
use crate::shmem;

static PREVIOUS: ProcessLocal<pg_sys::ProcessUtility_hook_type> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before anything is forked.
    unsafe {
        PREVIOUS.set(pg_sys::ProcessUtility_hook);
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
        let (labellings, altered) = (labels::mark(), altered::mark());
        let audited = if concerns_us((*node).type_) {
            pg_sys::panic::pgrx_extern_c_guard(|| prepare(node))
        } else {
            NOT_AUDITED
        };
        let named = naming::is_needed()
            && pg_sys::panic::pgrx_extern_c_guard(|| naming::note_command(node));
        let commits_prepared = commits_prepared(node);
        let next = PREVIOUS.get().unwrap_or(externs::standard_ProcessUtility);
        next(statement, query, read_only, context, params, environment, destination, completion);
        if named {
            page::names::forget();
        }
        labels::command_ends(labellings);
        if commits_prepared {
            shmem::count_label_change(); // what it has changed only its own session knew
        }
        if altered::any_since(altered) {
            pg_sys::panic::pgrx_extern_c_guard(|| altered::follow(altered).or_raise());
        }
        if policy::pending::any() {
            pg_sys::panic::pgrx_extern_c_guard(|| catalogs::follow().or_raise());
        }
        if audited != NOT_AUDITED {
            audit::statements::done(audited);
        }
    }
}

/// In place of the number of a statement that is audited.
const NOT_AUDITED: u64 = 0;

fn concerns_us(tag: pg_sys::NodeTag) -> bool {
    use pg_sys::NodeTag::*;
    matches!(
        tag,
        T_CreatedbStmt
            | T_SecLabelStmt
            | T_AlterSystemStmt
            | T_AlterRoleSetStmt
            | T_AlterDatabaseSetStmt
            | T_CreateExtensionStmt
    ) || granted::concerns_us(tag)
}

/// # Safety
/// `statement` is a parse tree node.
unsafe fn commits_prepared(statement: *mut pg_sys::Node) -> bool {
    use pg_sys::TransactionStmtKind::TRANS_STMT_COMMIT_PREPARED;
    // SAFETY: the tag says which node it is.
    unsafe {
        (*statement).type_ == pg_sys::NodeTag::T_TransactionStmt
            && (*statement.cast::<pg_sys::TransactionStmt>()).kind == TRANS_STMT_COMMIT_PREPARED
    }
}

/// Returns the number of the statement if it is audited.
///
/// # Safety
/// `statement` is a parse tree node.
unsafe fn prepare(statement: *mut pg_sys::Node) -> u64 {
    // SAFETY: the tag says which node it is.
    unsafe {
        let operation = audited::operation(statement);
        let number = operation.map_or(NOT_AUDITED, audit::statements::begin);
        match (*statement).type_ {
            pg_sys::NodeTag::T_CreatedbStmt => {
                let options = (*statement.cast::<pg_sys::CreatedbStmt>()).options;
                let file_copy = option(options, c"strategy")
                    .is_some_and(|strategy| strategy.bytes().eq_ignore_ascii_case(b"file_copy"));
                let template = option(options, c"template").unwrap_or_else(|| "template1".into());
                databases::creating(template, file_copy);
            }
            pg_sys::NodeTag::T_SecLabelStmt => {
                let provider = (*statement.cast::<pg_sys::SecLabelStmt>()).provider;
                if !provider.is_null() && CStr::from_ptr(provider) == PROVIDER {
                    ddl::register_label_provider();
                    labels::labelling_begins();
                }
            }
            _ => {}
        }
        number
    }
}

/// The text of an option of a command. `TEMPLATE DEFAULT` and the like have none, and mean the same
/// as no option (gram.y makes a DefElem without argument of them, and createdb in dbcommands.c
/// looks for one).
///
/// # Safety
/// `options` is a list of DefElem or NIL.
unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<ServerText> {
    // SAFETY: the caller's list, and what stands in it, lives as long as the command.
    unsafe {
        PgList::<DefElem>::from_pg(options)
            .iter_ptr()
            .find(|option| !(**option).arg.is_null() && CStr::from_ptr((**option).defname) == name)
            .and_then(|option| ServerText::copied(pg_sys::defGetString(option)))
    }
}
