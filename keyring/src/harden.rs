//! Protection of the process, before it handles a secret.

use std::io::{self, Write};
use std::panic;
use std::sync::OnceLock;

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::geteuid;
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities,
};

/// Enough for everything but many providers at once, for which `serve` allows more; servers often
/// have a limit of a million.
const OPEN_FILES: u64 = 1024;

/// The limit of open files, and the mode of new files, that this process was started with.
static BEFORE: OnceLock<(u64, Mode)> = OnceLock::new();

/// No core dumps; no tracing by other processes of the same user; no privileges beyond the user's,
/// also in child processes; new files for the owner only; and panic messages without values.
///
/// Descriptors of the server are not closed here: it opens them with close-on-exec.
///
/// # Errors
/// Those of the system calls. The caller must not continue.
pub fn harden() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // RLIMIT_CORE does not apply if core_pattern pipes into a program. Not dumpable covers that,
    // and denies other processes of the same user /proc/PID/mem and ptrace.
    prctl::set_dumpable(false)?;
    let (files, most_files) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES.min(most_files), most_files)?;
    prctl::set_no_new_privs()?;
    if !geteuid().is_root() {
        drop_capabilities()?;
    }
    let _ = BEFORE.set((files, umask(Mode::from_bits_truncate(0o077))));
    panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(String::new, |at| format!(" at {at}"));
        // Who reads it may be gone.
        let _ = writeln!(io::stderr(), "pagevault-keyring: internal error{place}");
    }));
    Ok(())
}

/// For a program of PostgreSQL that is run in the place of this one: what does not protect secrets
/// is as it was.
pub(crate) fn relax() {
    if let Some(&(files, mode)) = BEFORE.get() {
        umask(mode);
        if let Ok((_, most_files)) = getrlimit(Resource::RLIMIT_NOFILE) {
            // It was possible before.
            let _ = setrlimit(Resource::RLIMIT_NOFILE, files, most_files);
        }
    }
}

/// Drops capabilities that a service manager may have given the server, such as `CAP_IPC_LOCK`.
/// Root keeps its own: the server never runs as root, and an operator who uses root wants access to
/// files of others.
fn drop_capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    clear_ambient_capability_set()?;
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(())
}
