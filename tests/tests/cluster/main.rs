//! Cluster tests: each verifies a promise of pagevault on a real server.
//!
//! One file per promise, one server per test. `make test` runs them with a release build of the
//! extension in the PostgreSQL that `PAGEVAULT_PG_CONFIG` names.

mod anchor;
mod audit;
mod authenticated;
mod binary_upgrade;
mod catalogs;
mod checkpoints;
mod crash;
mod damage;
mod databases;
mod ddl;
mod drift;
mod encodings;
mod errors;
mod escrow;
mod exec;
mod golden;
mod health;
mod hygiene;
mod io_methods;
mod key_log;
mod keys;
mod labels;
mod later_versions;
mod leaks;
mod life;
mod limits;
mod lost_wal;
mod memory;
mod modes;
mod neighbours;
mod offline;
mod open_transactions;
mod permissions;
mod preload;
mod proven_backup;
mod proven_files;
mod proven_wal;
mod random_ddl;
mod redo;
mod rekey;
mod removing;
mod reuse;
mod revalidate;
mod rotation;
mod rotation_crashes;
mod routes;
mod sealed_manifest;
mod sealed_only;
mod segments;
mod self_check;
mod shared_labels;
mod shred;
mod statistics;
mod stats;
mod stock_tools;
mod temp;
mod unlock;
mod upgrade;
mod wal;
mod watching;
mod withdrawal;
mod wrong_keys;

use pagevault_tests::datafile::{assert_plain, assert_sealed};
