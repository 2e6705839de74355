//! Where nobody wraps PostgreSQL's programs in `pagevault-keyring exec`, the environment may name
//! this library instead (`LD_PRELOAD`): operators of Kubernetes run `pg_rewind` and `pg_upgrade`
//! themselves, and take variables for their environment. Then the library replaces the program by
//! `pagevault-keyring exec`, which gets the keys and runs the program again.
//!
//! In every other program it does nothing: in `postgres`, `pg_ctl`, shells, and in the helper.

use std::ffi::{CStr, OsStr, OsString, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagevault_keystore::briefing::ASKED;
use pagevault_keystore::installed;

use crate::{raw, say};

/// The programs that others start and that need keys.
const PROGRAMS: [&[u8]; 2] = [b"pg_rewind", b"pg_upgrade"];

/// Environment variable with options for `pagevault-keyring exec`, separated by spaces.
const OPTIONS: &str = "PAGEVAULT_EXEC_OPTIONS";

/// Options that may be in [`OPTIONS`].
const FLAGS: [&str; 3] = ["--allow-command", "--allow-credentials", "--allow-shared-parents"];
const PROVIDERS: &str = "--providers=";

/// Called before `main`, without a briefing. Returns in programs that need no keys.
pub(crate) fn begin() {
    let Ok(program) = std::env::current_exe() else { return };
    let name = program.file_name().unwrap_or_default().as_bytes();
    if !PROGRAMS.contains(&name) {
        return;
    }
    // No keys were needed, and this library is loaded again by another name.
    let number = std::process::id().to_string();
    if std::env::var_os(ASKED).is_some_and(|asked| asked.as_bytes() == number.as_bytes()) {
        return;
    }
    let problem = match arguments() {
        Ok(arguments) if only_prints_info(&arguments) => return,
        Ok(arguments) => run(&program, &arguments),
        Err(problem) => problem,
    };
    say(&problem);
    // Without keys it would fail later, or take WAL that it cannot read for the end of WAL.
    // SAFETY: ends the process, which has begun nothing yet.
    unsafe { libc::_exit(1) };
}

/// Replaces this program; returns why that failed.
fn run(program: &Path, arguments: &[OsString]) -> String {
    let options = match options(&std::env::var_os(OPTIONS).unwrap_or_default()) {
        Ok(options) => options,
        Err(problem) => return problem,
    };
    let path = std::env::var_os("PATH");
    // SAFETY: a system call without arguments, which cannot fail.
    let user = unsafe { libc::geteuid() };
    let helper = installed::find_helper(library().as_deref(), None, path.as_deref(), user);
    let helper = match helper {
        Ok(helper) => helper,
        Err(places) => {
            return format!(
                "could not find the program \"{}\", which gets the keys. {places}",
                installed::HELPER
            );
        }
    };
    let mut command = Command::new(&helper);
    command.env(ASKED, std::process::id().to_string());
    command.args(["exec", "--if-needed"]).args(options).arg("--").arg(program).args(arguments);
    match without_this(&std::env::var_os("LD_PRELOAD").unwrap_or_default()) {
        Some(others) => command.env("LD_PRELOAD", others),
        None => command.env_remove("LD_PRELOAD"),
    };
    let error = command.exec();
    format!("could not run \"{}\": {error}", helper.display())
}

/// The options in the variable. They are permissions; nothing else may be said there, such as
/// another program.
fn options(text: &OsStr) -> Result<Vec<OsString>, String> {
    let parts = text.as_bytes().split(u8::is_ascii_whitespace).filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let is_flag = FLAGS.iter().any(|flag| flag.as_bytes() == part);
            if is_flag || part.starts_with(PROVIDERS.as_bytes()) {
                return Ok(OsString::from_vec(part.to_vec()));
            }
            let part = String::from_utf8_lossy(part);
            let flags = FLAGS.join(", ");
            Err(format!("{OPTIONS} contains \"{part}\". It may contain {flags}, {PROVIDERS}FILE."))
        })
        .collect()
}

/// The list of libraries without this one. Whatever the program runs gets no key by it.
fn without_this(list: &OsStr) -> Option<OsString> {
    let is_separator = |c: &u8| matches!(c, b':' | b' ');
    let is_other = |entry: &&[u8]| {
        let name = entry.rsplit(|c| *c == b'/').next().unwrap_or_default();
        !entry.is_empty() && name != b"pagevault_preload.so"
    };
    let others = list.as_bytes().split(is_separator).filter(is_other);
    let others = others.collect::<Vec<_>>().join(&b':');
    (!others.is_empty()).then(|| OsString::from_vec(others))
}

/// PostgreSQL's programs look for these in their first argument.
fn only_prints_info(arguments: &[OsString]) -> bool {
    let first = arguments.first().map(|first| first.as_bytes());
    matches!(first, Some(b"--help" | b"-?" | b"--version" | b"-V"))
}

/// The arguments of this process, without its name. Not from the standard library: with some C
/// libraries it does not know them before `main`.
fn arguments() -> Result<Vec<OsString>, String> {
    let fd =
        raw::openat(libc::AT_FDCWD, c"/proc/self/cmdline", libc::O_RDONLY | libc::O_CLOEXEC, 0);
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        // SAFETY: the array has room for as many bytes.
        let got = unsafe { raw::read(fd, chunk.as_mut_ptr(), chunk.len()) };
        let Ok(got) = usize::try_from(got) else {
            return Err("the arguments of this program are not known".into());
        };
        if got == 0 {
            break;
        }
        bytes.extend_from_slice(chunk.get(..got).unwrap_or_default());
    }
    raw::close(fd);
    bytes.pop();
    let all = bytes.split(|c| *c == 0).skip(1);
    Ok(all.map(|argument| OsString::from_vec(argument.to_vec())).collect())
}

/// The file of this library.
fn library() -> Option<PathBuf> {
    // SAFETY: Dl_info is a plain structure of pointers and null is a valid value for each; dladdr
    // takes any address. The name is a C string that lives as long as the library is loaded, and is
    // copied at once.
    let path = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(library as *const c_void, &raw mut info);
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        PathBuf::from(OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes()))
    };
    path.is_absolute().then_some(path)
}
