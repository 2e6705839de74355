//! What pagevault remembers about keys, and how it speaks to the program that holds the master
//! keys.
//!
//! No key is ever here in clear: records hold wrapped keys, and only [`protocol`] carries a secret,
//! in types that wipe it. The crate is pure but for one trait, [`storage::Storage`].
//!
//! | module | subject |
//! |---|---|
//! | [`rel_file`] | files of relations, and how each is written |
//! | [`record`] | the facts that are kept |
//! | [`check_value`] | what tells the right database key from a wrong one |
//! | [`audit`] | lines of the audit trail, and where it stands |
//! | [`batch`] | the records of one change as one checked piece of bytes, also a WAL record's payload |
//! | [`log`] | an append-only file of batches: replay, append, compact |
//! | [`compaction`] | what of a log is written anew, and in which order |
//! | [`storage`] | the file operations a log needs |
//! | [`state`] | records folded into what is so now |
//! | [`directory`] | which key belongs to which relation file, in shared memory |
//! | [`wal`] | keys of WAL, and from where each is used |
//! | [`wal_pages`] | opening and completing pages of WAL |
//! | [`wal_segments`] | reading and writing ranges of segments by these |
//! | [`wal_timelines`] | which timeline a page is of, and which it should be of |
//! | [`transfer`] | `read` and `preadv` for who has `pread`, and so on |
//! | [`wrappings`] | older wrappings of data keys |
//! | [`escrow`] | which database keys are in escrow, and what a restore left |
//! | [`briefing`] | what PostgreSQL's own programs are told by `pagevault-keyring exec` |
//! | [`job`] | rekey jobs |
//! | [`job_table`] | rekey jobs, in shared memory |
//! | [`upgrade`] | what goes along when `pg_upgrade` makes a new cluster |
//! | [`protocol`] | request to and reply from `pagevault-keyring` |

#![forbid(unsafe_code)]

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
pub mod job;
pub mod job_table;
pub mod log;
pub mod protocol;
pub mod record;
pub mod rel_file;
mod scope;
pub mod state;
pub mod storage;
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
pub use record::Record;
pub use rel_file::{Phase, RelFile};
pub use scope::Scope;
