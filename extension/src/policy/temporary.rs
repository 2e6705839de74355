//! Temporary data: whether what is made now is encrypted. See `pagevault.temp_encryption`.
//!
//! The setting and the keys may change at any time, in each process at a moment of its own. So
//! every page of a temporary table and every temporary file says by itself what it is; here is only
//! asked what new ones become.

use crate::pg::guc::{self, TempEncryption};
use crate::shmem;

/// Whether new pages of temporary tables and new temporary files are encrypted.
#[inline]
pub(crate) fn is_wanted() -> bool {
    match guc::temp_encryption() {
        TempEncryption::Auto => shmem::any_database_key(),
        TempEncryption::On => true,
        TempEncryption::Off => false,
    }
}

/// Whether new segments of the NOTIFY queue are. It is emptied at every start, and its first
/// segment may live until the next one: it cannot wait for the first key.
#[inline]
pub(crate) fn is_wanted_of_queues() -> bool {
    guc::temp_encryption() != TempEncryption::Off
}
