//! Facts about a relation that the policy uses.

use pagevault_keystore::RelFile;

/// The number of an object in a system catalog.
pub type Oid = u32;

/// `relkind`, as far as pagevault distinguishes kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelationKind {
    /// An ordinary table.
    Table,
    /// An index that is not partitioned.
    Index,
    /// The TOAST table of another relation.
    Toast,
    /// A sequence.
    Sequence,
    /// A materialized view.
    MaterializedView,
    /// A partitioned table.
    PartitionedTable,
    /// Partitioned indexes, views, foreign tables, composite types.
    WithoutStorage,
}

impl RelationKind {
    /// The kind for a value of `relkind`.
    #[must_use]
    pub fn of(relkind: u8) -> Self {
        match relkind {
            b'r' => Self::Table,
            b'i' => Self::Index,
            b't' => Self::Toast,
            b'S' => Self::Sequence,
            b'm' => Self::MaterializedView,
            b'p' => Self::PartitionedTable,
            _ => Self::WithoutStorage,
        }
    }

    /// True for kinds that have files.
    #[must_use]
    pub fn has_storage(self) -> bool {
        !matches!(self, Self::PartitionedTable | Self::WithoutStorage)
    }

    /// True for kinds that can have a label.
    #[must_use]
    pub fn takes_labels(self) -> bool {
        matches!(
            self,
            Self::Table | Self::MaterializedView | Self::Sequence | Self::PartitionedTable
        )
    }
}

/// An object that may have a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Labelled {
    /// A relation.
    Relation(Oid),
    /// A schema.
    Schema(Oid),
    /// A tablespace; its label applies to the whole cluster.
    Tablespace(Oid),
    /// A database.
    Database(Oid),
}

/// A relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relation {
    /// Its OID.
    pub oid: Oid,
    /// Its kind.
    pub kind: RelationKind,
    /// Created by a user, not by initdb and not by this extension.
    pub user_made: bool,
    /// Temporary: its files exist only as long as its session.
    pub temporary: bool,
    /// The role that owns it.
    pub owner: Oid,
    /// The schema that it is in.
    pub schema: Oid,
    /// Its tablespace; never 0: where the catalog has 0, that of the database.
    pub tablespace: Oid,
    /// Its file, for kinds with storage.
    pub file: RelFile,
    /// Whether it is a partition.
    pub is_partition: bool,
    /// For a transient relation, the relation that it will replace. VACUUM FULL, CLUSTER, REFRESH
    /// and rewriting ALTER TABLE fill one. Users cannot create any.
    pub rewrites: Option<Oid>,
    /// For an index, its table, if that was read together with the index.
    pub indexed_table: Option<Oid>,
    /// The OID that its name ends in: see [`named_for`].
    pub named_for: Option<Oid>,
    /// The OID that its name ends in: see [`squeezes`].
    pub squeezes: Option<Oid>,
}

impl Relation {
    /// True if it has files that outlive its session.
    #[must_use]
    pub fn is_stored(&self) -> bool {
        self.kind.has_storage() && !self.temporary
    }

    /// True if it belongs to the cluster, not to a database.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.file.database == SHARED
    }
}

/// Database number of the files of shared catalogs, and of the transient tables by which VACUUM
/// FULL rewrites them.
pub const SHARED: u32 = 0;

/// The OID in the name of a relation that is named after another: `pg_toast_OID`, and the tables
/// that pg_repack fills (`table_OID`) and logs to (`log_OID`).
#[must_use]
pub fn named_for(kind: RelationKind, name: &[u8]) -> Option<Oid> {
    match kind {
        RelationKind::Toast => number_after(&[b"pg_toast_"], name),
        RelationKind::Table => number_after(&[b"table_", b"log_"], name),
        _ => None,
    }
}

/// The OID in the name of the table that pg_squeeze fills beside another: `tmp_OID`
/// (`create_transient_table`, pg_squeeze.c).
#[must_use]
pub fn squeezes(kind: RelationKind, name: &[u8]) -> Option<Oid> {
    (kind == RelationKind::Table).then(|| number_after(&[b"tmp_"], name)).flatten()
}

fn number_after(prefixes: &[&[u8]], name: &[u8]) -> Option<Oid> {
    let digits = prefixes.iter().find_map(|prefix| name.strip_prefix(*prefix))?;
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}
