//! Simulated power cuts of real servers.
//!
//! ```text
//!   Scenario   what is set up before, and what happens while the journal is written
//!   Recording  a server whose I/O is written down, with clients that note what was acknowledged
//!   Recorded   base directory, journal, marks: any cut of it can be repeated
//!   judge      starts a server on what a cut may have left, and finds out what it has lost
//!   facts      what a server says of its keys, before a cut and after it
//!   said       what its log may say; known: what PostgreSQL itself does wrong
//!   campaign   which cuts are tried
//! ```

pub mod campaign;
pub mod catalogue;
mod facts;
mod judge;
mod known;
mod ledger;
mod outage;
pub mod recording;
mod said;
pub mod scenarios;
mod witnesses;
mod workload;
