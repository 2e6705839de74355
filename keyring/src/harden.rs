//! What the process does for itself before it sees a secret.

use std::io;
use std::panic;

use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, umask};

/// No core dumps, no tracing by other processes of the same user, files for the owner only, and
/// panic messages that tell the place but not the value.
///
/// # Errors
/// What the system refused. The caller must not go on.
pub fn harden() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // A core_pattern that pipes into a program ignores RLIMIT_CORE; not dumpable covers that,
    // and closes /proc/PID/mem and ptrace to others of the same user.
    prctl::set_dumpable(false)?;
    umask(Mode::from_bits_truncate(0o077));
    panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(String::new, |at| format!(" at {at}"));
        eprintln!("pagevault-keyring: internal error{place}");
    }));
    Ok(())
}
