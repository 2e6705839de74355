//! Writes down what a server asks of its disk: a library for `LD_PRELOAD` that stands in front of
//! the C library's functions, and so below pagevault's, which sees plaintext.
//!
//! ```text
//!   PAGEVAULT_POWERCUT_JOURNAL  file to which records are appended; outside the data directory
//!   PAGEVAULT_POWERCUT_ROOT     the data directory, without symbolic links in its path
//!   PAGEVAULT_POWERCUT_SERVER   a number for it, where several servers share a journal
//!   PAGEVAULT_POWERCUT_SYNC_US  how long a sync takes, in microseconds
//! ```
//!
//! A record is appended by one `writev` after its operation and before the caller goes on, so the
//! journal has the order in which processes can know of one another's operations. A sync names the
//! place of the journal at which it began: what was written down before is durable when it ends.
//! Syncs themselves are not made: no disk is needed for what the journal says.
//!
//! `io_uring` is not seen. PostgreSQL 18 only reads through it: nothing calls
//! `pgaio_io_start_writev` (aio_io.c).

mod begin;
mod calls;
mod files;
mod names;
mod note;
mod raw;
mod stdio;
