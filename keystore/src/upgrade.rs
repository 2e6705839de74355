//! What of a keystore goes into the cluster that `pg_upgrade` makes, and how the servers are told
//! that it did.
//!
//! `pg_upgrade` puts relation files into a new cluster as they are, under their numbers (since
//! PostgreSQL 15 also those of databases and tablespaces). So their keys are the same in both,
//! under the same identity of the keystore, to which database keys are bound. Catalogs are not
//! carried: those of the new cluster are other files under the same numbers, in plaintext at first.

use pagevault_cipher::DataKeyVersion;

use crate::record::Record;
use crate::rel_file::RelFile;
use crate::state::{State, StateError};
use crate::wal;

/// Environment variable by which `pagevault-keyring exec` tells the servers that `pg_upgrade`
/// starts that keys go along.
pub const VARIABLE: &str = "PAGEVAULT_UPGRADE";

/// What [`VARIABLE`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// The keystore of the old cluster.
    pub keystore: [u8; 16],
    /// Nothing will be moved (`pg_upgrade --check`), so the new cluster has no keys yet.
    pub only_check: bool,
}

impl Ticket {
    /// As the value of the variable: the identity in hexadecimal digits, then perhaps `check`.
    #[must_use]
    pub fn encode(&self) -> String {
        let id = u128::from_be_bytes(self.keystore);
        format!("{id:032x}{}", if self.only_check { ",check" } else { "" })
    }

    /// Reads what [`Ticket::encode`] wrote; `None` if it is anything else.
    #[must_use]
    pub fn decode(text: &str) -> Option<Self> {
        let (id, only_check) = match text.strip_suffix(",check") {
            Some(id) => (id, true),
            None => (text, false),
        };
        let id =
            Some(id).filter(|id| id.len() == 32 && id.bytes().all(|c| c.is_ascii_hexdigit()))?;
        let keystore = u128::from_str_radix(id, 16).ok()?.to_be_bytes();
        Some(Self { keystore, only_check })
    }
}

/// Numbers below are those of catalogs as initdb made them (`FirstNormalObjectId`, transam.h).
const FIRST_USER_FILE: u32 = 16384;

/// `pg_largeobject` and its index, which `pg_upgrade` carries under the numbers that they have in
/// the old cluster.
const LARGE_OBJECTS: [u32; 2] = [2613, 2683];

/// Whether `pg_upgrade` carries the file of this number, or it stands for a key of WAL.
fn is_carried(file: RelFile) -> bool {
    wal::is_key_place(file)
        || (file.database != 0
            && (file.relation >= FIRST_USER_FILE || LARGE_OBJECTS.contains(&file.relation)))
}

/// The state of the new cluster's keystore. It has all keys, so that versions go on; what is not
/// carried is written in plaintext until the new server decides anew.
///
/// # Errors
/// When the state contradicts itself.
pub fn carried(mut state: State) -> Result<State, StateError> {
    let left: Vec<(RelFile, DataKeyVersion)> = state
        .files()
        .filter(|(file, _)| !is_carried(*file))
        .filter_map(|(file, entry)| Some((file, entry.last_version()?)))
        .collect();
    for (file, after) in left {
        state.apply(Record::Plaintext { file, after })?;
    }
    Ok(state)
}

/// Whether `state` says nothing that `whole` does not say: no key is lost where `whole` takes its
/// place.
#[must_use]
pub fn is_part_of(state: &State, whole: &State) -> bool {
    state
        .database_keys()
        .all(|(scope, version, key)| whole.database_key(scope, version) == Some(key))
        && state.providers().all(|(name, provider)| whole.provider(name) == Some(provider))
        && state.files().all(|(file, entry)| whole.file(file) == Some(entry))
        && state.wal_switches().all(|switch| whole.wal_switches().any(|other| other == switch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KeyVersion, Scope};

    fn version(number: u16) -> DataKeyVersion {
        DataKeyVersion::new(number).unwrap()
    }

    const KEYED: [RelFile; 6] = [
        RelFile { tablespace: 1663, database: 5, relation: 16384 },
        RelFile { tablespace: 1663, database: 5, relation: 2613 },
        RelFile { tablespace: 0, database: 0, relation: 1 },
        RelFile { tablespace: 1663, database: 5, relation: 2619 },
        RelFile { tablespace: 1664, database: 0, relation: 1260 },
        RelFile { tablespace: 1664, database: 0, relation: 16400 },
    ];

    fn state() -> State {
        let records = KEYED.into_iter().flat_map(|file| {
            let key = |number| Record::DataKey {
                file,
                version: version(number),
                cipher: 1,
                scope: Scope::CLUSTER,
                key_version: KeyVersion::FIRST,
                wrapped: vec![7; 92],
                created: 0,
            };
            [key(1), key(2), Record::Current { file, version: version(2) }]
        });
        State::from_records(records).unwrap()
    }

    #[test]
    fn files_that_are_carried_stay_sealed_and_all_keys_stay() {
        let new = carried(state()).unwrap();
        for (at, file) in KEYED.into_iter().enumerate() {
            let entry = new.file(file).unwrap();
            assert_eq!(entry.keys.len(), 2, "{file}");
            assert_eq!(entry.phase.current(), (at < 3).then_some(version(2)), "{file}");
            assert_eq!(entry.next_version(), Some(version(3)), "{file}");
        }
        // Once more changes nothing.
        assert_eq!(carried(new.clone()).unwrap(), new);
    }

    #[test]
    fn what_has_a_key_more_is_not_part() {
        let (whole, mut state) = (carried(state()).unwrap(), carried(state()).unwrap());
        assert!(is_part_of(&State::default(), &whole));
        assert!(is_part_of(&state, &whole));
        let file = KEYED[0];
        state.apply(Record::Plaintext { file, after: version(2) }).unwrap();
        assert!(!is_part_of(&state, &whole));
        assert!(!is_part_of(&whole, &State::default()));
    }

    #[test]
    fn tickets_are_read_as_they_are_written() {
        for only_check in [false, true] {
            let ticket = Ticket { keystore: [0xa5; 16], only_check };
            assert_eq!(Ticket::decode(&ticket.encode()), Some(ticket));
        }
        for text in [
            "",
            "check",
            ",check",
            "a5",
            &"g".repeat(32),
            &"a".repeat(33),
            &format!("+{}", "1".repeat(31)),
        ] {
            assert_eq!(Ticket::decode(text), None, "{text}");
        }
    }
}
