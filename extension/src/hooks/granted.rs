//! Audited operations of GRANT and similar statements: who may manage keys, call our functions, or
//! change our settings.

use std::ffi::{CStr, c_char};

use pgrx::PgList;
use pgrx::pg_sys::{self, NodeTag, RoleSpecType};

use super::audited::{is_library_list, is_ours, text};
use crate::audit::Operation;
use crate::pg::{catalog, process, session};
use crate::roles::ADMIN;

const SCHEMA: &CStr = c"pagevault";

pub(super) fn concerns_us(tag: NodeTag) -> bool {
    use NodeTag::*;
    matches!(tag, T_GrantRoleStmt | T_GrantStmt | T_CreateRoleStmt | T_AlterRoleStmt)
        || matches!(tag, T_RenameStmt | T_AlterObjectSchemaStmt | T_AlterOwnerStmt)
        || tag == T_ReassignOwnedStmt
}

/// The audited operation of a statement for which [`concerns_us`] is true; `None` if there is none.
/// # Safety
/// `statement` is a parse tree node.
pub(super) unsafe fn operation(statement: *mut pg_sys::Node) -> Option<Operation> {
    // SAFETY: the tag says which node it is; a node and all it points to have the same lifetime.
    unsafe {
        match (*statement).type_ {
            NodeTag::T_GrantRoleStmt => {
                let statement = &*statement.cast::<pg_sys::GrantRoleStmt>();
                let roles = PgList::<pg_sys::AccessPriv>::from_pg(statement.granted_roles);
                let roles = roles.iter_ptr().filter(|role| !(**role).priv_name.is_null());
                let roles = roles.map(|role| named((*role).priv_name));
                let to = names(statement.grantee_roles);
                Some(granted(statement.is_grant, of_admins(roles)?, to))
            }
            NodeTag::T_GrantStmt => {
                let statement = &*statement.cast::<pg_sys::GrantStmt>();
                let to = names(statement.grantees);
                if process::creates_us() && is_of_script(statement) {
                    return None;
                }
                Some(granted(statement.is_grant, objects(statement)?, to))
            }
            NodeTag::T_CreateRoleStmt => {
                let statement = &*statement.cast::<pg_sys::CreateRoleStmt>();
                let members = [c"rolemembers", c"adminmembers"];
                let members = members.into_iter().filter_map(|of| option(statement.options, of));
                let mut to: Vec<_> = members.map(|roles| names(roles)).collect();
                // The extension takes a role of this name for its own.
                let role = if !statement.role.is_null() && CStr::from_ptr(statement.role) == ADMIN {
                    (!to.is_empty()).then(|| format!("role {}", ADMIN.to_string_lossy()))?
                } else {
                    // They become members of both.
                    to.insert(0, text(statement.role).unwrap_or_default());
                    of_admins(each(option(statement.options, c"addroleto")?).into_iter())?
                };
                Some(Operation { by: "CREATE ROLE", ..granted(true, role, to.join(", ")) })
            }
            NodeTag::T_AlterRoleStmt => {
                let statement = &*statement.cast::<pg_sys::AlterRoleStmt>();
                let members = option(statement.options, c"rolemembers")?;
                let role = of_admins(identified(statement.role).into_iter())?;
                let adds = statement.action > 0;
                Some(Operation { by: "ALTER GROUP", ..granted(adds, role, names(members)) })
            }
            // A grant under another name would have no line.
            NodeTag::T_RenameStmt => {
                let statement = &*statement.cast::<pg_sys::RenameStmt>();
                let (by, kind, name) = match statement.renameType {
                    pg_sys::ObjectType::OBJECT_ROLE => ("ALTER ROLE", "role", ADMIN),
                    pg_sys::ObjectType::OBJECT_SCHEMA => ("ALTER SCHEMA", "schema", SCHEMA),
                    _ => return None,
                };
                let (from, to) = (statement.subname, statement.newname);
                let mut names = [from, to].into_iter().filter(|name| !name.is_null());
                if !names.any(|named| CStr::from_ptr(named) == name) {
                    return None;
                }
                let to = text(to);
                let renamed = Operation { action: "rename", by, to, ..Operation::default() };
                Some(renamed.on(format!("{kind} {}", text(from)?)))
            }
            NodeTag::T_AlterObjectSchemaStmt => {
                let statement = &*statement.cast::<pg_sys::AlterObjectSchemaStmt>();
                let object = function(statement.objectType, statement.object)?;
                let to = text(statement.newschema);
                let moved = Operation { action: "rename", to, ..Operation::default() };
                Some(Operation { by: "ALTER FUNCTION", ..moved.on(object) })
            }
            NodeTag::T_AlterOwnerStmt => {
                let statement = &*statement.cast::<pg_sys::AlterOwnerStmt>();
                let (by, object) = if statement.objectType == pg_sys::ObjectType::OBJECT_SCHEMA {
                    let schema = text((*statement.object.cast::<pg_sys::String>()).sval)?;
                    let is_ours = schema.as_bytes() == SCHEMA.to_bytes();
                    ("ALTER SCHEMA", is_ours.then(|| format!("schema {schema}"))?)
                } else {
                    ("ALTER FUNCTION", function(statement.objectType, statement.object)?)
                };
                let to = name(statement.newowner);
                Some(Operation { by, ..granted(true, object, to) })
            }
            NodeTag::T_ReassignOwnedStmt if catalog::has_extension() => {
                let statement = &*statement.cast::<pg_sys::ReassignOwnedStmt>();
                let object = format!("all that {} owns here", names(statement.roles));
                let to = name(statement.newrole);
                Some(Operation { by: "REASSIGN OWNED", ..granted(true, object, to) })
            }
            _ => None,
        }
    }
}

/// A function of ours.
///
/// # Safety
/// `object` is as the parser made it for an object of this type.
unsafe fn function(of_type: pg_sys::ObjectType::Type, object: *mut pg_sys::Node) -> Option<String> {
    use pg_sys::ObjectType::{OBJECT_FUNCTION, OBJECT_ROUTINE};
    if !matches!(of_type, OBJECT_FUNCTION | OBJECT_ROUTINE) {
        return None;
    }
    // SAFETY: such an object has a name and arguments; the look-up is that of the statement
    // (`get_object_address`, objectaddress.c), and raises the errors that it would raise.
    let found = unsafe { pg_sys::LookupFuncWithArgs(of_type, object.cast(), true) };
    catalog::name_in_schema(found, SCHEMA).map(|name| format!("function {name}"))
}

/// Whether the extension's script grants such things, always the same: functions, to these.
///
/// # Safety
/// `statement` is as the parser made it.
unsafe fn is_of_script(statement: &pg_sys::GrantStmt) -> bool {
    const USUAL: [&CStr; 2] = [c"pg_monitor", ADMIN];
    // SAFETY: the grantees are roles; one with a name has a NUL-terminated one.
    let is_usual = |role: *mut pg_sys::RoleSpec| unsafe {
        match (*role).roletype {
            RoleSpecType::ROLESPEC_PUBLIC => true,
            RoleSpecType::ROLESPEC_CSTRING => USUAL.contains(&CStr::from_ptr((*role).rolename)),
            _ => false,
        }
    };
    // SAFETY: a list of roles, or NIL.
    let grantees = unsafe { PgList::<pg_sys::RoleSpec>::from_pg(statement.grantees) };
    statement.objtype != pg_sys::ObjectType::OBJECT_PARAMETER_ACL
        && grantees.iter_ptr().all(is_usual)
}

fn granted(grants: bool, object: String, to: String) -> Operation {
    let (action, by) = if grants { ("grant", "GRANT") } else { ("revoke", "REVOKE") };
    Operation { action, by, to: Some(to), ..Operation::default() }.on(object)
}

/// Those of these roles whose members can manage keys; `None` if there is none. By OID: names may
/// have bytes for which there is no character.
fn of_admins(roles: impl Iterator<Item = (pg_sys::Oid, String)>) -> Option<String> {
    let admin = catalog::role_oid(ADMIN);
    let manages = |role: pg_sys::Oid| {
        // SAFETY: a catalog look-up; statements run in a transaction.
        role != pg_sys::Oid::INVALID && unsafe { pg_sys::is_member_of_role_nosuper(role, admin) }
    };
    if admin == pg_sys::Oid::INVALID {
        return None;
    }
    listed("role", roles.filter(|(role, _)| manages(*role)).map(|(_, name)| name))
}

/// `None` if there is nothing to list.
fn listed(kind: &str, names: impl Iterator<Item = String>) -> Option<String> {
    let names: Vec<_> = names.map(|name| format!("{kind} {name}")).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// The statement's objects that are ours; `None` if there is none.
///
/// # Safety
/// `statement` is as the parser made it.
unsafe fn objects(statement: &pg_sys::GrantStmt) -> Option<String> {
    use pg_sys::GrantTargetType::{ACL_TARGET_ALL_IN_SCHEMA, ACL_TARGET_OBJECT};
    use pg_sys::ObjectType::{OBJECT_FUNCTION, OBJECT_PARAMETER_ACL, OBJECT_ROUTINE};
    // SAFETY: the lists have the members that the grammar (gram.y) produces. The look-up finds the
    // same function as the statement (`objectNamesToOids`, aclchk.c), or raises the error that the
    // statement would raise.
    unsafe {
        match (statement.targtype, statement.objtype) {
            (ACL_TARGET_OBJECT, OBJECT_FUNCTION | OBJECT_ROUTINE) => {
                let functions = PgList::<pg_sys::ObjectWithArgs>::from_pg(statement.objects);
                let found = functions.iter_ptr().filter_map(|function| {
                    let found = pg_sys::LookupFuncWithArgs(statement.objtype, function, true);
                    catalog::name_in_schema(found, SCHEMA)
                });
                listed("function", found)
            }
            (ACL_TARGET_ALL_IN_SCHEMA, OBJECT_FUNCTION | OBJECT_ROUTINE) => {
                let name = SCHEMA.to_str().unwrap_or_default();
                let ours = strings(statement.objects).iter().any(|schema| schema == name);
                ours.then(|| format!("all functions of schema {name}"))
            }
            (ACL_TARGET_OBJECT, OBJECT_PARAMETER_ACL) => {
                let settings = strings(statement.objects).into_iter();
                let ours = settings.filter(|name| is_ours(name) || is_library_list(name));
                listed("setting", ours.map(|setting| setting.to_ascii_lowercase()))
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
/// `roles` is a list of RoleSpec or NIL.
unsafe fn each(roles: *mut pg_sys::List) -> Vec<(pg_sys::Oid, String)> {
    // SAFETY: the members are roles, as the caller guarantees.
    unsafe {
        let roles = PgList::<pg_sys::RoleSpec>::from_pg(roles);
        roles.iter_ptr().filter_map(|role| identified(role)).collect()
    }
}

/// The role that is meant; `None` for PUBLIC, which is none.
///
/// # Safety
/// `role` is a role in a statement.
unsafe fn identified(role: *mut pg_sys::RoleSpec) -> Option<(pg_sys::Oid, String)> {
    // SAFETY: as above; a look-up in a transaction.
    unsafe {
        match (*role).roletype {
            RoleSpecType::ROLESPEC_PUBLIC => None,
            _ => Some((pg_sys::get_rolespec_oid(role, true), name(role))),
        }
    }
}

/// # Safety
/// `name` is the NUL-terminated name of a role.
unsafe fn named(name: *const c_char) -> (pg_sys::Oid, String) {
    // SAFETY: the text ends with a NUL, as the caller guarantees.
    unsafe { (catalog::role_oid(CStr::from_ptr(name)), text(name).unwrap_or_default()) }
}

/// The name of the role that is meant (`get_rolespec_oid`, acl.c).
///
/// # Safety
/// `role` is a role in a statement.
pub(super) unsafe fn name(role: *mut pg_sys::RoleSpec) -> String {
    // SAFETY: a role of type ROLESPEC_CSTRING has a NUL-terminated name.
    unsafe {
        match (*role).roletype {
            RoleSpecType::ROLESPEC_CSTRING => text((*role).rolename).unwrap_or_default(),
            RoleSpecType::ROLESPEC_PUBLIC => "PUBLIC".to_owned(),
            RoleSpecType::ROLESPEC_SESSION_USER => session::session_role(),
            _ => session::current_role(),
        }
    }
}
