//! Key providers in SQL.

use pgrx::JsonB;
use pgrx::prelude::*;

use super::require_key_admin;
use crate::keys::manage;
use crate::pg::report::OrRaise;

/// Makes a key provider known. Options are checked, the provider is not asked for anything yet.
#[pg_extern]
fn add_provider(name: &str, kind: &str, options: JsonB) {
    require_key_admin("add a key provider")
        .and_then(|()| manage::add_provider(name, kind, &options.0))
        .or_raise();
}

/// Gives a provider other options, after proving that every key it wrapped still unwraps.
#[pg_extern]
fn alter_provider(name: &str, options: JsonB) {
    require_key_admin("alter a key provider")
        .and_then(|()| manage::alter_provider(name, &options.0))
        .or_raise();
}

/// Forgets a provider that wraps nothing.
#[pg_extern]
fn drop_provider(name: &str) {
    require_key_admin("drop a key provider").and_then(|()| manage::drop_provider(name)).or_raise();
}
