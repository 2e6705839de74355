//! Statements, and hooks that are called for them.

use pgrx::pg_sys::{self, NodeTag};

/// The node of CLUSTER (`ClusterStmt`) and, from 19 on, of REPACK, which is also that of CLUSTER
/// (`RepackStmt`).
#[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
pub(crate) const T_REPACK: NodeTag = NodeTag::T_ClusterStmt;
/// The node of CLUSTER (`ClusterStmt`) and, from 19 on, of REPACK, which is also that of CLUSTER
/// (`RepackStmt`).
#[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
pub(crate) const T_REPACK: NodeTag = NodeTag::T_RepackStmt;

/// The table that CLUSTER or REPACK names; null if it names none.
///
/// # Safety
/// The statement has the tag [`T_REPACK`], and was produced by the grammar.
pub(crate) unsafe fn repacked_table(statement: *mut pg_sys::Node) -> *mut pg_sys::RangeVar {
    // SAFETY: the caller guarantees the type of the node; what it points to is null or complete.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        return (*statement.cast::<pg_sys::ClusterStmt>()).relation;
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        return (*statement.cast::<pg_sys::RepackStmt>())
            .relation
            .as_ref()
            .map_or(std::ptr::null_mut(), |table| table.relation);
    }
}

/// Defines a function of type `planner_hook_type` that calls `$before` with the query, then the
/// hook in `$previous` or the server's planner. From 19 on planners also get what EXPLAIN wants.
macro_rules! planner_hook {
    ($name:ident, $before:path, $previous:path) => {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        unsafe extern "C-unwind" fn $name(
            query: *mut pg_sys::Query,
            text: *const std::ffi::c_char,
            options: std::ffi::c_int,
            params: pg_sys::ParamListInfo,
        ) -> *mut pg_sys::PlannedStmt {
            // SAFETY: the server's own arguments, passed on unchanged.
            unsafe {
                $before(query);
                let next = $previous.get().unwrap_or($crate::pg::externs::standard_planner);
                next(query, text, options, params)
            }
        }
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        unsafe extern "C-unwind" fn $name(
            query: *mut pg_sys::Query,
            text: *const std::ffi::c_char,
            options: std::ffi::c_int,
            params: pg_sys::ParamListInfo,
            explain: *mut pg_sys::ExplainState,
        ) -> *mut pg_sys::PlannedStmt {
            // SAFETY: the server's own arguments, passed on unchanged.
            unsafe {
                $before(query);
                let next = $previous.get().unwrap_or($crate::pg::externs::standard_planner);
                next(query, text, options, params, explain)
            }
        }
    };
}
pub(crate) use planner_hook;

/// Whether permissions are needed for a relation of a range table: a query names it. None are
/// needed for what the planner adds, partitions and other tables that inherit
/// (`expand_single_inheritance_child`, inherit.c).
///
/// # Safety
/// `entry` is a range table entry.
pub(crate) unsafe fn needs_permission(entry: *mut pg_sys::RangeTblEntry) -> bool {
    // SAFETY: the caller's entry, which lives as long as its query.
    unsafe {
        #[cfg(feature = "pg15")]
        return (*entry).requiredPerms != 0;
        #[cfg(not(feature = "pg15"))]
        return (*entry).perminfoindex != 0;
    }
}

/// Type of ExecutorCheckPerms_hook: gets the range table and, from 16 on, a list of permissions.
#[cfg(feature = "pg15")]
pub(crate) type CheckPerms = unsafe extern "C-unwind" fn(*mut pg_sys::List, bool) -> bool;
/// Type of ExecutorCheckPerms_hook: gets the range table and, from 16 on, a list of permissions.
#[cfg(not(feature = "pg15"))]
pub(crate) type CheckPerms =
    unsafe extern "C-unwind" fn(*mut pg_sys::List, *mut pg_sys::List, bool) -> bool;

/// Defines a function of type [`CheckPerms`] that calls `$check` with the range table, then the
/// hook in `$previous`.
macro_rules! check_perms_hook {
    ($name:ident, $check:path, $previous:path) => {
        #[cfg(feature = "pg15")]
        unsafe extern "C-unwind" fn $name(range_table: *mut pg_sys::List, raise: bool) -> bool {
            // SAFETY: the server's own arguments, passed on unchanged.
            unsafe {
                $check(range_table);
                $previous.get().is_none_or(|next| next(range_table, raise))
            }
        }
        #[cfg(not(feature = "pg15"))]
        unsafe extern "C-unwind" fn $name(
            range_table: *mut pg_sys::List,
            permissions: *mut pg_sys::List,
            raise: bool,
        ) -> bool {
            // SAFETY: the server's own arguments, passed on unchanged.
            unsafe {
                $check(range_table);
                let previous = $previous.get();
                previous.is_none_or(|next| next(range_table, permissions, raise))
            }
        }
    };
}
pub(crate) use check_perms_hook;
