//! The atomics of shared memory. In `models/` the sources that use them are compiled a second time,
//! with atomics that try every order of events.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
