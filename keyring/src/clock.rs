//! The time, for what people read later.

use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since 1970. A time that cannot be represented is the first or the last that can.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
