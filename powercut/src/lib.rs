//! Simulated power cuts of real servers.
//!
//! ```text
//!   Scenario   what is set up before, and what happens while the journal is written
//!   Recording  a server whose I/O is written down, with clients that note what was acknowledged
//!   Recorded   base directory, journal, marks: any cut of it can be repeated
//!   judge      starts a server on what a cut may have left, and finds out what it has lost
//!   campaign   which cuts are tried
//! ```

pub mod campaign;
pub mod catalogue;
mod judge;
mod ledger;
pub mod recording;
pub mod scenarios;
mod witnesses;
mod workload;
