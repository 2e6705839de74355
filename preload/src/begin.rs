//! Before `main`: the library takes its briefing and hides it from other programs.
//!
//! The briefing is in anonymous memory. The program has inherited the descriptor, and its number is
//! in the environment. After reading, the memory is wiped, the descriptor closed, and both the
//! number and the library are removed from the environment. Programs that this one runs, such as a
//! `restore_command` or a single-user server, see nothing of them.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, OnceLock, PoisonError};

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::{DataKey, KeyVersion, Lsn, PageKey};
use pagevault_keystore::briefing::{AT_WORK, Briefing, Role, VARIABLE};
use pagevault_keystore::wal::{Switch, WalPhase, stretch_at};
use pagevault_keystore::wal_pages::WalKeys;
use zeroize::Zeroizing;

use crate::{raw, say, unasked};

/// The task of this program, once it is known to be the one in the briefing.
pub(crate) struct Work {
    pub(crate) role: Role,
    switches: Vec<Switch>,
    keys: BTreeMap<KeyVersion, Key>,
}

/// A key that is expanded when it is used first: then the constructors of all libraries have run,
/// and a validated module has tested itself. Of such a module an expanded key is for one thread at
/// a time.
struct Key {
    key: DataKey,
    expanded: Mutex<Option<PageKey>>,
}

impl Key {
    fn with<R>(&self, f: impl FnOnce(&PageKey) -> R) -> R {
        let mut expanded = self.expanded.lock().unwrap_or_else(PoisonError::into_inner);
        if expanded.is_none() {
            without_trace(|| *expanded = Some(PageKey::new(&self.key)));
        }
        // Just put there if need be.
        f(expanded.get_or_insert_with(|| PageKey::new(&self.key)))
    }
}

static WORK: OnceLock<Work> = OnceLock::new();

/// The task of this program; `None` in programs that the briefing does not name.
pub(crate) fn work() -> Option<&'static Work> {
    WORK.get()
}

/// There is no key of that version.
pub(crate) struct NoKey;

impl WalKeys for Work {
    type Error = NoKey;

    fn phase_at(&self, address: Lsn) -> WalPhase {
        stretch_at(self.switches.iter().copied(), address).phase
    }

    fn with_key<R>(&self, version: KeyVersion, f: impl FnOnce(&PageKey) -> R) -> Result<R, NoKey> {
        self.keys.get(&version).map(|key| key.with(f)).ok_or(NoKey)
    }
}

/// Called by the dynamic linker before the program's `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    let Some(number) = std::env::var_os(VARIABLE) else { return unasked::begin() };
    let number = number.to_str().and_then(|number| number.parse().ok()).ok_or("it has no number");
    // Protect the process also if the keys are meant for a program that this one runs: until that
    // starts, they can be read through the descriptor.
    if let Err(problem) = protect().and(number).and_then(take) {
        say(&format!("could not take over the keys for this program: {problem}"));
        // SAFETY: ends the process, which has begun nothing yet.
        unsafe { libc::_exit(1) };
    }
}

/// Takes the briefing from its descriptor, if it is meant for this program.
fn take(fd: c_int) -> Result<(), &'static str> {
    let bytes = read_all(fd).ok_or("it cannot be read")?;
    // A program that ran between `exec` and the intended one may have read the bytes here already.
    let briefing = without_trace(|| Briefing::decode(&bytes));
    let briefing = briefing.map_err(|_| "it is not of this release")?;
    if matches!(briefing.role, Role::Probe) {
        // SAFETY: the bytes are a constant, passed with its length.
        unsafe { raw::pwrite(fd, AT_WORK.as_ptr(), AT_WORK.len(), 0) };
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|_| "this program's name is not known")?;
    if program.file_name() != Some(OsStr::from_bytes(&briefing.program)) {
        return Ok(());
    }
    hide();
    if !briefing.shared {
        wipe(fd, bytes.len());
    }
    raw::close(fd);
    let later = |(version, key)| (version, Key { key, expanded: Mutex::new(None) });
    let keys = without_trace(|| briefing.keys.into_iter().map(later).collect());
    let work = Work { keys, role: briefing.role, switches: briefing.switches };
    WORK.set(work).map_err(|_| "it was taken before")
}

fn read_all(fd: c_int) -> Option<Zeroizing<Vec<u8>>> {
    let length = usize::try_from(raw::length(fd)).ok()?;
    let mut bytes = Zeroizing::new(vec![0; length]);
    // SAFETY: the vector has room for as many bytes.
    let got = unsafe { raw::pread(fd, bytes.as_mut_ptr(), length, 0) };
    (length > 0 && got == length as isize).then_some(bytes)
}

fn wipe(fd: c_int, length: usize) {
    let zeros = vec![0; length];
    // SAFETY: the bytes are those of the vector, passed with its length.
    unsafe { raw::pwrite(fd, zeros.as_ptr(), length, 0) };
}

/// No core dump of keys, no debugger of the same user, and only root can list the descriptors
/// (proc(5)).
fn protect() -> Result<(), &'static str> {
    // SAFETY: numbers only; no memory is passed.
    match unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err("this process cannot be protected"),
    }
}

/// Restores the environment as it would be without this library.
fn hide() {
    let others = std::env::var_os("LD_PRELOAD").and_then(|list| {
        // `exec` puts this library first.
        let rest = list.as_bytes().split(|c| *c == b':').skip(1).collect::<Vec<_>>().join(&b':');
        CString::new(rest).ok().filter(|rest| !rest.is_empty())
    });
    // SAFETY: before `main` there is one thread; the strings are C strings.
    unsafe {
        libc::unsetenv(c"PAGEVAULT_BRIEFING".as_ptr());
        match others {
            Some(others) => libc::setenv(c"LD_PRELOAD".as_ptr(), others.as_ptr(), 1),
            None => libc::unsetenv(c"LD_PRELOAD".as_ptr()),
        };
    }
}

const _: () = assert!(VARIABLE.len() == c"PAGEVAULT_BRIEFING".count_bytes());
