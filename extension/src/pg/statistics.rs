//! Rows of statistics catalogs: counting those with samples of relations, and deleting them.

use std::collections::HashSet;
use std::mem::offset_of;

use pgrx::pg_sys::{self, Oid};
use pgrx::spi::SpiError;
use pgrx::{PgSqlErrorCode, Spi};

use super::catalog;
use super::remnants::KeptBytes;
use super::report::{Report, Result};

/// `StatisticExtRelationId` and `StatisticExtDataRelationId`: pg_statistic_ext and
/// pg_statistic_ext_data. Not among pgrx's bindings of all majors.
const EXTENDED: Oid = Oid::from_u32(3381);
const EXTENDED_DATA: Oid = Oid::from_u32(3429);

/// The first columns of pg_statistic_ext, the same in 15 to 18.
#[repr(C)]
struct Extended {
    oid: Oid,
    relation: Oid,
}

/// The first columns of pg_statistic_ext_data.
#[repr(C)]
struct ExtendedData {
    statistics: Oid,
    inherited: bool,
}

/// The catalogs with sampled values, and the part of their rows that contains none: the columns
/// before the first of variable width, the same in 15 to 18 (catalog/pg_statistic.h,
/// catalog/pg_statistic_ext_data.h). In pg_statistic `stakind1` and all later columns are zeroed,
/// so that a planner that found the row before looks for no values in it (`get_attstatsslot`,
/// lsyscache.c).
pub(crate) const CATALOGS: [(Oid, KeptBytes); 2] = [
    (
        pg_sys::StatisticRelationId,
        KeptBytes::Columns {
            count: 21,
            bytes: offset_of!(pg_sys::FormData_pg_statistic, stakind1),
        },
    ),
    (EXTENDED_DATA, KeptBytes::Columns { count: 2, bytes: EXTENDED_DATA_WIDTH }),
];
const EXTENDED_DATA_WIDTH: usize = offset_of!(ExtendedData, inherited) + size_of::<bool>();

/// Relations, and their ancestors, whose statistics with inheritance contain samples of them too.
pub(crate) struct Sampled {
    pub(crate) relations: HashSet<Oid>,
    pub(crate) above: HashSet<Oid>,
}

impl Sampled {
    fn is_in(&self, relation: Oid, inherited: bool) -> bool {
        self.relations.contains(&relation) || (inherited && self.above.contains(&relation))
    }

    /// The current number of rows. Includes what other sessions have committed since the session's
    /// snapshot was taken.
    pub(crate) fn rows(&self) -> usize {
        // SAFETY: in a transaction. Catalog scans take a new snapshot after these invalidation
        // messages (GetCatalogSnapshot); rows begin like the structures.
        unsafe {
            pg_sys::AcceptInvalidationMessages();
            let columns = catalog::scan(pg_sys::StatisticRelationId, |row| {
                let row = &*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_statistic>();
                self.is_in(row.starelid, row.stainherit).then_some(())
            });
            let (mut direct, mut inherited) = (HashSet::new(), HashSet::new());
            catalog::scan(EXTENDED, |row| {
                let row = &*pg_sys::GETSTRUCT(row).cast::<Extended>();
                if self.is_in(row.relation, false) {
                    direct.insert(row.oid);
                } else if self.is_in(row.relation, true) {
                    inherited.insert(row.oid);
                }
                None::<()>
            });
            let extended = catalog::scan(EXTENDED_DATA, |row| {
                let row = &*pg_sys::GETSTRUCT(row).cast::<ExtendedData>();
                let is_in = direct.contains(&row.statistics)
                    || (row.inherited && inherited.contains(&row.statistics));
                is_in.then_some(())
            });
            columns.len() + extended.len()
        }
    }
}

/// The tables with statistics that contain samples of their children, ascending.
pub(crate) fn with_inherited_statistics() -> Vec<Oid> {
    // SAFETY: in a transaction; rows begin like the structures. See `Sampled::rows`.
    let mut tables = unsafe {
        pg_sys::AcceptInvalidationMessages();
        let mut tables = catalog::scan(pg_sys::StatisticRelationId, |row| {
            let row = &*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_statistic>();
            row.stainherit.then_some(row.starelid)
        });
        let extended: HashSet<Oid> = catalog::scan(EXTENDED_DATA, |row| {
            let row = &*pg_sys::GETSTRUCT(row).cast::<ExtendedData>();
            row.inherited.then_some(row.statistics)
        })
        .into_iter()
        .collect();
        tables.extend(catalog::scan(EXTENDED, |row| {
            let row = &*pg_sys::GETSTRUCT(row).cast::<Extended>();
            extended.contains(&row.oid).then_some(row.relation)
        }));
        tables
    };
    tables.sort_unstable_by_key(|oid| oid.to_u32());
    tables.dedup();
    tables
}

/// Deletes the rows of all relations that another process of this database has locked in
/// AccessExclusiveLock mode, and of their ancestors. As the bootstrap superuser.
pub(crate) fn delete_of_relations_locked_by(pid: i32) -> Result<()> {
    const RELATIONS: &str = "WITH RECURSIVE locked AS (
            SELECT relation FROM pg_catalog.pg_locks
             WHERE pid = $1 AND locktype = 'relation' AND mode = 'AccessExclusiveLock' AND granted
               AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())),
        above AS (
            SELECT relation FROM locked
            UNION
            SELECT inhparent FROM pg_catalog.pg_inherits JOIN above ON inhrelid = relation)";
    const COLUMNS: &str = "DELETE FROM pg_catalog.pg_statistic
         WHERE starelid IN (SELECT relation FROM locked)
            OR (stainherit AND starelid IN (SELECT relation FROM above))";
    const EXTENDED_COLUMNS: &str =
        "DELETE FROM pg_catalog.pg_statistic_ext_data d USING pg_catalog.pg_statistic_ext e
         WHERE e.oid = d.stxoid
           AND (e.stxrelid IN (SELECT relation FROM locked)
                OR (d.stxdinherit AND e.stxrelid IN (SELECT relation FROM above)))";
    let deleted: std::result::Result<(), SpiError> = Spi::connect_mut(|spi| {
        for delete in [COLUMNS, EXTENDED_COLUMNS] {
            spi.update(&format!("{RELATIONS} {delete}"), None, &[pid.into()])?;
        }
        Ok(())
    });
    deleted.map_err(|error| {
        Report::new(
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            format!("statistics could not be deleted: {error}"),
        )
    })
}
