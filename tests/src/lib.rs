//! Harness for the cluster tests: temporary PostgreSQL servers and access to their files.
//!
//! ```text
//!   Installation     one PostgreSQL with pagevault installed (PAGEVAULT_PG_CONFIG)
//!     Cluster        one data directory and its server: start, stop, crash, SQL, log
//!       KeyFile      keys of the provider `file`, made by the real pagevault-keyring
//!       DataFile     one file of a relation on disk, read without the server
//!   leaks            values that must not be on disk, and a scanner for their encodings
//!   sealing          pages as a server wrote them, sealed and opened by the library
//! ```
//!
//! If the tests run as root, servers and programs run as the unprivileged user
//! `PAGEVAULT_SERVER_USER` (default `pagevault`), because PostgreSQL refuses root. The tests
//! themselves stay root and can read every file. A test returns `anyhow::Result` and ends with
//! [`Cluster::finish`], which checks that the server log contains no warning except those that the
//! test permits.

pub mod backup;
pub mod choice;
pub mod cluster;
mod crashed;
pub mod datafile;
pub mod errors;
pub mod fault;
mod follower;
mod initdb;
pub mod installation;
pub mod key_servers;
pub mod keyfile;
pub mod leaks;
pub mod log;
pub mod memory;
pub mod process;
mod replay;
pub mod schedules;
pub mod sealing;
mod server;
pub mod standby;
pub mod tools;
pub mod unreading;
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
pub use pagevault_powercut_disk::Random;
pub use standby::Standby;
