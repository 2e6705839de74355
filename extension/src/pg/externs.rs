//! Functions of the server that pgrx does not bind, or binds only with a guard. An ERROR in them
//! jumps over the caller's frames.

use std::ffi::{c_char, c_int, c_void};

use pgrx::pg_sys;

/// `ClientAuthentication_hook_type` (auth.h): the connection, and whether authentication succeeded.
pub(crate) type ClientAuthentication = unsafe extern "C-unwind" fn(*mut c_void, c_int);

// Signatures as in the sources of 15 to 19, which agree except for names and what is conditional.
unsafe extern "C-unwind" {
    /// auth.c
    pub(crate) static mut ClientAuthentication_hook: Option<ClientAuthentication>;

    /// checkpointer.c
    pub(crate) fn AbsorbSyncRequests();

    /// xlog.c: returns `ControlFile->data_checksum_version > 0`; cannot raise.
    pub(crate) fn DataChecksumsEnabled() -> bool;

    /// postgres.c: signal handler
    pub(crate) fn die(
        signal: c_int,
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        info: *const pg_sys::pg_signal_info,
    );

    /// elog.c
    pub(crate) fn errcode(code: c_int) -> c_int;

    /// elog.c
    pub(crate) fn errstart(level: c_int, domain: *const c_char) -> bool;

    /// elog.c
    pub(crate) fn errfinish(file: *const c_char, line: c_int, function: *const c_char);

    /// pg_inherits.c; may raise.
    pub(crate) fn find_inheritance_children_extended(
        parent: pg_sys::Oid,
        omit_detached: bool,
        lock: pg_sys::LOCKMODE,
        any_detached: *mut bool,
        detached_by: *mut pg_sys::TransactionId,
    ) -> *mut pg_sys::List;

    /// pg_inherits.c; may raise.
    pub(crate) fn find_all_inheritors(
        parent: pg_sys::Oid,
        lock: pg_sys::LOCKMODE,
        parents: *mut *mut pg_sys::List,
    ) -> *mut pg_sys::List;

    /// nodeFuncs.c: calls the walker for each child of a plan state, subplans included, until the
    /// walker returns true; may raise. From 16 on the name is that of a macro that calls this.
    #[cfg_attr(not(feature = "pg15"), link_name = "planstate_tree_walker_impl")]
    pub(crate) fn planstate_tree_walker(
        plan: *mut pg_sys::PlanState,
        walker: unsafe extern "C-unwind" fn(*mut pg_sys::PlanState, *mut c_void) -> bool,
        context: *mut c_void,
    ) -> bool;

    /// ipc.c: calls what is registered for the end of the process, and does not return.
    pub(crate) fn proc_exit(status: c_int) -> !;

    /// startup.c: may end the process.
    #[cfg_attr(
        any(feature = "pg15", feature = "pg16", feature = "pg17"),
        link_name = "HandleStartupProcInterrupts"
    )]
    pub(crate) fn ProcessStartupProcInterrupts();

    /// relmapper.c: cannot raise.
    #[cfg_attr(feature = "pg15", link_name = "RelationMapOidToFilenode")]
    pub(crate) fn RelationMapOidToFilenumber(oid: pg_sys::Oid, is_shared: bool) -> u32;

    /// interrupt.c: signal handler
    pub(crate) fn SignalHandlerForConfigReload(
        signal: c_int,
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        info: *const pg_sys::pg_signal_info,
    );

    /// interrupt.c: signal handler
    pub(crate) fn SignalHandlerForShutdownRequest(
        signal: c_int,
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        info: *const pg_sys::pg_signal_info,
    );

    /// smgr.c; may raise.
    pub(crate) fn smgrnblocks(reln: pg_sys::SMgrRelation, fork: c_int) -> u32;

    /// execMain.c; may raise.
    pub(crate) fn standard_ExecutorStart(query: *mut pg_sys::QueryDesc, flags: c_int);

    /// planner.c; may raise.
    pub(crate) fn standard_planner(
        query: *mut pg_sys::Query,
        text: *const c_char,
        options: c_int,
        params: pg_sys::ParamListInfo,
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        explain: *mut pg_sys::ExplainState,
    ) -> *mut pg_sys::PlannedStmt;

    /// utility.c; may raise.
    pub(crate) fn standard_ProcessUtility(
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
