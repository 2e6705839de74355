//! pagevault: transparent encryption at rest for stock PostgreSQL.
//!
//! The only crate that knows PostgreSQL. See ARCHITECTURE.md for an overview.
//!
//! Start-up has three stages, in this order, each with one function per subsystem:
//!
//! 1. `_PG_init` in the postmaster, while `shared_preload_libraries` are loaded: settings, resource
//!    manager, hooks, replacement of functions. Any error here ends the start.
//! 2. `shmem_request_hook`: requests pagevault's lock.
//! 3. `shmem_startup_hook`: finds the lock, reads the keystore, unlocks. Runs again after a crash
//!    restart.

mod anchor;
mod api;
mod audit;
mod backups;
mod commands;
mod fault;
mod hooks;
mod keys;
mod keystore_dir;
mod page;
mod pg;
mod policy;
mod preload;
mod rekey;
mod remnants;
mod roles;
mod rotation;
mod shmem;
mod shred;
mod stats;
mod sync;
mod verify;
mod workers;
mod writers;

use pgrx::prelude::*;

pg_module_magic!();

extension_sql_file!("../../sql/roles.sql", name = "roles", bootstrap);
extension_sql_file!("../../sql/rekey.sql", name = "rekey", requires = ["roles", rekey_job_rows]);
extension_sql_file!("../../sql/views.sql", name = "views", finalize);

/// Called by the server when the library is loaded. Installs everything if it is loaded from
/// `shared_preload_libraries`. Otherwise (CREATE EXTENSION on a server without the setting) it
/// installs nothing, and all functions report that.
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    preload::start();
}

#[cfg(any(test, feature = "pg_test"))]
mod pgbench_tests;
#[cfg(any(test, feature = "pg_test"))]
mod sql_tests;

/// Set-up of `cargo pgrx test`.
#[cfg(test)]
pub mod pg_test {
    /// Called once before the test server starts.
    pub fn setup(_options: Vec<&str>) {}

    /// Lines added to the test server's postgresql.conf.
    #[must_use]
    pub fn postgresql_conf_options() -> Vec<&'static str> {
        // If the server's role is called pagevault, a schema of its name would be first in the
        // search path.
        let mut lines = vec!["shared_preload_libraries = 'pagevault'", "search_path = 'public'"];
        // Built in the same directory: see tools/test-server. Without it, tests that need keys are
        // skipped.
        let keyring = std::env::current_exe()
            .ok()
            .and_then(|test| Some(test.parent()?.parent()?.join("pagevault-keyring")))
            .filter(|keyring| keyring.exists());
        if let Some(keyring) = keyring {
            let line = format!("pagevault.keyring_command = '{}'", keyring.display());
            lines.push(Box::leak(line.into_boxed_str()));
        }
        lines
    }
}
