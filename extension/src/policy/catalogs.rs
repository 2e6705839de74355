//! System catalogs: which of them are sealed, and when that happens.
//!
//! - `pg_statistic`, `pg_statistic_ext_data` and `pg_largeobject` hold values of user tables. As soon as
//!   anything in a database is encrypted, they are too (`pagevault.protect_statistics`).
//! - A label on the database covers all its catalogs.
//! - Shared catalogs are sealed if `pagevault.protect_shared_catalogs` says so.
//!
//! A catalog that is replaced follows the policy as any relation does ([`super::decision`]). One that is
//! there is sealed in place, where the first two begin to hold: at the end of the command that made it so,
//! or at the latest before its transaction commits. Nobody is kept from reading or writing it meanwhile.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use super::decision::{self, Decision, Source};
use super::label::Label;
use super::memo;
use crate::keys::shared;
use crate::pg::guc;
use crate::pg::labels::Object;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::{Report, Result};
use crate::rewrite;

/// The database of files of shared catalogs, and of the transient tables by which VACUUM FULL rewrites them.
pub(super) const SHARED: u32 = 0;

/// `LargeObjectRelationId` and `StatisticExtDataRelationId`, not among pgrx's bindings.
const LARGE_OBJECTS: Oid = Oid::from_u32(2613);
const EXTENDED_STATISTICS: Oid = Oid::from_u32(3429);

/// Catalogs with values of user tables, in the order in which they are sealed.
const WITH_VALUES: [Oid; 3] = [LARGE_OBJECTS, EXTENDED_STATISTICS, pg_sys::StatisticRelationId];

/// Up to this size old large objects are sealed within the user's command: 64 MiB, about a second.
const LARGE_OBJECTS_AT_ONCE: u32 = 8192;

/// What is to be sealed when the command ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pending {
    Nothing,
    Statistics,
    /// A label was put on this database.
    Everything,
}

static PENDING: ProcessLocal<Pending> = ProcessLocal::new(Pending::Nothing);

/// A relation of this database is encrypted, or a label here wants that.
pub(crate) fn note_encryption() {
    note(Pending::Statistics);
}

/// A label on this database wants encryption.
pub(super) fn note_database_label() {
    note(Pending::Everything);
}

fn note(what: Pending) {
    PENDING.with(|pending| *pending = what.max(*pending));
}

/// True if there is something for [`follow`] to do.
#[inline]
pub(crate) fn any() -> bool {
    PENDING.with(|pending| *pending != Pending::Nothing)
}

/// The transaction was rolled back.
pub(crate) fn forget() {
    PENDING.with(|pending| *pending = Pending::Nothing);
}

/// Seals what the command has made necessary.
pub(crate) fn follow() -> Result<()> {
    let pending = PENDING.with(|pending| std::mem::replace(pending, Pending::Nothing));
    if !process::runs_transactions() {
        return Ok(());
    }
    match pending {
        Pending::Nothing => Ok(()),
        Pending::Statistics => protect_statistics(),
        Pending::Everything => {
            relation::make_command_visible();
            seal_wanted(|catalog| !is_shared(catalog)).and_then(|_| protect_statistics())
        }
    }
}

fn protect_statistics() -> Result<()> {
    if !guc::protect_statistics() || values_are_sealed() {
        return Ok(());
    }
    for oid in WITH_VALUES {
        let big = oid == LARGE_OBJECTS && relation::blocks(oid) > LARGE_OBJECTS_AT_ONCE;
        // The index stays plain until the old pages are sealed: that is how drift knows. It holds
        // numbers only.
        if big { rewrite::seal_new_pages(oid)? } else { rewrite::encrypt_catalog(oid, None)? }
    }
    Ok(())
}

/// What is sealed last tells that all before it was sealed wholly: [`rewrite::encrypt_catalog`] goes on
/// to the next file only when one is on disk.
fn values_are_sealed() -> bool {
    WITH_VALUES.iter().all(|&oid| {
        let is_sealed = |facts: &Facts| shared::is_sealed(facts.file);
        match oid {
            LARGE_OBJECTS => relation::facts(oid).is_some_and(|facts| is_sealed(&facts)),
            _ => relation::family_as_it_is(oid).iter().all(is_sealed),
        }
    })
}

/// True if a catalog belongs to the cluster.
pub(crate) fn is_shared(catalog: &Facts) -> bool {
    catalog.file.database == SHARED
}

/// What is wanted of a catalog that follows no other; `None` if nothing says.
pub(super) fn wanted(catalog: &Facts) -> Result<Option<Decision>> {
    if is_shared(catalog) {
        return Ok(wanted_of_shared());
    }
    let database = Object::my_database();
    if let Some(label @ Label::Encrypted(_)) = memo::label_of(database)? {
        return Ok(Some(Decision::new(label, Source::Around(database))));
    }
    let holds_values = WITH_VALUES.contains(&catalog.oid);
    let protected = holds_values
        && guc::protect_statistics()
        && shared::anything_sealed_in(process::my_database());
    Ok(protected.then(|| by_setting("pagevault.protect_statistics")))
}

/// What is wanted of shared catalogs.
pub(super) fn wanted_of_shared() -> Option<Decision> {
    guc::protect_shared_catalogs().then(|| by_setting("pagevault.protect_shared_catalogs"))
}

fn by_setting(name: &'static str) -> Decision {
    Decision::new(Label::Encrypted(None), Source::Setting(name))
}

/// Seals every catalog of which that is wanted. Returns the number of files that were not.
pub(crate) fn seal_all_wanted() -> Result<i64> {
    seal_wanted(|_| true)
}

fn seal_wanted(which: impl Fn(&Facts) -> bool) -> Result<i64> {
    let unsealed = || -> Result<Vec<Facts>> {
        let mut found = Vec::new();
        for facts in all().filter(|facts| which(facts)) {
            let wanted = decision::wanted(&facts)?;
            let current = shared::current_cipher(facts.file);
            if wanted.is_some_and(|d| d.is_encrypted() && !d.is_met_by(current)) {
                found.push(facts);
            }
        }
        Ok(found)
    };
    let before = unsealed()?.len();
    for catalog in all().filter(|facts| facts.kind == Kind::Table && which(facts)) {
        if let Some(wanted) = decision::wanted(&catalog)?.filter(Decision::is_encrypted) {
            rewrite::encrypt_catalog(catalog.oid, wanted.named_cipher())?;
        }
    }
    Ok(before as i64)
}

fn all() -> impl Iterator<Item = Facts> {
    let relations = relation::all().into_iter().filter_map(relation::facts);
    relations.filter(|facts| !facts.user_made && facts.is_stored())
}

/// `pagevault.encrypt()` of a catalog. Catalogs have no label of their own.
pub(crate) fn encrypt(catalog: &Facts, cipher: Option<pagevault_cipher::CipherId>) -> Result<()> {
    require_table(catalog)?;
    let wanted = decision::wanted(catalog)?.filter(Decision::is_encrypted);
    if is_shared(catalog) && wanted.is_none() {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("\"{}\" is a shared catalog, and these are not protected", catalog.name),
        )
        .detail("While the key of the cluster is locked nobody could log in.")
        .hint("To accept that, set pagevault.protect_shared_catalogs = on."));
    }
    let named = || wanted.and_then(|wanted| wanted.named_cipher());
    rewrite::encrypt_catalog(catalog.oid, cipher.or_else(named))
}

/// `pagevault.decrypt()` of a catalog, unless that is against the policy.
pub(crate) fn decrypt(catalog: &Facts) -> Result<()> {
    require_table(catalog)?;
    if let Some(wanted) = decision::wanted(catalog)?.filter(Decision::is_encrypted) {
        let (detail, hint) = match wanted.source {
            Source::Setting(name) => (format!("{name} is on."), format!("Turn {name} off first.")),
            source => (
                format!("The label of {} says encrypted.", source.describe()),
                "Change the label first.".to_owned(),
            ),
        };
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("\"{}\" is to be encrypted", catalog.name),
        )
        .detail(detail)
        .hint(hint));
    }
    rewrite::decrypt_catalog(catalog.oid)
}

fn require_table(catalog: &Facts) -> Result<()> {
    if catalog.kind == Kind::Table {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
        format!("\"{}\" is not a table", catalog.name),
    )
    .hint("Name the catalog; its indexes and TOAST table follow."))
}
