//! Power cuts, without a server: the journal of what was asked of a disk ([`journal`]), and what a
//! disk may hold after the power failed at some place of it ([`Disk`]).
//!
//! ```text
//!   base directory + journal up to the cut   -> Disk   what was synced, and what was not
//!   Disk + seed                              -> Image  one of the directories that may be left
//! ```
//!
//! The model is what POSIX promises, and what PostgreSQL relies on beyond that: `fsync` of a file
//! makes its contents, its length and its name durable, `fsync` of a directory its entries. Of
//! everything else each write survives, is lost, or is torn between sectors, on its own.

mod directories;
mod disk;
mod file;
mod image;
pub mod journal;
mod random;

pub use disk::{Disk, Ignore, Order};
pub use image::{Image, Survival};
pub use random::Random;
