//! `pagevault-keyring exec -- pg_upgrade ...`: copies the keystore of the old cluster into the new
//! one, and informs the servers that `pg_upgrade` starts ([`pagevault_keystore::upgrade`] describes
//! what is copied, and why).
//!
//! Whatever could make `pg_upgrade` fail later for lack of a key is checked first. The old cluster
//! is only read. The new keystore appears atomically, by renaming its directory. If the process is
//! killed before that, nothing has changed. If it is killed later, the same command can be repeated
//! as far as `pg_upgrade` allows.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pagevault_keystore::interim;
use pagevault_keystore::log::{self, Log};
use pagevault_keystore::presence;
use pagevault_keystore::state::State;
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::upgrade::{self, Majors, Ticket, VARIABLE};

use super::options::Line;
use crate::access::Access;
use crate::failure::{Failure, refuse, unreadable};
use crate::offline::{self, DIRECTORY, Keystore};

/// Directory in which the new keystore is prepared.
const UNFINISHED: &str = "pagevault.upgrade";

/// Prepares the new cluster, and `command`, which will run `pg_upgrade`. `if_needed`: if it cannot
/// be said which clusters are meant, `pg_upgrade` says so itself.
pub(super) fn prepare(
    command: &mut Command,
    access: Access,
    if_needed: bool,
    line: &Line,
) -> Result<(), Failure> {
    let mut old = directory(line, "old-datadir", "PGDATAOLD");
    if let (Some(named), Some(programs)) = (&old, directory(line, "old-bindir", "PGBINOLD")) {
        match data_directory(named, &programs.join("postgres")) {
            Err(_) if if_needed => {}
            found => old = Some(found?),
        }
    }
    if if_needed && !old.as_deref().is_some_and(offline::has_keystore) {
        return Ok(());
    }
    let old = old.ok_or_else(|| refuse("pg_upgrade needs -d or --old-datadir"))?;
    require_cluster(&old)?;
    let new_configuration = directory(line, "new-datadir", "PGDATANEW")
        .ok_or_else(|| refuse("pg_upgrade needs -D or --new-datadir"))?;
    let new_server = new_bindir(line, Path::new(command.get_program())).join("postgres");
    let new = data_directory(&new_configuration, &new_server)?;
    require_cluster(&new)?;
    let real = |path: &Path| fs::canonicalize(path).map_err(|error| unreadable(path, &error));
    if real(&old)? == real(&new)? {
        return Err(refuse("old and new cluster have the same data directory"));
    }
    if !offline::has_keystore(&old) {
        return Ok(()); // no keys: an ordinary cluster
    }
    let only_check = line.has("check");
    if !only_check {
        // A check may be made while the old one runs.
        require_down(&old)?;
    }
    require_down(&new)?;
    let places = access.only_places();
    let keystore = Keystore::read(&old, access)?;
    keystore.unlock(&keystore.needed())?;
    require_preload(&new_server, &new_configuration, line)?;
    let ticket = Ticket { keystore: keystore.id(), only_check };
    if !ticket.only_check {
        let majors = Majors { old: major(&old)?, new: major(&new)? };
        copy_keystore(&keystore, &old, &new, places, majors)?;
    }
    exclude_statistics(command)?;
    command.env(VARIABLE, ticket.encode());
    Ok(())
}

/// Excludes statistics. From 18 on, pg_upgrade dumps them into the new data directory for a while,
/// as plaintext, including values of encrypted tables. As in earlier versions, ANALYZE computes
/// them again.
fn exclude_statistics(command: &mut Command) -> Result<(), Failure> {
    const OPTION: &str = "--no-statistics";
    let program = command.get_program().to_owned();
    let help = Command::new(&program)
        .arg("--help")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| refuse(format!("could not run \"{}\": {error}", program.display())))?;
    if String::from_utf8_lossy(&help.stdout).contains(OPTION) {
        command.arg(OPTION);
    }
    Ok(())
}

/// The data directory that an option or variable names.
fn directory(line: &Line, option: &str, variable: &str) -> Option<PathBuf> {
    let named = line.value(option).map(OsStr::to_owned);
    named.or_else(|| std::env::var_os(variable)).map(PathBuf::from)
}

/// Where the programs of the new server are (`parseCommandLine`, option.c).
fn new_bindir(line: &Line, program: &Path) -> PathBuf {
    directory(line, "new-bindir", "PGBINNEW")
        .unwrap_or_else(|| program.parent().unwrap_or(Path::new("")).to_owned())
}

/// The data directory that a configuration directory names; a data directory itself is returned as
/// it is (`adjust_data_dir`, option.c). pg_upgrade, too, asks without the options of -o and -O.
fn data_directory(named: &Path, server: &Path) -> Result<PathBuf, Failure> {
    if named.join("PG_VERSION").exists() || !named.join("postgresql.conf").exists() {
        return Ok(named.to_owned());
    }
    setting(server, named, &[], "data_directory").map(|output| {
        let line = output.split(|&byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
        PathBuf::from(OsStr::from_bytes(line))
    })
}

/// What a server says of a setting, with a directory and options.
fn setting(
    server: &Path,
    directory: &Path,
    options: &[Vec<u8>],
    name: &str,
) -> Result<Vec<u8>, Failure> {
    let output = Command::new(server)
        .arg("-D")
        .arg(directory)
        .args(options.iter().map(|option| OsStr::from_bytes(option)))
        .args(["-C", name])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| refuse(format!("could not run \"{}\": {error}", server.display())))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(refuse(format!(
        "could not get the settings of \"{}\" from \"{}\"",
        directory.display(),
        server.display()
    ))
    .with_detail(String::from_utf8_lossy(output.stderr.trim_ascii()).into_owned())
    .with_hint("If the configuration is outside of the data directories, name both files: -o \"-c config_file=OLD/postgresql.conf\" -O \"-c config_file=NEW/postgresql.conf\"; or give pg_upgrade the directories of the configuration instead, if the files set data_directory."))
}

fn require_cluster(path: &Path) -> Result<(), Failure> {
    fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    if path.join("PG_VERSION").is_file() {
        return Ok(());
    }
    Err(refuse(format!("\"{}\" is not a data directory", path.display()))
        .with_detail("It has no file PG_VERSION.")
        .with_hint("Specify the data directory; if the configuration files are elsewhere, use the options -o and -O of pg_upgrade."))
}

fn require_down(path: &Path) -> Result<(), Failure> {
    if !path.join("postmaster.pid").exists() {
        return Ok(());
    }
    Err(refuse(format!("a server is running in \"{}\"", path.display()))
        .with_detail("Lock file postmaster.pid exists. Nothing was done.")
        .with_hint("Stop the server."))
}

/// The major version of a data directory (file PG_VERSION).
fn major(data_directory: &Path) -> Result<u32, Failure> {
    let path = data_directory.join("PG_VERSION");
    let text = fs::read_to_string(&path).map_err(|error| unreadable(&path, &error))?;
    text.trim()
        .parse()
        .map_err(|_| refuse(format!("\"{}\" does not contain a major version", path.display())))
}

/// Requires that the new server loads pagevault: otherwise it would write the restored data as
/// plaintext.
fn require_preload(server: &Path, new: &Path, line: &Line) -> Result<(), Failure> {
    // pg_upgrade joins them (`parseCommandLine`, option.c), and a shell splits what results.
    let options = line.all("new-options").collect::<Vec<_>>().join(OsStr::new(" "));
    let options = shlex::bytes::split(options.as_bytes()).ok_or_else(|| {
        refuse(format!("the options \"{}\" of the new server end within quotes", options.display()))
    })?;
    let output = setting(server, new, &options, "shared_preload_libraries")?;
    let libraries = String::from_utf8_lossy(&output).into_owned();
    let mut names = libraries.split(',').map(|name| name.trim().trim_matches('"'));
    if names.any(|name| name.rsplit('/').next() == Some("pagevault")) {
        return Ok(());
    }
    Err(refuse(format!("the new cluster \"{}\" does not load pagevault", new.display()))
        .with_detail("It would write the data that pg_upgrade restores in plaintext. Nothing was done.")
        .with_hint("Configure the new cluster like the old one, including shared_preload_libraries = 'pagevault'."))
}

/// Copies the keystore into the new cluster, unless it is there already.
fn copy_keystore(
    keystore: &Keystore,
    old: &Path,
    new: &Path,
    places: Access,
    majors: Majors,
) -> Result<(), Failure> {
    let whole = upgrade::carry_over(keystore.state().clone(), majors)
        .map_err(|error| refuse(format!("the keystore of the old cluster is damaged: {error}")))?;
    let place = new.join(DIRECTORY);
    if has_logs(&place)? {
        require_replaceable_keystore(keystore, &whole, new, places)?;
    }
    write(keystore, old, &whole, new).map_err(|error| {
        refuse(format!("could not create the keystore of \"{}\": {error}", new.display()))
    })
}

fn has_logs(place: &Path) -> Result<bool, Failure> {
    match fs::read_dir(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(unreadable(place, &error)),
        Ok(entries) => {
            let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
            Ok(names.filter_map(|name| name.to_str().and_then(log::scope_of)).next().is_some())
        }
    }
}

/// The new cluster has a keystore. It may be the result of an earlier attempt, but must not contain
/// keys of its own.
fn require_replaceable_keystore(
    keystore: &Keystore,
    whole: &State,
    new: &Path,
    places: Access,
) -> Result<(), Failure> {
    let present = Keystore::read(new, places)?;
    let detail = if present.id() != keystore.id() {
        "It already has keys of its own, which the upgrade would replace."
    } else if upgrade::is_part_of(present.state(), whole) {
        return Ok(());
    } else {
        "It is a copy of the keystore of the old cluster with additional keys: the cluster was already upgraded, completely or in part."
    };
    Err(refuse(format!("the new cluster \"{}\" already has a keystore", new.display()))
        .with_detail(format!("{detail} Nothing was done."))
        .with_hint("Create the new cluster again with initdb. It needs the settings of the old cluster, but no provider and no keys: the upgrade transfers them."))
}

fn write(keystore: &Keystore, old: &Path, whole: &State, new: &Path) -> io::Result<()> {
    let (unfinished, place) = (new.join(UNFINISHED), new.join(DIRECTORY));
    remove_directory(&unfinished)?;
    let storage = FileStorage::new(&unfinished)?;
    for &scope in keystore.scopes() {
        let records = whole.records(scope);
        Log::create(&storage, keystore.id(), scope, &records).map_err(io::Error::other)?;
    }
    copy_marks(&old.join(DIRECTORY), &unfinished)?;
    File::open(&unfinished)?.sync_all()?;
    // Of an earlier attempt: it may name key files that this one does not have.
    match fs::remove_file(new.join(presence::NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    remove_directory(&place)?;
    fs::rename(&unfinished, &place)?;
    File::open(new)?.sync_all()
}

/// Copies the marks of files with pages under interim keys. pg_upgrade takes over pages as they
/// are, and with them the numbers of files, databases and tablespaces.
fn copy_marks(old: &Path, new: &Path) -> io::Result<()> {
    let marks = match fs::read_dir(old.join(interim::FOLDER)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        marks => marks?,
    };
    let folder = new.join(interim::FOLDER);
    fs::create_dir(&folder)?;
    for mark in marks {
        let mark = mark?;
        let mut copy = File::create_new(folder.join(mark.file_name()))?;
        copy.write_all(&fs::read(mark.path())?)?;
        copy.sync_all()?;
    }
    File::open(&folder)?.sync_all()
}

fn remove_directory(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
