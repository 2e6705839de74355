//! WAL keys: those of the keystore, and those that only WAL has. A base backup copies the keystore
//! at one moment and WAL later; a server in recovery has WAL that it has not replayed yet. The
//! record of a key precedes all pages under it.

use std::collections::BTreeMap;
use std::rc::Rc;

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::{KeyVersion, Lsn, PageKey};
use pagevault_keystore::state::DataKey;
use pagevault_keystore::wal::{WalPhase, is_key_place, key_place, stretch_at, version_at};
use pagevault_keystore::wal_pages::WalKeys;
use pagevault_keystore::{DatabaseKey, Record, Scope};

use super::key_records::records_of;
use super::{Context, Findings};
use crate::offline::DatabaseKeys;

/// A key, or why there is none.
type Unwrapped<K> = Result<Rc<K>, String>;

/// Keys that a record of WAL adds. They are those of one history: a sibling of a timeline may have
/// others with the same numbers.
#[derive(Clone, Default)]
pub(super) struct Learned {
    wal: BTreeMap<KeyVersion, Unwrapped<PageKey>>,
    wrappings: BTreeMap<(Scope, KeyVersion), DatabaseKey>,
    /// Database keys of which a provider was asked.
    database: BTreeMap<(Scope, KeyVersion), Unwrapped<DatabaseKeys>>,
}

/// All keys for WAL pages.
pub(super) struct Keys<'a> {
    context: &'a Context<'a>,
    known: BTreeMap<KeyVersion, PageKey>,
    pub(super) learned: Learned,
}

impl<'a> Keys<'a> {
    /// Those of the keystore.
    pub(super) fn of_keystore(context: &'a Context<'a>, findings: &mut Findings) -> Keys<'a> {
        let mut known = BTreeMap::new();
        for (version, record) in context.keystore.wal_keys() {
            let key = expanded(context.unlocked, version, record, |key| {
                known.insert(version, key);
            });
            if key.is_none() {
                findings.damage(format!("WAL key version {version} cannot be unwrapped"));
            }
        }
        Keys { context, known, learned: Learned::default() }
    }

    /// Learns the keys in a complete record.
    pub(super) fn learn(&mut self, record: &[u8]) {
        for record in records_of(record) {
            match record {
                Record::DataKey { file, version, cipher, scope, key_version, wrapped, created }
                    if is_key_place(file) =>
                {
                    let record = DataKey { cipher, scope, key_version, wrapped, created };
                    if let Some(version) = version_at(file, version) {
                        self.learn_key(version, &record);
                    }
                }
                Record::DatabaseKey { scope, version, key } => {
                    self.learned.wrappings.insert((scope, version), key);
                }
                _ => {}
            }
        }
    }

    fn learn_key(&mut self, version: KeyVersion, record: &DataKey) {
        // A rotation of the database key wraps a key again.
        let is_known = matches!(self.learned.wal.get(&version), Some(Ok(_)));
        if is_known || self.known.contains_key(&version) {
            return;
        }
        let mut key = Err("it cannot be unwrapped".to_owned());
        let mut put = |unwrapped| key = Ok(Rc::new(unwrapped));
        if expanded(self.context.unlocked, version, record, &mut put).is_none() {
            match self.database_key((record.scope, record.key_version)) {
                Ok(keys) => {
                    let _ = expanded(&keys, version, record, put);
                }
                Err(why) => key = Err(why),
            }
        }
        self.learned.wal.insert(version, key);
    }

    /// A database key that the keystore did not need, or does not have.
    fn database_key(&mut self, place: (Scope, KeyVersion)) -> Unwrapped<DatabaseKeys> {
        if let Some(keys) = self.learned.database.get(&place) {
            return keys.clone();
        }
        let keystore = self.context.keystore;
        let keys = match self.learned.wrappings.get(&place) {
            Some(key) => keystore.unlock_recorded(place, key),
            None => keystore.unlock(&[place].into()),
        };
        let keys = keys.map(Rc::new).map_err(|failure| failure.message);
        self.learned.database.insert(place, keys.clone());
        keys
    }

    /// Why there is no key of a version.
    pub(super) fn reason(&self, version: KeyVersion, address: Lsn) -> String {
        match self.learned.wal.get(&version) {
            Some(Err(why)) => format!("{address}: WAL key version {version}: {why}"),
            _ => format!("{address}: no WAL key of version {version}"),
        }
    }
}

/// Expands a key for `put`.
fn expanded(
    keys: &DatabaseKeys,
    version: KeyVersion,
    record: &DataKey,
    put: impl FnOnce(PageKey),
) -> Option<()> {
    let (file, data_key_version) = key_place(version);
    without_trace(|| {
        put(PageKey::new(&keys.data_key(file, data_key_version, record)?));
        Some(())
    })
}

pub(super) struct NoKey;

impl WalKeys for Keys<'_> {
    type Error = NoKey;

    fn phase_at(&self, address: Lsn) -> WalPhase {
        stretch_at(self.context.keystore.state().wal_switches(), address).phase
    }

    fn with_key<R>(&self, version: KeyVersion, f: impl FnOnce(&PageKey) -> R) -> Result<R, NoKey> {
        let learned = || self.learned.wal.get(&version)?.as_deref().ok();
        self.known.get(&version).or_else(learned).map(f).ok_or(NoKey)
    }
}
