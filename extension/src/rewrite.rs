//! Encrypting and decrypting a relation that has data, in place and under lock.
//!
//! The new epoch becomes current for writes, then every page is written again through shared
//! buffers with a full-page image in WAL, flushed and synced. A file may mix pages of any epochs and
//! plaintext, so it stays readable wherever this stops.

use pagevault_cipher::CipherId;
use pgrx::pg_sys::{self, Oid};

use crate::keys::{data_keys, shared};
use crate::pg::pages;
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::pg::wal;
use crate::policy;
use crate::verify;

const LOCK: pg_sys::LOCKMODE = pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE;

/// Encrypts a table, its indexes, TOAST table and owned sequences. What is already sealed with the
/// wanted cipher is left alone.
pub(crate) fn encrypt(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    let wanted = match cipher {
        Some(cipher) => cipher,
        None => policy::default_cipher()?,
    };
    for member in relation::family(oid, LOCK).iter().filter(|m| m.kind.has_storage()) {
        verify::refuse_destroyed(member.file)?;
        let current = shared::current_cipher(member.file);
        let right = current == Some(wanted) || (current.is_some() && cipher.is_none());
        if !right {
            verify::refuse_lost_epochs(member.file)?;
            wal::flush(data_keys::new_epoch(member.file, wanted)?);
        }
        if !right || has_plaintext(member)? {
            pages::rewrite_all(member.oid);
        }
    }
    Ok(())
}

/// Turns the same set of relations back into plaintext.
pub(crate) fn decrypt(oid: Oid) -> Result<()> {
    for member in relation::family(oid, LOCK).iter().filter(|m| m.kind.has_storage()) {
        if shared::is_known(member.file) {
            verify::refuse_destroyed(member.file)?;
            data_keys::write_plaintext(member.file)?;
            pages::rewrite_all(member.oid);
        }
    }
    Ok(())
}

fn has_plaintext(member: &Facts) -> Result<bool> {
    Ok(verify::count_pages(member.file)?.iter().any(|c| c.state == verify::PageState::Plaintext))
}
