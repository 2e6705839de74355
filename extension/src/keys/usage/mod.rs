//! Use of keys: data keys of relation files, WAL and temporary data are created, looked up, copied
//! and destroyed here.

pub(crate) mod authenticated;
pub(crate) mod cache;
pub(crate) mod closing;
pub(crate) mod copies;
pub(crate) mod data_keys;
pub(crate) mod destruction;
pub(crate) mod dropped;
pub(crate) mod fips;
pub(crate) mod forgetting;
pub(crate) mod interim;
pub(crate) mod key_error;
pub(crate) mod key_groups;
pub(crate) mod overwriting;
pub(crate) mod refused;
mod same_keys;
pub(crate) mod temporary;
pub(crate) mod unneeded;
pub(crate) mod wal;
mod wal_on_disk;
pub(crate) mod wal_switch;
pub(crate) mod withheld;
