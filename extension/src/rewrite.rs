//! Encrypting a relation that has data within one command, in place. Decrypting one is a job
//! always: it could not be rolled back.
//!
//! The steps are those of the rekey engine ([`file`]), without waits and without giving back the
//! lock in between. That lock keeps away VACUUM, which shortens files, and whatever makes new ones;
//! readers and writers go on. A file may mix pages of any epochs and plaintext, so it stays
//! readable wherever this stops.
//!
//! Rekey jobs take a weaker lock, which this one does not keep away: so whoever rewrites a
//! relation, a command or a job, first gets the right to do so ([`Rewriting`]), and no two switch
//! its key at a time.

use pagevault_cipher::CipherId;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use crate::keys::store::directory;
use crate::pg::guc;
use crate::pg::locks::{self, Rewriting};
use crate::pg::pages::Held;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::rekey::file::{self, Target};
use crate::{policy, verify};

const LOCK: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;

/// Encrypts a table, its indexes, TOAST table and owned sequences. Of what is already sealed with
/// the wanted cipher only pages in plaintext are touched.
pub(crate) fn encrypt(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    policy::catalogs::note_encryption();
    encrypt_members(&relation::family(oid, LOCK), cipher)
}

/// As [`encrypt`], for a catalog. The locks are given back at once: what is sealed stays sealed,
/// also if the transaction is rolled back.
pub(crate) fn encrypt_catalog(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    let members = relation::family(oid, LOCK);
    encrypt_members(&members, cipher)?;
    relation::unlock(&members, LOCK);
    Ok(())
}

fn encrypt_members(members: &[Facts], cipher: Option<CipherId>) -> Result<()> {
    rewrite(members, |held| begin_epoch(held, cipher))
}

/// Has pages of a relation sealed from now on, with this cipher, or if none is named with any.
/// `None` if it was so before.
fn begin_epoch(held: &Held, cipher: Option<CipherId>) -> Result<Option<Target>> {
    let file = held.file();
    verify::refuse_destroyed(file)?;
    let current = directory::current_cipher(file);
    if current.is_some() && cipher.is_none_or(|cipher| current == Some(cipher)) {
        return Ok(None);
    }
    file::seal(held, cipher.unwrap_or_else(guc::cipher)).map(Some)
}

/// Has what is written to a catalog from now on sealed, and leaves its old pages and its indexes
/// alone.
pub(crate) fn seal_new_pages(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    const LOCK: pg_sys::LOCKMODE = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    let members = relation::family(oid, LOCK);
    if let Some(table) = members.first().and_then(|table| Held::open(table.oid)) {
        // Without the right to rewrite it: a job may take long, and notices that the key is another
        // one.
        begin_epoch(&table, cipher)?;
    }
    relation::unlock(&members, LOCK);
    Ok(())
}

/// Has one file after the other written as `switch` says from now on (`None`: as it is), and what
/// is not so on disk. The next one is begun when that is done: so what is begun last tells of all
/// before it.
fn rewrite(members: &[Facts], switch: impl Fn(&Held) -> Result<Option<Target>>) -> Result<()> {
    for member in members.iter().filter(|member| member.kind.has_storage()) {
        let Some(held) = Held::open(member.oid) else { continue };
        let _right = right_to_rewrite(&held)?;
        switch(&held)?;
        // A file without any page has nothing that could be written as it was. Of any other it is
        // not known whether whoever switched it has waited to the end.
        if held.forks().iter().any(|(_, blocks)| *blocks > 0) {
            file::await_writers(held.file())?;
        }
        file::rewrite_wholly(&held)?;
    }
    Ok(())
}

/// Waits for a job that rewrites the relation, unless the job would have to wait for this
/// transaction.
fn right_to_rewrite(held: &Held) -> Result<Rewriting> {
    let (oid, is_shared) = (held.oid(), held.is_shared());
    if let Some(right) = Rewriting::try_for_transaction(oid, is_shared) {
        return Ok(right);
    }
    if locks::relations_locked_against_all().contains(&oid) {
        let name = relation::qualified_name(oid);
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("{name} is being rekeyed already"),
        )
        .detail("A rekey job rewrites it, and waits for a lock that this transaction holds.")
        .hint("Wait with pagevault.wait_for_rekey() before the transaction, or end the job with pagevault.cancel_rekey()."));
    }
    Ok(Rewriting::wait_in_transaction(oid, is_shared))
}
