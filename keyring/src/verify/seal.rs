//! Seals of manifests. A manifest says what a base backup consists of, and nothing says who wrote
//! the manifest. `seal-manifest` says that, in a file beside it; `verify` checks it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use pagevault_cipher::KeyVersion;
use pagevault_keystore::Scope;
use pagevault_keystore::manifest_seal::{FILE, MAX_SEAL, OTHERS, Seal, Sealed, seal};

use super::Control;
use super::complete::{OPTIONS, is_stale};
use super::manifest::{self, Manifest};
use crate::access::Access;
use crate::clock::now_us;
use crate::failure::{Failure, refuse, unprintable, unreadable};
use crate::offline::{DatabaseKeys, Keystore};
use crate::regular::read_if_there;

/// The seal while it is written.
pub(super) const UNFINISHED: &str = "backup_manifest.pagevault.new";

/// Longest of the files beyond the manifest, in bytes.
const LONGEST_OTHER: u64 = 16 << 20;

/// Seals the manifest of a base backup with the cluster's key, and prints what was sealed.
///
/// # Errors
/// If it is not an untouched base backup with a manifest that has cryptographic checksums, or the
/// key cannot be unwrapped.
pub fn seal_manifest(
    data_directory: &Path,
    access: Access,
    out: &mut impl Write,
) -> Result<(), Failure> {
    refuse_tar(data_directory)?;
    let keystore = Keystore::read(data_directory, access)?;
    let root = keystore.data_directory();
    let started = || {
        refuse("a server was started in this directory")
            .with_detail("Its manifest does not describe it any more. Nothing was written.")
            .with_hint("Seal the manifest as soon as the backup is taken.")
    };
    if root.join(OPTIONS).exists() {
        return Err(started());
    }
    let Some(text) = manifest::read(root)? else {
        return Err(refuse(format!(
            "there is no \"{}\" in \"{}\"",
            manifest::NAME,
            root.display()
        ))
        .with_detail("It says what a base backup consists of.")
        .with_hint("Take the backup with pg_basebackup, and without --no-manifest."));
    };
    let damaged = |what: &str| refuse(format!("\"{}\" is damaged: {what}", manifest::NAME));
    let manifest = Manifest::parse(&text).map_err(|what| damaged(&what))?;
    if is_stale(root, &manifest) {
        return Err(started());
    }
    if manifest.system.is_some_and(|system| Control::ask(root).is_ok_and(|c| c.system != system)) {
        return Err(damaged("it is of a cluster with another system identifier"));
    }
    if !manifest.is_cryptographic() {
        return Err(refuse("the manifest has no cryptographic checksums")
            .with_detail("Files can be changed so that their CRC-32C stays the same: a sealed manifest would not show it. Nothing was written.")
            .with_hint("Take the backup with pg_basebackup --manifest-checksums=SHA256."));
    }
    let versions = keystore.state().database_keys().map(|(scope, version, _)| (scope, version));
    let newest = versions.filter(|(scope, _)| scope.is_cluster()).max();
    let keys = keystore.unlock(&newest.into_iter().collect())?;
    let (_, version, key) = keys.iter().next().ok_or_else(|| {
        refuse("the keystore has no key of the cluster").with_hint(
            "Set a master key with pagevault.set_cluster_master_key(), and take the backup again.",
        )
    })?;
    let line = seal(&found(root, &text)?, &keystore.id(), (version, key), now_us());
    let place = root.join(FILE);
    write(&place, line.as_bytes(), &root.join(manifest::NAME))
        .map_err(|error| refuse(format!("could not write \"{}\": {error}", place.display())))?;
    let files = manifest.files.len();
    writeln!(
        out,
        "Sealed the manifest of {files} files with version {version} of the cluster's key: {}",
        place.display()
    )
    .map_err(unprintable)
}

/// Writes a new file and renames it, so that there is always a whole one. Whoever can read the
/// manifest can read the seal. What an earlier run has left, which was killed, is removed.
fn write(place: &Path, content: &[u8], manifest: &Path) -> io::Result<()> {
    let new = place.with_file_name(UNFINISHED);
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = || {
        let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
        file.set_permissions(fs::metadata(manifest)?.permissions())?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, place)
    };
    written().inspect_err(|_| drop(fs::remove_file(&new)))?;
    File::open(place.parent().unwrap_or(Path::new(".")))?.sync_all()
}

/// Refuses the archives that `pg_basebackup --format=tar` makes.
pub(super) fn refuse_tar(directory: &Path) -> Result<(), Failure> {
    let archive = ["base.tar", "base.tar.gz", "base.tar.lz4", "base.tar.zst"];
    let archive = archive.map(|name| directory.join(name)).into_iter().find(|path| path.exists());
    let Some(archive) = archive else { return Ok(()) };
    Err(refuse(format!("\"{}\" is a base backup in tar format", directory.display()))
        .with_detail(format!("There is \"{}\".", archive.display()))
        .with_hint("Extract the archives into an empty directory as for a restore, and copy backup_manifest there."))
}

/// What there is to be sealed.
fn found(root: &Path, manifest: &[u8]) -> Result<Sealed, Failure> {
    let mut others = [const { None }; OTHERS.len()];
    for (name, content) in OTHERS.iter().zip(&mut others) {
        let path = root.join(name);
        let read = read_if_there(&path, LONGEST_OTHER);
        *content = read.map_err(|error| unreadable(&path, &error))?;
    }
    Ok(Sealed::new(manifest, &others))
}

/// The content of a seal beside a manifest.
pub(super) fn read(root: &Path) -> Result<Option<Vec<u8>>, Failure> {
    let path = root.join(FILE);
    read_if_there(&path, MAX_SEAL).map_err(|error| unreadable(&path, &error))
}

/// The key that a seal needs, if the keystore has it.
pub(super) fn key_of(keystore: &Keystore, text: &[u8]) -> Option<(Scope, KeyVersion)> {
    let version = Seal::parse(text).ok()?.version;
    keystore.state().database_key(Scope::CLUSTER, version)?;
    Some((Scope::CLUSTER, version))
}

/// A seal that is right for this manifest and the files beside it; else what is wrong.
pub(super) fn check<'a>(
    text: &'a [u8],
    manifest: &[u8],
    keystore: &Keystore,
    keys: &DatabaseKeys,
) -> Result<Result<Seal<'a>, String>, Failure> {
    let found = found(keystore.data_directory(), manifest)?;
    Ok(compare(text, &found, keystore, keys))
}

fn compare<'a>(
    text: &'a [u8],
    found: &Sealed,
    keystore: &Keystore,
    keys: &DatabaseKeys,
) -> Result<Seal<'a>, String> {
    let seal = Seal::parse(text).map_err(|error| error.to_string())?;
    if seal.keystore != keystore.id() {
        return Err("it was made with the key of another cluster".to_owned());
    }
    let is_it = |(scope, version, _): &(Scope, KeyVersion, _)| {
        scope.is_cluster() && *version == seal.version
    };
    let Some((_, _, key)) = keys.iter().find(is_it) else {
        return Err(format!("the keystore has no version {} of the cluster's key", seal.version));
    };
    if !seal.is_authentic(key) {
        return Err("it was changed, or not made with the cluster's key".to_owned());
    }
    if !seal.has_manifest_of(found) {
        return Err(format!("{} is not as it was sealed", manifest::NAME));
    }
    if !seal.has_others_of(found) {
        return Err(format!("not all of {} are as they were sealed", OTHERS.join(", ")));
    }
    Ok(seal)
}
