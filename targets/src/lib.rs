//! What pagevault replaces in a PostgreSQL server, by name and major, and whether a server in a
//! file has it.
//!
//! The extension (`hooks/install.rs`) replaces what is listed here, and [`check`] looks for the
//! same in a server that is not running. So the answer of `pagevault-keyring check-server` is what
//! a start of that server would find.

#![forbid(unsafe_code)]

mod check;
mod replaced;
mod version;

pub use check::{Finding, Report, check};
pub use replaced::{
    ASYNCHRONOUS_IO, CALLS, Call, Callbacks, DIRECT_CALLS, OTHER_COMPILER, READS_OF_FILES,
    READS_OF_LOCAL_BUFFERS, REPORT_OF_READS, Table, storage_manager, sync_handlers,
};
pub use version::{MAJORS, major_of};
