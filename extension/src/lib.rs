//! pagevault: transparent encryption at rest for stock PostgreSQL.
//!
//! This crate is the edge: the only one that knows PostgreSQL. See ARCHITECTURE.md for the picture.
//!
//! Start-up has three stages, in this order, each with one function per subsystem:
//!
//! 1. `_PG_init` in the postmaster, while `shared_preload_libraries` are loaded: settings, resource
//!    manager, hooks, interposition. Anything that fails here ends the start.
//! 2. `shmem_request_hook`: asks for our lock.
//! 3. `shmem_startup_hook`: finds the lock, reads the keystore, unlocks. Runs again when the server
//!    restarts after a crash of one of its processes.

mod api;
mod audit;
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
mod shmem;
mod shred;
mod stats;
mod verify;
mod workers;
mod writers;

use pgrx::prelude::*;

pg_module_magic!();

extension_sql_file!("../../sql/roles.sql", name = "roles", bootstrap);
extension_sql_file!("../../sql/rekey.sql", name = "rekey", requires = ["roles", rekey_job_rows]);
extension_sql_file!("../../sql/views.sql", name = "views", finalize);

/// Called by the server when the library is loaded: in full only from `shared_preload_libraries`.
/// Loaded otherwise (CREATE EXTENSION on a server without the setting), nothing is installed and
/// every entry point says so.
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
        // The server's role may be called pagevault, and has the schema of its name first in the
        // path else.
        let mut lines = vec!["shared_preload_libraries = 'pagevault'", "search_path = 'public'"];
        // Beside what this was built to: see tools/test-server. Without it, tests that need keys
        // are skipped.
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
