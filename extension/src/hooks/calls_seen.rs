//! Which of our functions the server has called.
//!
//! A server whose compiler turned indirect calls into direct ones ignores replaced pointers. So
//! each replacement notes its first call, and [`super::proof`] makes the server call all of them
//! before it admits a session.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::pg::compat::READS_INTO_VECTORS;
use crate::shmem;

/// A server function that the server calls through a replaced pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Call {
    Create = 1,
    Extend = 1 << 1,
    ZeroExtend = 1 << 2,
    Read = 1 << 3,
    Write = 1 << 4,
    StartRead = 1 << 5,
    CompleteRead = 1 << 6,
    Open = 1 << 7,
    WriteWal = 1 << 8,
}

use Call::*;

impl Call {
    const ALL: [Call; 9] =
        [Create, Extend, ZeroExtend, Read, Write, StartRead, CompleteRead, Open, WriteWal];

    /// PostgreSQL's name of the function.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Create => "mdcreate",
            Extend => "mdextend",
            ZeroExtend => "mdzeroextend",
            Read if READS_INTO_VECTORS => "mdreadv",
            Read => "mdread",
            Write if READS_INTO_VECTORS => "mdwritev",
            Write => "mdwrite",
            StartRead => "mdstartreadv",
            CompleteRead => "aio_md_readv_cb",
            Open => "open",
            WriteWal => "pwrite",
        }
    }

    /// What the server does by this function, as a part of a sentence.
    pub(crate) fn purpose(self) -> &'static str {
        match self {
            Create => "creates relation files",
            Extend | ZeroExtend => "extends relation files",
            Read | StartRead | CompleteRead => "reads pages",
            Write => "writes pages",
            Open => "opens files",
            WriteWal => "writes WAL",
        }
    }
}

/// The functions that were replaced in this server, as bits.
static REPLACED: AtomicU32 = AtomicU32::new(0);

/// Notes that a function was replaced; in the postmaster.
pub(super) fn expect(call: Call) {
    REPLACED.fetch_or(call as u32, Relaxed);
}

/// Notes a call. After the first call this costs one load and one test.
#[inline]
pub(super) fn note(call: Call) {
    if let Some(shared) = shmem::get()
        && shared.control.calls_seen() & call as u32 == 0
    {
        shared.control.add_calls_seen(call as u32);
    }
}

/// The first replaced function that was not called yet; writing WAL counts only if `with_wal`.
pub(crate) fn missing(with_wal: bool) -> Option<Call> {
    let seen = shmem::get()?.control.calls_seen();
    let missing = REPLACED.load(Relaxed) & !seen;
    let counts = |call: &Call| with_wal || *call != WriteWal;
    Call::ALL.into_iter().filter(counts).find(|call| missing & *call as u32 != 0)
}
