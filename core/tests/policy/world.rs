//! A model of a database with one relation of each kind and any combination of labels.

use std::cell::Cell;

use pagevault_cipher::CipherId;
use pagevault_core::policy::{
    Catalog, Decision, Label, Labelled, Named, Oid, Policy, Relation, RelationKind, catalogs,
};
use pagevault_keystore::{KeyGroup, RelFile};

pub(crate) const AES_256: CipherId = CipherId::Aes256Xts;
pub(crate) const AES_128: CipherId = CipherId::Aes128Xts;

/// All labels, and no label.
pub(crate) const LABELS: [Option<Label>; 4] = [
    None,
    Some(Label::Plaintext),
    Some(Label::Encrypted(None)),
    Some(Label::Encrypted(Some(AES_128))),
];

/// All states of a file.
pub(crate) const FILES: [Option<CipherId>; 3] = [None, Some(AES_256), Some(AES_128)];

pub(crate) const DATABASE: Oid = 5;
pub(crate) const SCHEMA: Oid = 10;
pub(crate) const SCHEMA_OF_PG_REPACK: Oid = 11;
/// The tablespace of the table and of the relations that follow it there.
pub(crate) const TABLESPACE: Oid = 20;
/// The tablespace of indexes and sequences.
pub(crate) const ELSEWHERE: Oid = 21;
const OWNER: Oid = 30;
const OTHER: Oid = 31;
const SUPERUSER: Oid = 32;

/// The table that the other relations follow.
pub(crate) const TABLE: Oid = 100;
/// Its partitioned table.
pub(crate) const PARENT: Oid = 101;
/// The partitioned table above that.
pub(crate) const GRANDPARENT: Oid = 102;
pub(crate) const INDEX: Oid = 103;
/// An index whose table is known only from a catalog.
pub(crate) const NEW_INDEX: Oid = 104;
pub(crate) const TOAST: Oid = 105;
pub(crate) const TOAST_INDEX: Oid = 106;
/// Owned by the table.
pub(crate) const SEQUENCE: Oid = 107;
pub(crate) const FREE_SEQUENCE: Oid = 108;
/// The transient table of VACUUM FULL.
pub(crate) const TRANSIENT: Oid = 109;
/// The copy that pg_repack makes.
pub(crate) const COPY: Oid = 110;
/// The same with another owner.
pub(crate) const COPY_OF_OTHER: Oid = 111;
pub(crate) const COPY_OF_SUPERUSER: Oid = 112;
/// A table with such a name in another schema.
pub(crate) const NAMESAKE: Oid = 113;
pub(crate) const VIEW: Oid = 114;
pub(crate) const TEMPORARY: Oid = 115;
/// The copy that pg_squeeze makes.
pub(crate) const SQUEEZED: Oid = 116;
/// A table of somebody else with such a name.
pub(crate) const SQUEEZED_OF_OTHER: Oid = 117;
pub(crate) const CATALOG: Oid = 1259;
pub(crate) const SHARED_CATALOG: Oid = 1260;

/// A label of this object names a key group that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing(pub(crate) Labelled);

/// The model: labels, settings, and the state of all files.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// Levels of partitioned tables above the table: 0 to 2.
    pub(crate) levels: usize,
    pub(crate) labels: [Option<Label>; 8],
    pub(crate) default_encryption: bool,
    pub(crate) data_catalog_encryption: bool,
    pub(crate) shared_catalog_encryption: bool,
    pub(crate) enforces: bool,
    /// The key groups that labels name, at the indexes of [`World::labels`].
    pub(crate) groups: [Option<Named>; 8],
    /// The key group of the table's file.
    pub(crate) table_group: Option<KeyGroup>,
    /// That of all other files.
    pub(crate) others_group: Option<KeyGroup>,
    /// The cipher of the table.
    pub(crate) table: Option<CipherId>,
    /// The cipher of all other files.
    pub(crate) others: Option<CipherId>,
    pub(crate) cipher: CipherId,
    /// A cipher that the server cannot use now.
    pub(crate) unusable: Option<CipherId>,
    /// The table has the name of a copy of its copy.
    pub(crate) circle: bool,
    /// Number of label look-ups.
    pub(crate) asked: Cell<usize>,
}

/// Indexes in [`World::labels`].
pub(crate) const OF_TABLE: usize = 0;
pub(crate) const OF_PARENT: usize = 1;
pub(crate) const OF_GRANDPARENT: usize = 2;
pub(crate) const OF_SCHEMA: usize = 3;
pub(crate) const OF_TABLESPACE: usize = 4;
pub(crate) const OF_ELSEWHERE: usize = 5;
pub(crate) const OF_DATABASE: usize = 6;
/// The label of all other relations that take one.
pub(crate) const OF_OTHERS: usize = 7;

impl Default for World {
    fn default() -> World {
        World {
            levels: 0,
            labels: [None; 8],
            groups: [None; 8],
            table_group: None,
            others_group: None,
            default_encryption: false,
            data_catalog_encryption: true,
            shared_catalog_encryption: false,
            enforces: false,
            table: None,
            others: None,
            cipher: AES_256,
            unusable: None,
            circle: false,
            asked: Cell::new(0),
        }
    }
}

impl World {
    /// All combinations of labels at these indexes, up to `levels` levels of partitioned tables,
    /// the setting, and the state of the table.
    pub(crate) fn all(places: &[usize], levels: usize) -> impl Iterator<Item = World> {
        let count = LABELS.len().pow(places.len() as u32);
        let rest = (levels + 1) * 2 * FILES.len();
        (0..count * rest).filter_map(move |number| {
            let mut world = World::default();
            let mut digits = number;
            let mut digit = |base: usize| {
                let digit = digits % base;
                digits /= base;
                digit
            };
            for place in places {
                world.labels[*place] = LABELS[digit(LABELS.len())];
            }
            world.levels = digit(levels + 1);
            world.default_encryption = digit(2) == 1;
            world.table = FILES[digit(FILES.len())];
            // A label on a partitioned table that does not exist would only repeat a combination.
            let absent = [OF_PARENT, OF_GRANDPARENT];
            let is_absent = |(above, place): (usize, &usize)| {
                world.levels <= above && world.labels[*place].is_some()
            };
            (!absent.iter().enumerate().any(is_absent)).then_some(world)
        })
    }

    pub(crate) fn wanted(&self, oid: Oid) -> Option<Decision> {
        Policy::of(self).wanted(&self.get(oid)).unwrap()
    }

    /// True if a relation is to be encrypted.
    pub(crate) fn wants_encryption(&self, oid: Oid) -> bool {
        self.wanted(oid).is_some_and(|wanted| wanted.is_encrypted())
    }

    pub(crate) fn get(&self, oid: Oid) -> Relation {
        self.relation(oid).unwrap().unwrap()
    }

    pub(crate) fn label(&self, place: usize) -> Option<Label> {
        self.labels[place]
    }

    pub(crate) fn with_label(&self, place: usize, label: Option<Label>) -> World {
        let mut world = self.clone();
        world.labels[place] = label;
        world
    }
}

/// The relations with files that a user has created.
pub(crate) const USERS: [Oid; 16] = [
    TABLE,
    INDEX,
    NEW_INDEX,
    TOAST,
    TOAST_INDEX,
    SEQUENCE,
    FREE_SEQUENCE,
    TRANSIENT,
    COPY,
    COPY_OF_OTHER,
    COPY_OF_SUPERUSER,
    NAMESAKE,
    VIEW,
    TEMPORARY,
    SQUEEZED,
    SQUEEZED_OF_OTHER,
];

pub(crate) fn file(relation: Oid, tablespace: Oid, database: u32) -> RelFile {
    RelFile { tablespace, database, relation }
}

/// The index in [`World::labels`] of an object's label.
fn place_of(object: Labelled) -> Option<usize> {
    Some(match object {
        Labelled::Relation(TABLE) => OF_TABLE,
        Labelled::Relation(PARENT) => OF_PARENT,
        Labelled::Relation(GRANDPARENT) => OF_GRANDPARENT,
        Labelled::Relation(_) => OF_OTHERS,
        Labelled::Schema(SCHEMA) => OF_SCHEMA,
        Labelled::Tablespace(TABLESPACE) => OF_TABLESPACE,
        Labelled::Tablespace(_) => OF_ELSEWHERE,
        Labelled::Database(DATABASE) => OF_DATABASE,
        Labelled::Schema(_) | Labelled::Database(_) => return None,
    })
}

impl Catalog for World {
    type Error = Missing;

    fn relation(&self, oid: Oid) -> Result<Option<Relation>, Missing> {
        use RelationKind::{Index, MaterializedView, PartitionedTable, Sequence, Table, Toast};
        let kind = match oid {
            PARENT | GRANDPARENT => PartitionedTable,
            INDEX | NEW_INDEX | TOAST_INDEX => Index,
            TOAST => Toast,
            SEQUENCE | FREE_SEQUENCE => Sequence,
            VIEW => MaterializedView,
            0 => return Ok(None),
            _ => Table,
        };
        let user_made = (TABLE..CATALOG).contains(&oid);
        let user_made = user_made && !catalogs::WITH_VALUES.contains(&oid);
        let tablespace = match kind {
            Index | Sequence => ELSEWHERE,
            _ => TABLESPACE,
        };
        let database = if oid == SHARED_CATALOG { 0 } else { DATABASE };
        let is_copy = [COPY, COPY_OF_OTHER, COPY_OF_SUPERUSER].contains(&oid);
        Ok(Some(Relation {
            oid,
            kind,
            user_made,
            temporary: oid == TEMPORARY,
            owner: match oid {
                COPY_OF_OTHER | SQUEEZED_OF_OTHER => OTHER,
                COPY_OF_SUPERUSER => SUPERUSER,
                _ => OWNER,
            },
            schema: if is_copy { SCHEMA_OF_PG_REPACK } else { SCHEMA },
            tablespace,
            file: file(oid, tablespace, database),
            is_partition: match oid {
                TABLE => self.levels > 0,
                PARENT => self.levels > 1,
                _ => false,
            },
            rewrites: (oid == TRANSIENT).then_some(TABLE),
            indexed_table: match oid {
                INDEX => Some(TABLE),
                TOAST_INDEX => Some(TOAST),
                _ => None,
            },
            named_for: (is_copy || [TOAST, NAMESAKE].contains(&oid)).then_some(TABLE),
            squeezes: match oid {
                SQUEEZED | SQUEEZED_OF_OTHER => Some(TABLE),
                TABLE if self.circle => Some(SQUEEZED),
                _ => None,
            },
        }))
    }

    fn label_of(&self, object: Labelled) -> Result<Option<Label>, Missing> {
        self.asked.set(self.asked.get() + 1);
        if let Labelled::Relation(oid) = object {
            let takes_labels = self.get(oid).kind.takes_labels();
            assert!(takes_labels, "a label of {oid} is asked for");
        }
        Ok(place_of(object).and_then(|place| self.label(place)))
    }

    fn key_group_of_label(&self, object: Labelled) -> Result<Option<Named>, Missing> {
        Ok(place_of(object).and_then(|place| self.groups[place]))
    }

    fn no_such_key_group(&self, of: Labelled) -> Missing {
        Missing(of)
    }

    fn key_group_of(&self, file: RelFile) -> Option<KeyGroup> {
        if file.relation == TABLE { self.table_group } else { self.others_group }
    }

    fn parent_of(&self, partition: Oid) -> Result<Option<Oid>, Missing> {
        assert!(self.get(partition).is_partition, "{partition} is no partition");
        Ok(Some(if partition == TABLE { PARENT } else { GRANDPARENT }))
    }

    fn table_of_index(&self, index: Oid) -> Result<Option<Oid>, Missing> {
        assert_eq!(index, NEW_INDEX);
        Ok(Some(TABLE))
    }

    fn owner_of_sequence(&self, sequence: Oid) -> Result<Option<Oid>, Missing> {
        Ok((sequence == SEQUENCE).then_some(TABLE))
    }

    fn is_schema_of_pg_repack(&self, schema: Oid) -> Result<bool, Missing> {
        Ok(schema == SCHEMA_OF_PG_REPACK)
    }

    fn is_superuser(&self, role: Oid) -> Result<bool, Missing> {
        Ok(role == SUPERUSER)
    }

    fn cipher_of(&self, file: RelFile) -> Option<CipherId> {
        if file.relation == TABLE { self.table } else { self.others }
    }

    fn is_anything_encrypted_here(&self) -> bool {
        self.table.is_some() || self.others.is_some()
    }

    fn my_database(&self) -> Oid {
        DATABASE
    }

    fn default_encryption(&self) -> bool {
        self.default_encryption
    }

    fn data_catalog_encryption(&self) -> bool {
        self.data_catalog_encryption
    }

    fn shared_catalog_encryption(&self) -> bool {
        self.shared_catalog_encryption
    }

    fn enforces(&self) -> bool {
        self.enforces
    }

    fn default_cipher(&self) -> CipherId {
        self.cipher
    }

    fn may_inherit(&self, cipher: CipherId) -> bool {
        self.unusable != Some(cipher)
    }
}
