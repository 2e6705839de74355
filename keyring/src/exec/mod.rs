//! `pagevault-keyring exec`: PostgreSQL's own programs, with the keys of WAL.
//!
//! The program is started with the library of `preload/` in `LD_PRELOAD`, and inherits anonymous
//! memory that contains the keys ([`pagevault_keystore::briefing`]). No key is in an argument, in
//! the environment, or on disk. The program gets only the WAL keys: no keys of relations, and no
//! database key.
//!
//! The dynamic linker silently ignores a library that it cannot load. So the program is first run
//! with `--version`, and the library must report that it is loaded there.

mod options;
mod tools;
mod unfinished;
mod upgrade;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::unistd::geteuid;
use pagevault_cipher::residue::without_trace;
use pagevault_keystore::briefing::{ASKED, AT_WORK, Briefing, Role, VARIABLE};
use pagevault_keystore::installed::{self, Asking};
use pagevault_keystore::protocol::ErrorClass;
use pagevault_keystore::wal;

use self::options::Line;
use self::tools::{Tool, WalUse};
use crate::access::Access;
use crate::bindir::{find, own_directory};
use crate::failure::{Failure, refuse, unreadable};
use crate::harden;
use crate::offline::{self, Keystore};
use crate::regular::open_regular;

/// File name of the library.
const LIBRARY: &str = "pagevault_preload.so";

/// Replaces this process by the program. Returns only if that fails. `if_needed`: without a
/// keystore or WAL keys it is run as it is.
pub fn exec(
    keystore: Option<&Path>,
    library: Option<&Path>,
    if_needed: bool,
    access: Access,
    line: &[OsString],
) -> Failure {
    prepare(keystore, library, if_needed, access, line).map_or_else(
        |error| error,
        |mut command| {
            // Where the environment names the library, it has asked this process already.
            command.env(ASKED, std::process::id().to_string());
            harden::relax();
            let error = command.exec();
            refuse(format!("could not run \"{}\": {error}", command.get_program().display()))
        },
    )
}

fn prepare(
    keystore: Option<&Path>,
    library: Option<&Path>,
    if_needed: bool,
    access: Access,
    line: &[OsString],
) -> Result<Command, Failure> {
    let Some((name, arguments)) = line.split_first() else {
        return Err(refuse("no program was specified"));
    };
    let program = find(name)?;
    let tool = Tool::of(&program)?;
    let mut command = Command::new(&program);
    command.args(arguments);
    let said = tool.syntax.read(arguments);
    let wal_use = match &tool.wal_use {
        WalUse::Nothing => return Ok(command),
        _ if tools::only_prints_info(arguments) => return Ok(command),
        WalUse::Upgrade => {
            upgrade::prepare(&mut command, access, if_needed, &said)?;
            return Ok(command);
        }
        wal_use => wal_use,
    };
    require_elf(&program)?;
    require_no_privileges(&program)?;
    let library = find_library(library)?;
    probe(&program, &library)?;
    let (data_directory, role) = match wal_use {
        WalUse::Rewind => {
            let target = match tool.directory(&said) {
                Some(target) => target,
                None if if_needed => return Ok(command), // it says so itself
                None => return Err(refuse("pg_rewind needs --target-pgdata")),
            };
            let whole = fs::canonicalize(&target).map_err(|error| unreadable(&target, &error))?;
            // As it is named: links on the way there must be trustworthy, too.
            unfinished::put_back(&target, &access)?;
            let role = Role::Rewind { target: whole.as_os_str().as_bytes().to_vec() };
            (keystore.map_or(target, Path::to_owned), role)
        }
        WalUse::Seal => (data_directory(keystore, tool, &said)?, Role::Seal),
        _ => (data_directory(keystore, tool, &said)?, Role::Read),
    };
    let written = written_directory(tool, &said).filter(|_| tool.writes_there());
    let has_keystore = |place: &PathBuf| offline::has_keystore(place);
    if if_needed && !has_keystore(&data_directory) && !written.as_ref().is_some_and(has_keystore) {
        return Ok(command);
    }
    let places = access.only_places();
    let keystore = Keystore::read(&data_directory, access)?;
    if keystore.wal_keys().next().is_none() {
        if if_needed {
            return Ok(command);
        }
        return Err(never_encrypted(&keystore));
    }
    let mut switches = keystore.state().wal_switches();
    if tool.receives() && switches.all(|switch| switch.phase.version.is_none()) {
        return Err(not_encrypted_yet(&keystore));
    }
    if let Role::Rewind { target } = &role {
        require_same_keystore(target, &places, &said)?;
    }
    if let Some(target) = written {
        require_keystore_of(&target, &keystore, &places)?;
    }
    let briefing = make_briefing(&keystore, role, &tool)?;
    let memory = memory(&briefing.encode())?;
    drop(briefing);
    load(&mut command, &library, &memory);
    // It stays open: the program inherits it.
    std::mem::forget(memory);
    Ok(command)
}

/// Scripts, which some packages install in place of PostgreSQL's programs, are refused: it is not
/// known what they start.
fn require_elf(program: &Path) -> Result<(), Failure> {
    let mut magic = [0; 4];
    let mut file = open_regular(program).map_err(|error| unreadable(program, &error))?;
    if file.read_exact(&mut magic).is_ok() && magic == *b"\x7fELF" {
        return Ok(());
    }
    Err(refuse(format!("\"{}\" is a script, not a program", program.display())).with_hint(
        "Specify the path of the program itself, in the directory that pg_config --bindir shows.",
    ))
}

/// The dynamic linker does not preload libraries into programs that gain privileges; besides, this
/// process has set `no_new_privs`.
fn require_no_privileges(program: &Path) -> Result<(), Failure> {
    let mode = fs::metadata(program).map_err(|error| unreadable(program, &error))?.mode();
    if mode & 0o6000 == 0 {
        return Ok(());
    }
    Err(refuse(format!("\"{}\" is setuid or setgid", program.display())).with_hint(
        "PostgreSQL's programs do not need these mode bits. Use a program without them.",
    ))
}

fn find_library(given: Option<&Path>) -> Result<PathBuf, Failure> {
    let directory = own_directory().unwrap_or_default();
    let places = match given {
        Some(given) => vec![given.to_owned()],
        None => {
            ["../lib", "../lib/postgresql", "../lib64", "../lib64/pgsql", "../lib64/postgresql"]
                .map(|place| directory.join(place).join(LIBRARY))
                .to_vec()
        }
    };
    let found = places.iter().find_map(|place| fs::canonicalize(place).ok());
    let asked = || {
        let output = Command::new(directory.join("pg_config")).arg("--pkglibdir").output().ok()?;
        let path = Path::new(OsStr::from_bytes(output.stdout.trim_ascii())).join(LIBRARY);
        fs::canonicalize(path).ok()
    };
    let library = found.or_else(|| given.is_none().then(asked).flatten()).ok_or_else(|| {
        let shown = places.iter().map(|place| format!("\"{}\"", place.display()));
        let shown = shown.collect::<Vec<_>>().join(", ");
        refuse(format!("the library {LIBRARY} is not installed"))
            .with_detail(format!("There is none at {shown}."))
            .with_hint(
            "Install it in the directory that pg_config --pkglibdir shows, or specify its path with --library.",
        )
    })?;
    // It will get keys.
    let program = std::env::current_exe().ok();
    let asking = Asking { file: program.as_deref(), user: geteuid().as_raw() };
    installed::require(&library, asking).map_err(|unfit| {
        let message = format!("the library \"{}\" is not trusted", library.display());
        Failure::new(ErrorClass::Insecure, message)
            .with_detail(format!("{unfit}. Others could change it, and it would get keys."))
            .with_hint("It, and each directory above it, must belong to root or to you, and nobody else may write there.")
    })?;
    // These characters separate libraries in LD_PRELOAD and cannot be quoted.
    if library.as_os_str().as_bytes().iter().any(|c| b": \t\n".contains(c)) {
        return Err(refuse(format!(
            "the path of the library must not contain a colon or white space: \"{}\"",
            library.display()
        )));
    }
    Ok(library)
}

/// Requires that the library is loaded into this program and works there.
fn probe(program: &Path, library: &Path) -> Result<(), Failure> {
    let briefing = Briefing {
        role: Role::Probe,
        shared: true,
        program: Vec::new(),
        switches: Vec::new(),
        keys: Vec::new(),
    };
    let memory = memory(&briefing.encode())?;
    let mut command = Command::new(program);
    load(&mut command, library, &memory);
    let ended = command
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|error| refuse(format!("could not run \"{}\": {error}", program.display())))?;
    let mut shown = [0; AT_WORK.len()];
    let read = File::from(memory).read_exact_at(&mut shown, 0);
    if read.is_ok() && shown == AT_WORK {
        return Ok(());
    }
    Err(refuse(format!("the library was not loaded into \"{}\"", program.display()))
        .with_detail(format!(
            "The program was run with --version and LD_PRELOAD={}, and the library did not report that it was loaded ({ended}). Nothing was done.",
            library.display()
        ))
        .with_hint("The program must be dynamically linked, and built for the same C library and architecture as the library."))
}

/// Makes a command load the library and inherit the memory.
fn load(command: &mut Command, library: &Path, memory: &OwnedFd) {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    command.env("LD_PRELOAD", list).env(VARIABLE, memory.as_raw_fd().to_string());
}

/// Anonymous memory with this content, which child processes inherit.
fn memory(content: &[u8]) -> Result<OwnedFd, Failure> {
    let make = || -> io::Result<OwnedFd> {
        let memory = rustix::fs::memfd_create("pagevault", rustix::fs::MemfdFlags::empty())?;
        let file = File::from(memory);
        file.write_all_at(content, 0)?;
        Ok(file.into())
    };
    make().map_err(|error| refuse(format!("could not allocate memory for keys: {error}")))
}

fn data_directory(keystore: Option<&Path>, tool: Tool, said: &Line) -> Result<PathBuf, Failure> {
    if let Some(given) = keystore {
        return Ok(given.to_owned());
    }
    if tool.writes_there()
        && let Some(target) = written_directory(tool, said)
    {
        return Ok(target);
    }
    // Only directories that are named: the keystore near a WAL file may be anybody's.
    let environment = std::env::var_os("PGDATA").map(PathBuf::from);
    let mut places = tool.directory(said).into_iter().chain(environment);
    places
        .find(|place| offline::has_keystore(place))
        .ok_or_else(|| {
            refuse("could not determine which keystore to use").with_hint(
                "Specify a data directory, or a copy of one, with --keystore or in PGDATA. It must contain pagevault/cluster.keys.",
            )
        })
}

/// The directory whose WAL a program writes.
fn written_directory(tool: Tool, said: &Line) -> Option<PathBuf> {
    tool.directory(said).or_else(|| std::env::var_os("PGDATA").map(PathBuf::from))
}

/// Requires that WAL in this directory is encrypted by keys of this keystore: the server that is
/// started there must have them.
fn require_keystore_of(
    directory: &Path,
    keystore: &Keystore,
    places: &Access,
) -> Result<(), Failure> {
    if !offline::has_keystore(directory) {
        return Err(refuse(format!("\"{}\" has no keystore", directory.display()))
            .with_detail("A server there could not read WAL that is encrypted. Nothing was done.")
            .with_hint("If WAL was never encrypted there, run the program directly, without exec. Otherwise restore the directory pagevault first."));
    }
    let own = Keystore::read(directory, places.only_places())?;
    if own.id() == keystore.id() {
        return Ok(());
    }
    Err(refuse(format!("\"{}\" has another keystore", directory.display())).with_detail(format!(
        "It does not originate from the same cluster as \"{}\". Nothing was done.",
        keystore.data_directory().display()
    )))
}

/// Requires that the source, if it is a directory, has the same keystore as the target. If the
/// source is a server, the library verifies what it sends.
fn require_same_keystore(target: &[u8], places: &Access, said: &Line) -> Result<(), Failure> {
    let Some(source) = said.value("source-pgdata") else { return Ok(()) };
    let (target, source) = (
        Keystore::read(Path::new(OsStr::from_bytes(target)), places.only_places())?,
        Keystore::read(Path::new(source), places.only_places())?,
    );
    if target.id() == source.id() {
        return Ok(());
    }
    Err(refuse("source and target have different keystores").with_detail(format!(
        "\"{}\" and \"{}\" do not originate from the same cluster, or one of them was given a new keystore. Nothing was done.",
        source.data_directory().display(),
        target.data_directory().display()
    )))
}

fn never_encrypted(keystore: &Keystore) -> Failure {
    refuse(format!("the keystore of \"{}\" has no WAL keys", keystore.data_directory().display()))
        .with_hint("WAL was never encrypted. Run the program directly, without exec.")
}

/// The copy was made while WAL encryption was switched on for the first time, between the key and
/// the switch: it is not known from where on WAL may be encrypted.
fn not_encrypted_yet(keystore: &Keystore) -> Failure {
    let place = keystore.data_directory().display();
    refuse(format!("the keystore of \"{place}\" is from before WAL was encrypted"))
        .with_hint("Make a new copy of it when wal_encrypted in pagevault.status is true.")
}

/// Unwraps the WAL keys.
fn make_briefing(keystore: &Keystore, role: Role, tool: &Tool) -> Result<Briefing, Failure> {
    let wanted: BTreeSet<_> =
        keystore.wal_keys().map(|(_, key)| (key.scope, key.key_version)).collect();
    let unlocked = keystore.unlock(&wanted)?;
    // With enough capacity: a vector that grows leaves copies of keys behind.
    let mut keys = Vec::with_capacity(keystore.wal_keys().count());
    without_trace(|| -> Result<(), Failure> {
        for (version, record) in keystore.wal_keys() {
            let (file, data_key_version) = wal::key_place(version);
            let key = unlocked.data_key(file, data_key_version, record).ok_or_else(|| {
                Failure::new(
                    ErrorClass::WrongCiphertext,
                    format!("WAL key {version} in the keystore cannot be unwrapped"),
                )
            })?;
            keys.push((version, key));
        }
        Ok(())
    })?;
    let switches = keystore.state().wal_switches();
    Ok(Briefing {
        role,
        shared: tool.wal_use == WalUse::ReadByOther,
        program: tool.reader.as_bytes().to_vec(),
        switches: if tool.receives() { wal::for_receiving(switches) } else { switches.collect() },
        keys,
    })
}
