//! `pagevault-keyring give-up-key-group`: destroys a key group in a data directory whose server is
//! down, because recovery needs its key, and no provider will ever unwrap that again.
//!
//! The command writes one file beside the key files ([`given_up`]), at once. So there is no state
//! in between if it is killed; and it need not know which records at the end of the key files
//! count, which only a server that starts decides. What is in that file counts without WAL. The
//! server takes it into the key files before it reads a page, and logs it when it may.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;

use pagevault_cipher::KeyVersion;
use pagevault_keystore::given_up::{self, GivenUp};
use pagevault_keystore::protocol::Outcome;
use pagevault_keystore::{DatabaseKey, KeyGroup, RelFile, Scope, Wrapping};

use crate::access::Access;
use crate::audit::tools::TrailEntry;
use crate::clock::now_us;
use crate::escrow::with_trail_result;
use crate::failure::{Failure, refuse, unprintable};
use crate::offline::{DIRECTORY, DatabaseKeys, Keystore, put, require_no_server, unwrapped};
use crate::options::printable;
use crate::verify::Control;

/// What is to be given up, and how.
pub struct Request<'a> {
    /// The data directory.
    pub data_directory: &'a Path,
    /// The name of the key group.
    pub key_group: &'a str,
    /// The name once more; not needed for a dry run.
    pub confirm: Option<&'a str>,
    /// Only print what would be destroyed.
    pub dry_run: bool,
    /// Go on if a provider does not answer.
    pub without_answer: bool,
}

/// Gives a key group up, and prints what is destroyed.
///
/// # Errors
/// If the server is running or needs no recovery, if there is no such group, if a provider unwraps
/// its key or does not answer, or if files cannot be read or written: nothing is changed then.
pub fn give_up_key_group(
    request: &Request<'_>,
    access: Access,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let Request { data_directory, key_group: name, .. } = *request;
    if !request.dry_run && request.confirm != Some(name) {
        return Err(refuse("--confirm differs from the name of the key group")
            .with_detail(
                "The relations of the key group can never be read again. Nothing was changed.",
            )
            .with_hint(
                "Repeat the name with --confirm; or use --dry-run, to see what would be destroyed.",
            ));
    }
    require_no_server(data_directory)?;
    let keystore = match request.dry_run {
        true => Keystore::read(data_directory, access)?,
        false => Keystore::read_to_write(data_directory, access)?,
    };
    require_recovery(&keystore)?;
    let group = keystore.state().key_group_named(name).ok_or_else(|| {
        refuse(format!("key group \"{name}\" does not exist, or has ended"))
            .with_detail("Nothing was changed.")
            .with_hint("\"pagevault-keyring inspect\" shows the key groups. One that was given up has ended: start the server.")
    })?;
    let unanswered = require_no_key(&keystore, name, group, request.without_answer)?;
    let files = files_of(&keystore, group);
    show(out, name, group, &files, &unanswered).map_err(unprintable)?;
    if request.dry_run {
        return writeln!(out, "Nothing was changed.").map_err(unprintable);
    }
    let to = format!("{} relation files", files.len());
    let entry = TrailEntry::begin(&keystore, "give_up_key_group", name, &to)?;
    let done = require_no_server(data_directory)
        .and_then(|()| write(&keystore, group))
        .and_then(|()| require_still_no_server(data_directory));
    // The cluster's key authenticates the line. Its provider may not answer here.
    let keys = cluster_key(&keystore);
    let outcome = if done.is_ok() { "ok" } else { "failed" };
    with_trail_result(entry.end(&keystore, keys.as_ref(), outcome), done)?;
    writeln!(
        out,
        "Key group \"{}\" is destroyed in this data directory. Start the server.",
        printable(name)
    )
    .map_err(unprintable)
}

/// Refuses where nothing is replayed: there `pagevault.shred_key_group()` does it completely, and
/// does not need the key either.
fn require_recovery(keystore: &Keystore) -> Result<(), Failure> {
    let is_there = |name: &str| keystore.data_directory().join(name).exists();
    if !Control::ask(keystore.data_directory())?.ended
        || is_there("standby.signal")
        || is_there("recovery.signal")
    {
        return Ok(());
    }
    Err(refuse("the server was shut down cleanly, and starts without the key")
        .with_detail("Nothing was changed.")
        .with_hint(
            "Start the server, and use pagevault.shred_key_group(): it does not need the key.",
        ))
}

/// Asks all master keys of all versions of the group's key that are in use. Returns the failures of
/// those that gave no answer.
fn require_no_key(
    keystore: &Keystore,
    name: &str,
    group: KeyGroup,
    without_answer: bool,
) -> Result<Vec<String>, Failure> {
    let scope = group.scope();
    let asked: Vec<(KeyVersion, &DatabaseKey, &Wrapping)> = versions(keystore, scope)
        .into_iter()
        .filter_map(|version| Some((version, keystore.state().database_key(scope, version)?)))
        .flat_map(|(version, key)| key.wrappings().map(move |wrapping| (version, key, wrapping)))
        .collect();
    let mut operations = Vec::new();
    // Whether a key file is asked. One that cannot be asked for, because of the configuration here,
    // has a failure.
    let is_in_file: Vec<Result<bool, Failure>> = asked
        .iter()
        .map(|(_, _, wrapping)| {
            let operation = keystore.unwrap_operation(scope, wrapping, without_answer)?;
            let is_in_file = operation.provider.kind == "file";
            operations.push(operation);
            Ok(is_in_file)
        })
        .collect();
    let mut outcomes = keystore.ask(operations).into_iter();
    let mut unanswered = Vec::new();
    for ((version, key, wrapping), is_in_file) in asked.into_iter().zip(is_in_file) {
        let (outcome, is_in_file) = match is_in_file {
            Err(failure) => (Outcome::Failed(failure), false),
            Ok(is_in_file) => {
                let outcome = outcomes.next();
                (outcome.unwrap_or_else(|| Outcome::Failed(refuse("no reply"))), is_in_file)
            }
        };
        let what = format!(
            "master key \"{}\" of provider \"{}\"",
            printable(&wrapping.master_key),
            printable(&wrapping.provider)
        );
        let plain = unwrapped(outcome)
            .and_then(|plain| keystore.require_recorded((scope, version), key, wrapping, &plain));
        match plain {
            Ok(()) => {
                return Err(refuse(format!("the key of key group \"{name}\" can be had"))
                    .with_detail(format!("It is unwrapped by {what}. Nothing was changed."))
                    .with_hint("Start the server: it needs nothing else. To end the group all the same, use pagevault.shred_key_group() then."));
            }
            // No key file says that a key is gone: it may be an old copy, or a new file where the
            // right one is not mounted.
            Err(failure) if is_in_file => unanswered.push(format!(
                "{what}: {}; another copy of the key file may have the key",
                failure.message
            )),
            Err(failure) if is_refusal(&failure) => {}
            Err(failure) => unanswered.push(format!("{what}: {}", failure.message)),
        }
    }
    if unanswered.is_empty() || without_answer {
        return Ok(unanswered);
    }
    Err(refuse(format!("it is not known whether the key of key group \"{name}\" is gone"))
        .with_detail(format!("No answer from {}. Nothing was changed.", unanswered.join("; ")))
        .with_hint("Make the provider reachable for this command, or ask the owner of the key. Options of a provider can be replaced with --providers; --allow-credentials and --allow-command permit those in the key files. If the provider will never answer again, or no copy of a key file has the key, use --without-answer."))
}

/// Whether the provider has answered, and will not unwrap with the key. Anything else may pass.
fn is_refusal(failure: &Failure) -> bool {
    failure.class.is_revocation() && !failure.retry
}

/// The versions of the database key that wrap data keys, and the newest, which will wrap others.
fn versions(keystore: &Keystore, scope: Scope) -> BTreeSet<KeyVersion> {
    let state = keystore.state();
    let keys = state.files().flat_map(|(_, entry)| entry.keys.values());
    let used = keys.filter(|key| key.scope == scope).map(|key| key.key_version);
    used.chain(state.current_database_key(scope).map(|(version, _)| version)).collect()
}

/// The files that have data keys under the key of a group, and whether each is written under it.
fn files_of(keystore: &Keystore, group: KeyGroup) -> BTreeMap<RelFile, bool> {
    let scope = group.scope();
    let files = keystore.state().files().filter_map(|(file, entry)| {
        let under = |key: &_| key_scope(key) == scope;
        entry.keys.values().any(under).then(|| {
            let current = entry.phase.current().and_then(|version| entry.keys.get(&version));
            (file, current.is_some_and(under))
        })
    });
    files.collect()
}

fn key_scope(key: &pagevault_keystore::state::DataKey) -> Scope {
    key.scope
}

fn show(
    out: &mut impl Write,
    name: &str,
    group: KeyGroup,
    files: &BTreeMap<RelFile, bool>,
    unanswered: &[String],
) -> io::Result<()> {
    let name = printable(name);
    writeln!(
        out,
        "Key group \"{name}\" ({}): {} relation files",
        group.scope().name(),
        files.len()
    )?;
    for what in unanswered {
        writeln!(out, "no answer from {what}")?;
    }
    let mut databases: BTreeMap<u32, Vec<(&RelFile, bool)>> = BTreeMap::new();
    for (file, is_current) in files {
        databases.entry(file.database).or_default().push((file, *is_current));
    }
    for (database, files) in databases {
        writeln!(out, "database {database}: {} relation files", files.len())?;
        for (RelFile { tablespace, relation, .. }, is_current) in files {
            let left = if is_current { "" } else { ", former keys only" };
            writeln!(out, "  tablespace {tablespace}, relfilenumber {relation}{left}")?;
        }
    }
    writeln!(
        out,
        "So are the files of the group that are made in WAL that is still to be replayed."
    )
}

/// A server writes its lock file before it reads the keystore (`PostmasterMain`, postmaster.c). So
/// if none is there now, the next start knows of the group.
fn require_still_no_server(data_directory: &Path) -> Result<(), Failure> {
    require_no_server(data_directory).map_err(|_| {
        refuse("a server was started at the same time")
            .with_detail("Either it has read that the key group is destroyed, and its log says so; or not, and it will remove the file pagevault/given_up when it accepts changes.")
            .with_hint("See the server's log. Stop the server before you run the command again.")
    })
}

/// Adds the group to those that were given up.
fn write(keystore: &Keystore, group: KeyGroup) -> Result<(), Failure> {
    let at = i64::try_from(now_us() / 1_000_000).unwrap_or_default();
    let mut groups = keystore.given_up().groups.clone();
    groups.push((group, at));
    let given_up = GivenUp { keystore: keystore.id(), groups };
    let bytes = given_up.encode().map_err(|error| refuse(error.to_string()))?;
    put(keystore, given_up::NAME, &bytes).map_err(|error| {
        let directory = keystore.data_directory().join(DIRECTORY);
        refuse(format!("could not write to \"{}\": {error}", directory.display()))
            .with_hint("Run the command again: it tells whether the group has ended.")
    })
}

/// The newest database key of the cluster, from which the audit trail's key is derived.
fn cluster_key(keystore: &Keystore) -> Option<DatabaseKeys> {
    let (version, _) = keystore.state().current_database_key(Scope::CLUSTER)?;
    keystore.unlock(&BTreeSet::from([(Scope::CLUSTER, version)])).ok()
}
