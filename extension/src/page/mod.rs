//! Pages of relations: sealed before they are written, opened after they are read.

pub(crate) mod access;
pub(crate) mod altered;
pub(crate) mod errors;
pub(crate) mod flushing;
pub(crate) mod io;
mod lost;
mod misnamed;
pub(crate) mod names;
pub(crate) mod placeholders;
pub(crate) mod proven;
pub(crate) mod raw_copies;
pub(crate) mod standby_map;
pub(crate) mod undecided;
pub(crate) mod voided;
pub(crate) mod withdrawal;
pub(crate) mod written_over;
