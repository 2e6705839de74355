//! The key of a page.

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::{DataKeyVersion, PageKey, interim};
use pagevault_keystore::RelFile;
use pagevault_keystore::interim::key_place;

use super::Context;

/// The version of the data key that pages of a file with this version are under, or for which their
/// interim key stands.
pub(super) fn data_key_version(
    context: &Context<'_>,
    file: RelFile,
    version: DataKeyVersion,
) -> Option<DataKeyVersion> {
    if !interim::is_interim(version) {
        return Some(version);
    }
    interim::data_key_of(version, context.keystore.state().file(file)?.last_version()?)
}

/// Whether the key of pages of a file that name this version cannot be had, because its key group
/// is locked. Interim keys are the cluster's.
pub(super) fn is_locked(context: &Context<'_>, file: RelFile, version: DataKeyVersion) -> bool {
    let entry = context.keystore.state().file(file);
    let record = entry.and_then(|entry| entry.keys.get(&version));
    !interim::is_interim(version)
        && record.is_some_and(|record| context.locked.has((record.scope, record.key_version)))
}

/// The key of pages of a file that name this version.
///
/// # Errors
/// Why there is none.
pub(super) fn page_key(
    context: &Context<'_>,
    file: RelFile,
    version: DataKeyVersion,
) -> Result<PageKey, String> {
    let missing = || format!("the keystore has no data key of version {version}");
    let record = |file, version| {
        context.keystore.state().file(file).and_then(|entry| entry.keys.get(&version))
    };
    let own = data_key_version(context, file, version).ok_or_else(missing)?;
    let of_own = record(file, own).ok_or_else(missing)?;
    let mut unwrapped = None;
    if let Some(cipher) = interim::cipher_of(version) {
        // Recovery has written the page while its key group was locked.
        let group = of_own.scope.key_group().filter(|_| of_own.cipher == cipher as u8);
        let place = key_place(group.ok_or_else(missing)?);
        let root = record(place.0, place.1).ok_or_else(missing)?;
        without_trace(|| {
            let root = context.unlocked.data_key(place.0, place.1, root);
            let key = root.and_then(|root| {
                interim::key(&root, file.database, file.relation, own, cipher).ok()
            });
            unwrapped = key.as_ref().map(PageKey::new);
        });
    } else {
        without_trace(|| {
            let key = context.unlocked.data_key(file, version, of_own);
            unwrapped = key.as_ref().map(PageKey::new);
        });
    }
    unwrapped.ok_or_else(|| format!("data key version {version} cannot be unwrapped"))
}
