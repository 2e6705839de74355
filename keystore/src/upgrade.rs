//! The keystore of the cluster that `pg_upgrade` creates, and how its servers learn that keys are
//! carried over.
//!
//! `pg_upgrade` moves relation files into a new cluster unchanged, and keeps their numbers (since
//! PostgreSQL 15 also those of databases and tablespaces). So their keys are the same in both
//! clusters, and so is the identity of the keystore, to which database keys are bound. Catalogs are
//! not carried over: those of the new cluster are other files with the same numbers, plaintext at
//! first.

use pagevault_cipher::DataKeyVersion;

use crate::record::Record;
use crate::rel_file::RelFile;
use crate::state::{State, StateError};
use crate::wal;

/// Environment variable by which `pagevault-keyring exec` tells the servers that `pg_upgrade`
/// starts that keys are carried over.
pub const VARIABLE: &str = "PAGEVAULT_UPGRADE";

/// Contents of [`VARIABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// Identity of the old cluster's keystore.
    pub keystore: [u8; 16],
    /// Nothing will be moved (`pg_upgrade --check`), so the new cluster has no keys.
    pub only_check: bool,
}

impl Ticket {
    /// The value of the variable: the identity in hexadecimal digits, then `,check` if
    /// `only_check`.
    #[must_use]
    pub fn encode(&self) -> String {
        let id = u128::from_be_bytes(self.keystore);
        format!("{id:032x}{}", if self.only_check { ",check" } else { "" })
    }

    /// Decodes what [`Ticket::encode`] wrote; `None` if it is anything else.
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

/// Lower numbers belong to catalogs that initdb created (`FirstNormalObjectId`, transam.h).
const FIRST_USER_FILE: u32 = 16384;

/// `pg_largeobject` and its index, whose files `pg_upgrade` carries over under their old numbers.
const LARGE_OBJECTS: [u32; 2] = [2613, 2683];

/// `pg_largeobject_metadata` and its index. `pg_upgrade` of 19 carries over their files too, unless
/// they are older than 16 (`get_rel_infos_query`, info.c).
const LARGE_OBJECT_METADATA: [u32; 2] = [2995, 2996];

/// The major versions of PostgreSQL of the old and of the new cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Majors {
    /// That of the cluster to upgrade.
    pub old: u32,
    /// That of the cluster which `pg_upgrade` creates, and of `pg_upgrade`.
    pub new: u32,
}

impl Majors {
    /// Whether `pg_upgrade` carries this file over, or it stands for a WAL key.
    fn carry(self, file: RelFile) -> bool {
        let number = file.relation;
        let of_metadata = self.old >= 16 && self.new >= 19;
        let is_carried = number >= FIRST_USER_FILE
            || LARGE_OBJECTS.contains(&number)
            || (of_metadata && LARGE_OBJECT_METADATA.contains(&number));
        wal::is_key_place(file) || (file.database != 0 && is_carried)
    }
}

/// The state of the new cluster's keystore. It contains all keys, so that version numbers continue;
/// files that are not carried over are plaintext until the new server decides otherwise.
///
/// # Errors
/// If the state contradicts itself.
pub fn carry_over(mut state: State, majors: Majors) -> Result<State, StateError> {
    let left: Vec<(RelFile, DataKeyVersion)> = state
        .files()
        .filter(|(file, _)| !majors.carry(*file))
        .filter_map(|(file, entry)| Some((file, entry.last_version()?)))
        .collect();
    for (file, after) in left {
        state.apply(Record::Plaintext { file, after })?;
    }
    // Of WAL that the new cluster does not have.
    state.clear_forgotten();
    Ok(state)
}

/// Whether `whole` contains all of `state`, so that no key is lost if `whole` replaces it.
#[must_use]
pub fn is_part_of(state: &State, whole: &State) -> bool {
    state
        .database_keys()
        .all(|(scope, version, key)| whole.database_key(scope, version) == Some(key))
        && state.providers().all(|(name, provider)| whole.provider(name) == Some(provider))
        && state.key_groups().all(|(group, known)| whole.key_group(group) == Some(known))
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

    const MAJORS: Majors = Majors { old: 15, new: 19 };

    const KEYED: [RelFile; 7] = [
        RelFile { tablespace: 1663, database: 5, relation: 16384 },
        RelFile { tablespace: 1663, database: 5, relation: 2613 },
        RelFile { tablespace: 0, database: 0, relation: 1 },
        RelFile { tablespace: 1663, database: 5, relation: 2995 },
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
    fn carried_files_stay_encrypted_and_all_keys_are_kept() {
        for (majors, carried) in [((15, 18), 3), ((18, 18), 3), ((15, 19), 3), ((16, 19), 4)] {
            let majors = Majors { old: majors.0, new: majors.1 };
            let new = carry_over(state(), majors).unwrap();
            for (at, file) in KEYED.into_iter().enumerate() {
                let entry = new.file(file).unwrap();
                assert_eq!(entry.keys.len(), 2, "{file}");
                let current = (at < carried).then_some(version(2));
                assert_eq!(entry.phase.current(), current, "{majors:?}, {file}");
                assert_eq!(entry.next_version(), Some(version(3)), "{file}");
            }
            // Repeating it changes nothing.
            assert_eq!(carry_over(new.clone(), majors).unwrap(), new);
        }
    }

    #[test]
    fn a_state_with_more_is_not_a_part() {
        let whole = carry_over(state(), MAJORS).unwrap();
        let mut state = whole.clone();
        assert!(is_part_of(&State::default(), &whole));
        assert!(is_part_of(&state, &whole));
        let file = KEYED[0];
        state.apply(Record::Plaintext { file, after: version(2) }).unwrap();
        assert!(!is_part_of(&state, &whole));
        assert!(!is_part_of(&whole, &State::default()));
    }

    #[test]
    fn encoded_tickets_are_decoded() {
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
