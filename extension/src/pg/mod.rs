//! Unsafe fence 2: all code that calls the server's C API directly.
//!
//! The rest of the crate uses the safe interfaces below. Version differences are in [`compat`].

pub(crate) mod audit_destination;
pub(crate) mod buffers;
pub(crate) mod catalog;
pub(crate) mod checkpoint;
pub(crate) mod child;
pub(crate) mod clock;
pub(crate) mod compat;
pub(crate) mod consistency;
pub(crate) mod control_file;
pub(crate) mod critical;
pub(crate) mod exit;
pub(crate) mod externs;
pub(crate) mod guc;
pub(crate) mod heap;
pub(crate) mod image;
pub(crate) mod inheritance;
pub(crate) mod labels;
pub(crate) mod locks;
pub(crate) mod mapping;
mod memory;
pub(crate) mod nesting;
pub(crate) mod pages;
pub(crate) mod privileges;
pub(crate) mod process;
pub(crate) mod processes;
pub(crate) mod redo_of_copies;
pub(crate) mod redo_record;
pub(crate) mod relation;
pub(crate) mod relation_files;
pub(crate) mod reloads;
pub(crate) mod remnants;
pub(crate) mod report;
pub(crate) mod scratch;
pub(crate) mod session;
pub(crate) mod shutdown;
pub(crate) mod statement;
pub(crate) mod statistics;
pub(crate) mod survey;
mod tablespaces;
pub(crate) mod text;
pub(crate) mod wal;
pub(crate) mod worker;
pub(crate) mod xact;
