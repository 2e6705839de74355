//! Memory of Rust code.
//!
//! If there is none, Rust aborts the process (`handle_alloc_error`), and the postmaster ends all
//! sessions because of one. The server's own code raises an ERROR
//! (`MemoryContextAllocationFailure`, mcxt.c). Rust code cannot be left by an ERROR wherever it
//! allocates. But where an interrupt may end the process, and no state of ours is in use, FATAL may
//! end it, too: the session alone.
//!
//! Of the startup process, the checkpointer, the background writer, the WAL writer and the
//! autovacuum launcher, the postmaster takes FATAL (exit code 1) for a crash (`reaper`,
//! postmaster.c), so the server restarts there as it would after an abort; when the startup process
//! fails, it may stop.
//!
//! Not covered: an ERROR of the server for want of memory, in a process that has none left at all.
//! pgrx's guard (`pg_guard_ffi_boundary_impl`) copies it into the caller's memory context
//! (`CopyErrorData`). That raises another ERROR, and so on: PANIC `ERRORDATA_STACK_SIZE exceeded`.

use std::alloc::{GlobalAlloc, Layout, System};

use pagevault_interpose::any_in_use;
use pgrx::pg_sys;
use pgrx::prelude::*;

use super::{externs, process};

struct Memory;

// What runs tests (`cargo pgrx test`) is no process of the server, and has none of its symbols.
#[cfg_attr(not(test), global_allocator)]
#[cfg_attr(test, allow(dead_code, reason = "only the server uses it"))]
static MEMORY: Memory = Memory;

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises a layout that is not empty.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises a layout that is not empty.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the memory has this layout and came from here, so from
        // the system's allocator, and that the new size is a valid one.
        or_end(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller promises that the memory has this layout and came from here, so from
        // the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn or_end(memory: *mut u8, size: usize) -> *mut u8 {
    if memory.is_null() {
        end_session(size);
    }
    memory
}

/// Ends the process if it may end here. Otherwise the caller aborts it: callbacks for the end of a
/// transaction that do not get a value of ours would leave locks, pins and files behind.
#[cold]
fn end_session(size: usize) {
    if !process::may_end() || any_in_use() {
        return;
    }
    // SAFETY: the same calls as in ereport(), in the same order. The server keeps memory for
    // messages (`ErrorContext`). FATAL does not return: what this process has open in Rust code is
    // left as when the session is terminated (`ProcessInterrupts`, postgres.c), and the callbacks
    // for its exit release what others could wait for.
    unsafe {
        if externs::errstart(PgLogLevel::FATAL as i32, std::ptr::null()) {
            externs::errcode(PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY as i32);
            pg_sys::errmsg_internal(c"out of memory".as_ptr());
            pg_sys::errdetail_internal(c"pagevault failed on request of size %zu.".as_ptr(), size);
            externs::errfinish(c"memory.rs".as_ptr(), 0, c"end_session".as_ptr());
        }
    }
}
