//! The library that `pagevault-keyring exec` loads into PostgreSQL's own programs (`pg_waldump`,
//! `pg_rewind` and others), so that they read and write sealed WAL. It replaces `open`, `read`,
//! `pwrite` and similar functions.
//!
//! | module | subject |
//! |---|---|
//! | `begin` | before `main`: takes the briefing, hides it from other programs |
//! | `unasked` | without a briefing: has `pg_rewind` and `pg_upgrade` run by `exec` |
//! | `calls` | the replacements of the C library's functions |
//! | `files` | the role of each path, and the open descriptors of segments |
//! | `segment` | reading and writing sealed WAL segments |
//! | `keystore` | replaces the keystore of `pg_rewind`'s target in one step |
//! | `raw` | the system calls |
//!
//! Programs with another name than the briefing says are left alone: the shell that runs a
//! `restore_command` copies segments as they are.
//!
//! Linux only. The programs are single-threaded; their children inherit this library's state.

mod begin;
mod calls;
mod files;
mod keystore;
mod raw;
mod segment;
mod unasked;

/// Prints a message on standard error.
fn say(text: &str) {
    let line = format!("pagevault: {text}\n");
    // SAFETY: the bytes are those of the line, passed with its length.
    unsafe { raw::write(2, line.as_ptr(), line.len()) };
}
