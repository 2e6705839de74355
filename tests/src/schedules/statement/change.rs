//! Changes to one table.

use serde::{Deserialize, Serialize};

use crate::schedules::database::{Kind, Table};

/// A change that replaces files of a table, or leaves its rows as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::schedules) enum Change {
    Analyze,
    BrinIndex,
    Cluster,
    GinIndex,
    HashIndex,
    Index,
    IndexConcurrently,
    Logged,
    Reindex,
    ReindexConcurrently,
    Rewrite,
    SchemaOpen,
    SchemaVault,
    SpaceDefault,
    SpaceOther,
    Truncate,
    Unlogged,
    Vacuum,
    VacuumFull,
    /// Types that need no rewriting: indexes keep their files.
    Retype,
}

impl Change {
    pub(in crate::schedules) const ALL: [Change; 20] = [
        Change::Analyze,
        Change::BrinIndex,
        Change::Cluster,
        Change::GinIndex,
        Change::HashIndex,
        Change::Index,
        Change::IndexConcurrently,
        Change::Logged,
        Change::Reindex,
        Change::ReindexConcurrently,
        Change::Rewrite,
        Change::SchemaOpen,
        Change::SchemaVault,
        Change::SpaceDefault,
        Change::SpaceOther,
        Change::Truncate,
        Change::Unlogged,
        Change::Vacuum,
        Change::VacuumFull,
        Change::Retype,
    ];

    pub(super) fn sql(self, keyword: &str) -> &'static str {
        let view = keyword != "TABLE";
        match self {
            Change::Analyze => "ANALYZE {t}",
            Change::BrinIndex => "CREATE INDEX ON {t} USING brin (mark)",
            Change::Cluster => "CLUSTER {t} USING {t}_pkey",
            Change::GinIndex => "CREATE INDEX ON {t} USING gin ((ARRAY[mark]))",
            Change::HashIndex => "CREATE INDEX ON {t} USING hash (mark)",
            Change::Index => "CREATE INDEX ON {t} (mark)",
            Change::IndexConcurrently => "CREATE INDEX CONCURRENTLY ON {t} (mark, id)",
            Change::Logged => "ALTER TABLE {t} SET LOGGED",
            Change::Reindex => "REINDEX TABLE {t}",
            Change::ReindexConcurrently => "REINDEX TABLE CONCURRENTLY {t}",
            Change::Rewrite => "ALTER TABLE {t} ALTER n TYPE bigint USING n + 0",
            Change::SchemaOpen if view => "ALTER MATERIALIZED VIEW {t} SET SCHEMA open",
            Change::SchemaOpen => "ALTER TABLE {t} SET SCHEMA open",
            Change::SchemaVault if view => "ALTER MATERIALIZED VIEW {t} SET SCHEMA vault",
            Change::SchemaVault => "ALTER TABLE {t} SET SCHEMA vault",
            Change::SpaceDefault if view => "ALTER MATERIALIZED VIEW {t} SET TABLESPACE pg_default",
            Change::SpaceDefault => "ALTER TABLE {t} SET TABLESPACE pg_default",
            Change::SpaceOther if view => "ALTER MATERIALIZED VIEW {t} SET TABLESPACE space",
            Change::SpaceOther => "ALTER TABLE {t} SET TABLESPACE space",
            Change::Truncate => "TRUNCATE {t}",
            Change::Unlogged => "ALTER TABLE {t} SET UNLOGGED",
            Change::Vacuum => "VACUUM {t}",
            Change::VacuumFull => "VACUUM FULL {t}",
            Change::Retype => {
                "ALTER TABLE {t} ALTER mark TYPE varchar; ALTER TABLE {t} ALTER mark TYPE text"
            }
        }
    }

    pub(super) fn suits(self, table: &Table, viewed: bool) -> bool {
        match (self, table.kind) {
            (Change::SchemaOpen | Change::SchemaVault, _) => true,
            (Change::Analyze, _) => !table.shredded,
            (Change::Truncate, Kind::Heap) => true,
            (_, Kind::Partitioned) => false,
            (_, _) if table.shredded => false,
            (Change::Rewrite | Change::Retype, Kind::Heap) => !viewed && table.parent.is_none(),
            (Change::Logged | Change::Unlogged, Kind::Heap) => true,
            (
                Change::Rewrite
                | Change::Retype
                | Change::Logged
                | Change::Unlogged
                | Change::Truncate,
                _,
            ) => false,
            _ => true,
        }
    }

    /// Whether it makes new files of the table and all of its indexes. SET TABLESPACE leaves the
    /// indexes where they are.
    pub(super) fn rewrites(self, before: &Table) -> bool {
        match self {
            Change::Logged if before.logged => false,
            Change::Unlogged if !before.logged => false,
            Change::Cluster
            | Change::Logged
            | Change::Rewrite
            | Change::Truncate
            | Change::Unlogged
            | Change::VacuumFull => true,
            Change::Analyze
            | Change::BrinIndex
            | Change::GinIndex
            | Change::HashIndex
            | Change::Index
            | Change::IndexConcurrently
            | Change::Reindex
            | Change::ReindexConcurrently
            | Change::Retype
            | Change::SchemaOpen
            | Change::SchemaVault
            | Change::SpaceDefault
            | Change::SpaceOther
            | Change::Vacuum => false,
        }
    }
}
