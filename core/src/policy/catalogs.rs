//! Policy for system catalogs.
//!
//! - `pg_statistic`, `pg_statistic_ext_data` and `pg_largeobject` hold values of user tables. They
//!   are encrypted as soon as anything in the database is (`pagevault.data_catalog_encryption`).
//! - A label on the database applies to all its catalogs.
//! - Shared catalogs are encrypted if `pagevault.shared_catalog_encryption` is on.

use super::Catalog;
use super::decision::{Decision, Policy, Setting, Source};
use super::label::Label;
use super::precedence::Surroundings;
use super::relation::{Oid, Relation};

/// `pg_largeobject`
pub const LARGE_OBJECTS: Oid = 2613;
/// `pg_statistic_ext_data`
pub const EXTENDED_STATISTICS: Oid = 3429;
/// `pg_statistic`
pub const STATISTICS: Oid = 2619;

/// Catalogs with values of user tables, in the order in which they are encrypted.
pub const WITH_VALUES: [Oid; 3] = [LARGE_OBJECTS, EXTENDED_STATISTICS, STATISTICS];

/// The catalog with values of user tables that a file belongs to, by the number of the file: that
/// of the catalog, its index or its TOAST table. A catalog that VACUUM FULL or the like has given
/// another number is not recognized. Files have the numbers of their relations at first
/// (`DECLARE_TOAST` and `DECLARE_UNIQUE_INDEX_PKEY` in pg_statistic.h, pg_statistic_ext_data.h,
/// pg_largeobject.h).
#[must_use]
pub fn with_values_by_first_file(number: u32) -> Option<&'static str> {
    match number {
        2619 | 2696 | 2840 | 2841 => Some("pg_statistic"),
        3429 | 3433 | 3430 | 3431 => Some("pg_statistic_ext_data"),
        2613 | 2683 => Some("pg_largeobject"),
        _ => None,
    }
}

/// The policy for a catalog that follows no other relation; `None` if there is none.
pub(super) fn wanted<C: Catalog>(
    policy: &Policy<'_, C>,
    relation: &Relation,
) -> Result<Option<Decision>, C::Error> {
    if relation.is_shared() {
        return Ok(wanted_of_shared(policy.catalog));
    }
    let database = policy.my_database();
    if let Some(label @ Label::Encrypted(_)) = policy.label_of(database)? {
        return Ok(Some(Decision::new(label, Source::Around(database))));
    }
    let protected = WITH_VALUES.contains(&relation.oid)
        && policy.catalog.data_catalog_encryption()
        && policy.catalog.is_anything_encrypted_here();
    Ok(protected.then(|| Decision::by(Setting::DataCatalogs)))
}

/// The policy for shared catalogs.
pub fn wanted_of_shared<C: Catalog>(catalog: &C) -> Option<Decision> {
    catalog.shared_catalog_encryption().then(|| Decision::by(Setting::SharedCatalogs))
}
