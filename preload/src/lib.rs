//! What `pagevault-keyring exec` loads into PostgreSQL's own programs (`pg_waldump`, `pg_rewind`,
//! ...), so that they read and write sealed WAL: it takes the place of `open`, `read`, `pwrite` and
//! their like.
//!
//! | module | subject |
//! |---|---|
//! | `begin` | before `main`: takes the briefing, hides every trace of it |
//! | `calls` | the functions that stand in for the C library's |
//! | `files` | what a path is to us, and which descriptor is open on what |
//! | `segment` | reading and writing sealed WAL segments |
//! | `keystore` | `pg_rewind` replaces the keystore of its target: all of it at once |
//! | `raw` | the system calls themselves |
//!
//! Programs whose name is not that of the briefing are left alone: the shell that runs a
//! `restore_command` copies segments as they are.
//!
//! Linux only. The programs are single-threaded; what they fork inherits all that is here.

mod begin;
mod calls;
mod files;
mod keystore;
mod raw;
mod segment;

/// Tells the user, on standard error.
fn say(text: &str) {
    let line = format!("pagevault: {text}\n");
    // SAFETY: the bytes are those of the line, passed with its length.
    unsafe { raw::write(2, line.as_ptr(), line.len()) };
}
