//! Keys that redo waits for at a page.

use super::io::{Cause, PageFault};
use crate::keys::provider::unlock;
use crate::keys::usage::key_error::KeyError;

/// In the startup process of a standby or a restore: if the cause of the fault is that the key of a
/// key group is locked, waits for it. Whether the key is there now, or the group was given up.
///
/// Redo holds locks on pages of the same relation, if any. Sessions that wait for these want to
/// read what is locked.
#[cold]
pub(crate) fn has_key(fault: PageFault) -> bool {
    match fault.cause {
        Cause::Key(KeyError::Locked { scope }) => unlock::await_key_of_group(scope),
        _ => false,
    }
}
