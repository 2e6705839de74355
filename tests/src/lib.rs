//! Harness for the cluster tests: throw-away PostgreSQL servers and a view of what is in their
//! files.
//!
//! ```text
//!   Installation   one PostgreSQL with pagevault installed (PAGEVAULT_PG_CONFIG)
//!     Cluster      one data directory and its server: start, stop, crash, SQL, log
//!       KeyFile    the file provider's keys, made by the real pagevault-keyring
//!       DataFile   one file of a relation as it lies on disk, read without the server
//!   leaks          values that must not be anywhere, and a scanner that knows them in disguise
//! ```
//!
//! Everything runs as the unprivileged user `PAGEVAULT_SERVER_USER` (default `pagevault`) when the
//! tests run as root, because PostgreSQL refuses root; the tests themselves keep their rights and
//! so can read every file. A test returns `anyhow::Result` and ends with [`Cluster::finish`], which
//! checks that the server log holds no warning that the test did not announce.

pub mod backup;
pub mod cluster;
pub mod datafile;
pub mod errors;
pub mod fault;
mod initdb;
pub mod installation;
pub mod key_servers;
pub mod keyfile;
pub mod leaks;
pub mod log;
pub mod memory;
pub mod process;
pub mod standby;
pub mod tools;
#[cfg(test)]
mod version;
pub mod waiting;
pub mod wal;
pub mod witnesses;

pub use cluster::{Cluster, Settings, StopMode};
pub use datafile::DataFile;
pub use errors::SqlError;
pub use installation::Installation;
pub use keyfile::KeyFile;
pub use standby::Standby;
