//! The session: user, transaction state, and the statement that called us.

use std::ffi::CStr;

use pgrx::callconv::{Arg, ArgAbi};
use pgrx::pg_sys::{self, Oid};
use pgrx::pgrx_sql_entity_graph::metadata::{
    ArgumentError, ReturnsError, ReturnsRef, SqlMappingRef, SqlTranslatable, TypeOrigin,
};
use pgrx::spi::SpiError;

use super::process::ProcessLocal;
use super::report::{Report, internal};
use super::text::ServerText;
use super::{catalog, guc, process};

/// Runs `work` as the bootstrap superuser, with a search path that contains only trusted schemas.
/// Undone at the end of `work`, or by the abort of the (sub)transaction.
pub(crate) fn as_owner_of_the_cluster<R>(work: impl FnOnce() -> R) -> R {
    let (mut user, mut context) = (Oid::INVALID, 0);
    // SAFETY: like the server's own ri_PerformCheck (ri_triggers.c) and maintenance commands:
    // switches the user, opens a nesting level of settings, and restores both; after an ERROR
    // AbortTransaction or AbortSubTransaction restores them.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&raw mut user, &raw mut context);
        pg_sys::SetUserIdAndSecContext(
            pg_sys::BOOTSTRAP_SUPERUSERID.into(),
            context
                | (pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_RESTRICTED_OPERATION)
                    as i32,
        );
        let level = pg_sys::NewGUCNestLevel();
        pg_sys::set_config_option(
            c"search_path".as_ptr(),
            c"pg_catalog, pg_temp".as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            pg_sys::GucAction::GUC_ACTION_SAVE,
            true,
            0,
            false,
        );
        let done = work();
        pg_sys::AtEOXact_GUC(false, level);
        pg_sys::SetUserIdAndSecContext(user, context);
        done
    }
}

impl From<SpiError> for Report {
    fn from(error: SpiError) -> Report {
        internal(format!("a statement of pagevault's own has failed: {error}"))
    }
}

/// The call of one of our SQL functions. pgrx passes it to functions that declare such an argument;
/// the argument does not exist in SQL. Not to be kept beyond the call.
pub(crate) struct Call(pg_sys::FunctionCallInfo);

// SAFETY: like the pointer itself, which pgrx takes from the current call.
unsafe impl<'fcx> ArgAbi<'fcx> for Call {
    unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
        // SAFETY: only pgrx calls this, with an argument of the current call.
        Call(unsafe { pg_sys::FunctionCallInfo::unbox_arg_unchecked(arg) })
    }

    fn is_virtual_arg() -> bool {
        pg_sys::FunctionCallInfo::is_virtual_arg()
    }
}

// SAFETY: like the pointer itself: no argument in SQL.
unsafe impl SqlTranslatable for Call {
    const TYPE_IDENT: &'static str = <pg_sys::FunctionCallInfo as SqlTranslatable>::TYPE_IDENT;
    const TYPE_ORIGIN: TypeOrigin = <pg_sys::FunctionCallInfo as SqlTranslatable>::TYPE_ORIGIN;
    const ARGUMENT_SQL: Result<SqlMappingRef, ArgumentError> =
        <pg_sys::FunctionCallInfo as SqlTranslatable>::ARGUMENT_SQL;
    const RETURN_SQL: Result<ReturnsRef, ReturnsError> =
        <pg_sys::FunctionCallInfo as SqlTranslatable>::RETURN_SQL;
}

impl Call {
    /// True if the function was called directly by a client's statement, outside any transaction
    /// block: not by another function, and not after anything that could be rolled back.
    ///
    /// Earlier statements of a pipeline of the extended protocol are in the same transaction. 15 to
    /// 17 indicate that by a flag only (`XACT_FLAGS_PIPELINING`, set by exec_execute_message in
    /// postgres.c); later minors of 17, and 18, begin an implicit transaction block with the second
    /// command (start_xact_command).
    pub(crate) fn is_statement_of_its_own(&self) -> bool {
        // SAFETY: only pgrx creates such a value, from the current call. Set-returning functions
        // are called with a ReturnSetInfo, whose context belongs to a running query; the portal
        // lives while a statement of it runs.
        unsafe {
            if pg_sys::IsTransactionBlock() || pg_sys::IsSubTransaction() {
                return false;
            }
            let in_pipeline = pg_sys::MyXactFlags as u32 & pg_sys::XACT_FLAGS_PIPELINING != 0;
            let has_written = pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId;
            if in_pipeline || has_written {
                return false;
            }
            let (portal, result) = (pg_sys::ActivePortal, (*self.0).resultinfo);
            if portal.is_null() || result.is_null() || (*portal).queryDesc.is_null() {
                return false;
            }
            let result = result.cast::<pg_sys::ReturnSetInfo>();
            if (*result).type_ != pg_sys::NodeTag::T_ReturnSetInfo || (*result).econtext.is_null() {
                return false;
            }
            // Loops of PL/pgSQL also run in portals, which SPI names.
            let name = CStr::from_ptr((*portal).name).to_bytes();
            let ours = (*(*result).econtext).ecxt_estate == (*(*portal).queryDesc).estate;
            ours && !name.starts_with(b"<unnamed portal")
        }
    }
}

/// Whether the utility command under way was sent by the client, and not by a function or a DO
/// block.
static IS_OUTERMOST: ProcessLocal<bool> = ProcessLocal::new(false);

/// A utility command begins. Returns what [`command_ends`] is to be told.
pub(crate) fn command_begins(is_outermost: bool) -> bool {
    IS_OUTERMOST.with(|flag| std::mem::replace(flag, is_outermost))
}

/// The command has ended. An ERROR skips this; then less is known to be outermost.
pub(crate) fn command_ends(before: bool) {
    IS_OUTERMOST.set(before);
}

/// Whether what this utility command has done may be rolled back after it has ended: it is in a
/// transaction block, was run by a function, or came by the extended protocol. There a pipeline may
/// go on, which the server knows from its second statement on (`XACT_FLAGS_PIPELINING`,
/// exec_execute_message, postgres.c). In a query: true.
pub(crate) fn may_be_rolled_back() -> bool {
    // SAFETY: state of this process; the portal lives while a statement of it runs. That of a
    // utility command has no query, and that of the simple protocol is not visible
    // (exec_simple_query, postgres.c).
    unsafe {
        let portal = pg_sys::ActivePortal;
        pg_sys::IsTransactionBlock()
            || pg_sys::IsSubTransaction()
            || !IS_OUTERMOST.get()
            || portal.is_null()
            || (*portal).visible
            || !(*portal).queryDesc.is_null()
    }
}

/// Whether this session has started a base backup, and not stopped it (`pg_backup_start`).
pub(crate) fn runs_a_backup() -> bool {
    // SAFETY: reads a variable of this process.
    unsafe { pg_sys::get_backup_status() == pg_sys::SessionBackupState::SESSION_BACKUP_RUNNING }
}

/// Makes the current statement, for which [`Call::is_statement_of_its_own`] is true, commit at its
/// end, also in a pipeline. `PreventInTransactionBlock` (xact.c) does this after its checks.
pub(crate) fn commit_after_this_statement() {
    // SAFETY: a plain global of this process, which is cleared when a transaction starts.
    unsafe { pg_sys::MyXactFlags |= pg_sys::XACT_FLAGS_NEEDIMMEDIATECOMMIT as i32 }
}

/// Roles and database of a session, for messages; all `None` in processes without a session.
#[derive(Default)]
pub(crate) struct Identity {
    /// The session user.
    pub(crate) role: Option<String>,
    /// The role that logged in, if different (SET SESSION AUTHORIZATION).
    pub(crate) login_role: Option<String>,
    /// The current user, if different (SET ROLE, SECURITY DEFINER).
    pub(crate) current_role: Option<String>,
    pub(crate) database: Option<String>,
}

/// Roles and database of this process.
pub(crate) fn identity() -> Identity {
    if !process::runs_transactions() {
        return Identity::default();
    }
    // SAFETY: plain look-ups of this session, in a transaction.
    let (session, current) = unsafe { (pg_sys::GetSessionUserId(), pg_sys::GetUserId()) };
    Identity {
        role: Some(role_name(session)),
        login_role: login_role(session).map(role_name),
        current_role: (current != session).then(|| role_name(current)),
        database: catalog::database_name(process::my_database()).map(|name| name.to_string()),
    }
}

/// Like [`identity`], but without catalog look-ups, for code that must not raise errors. Contains
/// OIDs instead of some names.
pub(crate) fn identity_at_hand() -> Identity {
    if !process::runs_transactions() {
        return Identity::default();
    }
    let name = |setting| Some(guc::shown(setting)).filter(|name| !name.is_empty());
    // SAFETY: plain look-ups of this session.
    unsafe {
        let (session, current) = (pg_sys::GetSessionUserId(), pg_sys::GetUserId());
        let current_role = match current {
            _ if current == session => None,
            // SET SESSION AUTHORIZATION does not reset this setting (show_role, variable.c).
            _ if current == pg_sys::GetCurrentRoleId() => name("role"),
            _ => Some(role_number(current)),
        };
        Identity {
            role: name("session_authorization").or_else(|| Some(role_number(session))),
            login_role: login_role(session).map(role_number),
            current_role,
            database: Some(format!("database {}", process::my_database())),
        }
    }
}

/// The role that logged in, if the session user is another role.
fn login_role(session: Oid) -> Option<Oid> {
    // SAFETY: plain look-ups of this session. Processes without a client have no such role.
    unsafe {
        let is_session = !pg_sys::MyProcPort.is_null();
        is_session.then(|| pg_sys::GetAuthenticatedUserId()).filter(|role| *role != session)
    }
}

/// The ID of the current subtransaction, or of the transaction outside any.
pub(crate) fn subtransaction() -> pg_sys::SubTransactionId {
    // SAFETY: a plain look-up of this session.
    unsafe { pg_sys::GetCurrentSubTransactionId() }
}

/// True while a session begins or runs a command, and while another process runs somebody's
/// functions, as triggers in an apply worker. False while it reloads the configuration in between,
/// while a transaction is rolled back, and in parallel workers, which get the settings of their
/// session.
///
/// No portal is active when functions are called by the planner, the fast path, deferred triggers
/// or login triggers; but a snapshot is.
pub(crate) fn is_in_command() -> bool {
    // SAFETY: plain globals of this process.
    unsafe {
        let begins = pg_sys::Mode != pg_sys::ProcessingMode::NormalProcessing;
        let carries_out = || !pg_sys::ActivePortal.is_null() || pg_sys::ActiveSnapshotSet();
        let is_session = !pg_sys::MyProcPort.is_null() || !pg_sys::IsUnderPostmaster;
        let is_parallel = pg_sys::ParallelWorkerNumber >= 0;
        pg_sys::IsTransactionState() && !is_parallel && (is_session && begins || carries_out())
    }
}

/// The name of the session user. In a transaction.
pub(crate) fn session_role() -> String {
    // SAFETY: a global of this process.
    role_name(unsafe { pg_sys::GetSessionUserId() })
}

/// The name of the current user. In a transaction.
pub(crate) fn current_role() -> String {
    // SAFETY: a global of this process.
    role_name(unsafe { pg_sys::GetUserId() })
}

/// The name of a role. A session can outlive its role.
fn role_name(role: Oid) -> String {
    // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
    let name = unsafe { ServerText::copied(pg_sys::GetUserNameFromId(role, true)) };
    name.map_or_else(|| role_number(role), |name| name.to_string())
}

fn role_number(role: Oid) -> String {
    format!("role {role}")
}
