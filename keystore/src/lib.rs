//! Key records and their storage, and the protocol between the server and the key provider helper.
//!
//! No plaintext key is stored: records hold wrapped keys. Only [`protocol`] and [`briefing`] carry
//! secrets, in types that wipe them. The crate is pure except for one trait, [`storage::Storage`],
//! and [`installed`], which looks at files.
//!
//! | module | subject |
//! |---|---|
//! | [`rel_file`] | relation files, and their states |
//! | [`record`] | key records |
//! | [`check_value`] | key check values of database keys |
//! | [`anchor`] | what a cluster has reached, as a note outside of it |
//! | [`audit`] | lines of the audit trail, and its state file |
//! | [`manifest_seal`] | the seal of a base backup's manifest |
//! | [`batch`] | the records of one change with a checksum; also the payload of a WAL record |
//! | [`log`] | an append-only file of batches: replay, append, compact |
//! | [`compaction`] | contents and order of a compacted log |
//! | [`storage`] | the file operations that a log needs |
//! | [`sorted`] | a map of few entries |
//! | [`state`] | the state that results from a sequence of records |
//! | [`directory`] | the data keys of each relation file, in shared memory |
//! | [`wal`] | WAL keys, and the addresses from which each is used |
//! | [`wal_pages`] | decrypting and completing single WAL pages |
//! | [`wal_segments`] | reading and writing byte ranges of WAL segments |
//! | [`wal_timelines`] | the timeline of a WAL page |
//! | [`transfer`] | `read`, `preadv` and similar calls in terms of `pread` and `pwrite` |
//! | [`wrappings`] | older wrappings of data keys |
//! | [`escrow`] | database keys in escrow, and keys written by a restore |
//! | [`given_up`] | key groups that were destroyed while the server was down |
//! | [`installed`] | finding `pagevault-keyring`, and whether it can be trusted |
//! | [`briefing`] | data that `pagevault-keyring exec` passes to PostgreSQL's programs |
//! | [`former`] | files that are gone, and whose keys are forgotten |
//! | [`job`] | rekey jobs |
//! | [`job_table`] | rekey jobs, in shared memory |
//! | [`upgrade`] | the keystore of a cluster that `pg_upgrade` creates |
//! | [`object_end`] | where a request or reply ends |
//! | [`protocol`] | requests to `pagevault-keyring`, and its replies |

#![forbid(unsafe_code)]

pub mod anchor;
pub mod audit;
pub mod batch;
mod binding;
pub mod briefing;
pub mod check_value;
pub mod compaction;
pub mod directory;
mod error;
pub mod escrow;
mod failure;
pub mod former;
pub mod given_up;
pub mod installed;
pub mod interim;
pub mod job;
pub mod job_table;
mod line;
pub mod log;
pub mod manifest_seal;
pub mod object_end;
pub mod presence;
pub mod protocol;
pub mod record;
pub mod rel_file;
mod scope;
pub mod sorted;
pub mod state;
pub mod storage;
mod sync;
pub mod transfer;
pub mod upgrade;
pub mod wal;
pub mod wal_pages;
pub mod wal_segments;
pub mod wal_timelines;
mod wire;
pub mod wrappings;

pub use binding::{data_key_aad, master_context};
pub use check_value::CheckValue;
pub use error::{FormatError, Problem};
pub use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};
pub use record::{DatabaseKey, Record, Wrapping};
pub use rel_file::{Phase, RelFile};
pub use scope::{KeyGroup, Scope};
