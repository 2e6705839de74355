//! What the process does for itself before it sees a secret.

use std::io;
use std::panic;

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::geteuid;
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities,
};

/// Enough for 64 providers at once; servers often allow themselves a million.
const OPEN_FILES: u64 = 1024;

/// No core dumps, no tracing by other processes of the same user, no privileges that the user does
/// not have (nor for what we start), files for the owner only, and panic messages that tell the
/// place but not the value.
///
/// Descriptors of the server are not closed here: it opens them so that they end with `exec`.
///
/// # Errors
/// What the system refused. The caller must not go on.
pub fn harden() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // A core_pattern that pipes into a program ignores RLIMIT_CORE; not dumpable covers that,
    // and closes /proc/PID/mem and ptrace to others of the same user.
    prctl::set_dumpable(false)?;
    let (_, most_files) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES.min(most_files), most_files)?;
    prctl::set_no_new_privs()?;
    if !geteuid().is_root() {
        drop_capabilities()?;
    }
    umask(Mode::from_bits_truncate(0o077));
    panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(String::new, |at| format!(" at {at}"));
        eprintln!("pagevault-keyring: internal error{place}");
    }));
    Ok(())
}

/// Gives up what a service manager may have given the server, such as `CAP_IPC_LOCK`. Root keeps
/// its own: the server never runs as root, and an operator who does means to reach files of others.
fn drop_capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    clear_ambient_capability_set()?;
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(())
}
