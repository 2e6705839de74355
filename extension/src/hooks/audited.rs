//! Audited operations of statements, and of attempts that the server itself denies.

use std::ffi::{CStr, c_char};

use pgrx::PgList;
use pgrx::PgSqlErrorCode as Code;
use pgrx::pg_sys;
use pgrx::prelude::PgLogLevel;

use super::{ddl, granted};
use crate::audit::{Operation, statements};
use crate::pg::guc;
use crate::pg::labels::PROVIDER;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::text::excerpt;
use crate::shmem;

/// Prefix of the names of our settings; compared without regard to case.
const PREFIX: &str = "pagevault.";

static PREVIOUS: ProcessLocal<pg_sys::emit_log_hook_type> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked; the function lives as long as the
    // library.
    unsafe {
        PREVIOUS.set(pg_sys::emit_log_hook);
        pg_sys::emit_log_hook = Some(emit_log);
    }
}

/// The audited operation of a statement; `None` for other statements.
///
/// # Safety
/// `statement` is a parse tree node.
pub(super) unsafe fn operation(statement: *mut pg_sys::Node) -> Option<Operation> {
    if shmem::get().is_none() || !process::runs_transactions() {
        return None;
    }
    // SAFETY: the tag says which node it is; a node and all it points to have the same lifetime.
    unsafe {
        match (*statement).type_ {
            pg_sys::NodeTag::T_SecLabelStmt => {
                let statement = statement.cast::<pg_sys::SecLabelStmt>();
                let provider = (*statement).provider;
                // Without FOR the label is ours if we are the only registered provider.
                let is_ours = match provider.is_null() {
                    true => ddl::label_provider_is_registered(),
                    false => CStr::from_ptr(provider) == PROVIDER,
                };
                is_ours.then(|| Operation {
                    action: "label",
                    by: "SECURITY LABEL",
                    object: named((*statement).object),
                    to: text((*statement).label),
                    ..Operation::default()
                })
            }
            pg_sys::NodeTag::T_AlterSystemStmt => {
                let setting = (*statement.cast::<pg_sys::AlterSystemStmt>()).setstmt;
                set("ALTER SYSTEM", String::new(), setting)
            }
            pg_sys::NodeTag::T_AlterDatabaseSetStmt => {
                let statement = statement.cast::<pg_sys::AlterDatabaseSetStmt>();
                let database = text((*statement).dbname).unwrap_or_default();
                set("ALTER DATABASE", format!(" of database {database}"), (*statement).setstmt)
            }
            pg_sys::NodeTag::T_AlterDatabaseStmt => {
                let statement = statement.cast::<pg_sys::AlterDatabaseStmt>();
                let options = PgList::<pg_sys::DefElem>::from_pg((*statement).options);
                let space = options.iter_ptr().find(|option| {
                    !(**option).arg.is_null() && CStr::from_ptr((**option).defname) == c"tablespace"
                })?;
                Some(Operation {
                    action: "move_database",
                    by: "ALTER DATABASE",
                    object: text((*statement).dbname),
                    to: text(pg_sys::defGetString(space)),
                    ..Operation::default()
                })
            }
            pg_sys::NodeTag::T_AlterRoleSetStmt => {
                let statement = statement.cast::<pg_sys::AlterRoleSetStmt>();
                let role = (*statement).role;
                let role = if role.is_null() { "ALL".to_owned() } else { granted::name(role) };
                let mut whose = format!(" of role {role}");
                if let Some(database) = text((*statement).database) {
                    whose.push_str(&format!(" in database {database}"));
                }
                set("ALTER ROLE", whose, (*statement).setstmt)
            }
            pg_sys::NodeTag::T_CreateExtensionStmt => {
                let name = text((*statement.cast::<pg_sys::CreateExtensionStmt>()).extname);
                let operation = Operation {
                    action: "create_extension",
                    by: "CREATE EXTENSION",
                    ..Operation::default()
                };
                name.filter(|name| name == "pagevault").map(|name| operation.on(name))
            }
            _ => granted::operation(statement),
        }
    }
}

/// # Safety
/// `setting` is a parse tree node of its type.
unsafe fn set(
    by: &'static str,
    whose: String,
    setting: *mut pg_sys::VariableSetStmt,
) -> Option<Operation> {
    // SAFETY: the caller's statement, as the server has parsed it. ExtractSetVariableArgs returns a
    // copy, or raises the error that the statement itself would raise.
    unsafe {
        let name = text((*setting).name);
        let all = (*setting).kind == pg_sys::VariableSetKind::VAR_RESET_ALL;
        let name = match name {
            Some(name) if is_ours(&name) || is_library_list(&name) => name.to_ascii_lowercase(),
            None if all => "ALL".to_owned(),
            _ => return None,
        };
        let value = match (*setting).kind {
            pg_sys::VariableSetKind::VAR_SET_VALUE => text(pg_sys::ExtractSetVariableArgs(setting)),
            pg_sys::VariableSetKind::VAR_SET_CURRENT => Some(guc::shown(&name)),
            _ => None,
        };
        let to = value.unwrap_or_else(|| "(default)".to_owned());
        let operation = Operation { action: "set", by, to: Some(to), ..Operation::default() };
        Some(operation.on(format!("{name}{whose}")))
    }
}

pub(super) fn is_ours(setting: &str) -> bool {
    setting.get(..PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREFIX))
}

/// If it no longer names pagevault, the next server start is without pagevault.
pub(super) fn is_library_list(setting: &str) -> bool {
    setting.eq_ignore_ascii_case("shared_preload_libraries")
}

/// A name, or as much of another text as a line shows.
///
/// # Safety
/// `text` is null or NUL-terminated.
pub(super) unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller guarantees that the text is null or NUL-terminated.
    (!text.is_null()).then(|| excerpt(unsafe { CStr::from_ptr(text) }.to_bytes()))
}

/// The name of an object as written in the statement.
///
/// # Safety
/// `node` is the object of a SECURITY LABEL statement.
unsafe fn named(node: *mut pg_sys::Node) -> Option<String> {
    // SAFETY: the tag says which node it is.
    unsafe {
        match (*node).type_ {
            pg_sys::NodeTag::T_List => text(pg_sys::NameListToString(node.cast())),
            pg_sys::NodeTag::T_String => text(pg_sys::defGetString(&mut definition(node))),
            _ => None,
        }
    }
}

/// A string node as the value of an option, because defGetString() exists in all versions.
fn definition(node: *mut pg_sys::Node) -> pg_sys::DefElem {
    pg_sys::DefElem {
        type_: pg_sys::NodeTag::T_DefElem,
        defname: c"object".as_ptr().cast_mut(),
        arg: node,
        ..pg_sys::DefElem::default()
    }
}

/// `emit_log_hook` (elog.c). Contract: called when a message is about to be logged, also in a
/// failed transaction; must neither raise errors nor log.
unsafe extern "C-unwind" fn emit_log(message: *mut pg_sys::ErrorData) {
    // SAFETY: the message that is being reported, and the previous hook, called as the server would
    // call it.
    unsafe {
        if (*message).elevel >= PgLogLevel::ERROR as i32 {
            statements::note_error((*message).sqlerrcode, || denied(message));
        }
        if let Some(hook) = PREVIOUS.get() {
            hook(message);
        }
    }
}

/// An operation that the server denied before any hook of ours was called: calling a function with
/// the name of one of ours, or changing a setting of ours (`aclcheck_error`, aclchk.c; guc.c).
///
/// # Safety
/// `message` is the message that is being reported.
unsafe fn denied(message: *mut pg_sys::ErrorData) -> Option<Operation> {
    const FUNCTION: &CStr = c"permission denied for function %s";
    const SETTING: &CStr = c"permission denied to set parameter \"%s\"";
    // SAFETY: the message that is being reported. Its untranslated text is a constant of the
    // server, or null.
    unsafe {
        if (*message).sqlerrcode != Code::ERRCODE_INSUFFICIENT_PRIVILEGE as i32
            || !pg_sys::IsTransactionState()
            || (*message).message_id.is_null()
        {
            return None;
        }
        let message_text = text((*message).message)?;
        let mut words = message_text.split([' ', '"', '\u{ab}', '\u{bb}']);
        let operation = match CStr::from_ptr((*message).message_id) {
            id if id == FUNCTION => {
                let function = words.find(|word| FUNCTIONS.contains(word))?;
                let operation = Operation { action: "call", ..Operation::default() };
                operation.on(format!("function {function}"))
            }
            id if id == SETTING => {
                let setting = words.find(|word| is_ours(word))?;
                Operation { action: "set", ..Operation::default() }.on(setting)
            }
            _ => return None,
        };
        Some(Operation { by: "server", ..operation })
    }
}

/// Functions that change what is protected, or who can read it.
const FUNCTIONS: [&str; 41] = [
    "add_cluster_master_key",
    "add_database_master_key",
    "add_key_group_master_key",
    "add_provider",
    "alter_provider",
    "cancel_rekey",
    "check_provider",
    "create_key_group",
    "database_key_rows",
    "decrypt",
    "decrypt_database",
    "drop_cluster_master_key",
    "drop_database_master_key",
    "drop_key_group",
    "drop_key_group_master_key",
    "drop_provider",
    "encrypt",
    "encrypt_catalogs",
    "encrypt_database",
    "pause_rekey",
    "provider_rows",
    "reconcile",
    "report",
    "resume_rekey",
    "rotate_all_data_keys",
    "rotate_cluster_master_key",
    "rotate_data_key",
    "rotate_database_key",
    "rotate_database_master_key",
    "rotate_key_group_key",
    "rotate_key_group_master_key",
    "rotate_wal_key",
    "set_cluster_master_key",
    "set_database_master_key",
    "set_key_group_master_key",
    "shred",
    "shred_database",
    "shred_former_files",
    "shred_key_group",
    "shred_schema",
    "unlock",
];
