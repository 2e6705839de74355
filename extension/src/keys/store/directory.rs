//! Look-ups in the directory of data keys in shared memory. Without a lock.

use pagevault_cipher::{CipherId, DataKeyVersion, KeyVersion, Lsn, PageFormat, interim};
use pagevault_core::policy::{Mixture, Sealing};
use pagevault_keystore::directory::{FileInfo, Writing};
use pagevault_keystore::given_up::AFTER_ALL_WAL;
use pagevault_keystore::interim::{group_at, key_place};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::wal::is_key_place;
use pagevault_keystore::{KeyGroup, Phase, RelFile, Scope};

use crate::shmem::secrets::State;
use crate::shmem::{anything_destroyed, get};

fn current(file: RelFile) -> Option<(DataKeyVersion, u8)> {
    let directory = &get()?.directory;
    directory.current(directory.find(file).ok()??).ok()?
}

/// The key version under which pages of this file are written now; `None` for plaintext.
#[inline]
pub(crate) fn current_version(file: RelFile) -> Option<DataKeyVersion> {
    current(file).map(|(version, _)| version)
}

/// The cipher that pages of this file are written with now; `None` for plaintext.
pub(crate) fn current_cipher(file: RelFile) -> Option<CipherId> {
    current(file).and_then(|(_, cipher)| CipherId::try_from(cipher).ok())
}

/// The scope of the database key that wraps the data key under which this file is written now.
fn current_scope(file: RelFile) -> Option<Scope> {
    let (version, _) = current(file)?;
    data_key(file, version, &mut [0; MAX_WRAPPED_DATA_KEY]).map(|found| found.scope)
}

/// The key group under whose key this file is written now.
pub(crate) fn current_key_group(file: RelFile) -> Option<KeyGroup> {
    current_scope(file).and_then(Scope::key_group)
}

/// How pages of this file are encrypted when they are written; `None` for plaintext.
pub(crate) fn current_sealing(file: RelFile) -> Option<Sealing> {
    Some(Sealing { cipher: current_cipher(file)?, group: current_key_group(file) })
}

/// True if any file, even one that was dropped, is written with a cipher of this page format. Reads
/// the entries of all files of the cluster.
pub(crate) fn any_of_format(format: PageFormat) -> bool {
    any_of(|cipher| PageFormat::of(cipher) == format)
}

/// Likewise with a cipher of which `is_meant` is true.
pub(crate) fn any_of(is_meant: impl FnMut(CipherId) -> bool) -> bool {
    let files = get().and_then(|shared| shared.directory.files().ok());
    let current = files.into_iter().flatten().flatten().filter_map(|known| known.current);
    current.filter_map(|(_, cipher)| CipherId::try_from(cipher).ok()).any(is_meant)
}

/// True if pages of this file are sealed when they are written.
pub(crate) fn is_sealed(file: RelFile) -> bool {
    current(file).is_some()
}

/// True if pages of any file of a database, or of any shared file, are sealed when they are
/// written; dropped files count too. Reads the entries of all files of the cluster.
pub(crate) fn anything_sealed_in(scope: Scope) -> bool {
    let files = get().and_then(|shared| shared.directory.files().ok());
    files
        .into_iter()
        .flatten()
        .flatten()
        .any(|known| known.file.scope() == scope && known.current.is_some())
}

/// How pages of this file are written at present; `None` if it never had a key.
#[inline]
pub(crate) fn writing(file: RelFile) -> Option<Writing> {
    let directory = &get()?.directory;
    directory.writing(directory.find(file).ok()??).ok()
}

/// True if the file contains sealed pages only: a page in plaintext is not its own.
#[inline]
pub(crate) fn is_sealed_only(file: RelFile) -> bool {
    let found = || {
        let directory = &get()?.directory;
        directory.is_sealed_only(directory.find(file).ok()??).ok()
    };
    found() == Some(true)
}

/// True if no page under this version is left on any server, so that such a page is not the file's
/// own.
pub(crate) fn is_former(file: RelFile, version: DataKeyVersion) -> bool {
    is_below(file, version, floor(file))
}

/// Whether this version, or the one that an interim version stands for, is before the [`floor`].
pub(crate) fn is_below(
    file: RelFile,
    version: DataKeyVersion,
    floor: Option<DataKeyVersion>,
) -> bool {
    let version = data_key_version(file, version);
    version.is_some_and(|version| floor.is_some_and(|floor| version < floor))
}

/// The first version under which pages of the file are accepted, if none in plaintext are.
pub(crate) fn floor(file: RelFile) -> Option<DataKeyVersion> {
    let directory = &get()?.directory;
    directory.floor(directory.find(file).ok()??).ok()?
}

/// True if the page on disk, under this version or in plaintext, is what a server may have written
/// that keeps up with the file's rewriting.
#[cold]
pub(crate) fn may_be_on_disk(file: RelFile, version: Option<DataKeyVersion>) -> bool {
    let first = || {
        let directory = &get()?.directory;
        directory.first_version(directory.find(file).ok()??).ok()?
    };
    let version = version.and_then(|version| data_key_version(file, version));
    first().is_none_or(|first| version >= Some(first))
}

/// What the file may contain besides pages in the state of new ones, as far as its keys tell: of
/// unlogged relations nothing is recorded.
pub(crate) fn mixture(file: RelFile) -> Mixture {
    let found = || {
        let directory = &get()?.directory;
        let slot = directory.find(file).ok()??;
        // In this order: a rewriting that ends meanwhile leaves no mixture.
        let (is_mixed, phase) = (directory.is_mixed(slot).ok()?, directory.info(slot).ok()?.phase);
        let has_first = directory.first_version(slot).ok()?.is_some();
        Some(match phase.current() {
            _ if !is_mixed => Mixture::None,
            Some(_) if has_first => Mixture::None,
            Some(_) => Mixture::WithPlaintext,
            None if phase.plaintext => Mixture::WithSealed,
            None => Mixture::None,
        })
    };
    found().unwrap_or(Mixture::None)
}

/// A number that changes when more versions may be [`is_former`].
#[inline]
pub(crate) fn floors() -> u32 {
    get().and_then(|shared| shared.directory.floors().ok()).unwrap_or_default()
}

/// True if every page of the file must have a tag: no page in plaintext is accepted in it, and all
/// keys under which pages are accepted are of ciphers that authenticate pages.
pub(crate) fn is_authenticated(file: RelFile) -> bool {
    let found = || {
        let directory = &get()?.directory;
        let slot = directory.find(file).ok()??;
        let floor = directory.floor(slot).ok()??;
        let mut keys = directory.keys(slot).ok()?;
        Some(keys.all(|key| {
            let Ok(key) = key else { return false };
            let cipher = CipherId::try_from(key.cipher);
            key.version < floor || cipher.is_ok_and(|c| PageFormat::of(c) == PageFormat::V2)
        }))
    };
    found() == Some(true)
}

/// True if the file ever had a data key.
pub(crate) fn is_known(file: RelFile) -> bool {
    get().is_some_and(|shared| matches!(shared.directory.find(file), Ok(Some(_))))
}

/// True if the file is written under a destroyed key: nothing in it can be read.
pub(crate) fn is_destroyed(file: RelFile) -> bool {
    anything_destroyed() && info(file).is_some_and(|info| info.is_destroyed())
}

/// True if keys of the file were destroyed, and none is left.
pub(crate) fn has_lost_all_keys(file: RelFile) -> bool {
    anything_destroyed()
        && info(file).is_some_and(|info| info.destroyed.is_some())
        && newest_key(file).is_none()
}

/// True if keys of the file were destroyed while WAL about it was still to be replayed: no page
/// under them is what WAL says.
pub(crate) fn is_lost(file: RelFile) -> bool {
    let found = || {
        let directory = &get()?.directory;
        directory.destroyed(directory.find(file).ok()??).ok()
    };
    anything_destroyed()
        && found().is_some_and(|(through, lsn)| through.is_some() && lsn == AFTER_ALL_WAL)
}

/// Whether the key was destroyed while WAL about pages under it was still to be replayed. If the
/// file is still in use, such a page is not what WAL says, and must not be taken for empty.
#[cold]
pub(crate) fn is_lost_key(file: RelFile, version: DataKeyVersion) -> bool {
    destroyed_at(file, version) == Some(AFTER_ALL_WAL)
}

/// True if the file is written under a later key than that of this version, or in plaintext since
/// then.
pub(crate) fn has_outlived(file: RelFile, version: DataKeyVersion) -> bool {
    info(file).is_some_and(|info| info.phase > Phase::under(version))
}

fn info(file: RelFile) -> Option<FileInfo> {
    let directory = &get()?.directory;
    directory.info(directory.find(file).ok()??).ok()
}

/// If the key of this version was destroyed: an LSN not before the end of any WAL record about
/// pages under it.
pub(crate) fn destroyed_at(file: RelFile, version: DataKeyVersion) -> Option<Lsn> {
    if !anything_destroyed() {
        return None;
    }
    let version = data_key_version(file, version)?;
    let directory = &get()?.directory;
    let (through, lsn) = directory.destroyed(directory.find(file).ok()??).ok()?;
    (Some(version) <= through).then_some(lsn)
}

/// If nothing in the file can be read because its keys were destroyed: as [`destroyed_at`].
pub(crate) fn whole_destroyed_at(file: RelFile) -> Option<Lsn> {
    if !is_destroyed(file) {
        return None;
    }
    let directory = &get()?.directory;
    Some(directory.destroyed(directory.find(file).ok()??).ok()?.1)
}

/// Whether pages of this version are under an interim key: not those of WAL, whose keys have all
/// versions.
#[inline]
pub(crate) fn is_interim(file: RelFile, version: DataKeyVersion) -> bool {
    interim::is_interim(version) && !is_key_place(file)
}

/// The version of the data key that a page with this version is under, or for which its interim key
/// stands; `None` if the file has no such version.
#[inline]
pub(crate) fn data_key_version(file: RelFile, version: DataKeyVersion) -> Option<DataKeyVersion> {
    if is_interim(file, version) {
        return interim::data_key_of(version, last_version(file)?);
    }
    Some(version)
}

/// The last version of the file's data key, destroyed ones included.
#[cold]
pub(crate) fn last_version(file: RelFile) -> Option<DataKeyVersion> {
    let directory = &get()?.directory;
    directory.last_version(directory.find(file).ok()??).ok()?
}

/// The last version that the file is known to have had: also if its key was destroyed, or forgotten
/// after the file was decrypted.
pub(crate) fn last_known(file: RelFile) -> Option<DataKeyVersion> {
    let directory = &get()?.directory;
    let slot = directory.find(file).ok()??;
    let phase = directory.info(slot).ok()?.phase;
    directory.last_version(slot).ok()?.max(phase.version)
}

/// Whether the file was decrypted, or is being decrypted.
pub(crate) fn is_in_plaintext(file: RelFile) -> bool {
    info(file).is_some_and(|info| info.phase.plaintext)
}

/// The last version of which the file has a key that is not destroyed.
pub(crate) fn newest_key(file: RelFile) -> Option<DataKeyVersion> {
    let directory = &get()?.directory;
    let keys = directory.keys(directory.find(file).ok()??).ok()?;
    keys.filter_map(std::result::Result::ok).map(|key| key.version).max()
}

/// The data key of a page with an interim version: its version, and where the key is recorded from
/// which interim keys of its group are derived. `None` if there is no such page: it would be under
/// the key of a group, with the same cipher.
#[cold]
pub(crate) fn interim_key(
    file: RelFile,
    version: DataKeyVersion,
) -> Option<(DataKeyVersion, (RelFile, DataKeyVersion))> {
    let data_key_version = data_key_version(file, version)?;
    let found = data_key(file, data_key_version, &mut [0; MAX_WRAPPED_DATA_KEY])?;
    let is_right = interim::cipher_of(version).is_some_and(|cipher| cipher as u8 == found.cipher);
    let root = key_place(found.scope.key_group().filter(|_| is_right)?);
    has_key(root.0, root.1).then_some((data_key_version, root))
}

/// Whether pages of this version may be under an interim key that was destroyed with its group. The
/// file has, or had, the data key that it stands for: a keystore from before that says nothing
/// about such pages.
#[cold]
pub(crate) fn is_interim_of_ended_group(file: RelFile, version: DataKeyVersion) -> bool {
    let Some(data_key_version) =
        data_key_version(file, version).filter(|_| is_interim(file, version))
    else {
        return false;
    };
    let has_ended = |(file, version)| destroyed_at(file, version).is_some();
    match data_key(file, data_key_version, &mut [0; MAX_WRAPPED_DATA_KEY]) {
        Some(found) => found.scope.key_group().map(key_place).is_some_and(has_ended),
        // The start after a crash leaves out keys that nobody can unwrap any more.
        None => get().and_then(|shared| shared.directory.files().ok()).is_some_and(|mut files| {
            files.any(|info| info.is_ok_and(|i| group_at(i.file).is_some() && i.is_destroyed()))
        }),
    }
}

/// True if the file has a data key of this version, or may have pages under this interim one.
pub(crate) fn has_key(file: RelFile, version: DataKeyVersion) -> bool {
    if is_interim(file, version) {
        return interim_key(file, version).is_some();
    }
    data_key(file, version, &mut [0; MAX_WRAPPED_DATA_KEY]).is_some()
}

/// Whether `is_it` is true of a version of which the file has a data key. No lock, no allocation.
#[cold]
pub(crate) fn any_version(file: RelFile, mut is_it: impl FnMut(DataKeyVersion) -> bool) -> bool {
    let mut any = || {
        let directory = &get()?.directory;
        let mut keys = directory.keys(directory.find(file).ok()??).ok()?;
        Some(keys.any(|key| key.is_ok_and(|key| is_it(key.version))))
    };
    any() == Some(true)
}

/// A wrapped data key, copied from the directory.
pub(crate) struct Found {
    pub(crate) cipher: u8,
    pub(crate) scope: Scope,
    pub(crate) key_version: KeyVersion,
    pub(crate) len: usize,
}

/// Copies the wrapped data key of a file and version. No lock, no allocation.
pub(crate) fn data_key(
    file: RelFile,
    version: DataKeyVersion,
    wrapped: &mut [u8; MAX_WRAPPED_DATA_KEY],
) -> Option<Found> {
    let directory = &get()?.directory;
    let slot = directory.find(file).ok()??;
    let info = directory.key(slot, version, wrapped).ok()?;
    Some(Found {
        cipher: info.cipher,
        scope: info.scope,
        key_version: info.key_version,
        len: info.length.min(MAX_WRAPPED_DATA_KEY),
    })
}

/// The scope of the database key behind the file's current data key, if that database key is
/// refused. While the file is being rewritten, also that of another key under which some of its
/// pages may still be sealed.
pub(crate) fn refused_scope(file: RelFile) -> Option<Scope> {
    let shared = get()?;
    let is_refused = |scope: &Scope| shared.secrets.is_refused(*scope);
    let slot = shared.directory.find(file).ok()??;
    let writing = shared.directory.writing(slot).ok()?;
    let scope_of = |version| Some(data_key(file, version, &mut [0; MAX_WRAPPED_DATA_KEY])?.scope);
    let current = writing.current.and_then(|(version, _)| scope_of(version)).filter(is_refused);
    if current.is_some() || !writing.mixed {
        return current;
    }
    let keys = shared.directory.keys(slot).ok()?;
    keys.filter_map(|key| Some(key.ok()?.scope)).find(is_refused)
}

/// True if the file has, or had, a key of a key group.
#[cold]
pub(crate) fn has_group_key(file: RelFile) -> bool {
    let has_one = || {
        let directory = &get()?.directory;
        let mut keys = directory.keys(directory.find(file).ok()??).ok()?;
        Some(keys.any(|key| key.is_ok_and(|key| key.scope.key_group().is_some())))
    };
    has_one() == Some(true)
}

/// The key group whose key is behind the file's current data key, if that key is locked. While the
/// file is being rewritten, also that of another key under which some of its pages may still be
/// sealed: not of one under which no page is left, as of a group that it left long ago.
#[cold]
pub(crate) fn locked_group(file: RelFile) -> Option<Scope> {
    locked_scope_of(file, true, |scope| scope.key_group().is_some())
}

/// The same of the current data key only.
#[cold]
pub(crate) fn current_locked_group(file: RelFile) -> Option<Scope> {
    locked_scope_of(file, false, |scope| scope.key_group().is_some())
}

/// As [`locked_group`], for any kind of scope.
#[cold]
pub(crate) fn locked_scope(file: RelFile) -> Option<Scope> {
    locked_scope_of(file, true, |_| true)
}

/// A scope whose keys are locked or refused, and behind any key that the file has had.
#[cold]
pub(crate) fn unusable_scope(file: RelFile) -> Option<Scope> {
    let shared = get()?;
    let slot = shared.directory.find(file).ok()??;
    let mut keys = shared.directory.keys(slot).ok()?.filter_map(std::result::Result::ok);
    let is_unusable = |state| matches!(state, Some(State::Locked | State::Refused));
    keys.find(|key| is_unusable(shared.secrets.state(key.scope, key.key_version)))
        .map(|key| key.scope)
}

fn locked_scope_of(
    file: RelFile,
    with_others: bool,
    counted: impl Fn(Scope) -> bool,
) -> Option<Scope> {
    let shared = get()?;
    let slot = shared.directory.find(file).ok()??;
    let writing = shared.directory.writing(slot).ok()?;
    let current = writing.current.map(|(version, _)| version);
    let floor = shared.directory.floor(slot).ok()?;
    let mut keys = shared.directory.keys(slot).ok()?.filter_map(std::result::Result::ok);
    let locked = keys.find(|key| {
        let has_pages = writing.mixed && floor.is_none_or(|floor| key.version >= floor);
        let counts = with_others && has_pages || Some(key.version) == current;
        let state = shared.secrets.state(key.scope, key.key_version);
        counts && counted(key.scope) && state == Some(State::Locked)
    });
    locked.map(|key| key.scope)
}

/// An encrypted file with the same number in another database: CREATE DATABASE copies its
/// template's files under their old numbers.
pub(crate) fn namesake(file: RelFile) -> Option<RelFile> {
    let files = get()?.directory.files().ok()?;
    let is_one = |other: &FileInfo| {
        other.file.relation == file.relation
            && other.file.database != file.database
            && other.current.is_some()
    };
    files.flatten().find(is_one).map(|found| found.file)
}
