//! The file by which a test gives orders to the processes of a server, and in which these write
//! down their calls. Every process maps it. Numbers are little-endian.
//!
//! ```text
//!    0  mode      u32, what to do; written last
//!    4  action    u32, what happens to the call
//!    8  errno     u32
//!   12  number    u32, which call of that name, from 1 on
//!   16  always    u32, 1: from that call on all of them
//!   20  seen      u32, calls of that name so far
//!   24  fired     u32, calls that an action was taken for
//!   28  calls     u32, calls that were written down; may exceed what there is room for
//!   32  name      u64, hash of the name of the call
//!   40  jump      i64, seconds by which the clock jumps
//!   64  calls, of ENTRY bytes each: one byte for the length, and the name
//! ```
//!
//! The name of a call has three words: the function, the path below the data directory without its
//! numbers, and the process: `fsync pagevault/#.keys checkpointer`.

/// Where the numbers are.
pub(crate) mod at {
    /// What to do.
    pub(crate) const MODE: usize = 0;
    /// What happens to the call.
    pub(crate) const ACTION: usize = 4;
    /// With which cause it fails.
    pub(crate) const ERRNO: usize = 8;
    /// Which call of that name.
    pub(crate) const NUMBER: usize = 12;
    /// Whether also those after it.
    pub(crate) const ALWAYS: usize = 16;
    /// Calls of that name so far.
    pub(crate) const SEEN: usize = 20;
    /// Calls that an action was taken for.
    pub(crate) const FIRED: usize = 24;
    /// Calls that were written down.
    pub(crate) const CALLS: usize = 28;
    /// Hash of the name of the call.
    pub(crate) const NAME: usize = 32;
    /// Seconds by which the clock jumps.
    pub(crate) const JUMP: usize = 40;
    /// The calls.
    pub(crate) const LIST: usize = 64;
}

/// Bytes for a call that is written down.
pub(crate) const ENTRY: usize = 128;
/// Calls for which there is room.
pub(crate) const ROOM: usize = 1 << 14;
/// Length of the file.
pub(crate) const LENGTH: usize = at::LIST + ROOM * ENTRY;

/// Calls go through.
pub(crate) const OFF: u32 = 0;
/// Calls are written down, and go through.
#[allow(dead_code, reason = "the library asks only whether it is OFF")]
pub(crate) const WATCH: u32 = 1;
/// Calls are written down, and the action is taken for those that are named.
pub(crate) const ACT: u32 = 2;

/// The call is not made, and fails.
pub(crate) const FAIL: u32 = 1;
/// Half of the bytes are read or written.
pub(crate) const SHORTEN: u32 = 2;
/// The call is made, as if the time of day had changed.
pub(crate) const SHIFT: u32 = 3;

/// FNV-1a
#[must_use]
pub(crate) fn hash(name: &[u8]) -> u64 {
    name.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
