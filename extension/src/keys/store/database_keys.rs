//! Which versions of database keys are in use.

use std::collections::HashSet;

use pagevault_cipher::KeyVersion;
use pagevault_keystore::Scope;

use crate::pg::report::Result;
use crate::shmem;

/// The database keys that wrap data keys. Reads the entries of all keys of the cluster.
pub(crate) fn wrapping() -> Result<HashSet<(Scope, KeyVersion)>> {
    let directory = &shmem::required()?.directory;
    let mut wrapping = HashSet::new();
    for info in directory.files()? {
        for key in directory.keys(info?.slot)? {
            let key = key?;
            wrapping.insert((key.scope, key.key_version));
        }
    }
    Ok(wrapping)
}

/// The database keys without which data cannot be read or written: those that wrap data keys, and
/// the newest of each scope.
pub(crate) fn in_use() -> Result<HashSet<(Scope, KeyVersion)>> {
    let mut found = wrapping()?;
    found.extend(shmem::required()?.secrets.newest_of_each());
    Ok(found)
}

/// Takes database keys out of memory that are not in use. They stay in the key file, and at the
/// next start there is room for them again.
pub(crate) fn make_room() -> Result<()> {
    let in_use = in_use()?;
    let secrets = &shmem::required()?.secrets;
    for (scope, version, _) in secrets.list() {
        if !in_use.contains(&(scope, version)) {
            secrets.forget(scope, version);
        }
    }
    Ok(())
}
