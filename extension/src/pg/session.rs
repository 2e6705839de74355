//! Who is asking.

use std::ffi::CStr;

use pgrx::callconv::{Arg, ArgAbi};
use pgrx::pg_sys::{self, Oid};
use pgrx::pgrx_sql_entity_graph::metadata::{
    ArgumentError, ReturnsError, ReturnsRef, SqlMappingRef, SqlTranslatable, TypeOrigin,
};
use pgrx::spi::SpiError;

use super::report::{Report, internal};
use super::text::ServerText;
use super::{catalog, guc, process};

/// Runs `work` as the bootstrap superuser, with a search path that nobody else can put anything
/// into. Is undone by the end of `work`, or by the abort of the (sub)transaction.
pub(crate) fn as_owner_of_the_cluster<R>(work: impl FnOnce() -> R) -> R {
    let (mut user, mut context) = (Oid::INVALID, 0);
    // SAFETY: what the server's own ri_PerformCheck (ri_triggers.c) and maintenance commands do:
    // switch the user, open a level of settings, and go back; an ERROR leaves both to
    // AbortTransaction or AbortSubTransaction.
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

/// The call by which the server has called one of our functions: an argument that pgrx hands to a
/// function which asks for it, and that SQL knows nothing of. Not to be kept beyond the call.
pub(crate) struct Call(pg_sys::FunctionCallInfo);

// SAFETY: as for the pointer itself, which pgrx makes an argument of the call that is carried out.
unsafe impl<'fcx> ArgAbi<'fcx> for Call {
    unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
        // SAFETY: pgrx, which alone calls this, has the argument from the call that is carried out.
        Call(unsafe { pg_sys::FunctionCallInfo::unbox_arg_unchecked(arg) })
    }

    fn is_virtual_arg() -> bool {
        pg_sys::FunctionCallInfo::is_virtual_arg()
    }
}

// SAFETY: as for the pointer itself: no argument in SQL.
unsafe impl SqlTranslatable for Call {
    const TYPE_IDENT: &'static str = <pg_sys::FunctionCallInfo as SqlTranslatable>::TYPE_IDENT;
    const TYPE_ORIGIN: TypeOrigin = <pg_sys::FunctionCallInfo as SqlTranslatable>::TYPE_ORIGIN;
    const ARGUMENT_SQL: Result<SqlMappingRef, ArgumentError> =
        <pg_sys::FunctionCallInfo as SqlTranslatable>::ARGUMENT_SQL;
    const RETURN_SQL: Result<ReturnsRef, ReturnsError> =
        <pg_sys::FunctionCallInfo as SqlTranslatable>::RETURN_SQL;
}

impl Call {
    /// True if a function was called by a statement of the client's own, in no transaction block:
    /// not by another function, and not behind anything that could be rolled back.
    ///
    /// What comes before it in a pipeline of the extended protocol is in the same transaction. 15
    /// to 17 say so by a flag only (`XACT_FLAGS_PIPELINING`, set by exec_execute_message in
    /// postgres.c), later minors of 17 and 18 begin an implicit transaction block with the second
    /// command (start_xact_command).
    pub(crate) fn is_statement_of_its_own(&self) -> bool {
        // SAFETY: only pgrx makes such a value, of the call that this process is carrying out.
        // Set-returning functions are called with a ReturnSetInfo, whose context belongs to a
        // running query; the portal is alive while a statement of it runs.
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
            // Loops of PL/pgSQL run portals too, which SPI names.
            let name = CStr::from_ptr((*portal).name).to_bytes();
            let ours = (*(*result).econtext).ecxt_estate == (*(*portal).queryDesc).estate;
            ours && !name.starts_with(b"<unnamed portal")
        }
    }
}

/// Has the present statement, of which [`Call::is_statement_of_its_own`] is true, committed when it
/// has ended, also in a pipeline: what `PreventInTransactionBlock` (xact.c) does after its checks.
pub(crate) fn commit_after_this_statement() {
    // SAFETY: a plain global of this process, which the start of a transaction clears.
    unsafe { pg_sys::MyXactFlags |= pg_sys::XACT_FLAGS_NEEDIMMEDIATECOMMIT as i32 }
}

/// Role and database of a session, as messages show them; nothing in processes that have none.
#[derive(Default)]
pub(crate) struct Identity {
    /// The session user.
    pub(crate) role: Option<String>,
    /// Who has logged in, where another (SET SESSION AUTHORIZATION).
    pub(crate) login_role: Option<String>,
    /// The current user, where another (SET ROLE, SECURITY DEFINER).
    pub(crate) current_role: Option<String>,
    pub(crate) database: Option<String>,
}

/// Who this process acts for.
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

/// Who this process acts for, of what it has at hand. Reads no catalog: for where no error must be
/// raised. There are numbers in place of some names.
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
            // The setting is not reset by SET SESSION AUTHORIZATION (show_role, variable.c).
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

/// Who has logged in, if the session user is another one.
fn login_role(session: Oid) -> Option<Oid> {
    // SAFETY: plain look-ups of this session. Others than sessions of clients have no such role.
    unsafe {
        let is_session = !pg_sys::MyProcPort.is_null();
        is_session.then(|| pg_sys::GetAuthenticatedUserId()).filter(|role| *role != session)
    }
}

/// The number of the current subtransaction; that of the transaction where there is none.
pub(crate) fn subtransaction() -> pg_sys::SubTransactionId {
    // SAFETY: a plain look-up of this session.
    unsafe { pg_sys::GetCurrentSubTransactionId() }
}

/// True while a session begins, or a command of it is carried out; not where it reads the
/// configuration again in between, where a transaction is rolled back, nor in a process without
/// client.
///
/// No portal is active where functions are called by planner, fast path, deferred triggers or
/// triggers at login; but a snapshot is.
pub(crate) fn sets_for_itself() -> bool {
    // SAFETY: plain globals of this process.
    unsafe {
        let begins = pg_sys::Mode != pg_sys::ProcessingMode::NormalProcessing;
        let carries_out = || !pg_sys::ActivePortal.is_null() || pg_sys::ActiveSnapshotSet();
        let is_session = !pg_sys::MyProcPort.is_null() || !pg_sys::IsUnderPostmaster;
        is_session && pg_sys::IsTransactionState() && (begins || carries_out())
    }
}

/// A session can outlive its role.
fn role_name(role: Oid) -> String {
    // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
    let name = unsafe { ServerText::copied(pg_sys::GetUserNameFromId(role, true)) };
    name.map_or_else(|| role_number(role), |name| name.to_string())
}

fn role_number(role: Oid) -> String {
    format!("role {role}")
}
