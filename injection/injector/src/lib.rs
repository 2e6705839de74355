//! Makes chosen calls of a server fail: a library for `LD_PRELOAD` that stands in front of the C
//! library's functions, and so below pagevault's interposition.
//!
//! ```text
//!   PAGEVAULT_INJECTOR       the file with the orders (`order`); outside the data directory
//!   PAGEVAULT_INJECTOR_ROOT  the data directory, without symbolic links in its path
//!   PAGEVAULT_INJECTOR_KEYS  the key file
//! ```
//!
//! Calls are named by function, path and process, and counted over all processes. Only those on
//! files that concern pagevault have names; all others go through. Syncs of files with a name do
//! not reach the disk: no test here cuts the power.

mod begin;
mod by_descriptor;
mod by_path;
mod calls;
mod descriptors;
mod names;
mod next;
mod order;
mod process;
