//! Audited operations of GRANT and similar statements: who may manage keys, call our functions, or
//! change our settings.

use std::ffi::{CStr, c_char};

use pgrx::PgList;
use pgrx::pg_sys::{self, NodeTag, RoleSpecType};

use super::audited::{FUNCTIONS, is_ours, text};
use crate::audit::Operation;
use crate::pg::{catalog, process};
use crate::roles::ADMIN;

const SCHEMA: &str = "pagevault";

pub(super) fn concerns_us(tag: NodeTag) -> bool {
    use NodeTag::*;
    matches!(tag, T_GrantRoleStmt | T_GrantStmt | T_CreateRoleStmt | T_AlterRoleStmt)
}

/// The audited operation of a statement for which [`concerns_us`] is true; `None` if there is none.
/// # Safety
/// `statement` is a parse tree node.
pub(super) unsafe fn operation(statement: *mut pg_sys::Node) -> Option<Operation> {
    if process::creates_us() {
        return None; // the extension's script always grants the same
    }
    // SAFETY: the tag says which node it is; a node and all it points to have the same lifetime.
    unsafe {
        match (*statement).type_ {
            NodeTag::T_GrantRoleStmt => {
                let statement = &*statement.cast::<pg_sys::GrantRoleStmt>();
                let roles = PgList::<pg_sys::AccessPriv>::from_pg(statement.granted_roles);
                let name = |role: *mut pg_sys::AccessPriv| (*role).priv_name;
                let role = roles.iter_ptr().map(name).find(|role| is_of_admins(*role))?;
                let to = names(statement.grantee_roles);
                Some(granted(statement.is_grant, of_role(role), to))
            }
            NodeTag::T_GrantStmt => {
                let statement = &*statement.cast::<pg_sys::GrantStmt>();
                Some(granted(statement.is_grant, object(statement)?, names(statement.grantees)))
            }
            NodeTag::T_CreateRoleStmt => {
                let statement = &*statement.cast::<pg_sys::CreateRoleStmt>();
                let into = option(statement.options, c"addroleto")?;
                let roles = PgList::<pg_sys::RoleSpec>::from_pg(into);
                let name = |role: *mut pg_sys::RoleSpec| (*role).rolename;
                let role = roles.iter_ptr().map(name).find(|role| is_of_admins(*role))?;
                let to = text(statement.role).unwrap_or_default();
                Some(Operation { by: "CREATE ROLE", ..granted(true, of_role(role), to) })
            }
            NodeTag::T_AlterRoleStmt => {
                let statement = &*statement.cast::<pg_sys::AlterRoleStmt>();
                let members = option(statement.options, c"rolemembers")?;
                let role = (*statement.role).rolename;
                let adds = statement.action > 0;
                is_of_admins(role).then(|| Operation {
                    by: "ALTER GROUP",
                    ..granted(adds, of_role(role), names(members))
                })
            }
            _ => None,
        }
    }
}

fn granted(grants: bool, object: String, to: String) -> Operation {
    let (action, by) = if grants { ("grant", "GRANT") } else { ("revoke", "REVOKE") };
    Operation { action, by, to: Some(to), ..Operation::default() }.on(object)
}

/// Whether members of the role of this name can manage keys.
///
/// # Safety
/// `name` is null or NUL-terminated.
unsafe fn is_of_admins(name: *const c_char) -> bool {
    if name.is_null() {
        return false;
    }
    let invalid = pg_sys::Oid::INVALID;
    // SAFETY: the name is NUL-terminated, as the caller guarantees; statements run in a
    // transaction, in which catalogs can be read.
    unsafe {
        let (role, admin) = (catalog::role_oid(CStr::from_ptr(name)), catalog::role_oid(ADMIN));
        role != invalid && admin != invalid && pg_sys::is_member_of_role_nosuper(role, admin)
    }
}

/// # Safety
/// `name` is null or NUL-terminated.
unsafe fn of_role(name: *const c_char) -> String {
    // SAFETY: the name is null or NUL-terminated, as the caller guarantees.
    format!("role {}", unsafe { text(name) }.unwrap_or_default())
}

/// The first of a statement's objects that is ours.
///
/// # Safety
/// `statement` is as the parser made it.
unsafe fn object(statement: &pg_sys::GrantStmt) -> Option<String> {
    use pg_sys::GrantTargetType::{ACL_TARGET_ALL_IN_SCHEMA, ACL_TARGET_OBJECT};
    use pg_sys::ObjectType::{OBJECT_FUNCTION, OBJECT_PARAMETER_ACL, OBJECT_ROUTINE};
    // SAFETY: the lists have the members that the grammar (gram.y) produces.
    unsafe {
        match (statement.targtype, statement.objtype) {
            (ACL_TARGET_OBJECT, OBJECT_FUNCTION | OBJECT_ROUTINE) => {
                let functions = PgList::<pg_sys::ObjectWithArgs>::from_pg(statement.objects);
                let function = functions.iter_ptr().map(|function| strings((*function).objname));
                function.into_iter().find_map(|name| match &name[..] {
                    [schema, name] if schema == SCHEMA => Some(format!("function {name}")),
                    [name] if FUNCTIONS.contains(&&name[..]) => Some(format!("function {name}")),
                    _ => None,
                })
            }
            (ACL_TARGET_ALL_IN_SCHEMA, OBJECT_FUNCTION | OBJECT_ROUTINE) => {
                let ours = strings(statement.objects).iter().any(|schema| schema == SCHEMA);
                ours.then(|| format!("all functions of schema {SCHEMA}"))
            }
            (ACL_TARGET_OBJECT, OBJECT_PARAMETER_ACL) => {
                let settings = strings(statement.objects);
                let setting = settings.into_iter().find(|setting| is_ours(setting))?;
                Some(format!("setting {}", setting.to_ascii_lowercase()))
            }
            _ => None,
        }
    }
}

/// # Safety
/// `list` is a list of strings, or NIL.
unsafe fn strings(list: *mut pg_sys::List) -> Vec<String> {
    // SAFETY: the members are strings, as the caller guarantees; their texts are NUL-terminated.
    unsafe {
        let list = PgList::<pg_sys::String>::from_pg(list);
        list.iter_ptr().filter_map(|string| text((*string).sval)).collect()
    }
}

/// The list that is the value of an option.
///
/// # Safety
/// `options` is a list of DefElem or NIL; the values of options with this name are lists.
unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<*mut pg_sys::List> {
    // SAFETY: the members are options, each with a name, and the value of this one is a list, as
    // the caller guarantees.
    unsafe {
        let options = PgList::<pg_sys::DefElem>::from_pg(options);
        let option =
            options.iter_ptr().find(|option| CStr::from_ptr((**option).defname) == name)?;
        Some((*option).arg.cast())
    }
}

/// # Safety
/// `roles` is a list of RoleSpec or NIL.
unsafe fn names(roles: *mut pg_sys::List) -> String {
    // SAFETY: the members are roles, as the caller guarantees.
    unsafe {
        let roles = PgList::<pg_sys::RoleSpec>::from_pg(roles);
        roles.iter_ptr().map(|role| name(role)).collect::<Vec<_>>().join(", ")
    }
}

/// # Safety
/// `role` is a role in a statement.
unsafe fn name(role: *mut pg_sys::RoleSpec) -> String {
    // SAFETY: a role of type ROLESPEC_CSTRING has a NUL-terminated name.
    unsafe {
        match (*role).roletype {
            RoleSpecType::ROLESPEC_CSTRING => text((*role).rolename).unwrap_or_default(),
            RoleSpecType::ROLESPEC_PUBLIC => "PUBLIC".to_owned(),
            RoleSpecType::ROLESPEC_SESSION_USER => "SESSION_USER".to_owned(),
            _ => "CURRENT_USER".to_owned(),
        }
    }
}
