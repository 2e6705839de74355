//! This process's cache of expanded keys: data keys ready for use, and the database keys that
//! unwrap more of them.
//!
//! The data key of a file and version never changes, so an entry is valid until keys are destroyed,
//! which a counter in shared memory indicates. Nothing here allocates, locks or raises errors,
//! because completions of asynchronous reads use it. Keys are unwrapped and expanded without
//! leaving copies on the stack, which is part of core dumps; this cache is not.

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::wrap::{self, WrapKey};
use pagevault_cipher::{CipherId, DataKey, DataKeyVersion, KeyVersion, PageKey, interim, kdf};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY as WRAPPED_MAX;
use pagevault_keystore::{RelFile, Scope, data_key_aad};
use zeroize::Zeroizing;

use super::fips;
use super::key_error::KeyError;
use super::temporary::TEMPORARY_CIPHER;
use crate::keys::store::directory;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::shmem;

const SETS: usize = 32;
const WAYS: usize = 4;

/// Maximum number of expanded data keys in the cache.
pub(super) const KEYS: usize = SETS * WAYS + 2;

/// Keys are large, so the searched names are stored apart from them, close together.
struct Set {
    names: [(SmgrFile, Option<DataKeyVersion>); WAYS],
    /// [`directory::floors`] when the version was last found not to be a former one; `None`: not
    /// looked at yet.
    floors: [Option<u32>; WAYS],
    keys: [Option<PageKey>; WAYS],
    /// The next entry to replace.
    hand: usize,
}

struct Cache {
    sets: [Set; SETS],
    wrap_keys: [Option<(Scope, KeyVersion, WrapKey)>; WAYS],
    wrap_hand: usize,
    /// [`shmem::destructions`] at the last check.
    destructions: u32,
    /// See [`with_lost_key`].
    lost: Option<PageKey>,
    /// See [`with_interim_key_in`].
    of_copy: Option<((RelFile, DataKeyVersion, u32), PageKey)>,
}

const NO_FILE: SmgrFile =
    SmgrFile { file: RelFile { tablespace: 0, database: 0, relation: 0 }, backend: SHARED_BACKEND };

const EMPTY: Set = Set {
    names: [(NO_FILE, None); WAYS],
    floors: [None; WAYS],
    keys: [const { None }; WAYS],
    hand: 0,
};

static CACHE: ProcessLocal<Cache> = ProcessLocal::new(Cache {
    sets: [EMPTY; SETS],
    wrap_keys: [const { None }; WAYS],
    wrap_hand: 0,
    destructions: 0,
    lost: None,
    of_copy: None,
});

/// Keeps the cache's memory out of core dumps, in this process and those forked from it.
pub(crate) fn protect() -> std::io::Result<()> {
    crate::pg::mapping::exclude_from_core_dumps(CACHE.as_ptr())
}

/// Calls `f` with the expanded data key of a file and version.
#[inline]
pub(crate) fn with_page_key<R>(
    file: SmgrFile,
    version: DataKeyVersion,
    f: impl FnOnce(&PageKey) -> R,
) -> Result<R, KeyError> {
    CACHE.with(|cache| {
        let (set, way) = cache.place_of(file, version)?;
        match &cache.sets[set].keys[way] {
            Some(key) => Ok(f(key)),
            None => Err(KeyError::NoKey { version }),
        }
    })
}

/// Like [`with_page_key`], for reading: also tells `f` whether no page under this version is
/// accepted ([`directory::is_former`]). For a key in use that is one comparison.
#[inline]
pub(crate) fn with_page_key_of<R>(
    file: SmgrFile,
    version: DataKeyVersion,
    f: impl FnOnce(&PageKey, bool) -> R,
) -> Result<R, KeyError> {
    CACHE.with(|cache| {
        let (set, way) = cache.place_of(file, version)?;
        let set = &mut cache.sets[set];
        // Before the directory is asked.
        let floors = directory::floors();
        let is_former = set.floors[way] != Some(floors) && is_former(file, version);
        if !is_former {
            set.floors[way] = Some(floors);
        }
        match &set.keys[way] {
            Some(key) => Ok(f(key, is_former)),
            None => Err(KeyError::NoKey { version }),
        }
    })
}

#[cold]
fn is_former(file: SmgrFile, version: DataKeyVersion) -> bool {
    !file.is_temporary() && directory::is_former(file.file, version)
}

/// Wipes all expanded keys of this process.
pub(crate) fn wipe() {
    CACHE.with(|cache| {
        cache.forget_all();
        cache.wrap_keys = [const { None }; WAYS];
    });
}

/// Wipes the expanded keys of this process if keys were destroyed since its last use of one.
#[inline]
pub(crate) fn forget_destroyed() {
    CACHE.with(Cache::forget_destroyed);
}

/// Calls `f` with a random key of this process, which is lost when the process ends: for pages
/// whose own key was destroyed but which must be written.
#[cold]
pub(crate) fn with_lost_key<R>(f: impl FnOnce(&PageKey) -> R) -> Option<R> {
    CACHE.with(|cache| {
        if cache.lost.is_none() {
            without_trace(|| {
                cache.lost = DataKey::random(TEMPORARY_CIPHER).ok().as_ref().map(PageKey::new);
            });
        }
        cache.lost.as_ref().map(f)
    })
}

/// Calls `f` with the key that stands in another database for the interim key of pages of a file
/// with this version: a raw copy of the file there has the same version, and its own interim key.
#[cold]
pub(crate) fn with_interim_key_in<R>(
    database: u32,
    file: RelFile,
    version: DataKeyVersion,
    f: impl FnOnce(&PageKey) -> R,
) -> Result<R, KeyError> {
    CACHE.with(|cache| {
        cache.forget_destroyed();
        let missing = KeyError::of_missing_key(file, version);
        let (data_key, _) = directory::interim_key(file, version).ok_or(missing)?;
        let name = (file, data_key, database);
        if cache.of_copy.as_ref().is_none_or(|(known, _)| *known != name) {
            cache.of_copy = None; // wipes the old one
            without_trace(|| {
                let key = cache.interim_key(database, file, version)?;
                cache.of_copy = Some((name, PageKey::new(&key)));
                Ok(())
            })?;
        }
        cache.of_copy.as_ref().map(|(_, key)| f(key)).ok_or(missing)
    })
}

/// What an entry is searched by.
type Name = (SmgrFile, DataKeyVersion);

/// The name of a key. Which one an interim version stands for depends on the last version of the
/// file's data key; so its entry is named after the data key, with a backend that nobody has.
#[inline]
fn name_of(file: SmgrFile, version: DataKeyVersion) -> Result<Name, KeyError> {
    if !file.is_temporary() && directory::is_interim(file.file, version) {
        return interim_name(file, version);
    }
    Ok((file, version))
}

#[cold]
fn interim_name(file: SmgrFile, version: DataKeyVersion) -> Result<Name, KeyError> {
    let missing = KeyError::of_missing_key(file.file, version);
    let (data_key, _) = directory::interim_key(file.file, version).ok_or(missing)?;
    let cipher = interim::cipher_of(version).ok_or(missing)?;
    Ok((SmgrFile { backend: -2 - cipher as i32, ..file }, data_key))
}

fn set_of(file: RelFile) -> usize {
    // Relfilenumbers are dense: a table and its indexes are in different sets.
    file.relation.wrapping_add(file.database.wrapping_mul(7)) as usize % SETS
}

impl Set {
    #[inline]
    fn find(&self, (file, version): Name) -> Option<usize> {
        let wanted = (file, Some(version));
        (0..WAYS).find(|way| self.names[*way] == wanted && self.keys[*way].is_some())
    }
}

impl Cache {
    /// The place of a key, which is put there if need be.
    #[inline]
    fn place_of(
        &mut self,
        file: SmgrFile,
        version: DataKeyVersion,
    ) -> Result<(usize, usize), KeyError> {
        self.forget_destroyed();
        let set = set_of(file.file);
        let name = name_of(file, version)?;
        match self.sets[set].find(name) {
            Some(way) => Ok((set, way)),
            None => Ok((set, self.fill(set, file, version, name)?)),
        }
    }

    #[inline]
    fn forget_destroyed(&mut self) {
        let destructions = shmem::destructions();
        if self.destructions != destructions {
            self.forget_all();
            self.destructions = destructions;
        }
    }

    #[cold]
    fn forget_all(&mut self) {
        for key in self.sets.iter_mut().flat_map(|set| &mut set.keys) {
            *key = None; // wipes it
        }
        self.of_copy = None;
    }

    #[cold]
    fn fill(
        &mut self,
        set: usize,
        file: SmgrFile,
        version: DataKeyVersion,
        name: Name,
    ) -> Result<usize, KeyError> {
        without_trace(|| self.expand(set, file, version, name))
    }

    fn expand(
        &mut self,
        set: usize,
        file: SmgrFile,
        version: DataKeyVersion,
        name: Name,
    ) -> Result<usize, KeyError> {
        let data_key = if file.is_temporary() {
            temporary_key(file)?
        } else if directory::is_interim(file.file, version) {
            self.interim_key(file.file.database, file.file, version)?
        } else {
            self.unwrap_data_key(file.file, version)?
        };
        let set = &mut self.sets[set];
        let way = set.hand;
        set.hand = (way + 1) % WAYS;
        set.keys[way] = None; // wipes the old one
        set.names[way] = (name.0, Some(name.1));
        set.floors[way] = None;
        set.keys[way] = Some(PageKey::new(&data_key));
        Ok(way)
    }

    fn unwrap_data_key(
        &mut self,
        file: RelFile,
        version: DataKeyVersion,
    ) -> Result<DataKey, KeyError> {
        let mut wrapped = [0u8; WRAPPED_MAX];
        let found = directory::data_key(file, version, &mut wrapped);
        let found = found.ok_or_else(|| KeyError::of_missing_key(file, version))?;
        let cipher = CipherId::try_from(found.cipher).map_err(|_| KeyError::Damaged { version })?;
        if fips::refuses(cipher) {
            return Err(KeyError::Unapproved { cipher });
        }
        let wrap_key = self
            .wrap_key(found.scope, found.key_version)
            .ok_or(KeyError::Locked { scope: found.scope })?;
        open_data_key(wrap_key, file, version, cipher, &wrapped[..found.len])
            .ok_or(KeyError::Damaged { version })
    }

    fn interim_key(
        &mut self,
        database: u32,
        file: RelFile,
        version: DataKeyVersion,
    ) -> Result<DataKey, KeyError> {
        let missing = KeyError::of_missing_key(file, version);
        let cipher = interim::cipher_of(version).ok_or(missing)?;
        let (data_key, root) = directory::interim_key(file, version).ok_or(missing)?;
        if fips::refuses(cipher) {
            return Err(KeyError::Unapproved { cipher });
        }
        let root = self.unwrap_data_key(root.0, root.1)?;
        interim::key(&root, database, file.relation, data_key, cipher).map_err(|_| missing)
    }

    fn wrap_key(&mut self, scope: Scope, version: KeyVersion) -> Option<&WrapKey> {
        let known = |key: &Option<(Scope, KeyVersion, WrapKey)>| {
            key.as_ref().is_some_and(|(of, number, _)| (*of, *number) == (scope, version))
        };
        let at = match self.wrap_keys.iter().position(known) {
            Some(at) => at,
            None => {
                let at = self.wrap_hand;
                shmem::secrets()?.with(scope, version, |key| {
                    self.wrap_keys[at] = None; // wipes the old one
                    self.wrap_keys[at] = Some((scope, version, WrapKey::new(key)));
                })?;
                self.wrap_hand = (at + 1) % WAYS;
                at
            }
        };
        self.wrap_keys[at].as_ref().map(|(_, _, key)| key)
    }
}

/// Unwraps a data key from its record; `None` if it does not authenticate. Within
/// [`without_trace`].
pub(crate) fn open_data_key(
    wrap_key: &WrapKey,
    file: RelFile,
    version: DataKeyVersion,
    cipher: CipherId,
    wrapped: &[u8],
) -> Option<DataKey> {
    let mut plaintext = Zeroizing::new([0u8; WRAPPED_MAX]);
    let aad = data_key_aad(file, version, cipher as u8);
    let len = wrap::unwrap(wrap_key, &aad, wrapped, plaintext.as_mut_slice()).ok()?;
    DataKey::from_bytes(cipher, &plaintext[..len]).ok()
}

/// The key of a temporary relation, derived from this server start's random key and the file.
fn temporary_key(file: SmgrFile) -> Result<DataKey, KeyError> {
    let missing = KeyError::NoKey { version: DataKeyVersion::FIRST };
    let RelFile { tablespace, database, relation } = file.file;
    let mut context = [0u8; 16];
    for (bytes, part) in context.as_chunks_mut::<4>().0.iter_mut().zip([
        tablespace,
        database,
        relation,
        file.backend as u32,
    ]) {
        *bytes = part.to_le_bytes();
    }
    let mut bytes = Zeroizing::new([0u8; 64]);
    shmem::secrets()
        .and_then(|secrets| {
            secrets.with_temporary(|key| {
                kdf::derive(key, "pagevault temporary relation v1", &context, &mut bytes);
            })
        })
        .ok_or(missing)?;
    DataKey::from_bytes(TEMPORARY_CIPHER, bytes.as_slice()).map_err(|_| missing)
}
