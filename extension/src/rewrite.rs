//! Encrypting and decrypting a relation that has data, in place and under lock.
//!
//! The new epoch becomes current for writes, then every page is written again through shared
//! buffers with a full-page image in WAL, flushed and synced. A file may mix pages of any epochs and
//! plaintext, so it stays readable wherever this stops.
//!
//! User relations are locked against everybody. Catalogs, which everybody needs, are locked against new
//! files and against being made shorter; readers and writers go on. A write of the old kind may be under
//! way when the new epoch becomes current: the page's buffer is written again after it. Pages that are
//! added meanwhile are of the new kind.

use pagevault_cipher::CipherId;
use pgrx::pg_sys::{self, Oid};

use crate::keys::{data_keys, shared};
use crate::page_io;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::pages;
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::wal;
use crate::policy;
use crate::verify;

const LOCK: pg_sys::LOCKMODE = pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE;

/// Conflicts with VACUUM, which shortens files, and with all that makes new ones; not with reading and writing.
const CATALOG_LOCK: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;

/// Encrypts a table, its indexes, TOAST table and owned sequences. What is already sealed with the
/// wanted cipher is left alone.
pub(crate) fn encrypt(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    policy::catalogs::note_encryption();
    encrypt_members(&relation::family(oid, LOCK), cipher)
}

/// As [`encrypt`], for a catalog. The locks are given back at once: what is sealed stays sealed, also if
/// the transaction is rolled back.
pub(crate) fn encrypt_catalog(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    let members = relation::family(oid, CATALOG_LOCK);
    encrypt_members(&members, cipher)?;
    relation::unlock(&members, CATALOG_LOCK);
    Ok(())
}

fn encrypt_members(members: &[Facts], cipher: Option<CipherId>) -> Result<()> {
    for member in members.iter().filter(|m| m.kind.has_storage()) {
        if begin_epoch(member, cipher)? || has_plaintext(member)? {
            pages::rewrite_all(member.oid);
        }
    }
    Ok(())
}

/// Has pages of a relation sealed from now on, with this cipher, or if none is named with any. False if
/// it was so before.
fn begin_epoch(member: &Facts, cipher: Option<CipherId>) -> Result<bool> {
    let current = shared::current_cipher(member.file);
    if current.is_some() && cipher.is_none_or(|cipher| current == Some(cipher)) {
        return Ok(false);
    }
    let cipher = cipher.map_or_else(policy::default_cipher, Ok)?;
    refuse_lost_epochs(member)?;
    wal::flush(data_keys::new_epoch(member.file, cipher)?);
    Ok(true)
}

/// Has what is written to a catalog from now on sealed, and leaves its old pages and its indexes alone.
pub(crate) fn seal_new_pages(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    const LOCK: pg_sys::LOCKMODE = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    let members = relation::family(oid, LOCK);
    if let Some(table) = members.first() {
        begin_epoch(table, cipher)?;
    }
    relation::unlock(&members, LOCK);
    Ok(())
}

/// Turns the same set of relations back into plaintext.
pub(crate) fn decrypt(oid: Oid) -> Result<()> {
    decrypt_members(&relation::family(oid, LOCK))
}

/// As [`decrypt`], for a catalog.
pub(crate) fn decrypt_catalog(oid: Oid) -> Result<()> {
    let members = relation::family(oid, CATALOG_LOCK);
    decrypt_members(&members)?;
    relation::unlock(&members, CATALOG_LOCK);
    Ok(())
}

fn decrypt_members(members: &[Facts]) -> Result<()> {
    for member in members.iter().filter(|m| m.kind.has_storage()) {
        if shared::is_known(member.file) {
            data_keys::write_plaintext(member.file)?;
            pages::rewrite_all(member.oid);
        }
    }
    Ok(())
}

/// A page sealed under an epoch that the keystore does not know belongs to a keystore that was lost; a
/// new key of that epoch would make it unreadable for ever.
fn refuse_lost_epochs(member: &Facts) -> Result<()> {
    for count in verify::count_pages(member.file)? {
        if let verify::PageState::Sealed(epoch) = count.state
            && !shared::has_key(member.file, epoch.get())
        {
            let file = SmgrFile { file: member.file, backend: SHARED_BACKEND };
            let cause = page_io::Cause::NoKey { epoch: epoch.get() };
            return Err(page_io::report(page_io::PageFault { file, cause }, 0));
        }
    }
    Ok(())
}

fn has_plaintext(member: &Facts) -> Result<bool> {
    Ok(verify::count_pages(member.file)?.iter().any(|c| c.state == verify::PageState::Plaintext))
}
