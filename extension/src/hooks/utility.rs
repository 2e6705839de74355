//! ProcessUtility hook: work before and after utility commands.
//!
//! For CREATE DATABASE, only here is it known whether files are copied below the storage manager,
//! and from which database; the object access hook gets only the new database. SECURITY LABEL FOR
//! pagevault registers the label provider in the session. Commands can run within commands, through
//! functions and event triggers.

use std::ffi::{CStr, c_char};

use pagevault_core::policy::storage::Makes;
use pgrx::PgList;
use pgrx::pg_sys::{self, DefElem, Oid};

use super::{audited, ddl, granted, naming};
use crate::audit;
use crate::commands::altered::{self, Detaching};
use crate::commands::{catalogs, databases, labels, storage};
use crate::page;
use crate::pg::externs;
use crate::pg::guc;
use crate::pg::labels::PROVIDER;
use crate::pg::process::ProcessLocal;
use crate::pg::report::OrRaise;
use crate::pg::session;
use crate::pg::text::ServerText;
use crate::policy;
use crate::shmem;

static PREVIOUS: ProcessLocal<pg_sys::ProcessUtility_hook_type> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked.
    unsafe {
        PREVIOUS.set(pg_sys::ProcessUtility_hook);
        pg_sys::ProcessUtility_hook = Some(process_utility);
    }
}

/// Contract: called for every utility command, in a backend, before it is executed; may raise
/// errors.
///
/// The command itself runs outside any pgrx guard, because its errors would lose their cursor
/// position and context in a guard. Nothing with a destructor is alive during that call.
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
    // SAFETY: the server's own arguments, forwarded unchanged.
    unsafe {
        let node = (*statement).utilityStmt;
        let (labellings, altered) = (labels::mark(), altered::mark());
        let is_outermost = context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL;
        let outer = session::command_begins(is_outermost);
        let making = storage::command_begins(makes((*node).type_));
        let (audited, detached) = if concerns_us((*node).type_) {
            pg_sys::panic::pgrx_extern_c_guard(|| prepare(node))
        } else {
            (NOT_AUDITED, None)
        };
        let named = naming::is_needed()
            && pg_sys::panic::pgrx_extern_c_guard(|| naming::note_command(node));
        let commits_prepared = commits_prepared(node);
        let next = PREVIOUS.get().unwrap_or(externs::standard_ProcessUtility);
        next(statement, query, read_only, context, params, environment, destination, completion);
        if named {
            page::names::forget();
        }
        storage::command_ends(making);
        if commits_prepared {
            shmem::count_label_change(); // other sessions have not seen its changes yet
        }
        if altered::any_since(altered) {
            let job = pg_sys::panic::pgrx_extern_c_guard(|| {
                altered::follow(altered, detached).or_raise()
            });
            if job.is_some() {
                labels::note_job(job);
            }
        }
        labels::command_ends(labellings);
        if policy::pending::any() {
            pg_sys::panic::pgrx_extern_c_guard(|| catalogs::follow().or_raise());
        }
        session::command_ends(outer);
        if audited != NOT_AUDITED {
            audit::statements::done(audited);
        }
    }
}

/// Instead of a statement number if the statement is not audited.
const NOT_AUDITED: u64 = 0;

fn concerns_us(tag: pg_sys::NodeTag) -> bool {
    use pg_sys::NodeTag::*;
    matches!(
        tag,
        T_CreatedbStmt
            | T_AlterDatabaseStmt
            | T_SecLabelStmt
            | T_AlterSystemStmt
            | T_AlterRoleSetStmt
            | T_AlterDatabaseSetStmt
            | T_CreateExtensionStmt
            | T_AlterTableStmt
    ) || granted::concerns_us(tag)
}

/// Whose files a command makes by itself; what it runs are commands of their own.
fn makes(tag: pg_sys::NodeTag) -> Makes {
    use pg_sys::NodeTag::*;
    match tag {
        T_CreateStmt | T_CreateTableAsStmt | T_CreateSeqStmt | T_IndexStmt => Makes::Relations,
        _ => Makes::Storage,
    }
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

/// Prepares for the command. Returns the number of the statement if it is audited, and the
/// partition that it detaches in steps.
///
/// # Safety
/// `statement` is a parse tree node.
unsafe fn prepare(statement: *mut pg_sys::Node) -> (u64, Option<Oid>) {
    let mut detached = None;
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
            pg_sys::NodeTag::T_AlterDatabaseStmt => {
                let statement = statement.cast::<pg_sys::AlterDatabaseStmt>();
                let tablespace = option((*statement).options, c"tablespace");
                let database = ServerText::copied((*statement).dbname);
                if let (Some(database), Some(tablespace)) = (database, tablespace) {
                    databases::altering(&database, &tablespace).or_raise();
                }
            }
            pg_sys::NodeTag::T_SecLabelStmt => {
                let provider = (*statement.cast::<pg_sys::SecLabelStmt>()).provider;
                if !provider.is_null() && CStr::from_ptr(provider) == PROVIDER {
                    ddl::register_label_provider();
                    labels::labelling_begins();
                }
            }
            pg_sys::NodeTag::T_AlterTableStmt if guc::enforce_encryption() => {
                if let Some(detaching) = detached_in_steps(statement.cast()) {
                    altered::detaching(detaching).or_raise();
                    detached = detaching.partition;
                }
            }
            _ => {}
        }
        (number, detached)
    }
}

/// DETACH PARTITION ... CONCURRENTLY or FINALIZE.
///
/// # Safety
/// `statement` is a parse tree node.
unsafe fn detached_in_steps(statement: *mut pg_sys::AlterTableStmt) -> Option<Detaching> {
    use pg_sys::AlterTableType as Kind;
    // SAFETY: the members of the statement's list, whose kind says what their definition is; both
    // live as long as the command.
    unsafe {
        PgList::<pg_sys::AlterTableCmd>::from_pg((*statement).cmds).iter_ptr().find_map(|command| {
            let detached = (*command).def.cast::<pg_sys::PartitionCmd>();
            let begins = match (*command).subtype {
                Kind::AT_DetachPartition if (*detached).concurrent => true,
                Kind::AT_DetachPartitionFinalize => false,
                _ => return None,
            };
            Some(Detaching { partition: naming::find((*detached).name), begins })
        })
    }
}

/// The name that is the value of an option of a command. `TEMPLATE DEFAULT` and the like are taken
/// for no option (gram.y makes a DefElem without argument of them, and createdb in dbcommands.c
/// checks for that).
///
/// # Safety
/// `options` is a list of DefElem or NIL.
unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<ServerText> {
    // SAFETY: the caller's list and its members live as long as the command.
    unsafe {
        PgList::<DefElem>::from_pg(options)
            .iter_ptr()
            .find(|option| !(**option).arg.is_null() && CStr::from_ptr((**option).defname) == name)
            .and_then(|option| ServerText::copied_name(pg_sys::defGetString(option)))
    }
}
