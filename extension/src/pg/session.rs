//! Who is asking.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Oid};

use super::{catalog, process};

/// Runs `work` as the bootstrap superuser, with a search path that nobody else can put anything into. Is
/// undone by the end of `work`, or by the abort of the (sub)transaction.
pub(crate) fn as_owner_of_the_cluster<R>(work: impl FnOnce() -> R) -> R {
    let (mut user, mut context) = (Oid::INVALID, 0);
    // SAFETY: what the server's own ri_PerformCheck (ri_triggers.c) and maintenance commands do: switch the user,
    // open a level of settings, and go back; an ERROR leaves both to AbortTransaction or AbortSubTransaction.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&raw mut user, &raw mut context);
        pg_sys::SetUserIdAndSecContext(
            pg_sys::BOOTSTRAP_SUPERUSERID.into(),
            context | pg_sys::SECURITY_LOCAL_USERID_CHANGE as i32,
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

/// True if a function was called by a statement of the client's own, in no transaction block: not by another
/// function, and not together with anything that could be rolled back.
///
/// # Safety
/// `call` is the call that this process is carrying out.
pub(crate) unsafe fn is_statement_of_its_own(call: pg_sys::FunctionCallInfo) -> bool {
    // SAFETY: set-returning functions are called with a ReturnSetInfo, whose context belongs to a running query;
    // the portal is alive while a statement of it runs.
    unsafe {
        if pg_sys::IsTransactionBlock() || pg_sys::IsSubTransaction() {
            return false;
        }
        let (portal, result) = (pg_sys::ActivePortal, (*call).resultinfo);
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

/// Role and database of a session; nothing in processes that have none.
#[derive(Default)]
pub(crate) struct Identity {
    /// The session user.
    pub(crate) role: Option<String>,
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
        role: role_name(session),
        current_role: if current == session { None } else { role_name(current) },
        database: catalog::database_name(process::my_database()),
    }
}

fn role_name(role: Oid) -> Option<String> {
    // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
    unsafe {
        let name = pg_sys::GetUserNameFromId(role, true);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}
