//! Encrypting system catalogs: which actions, and when. The policy decides which catalogs.
//!
//! A catalog with new storage follows the policy like any relation. An existing one is encrypted in
//! place as soon as the policy requires it: at the end of the command that changed the policy, or
//! at the latest before its transaction commits. Reads and writes continue meanwhile.

use pagevault_cipher::{CipherId, DataKeyVersion};
use pagevault_core::policy::catalogs;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use super::requests;
use crate::keys::store::directory;
use crate::pg::guc;
use crate::pg::process;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::policy::pending::{self, Pending};
use crate::policy::{self, Decision, Source};
use crate::rekey::at_once;

const LARGE_OBJECTS: Oid = Oid::from_u32(catalogs::LARGE_OBJECTS);

/// Catalogs with values of user tables, in the order in which they are encrypted.
pub(crate) const WITH_VALUES: [Oid; 3] = {
    let [first, second, third] = catalogs::WITH_VALUES;
    [Oid::from_u32(first), Oid::from_u32(second), Oid::from_u32(third)]
};

/// Up to this number of blocks (64 MiB, about a second), existing large objects are encrypted
/// within the user's command.
const LARGE_OBJECTS_AT_ONCE: u32 = 8192;

/// Encrypts what the command has made necessary. If this fails, it remains pending: a nested
/// command may have called this, and its error may be caught.
pub(crate) fn follow() -> Result<()> {
    if process::runs_transactions() {
        seal(pending::get())?;
    }
    pending::forget();
    Ok(())
}

fn seal(pending: Pending) -> Result<()> {
    if pending == Pending::Everything {
        relation::make_command_visible();
        for (catalog, decision) in wanted_encrypted()? {
            if !catalog.is_shared() && !is_brought_by_pg_upgrade(catalog.oid) {
                seal_now(catalog.oid, decision.named_cipher())?;
            }
        }
    }
    if pending != Pending::Nothing && guc::data_catalog_encryption() && !values_are_sealed() {
        for oid in WITH_VALUES.into_iter().filter(|oid| !is_brought_by_pg_upgrade(*oid)) {
            seal_now(oid, None)?;
        }
    }
    Ok(())
}

/// The only catalog whose file pg_upgrade takes from the old cluster, with its key or as plaintext.
fn is_brought_by_pg_upgrade(catalog: Oid) -> bool {
    catalog == LARGE_OBJECTS && process::is_binary_upgrade()
}

/// Encrypts a catalog within a user's command about something else.
fn seal_now(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    if oid == LARGE_OBJECTS && relation::blocks(oid) > LARGE_OBJECTS_AT_ONCE {
        // The index, which contains only numbers, stays plaintext until the old pages are
        // encrypted. Drift detection recognises the state by that.
        at_once::seal_new_pages(oid, cipher)
    } else {
        at_once::encrypt_catalog(oid, cipher)
    }
}

/// If the last file is encrypted, all before it are completely encrypted:
/// [`at_once::encrypt_catalog`] begins a file only after the one before is on disk.
fn values_are_sealed() -> bool {
    WITH_VALUES.into_iter().filter(|oid| !is_brought_by_pg_upgrade(*oid)).all(|oid| {
        let is_sealed = |facts: &Facts| directory::is_sealed(facts.file);
        match oid {
            LARGE_OBJECTS => relation::facts(oid).is_some_and(|facts| is_sealed(&facts)),
            _ => relation::family_unlocked(oid).iter().all(is_sealed),
        }
    })
}

/// `pagevault.encrypt_catalogs()`: encrypts all catalogs for which the policy requires it.
pub(crate) fn encrypt_wanted() -> Result<()> {
    for (catalog, decision) in wanted_encrypted()? {
        at_once::encrypt_catalog(catalog.oid, decision.named_cipher())?;
    }
    Ok(())
}

/// Data key versions of all catalogs and of the relations that follow them.
pub(crate) struct Keys(Vec<(Oid, Vec<Option<DataKeyVersion>>)>);

impl Keys {
    pub(crate) fn current() -> Keys {
        let catalogs = relation::all().into_iter().filter_map(relation::facts);
        let catalogs =
            catalogs.filter(|facts| !facts.user_made && facts.kind == RelationKind::Table);
        Keys(catalogs.map(|catalog| (catalog.oid, keys_of(catalog.oid))).collect())
    }

    /// The catalogs whose key versions have changed.
    pub(crate) fn changed(self) -> impl Iterator<Item = Oid> {
        let changed = self.0.into_iter().filter(|(catalog, keys)| keys_of(*catalog) != *keys);
        changed.map(|(catalog, _)| catalog)
    }
}

fn keys_of(catalog: Oid) -> Vec<Option<DataKeyVersion>> {
    let members = relation::family_unlocked(catalog);
    members.iter().map(|member| directory::current_version(member.file)).collect()
}

/// Catalogs that the policy requires to be encrypted, without their indexes and TOAST tables.
fn wanted_encrypted() -> Result<Vec<(Facts, Decision)>> {
    let mut found = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if !facts.user_made
            && facts.kind == RelationKind::Table
            && let Some(wanted) = policy::wanted_encrypted(&facts)?
        {
            found.push((facts, wanted));
        }
    }
    Ok(found)
}

/// `pagevault.encrypt()` of a catalog. Catalogs have no labels of their own.
pub(crate) fn encrypt(catalog: &Facts, cipher: Option<CipherId>) -> Result<()> {
    require_table(catalog)?;
    let wanted = policy::wanted_encrypted(catalog)?;
    if catalog.is_shared() && wanted.is_none() && !directory::is_sealed(catalog.file) {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("\"{}\" is a shared catalog, and these are not protected", catalog.name),
        )
        .detail("While the key of the cluster is locked nobody could log in.")
        .hint("To accept that, set pagevault.shared_catalog_encryption = on."));
    }
    let named = || wanted.and_then(|wanted| wanted.named_cipher());
    at_once::encrypt_catalog(catalog.oid, cipher.or_else(named))
}

/// `pagevault.decrypt()` of a catalog, unless it is against the policy. Returns the number of the
/// rekey job, if one is needed.
pub(crate) fn decrypt(catalog: &Facts) -> Result<Option<i64>> {
    require_table(catalog)?;
    if let Some(wanted) = policy::wanted_encrypted(catalog)? {
        let (detail, hint) = match wanted.source {
            Source::Setting(setting) => {
                let name = setting.name();
                (format!("{name} is on."), format!("Turn {name} off first."))
            }
            source => (
                format!("The label of {} says encrypted.", policy::describe(source)),
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
    requests::decrypt(catalog)
}

fn require_table(catalog: &Facts) -> Result<()> {
    if catalog.kind == RelationKind::Table {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
        format!("\"{}\" is not a table", catalog.name),
    )
    .hint("Name the catalog; its indexes and TOAST table follow."))
}
