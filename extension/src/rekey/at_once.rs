//! Encrypting a relation with data in place, within one command. Decryption is always a job,
//! because it could not be rolled back.
//!
//! The steps are those of a job ([`pagevault_core::rekey::file`]), but the lock is held throughout.
//! It excludes VACUUM, which truncates files, and all commands that create new ones; reads and
//! writes continue. A file may mix plaintext pages and pages of any versions, so it stays readable
//! wherever this stops.
//!
//! Rekey jobs take a weaker lock, which does not conflict with this one. So a command or job that
//! rewrites a relation first acquires the right to do so ([`Rewriting`]), and no two of them switch
//! its key at the same time.

use std::ops::Range;

use pagevault_cipher::CipherId;
use pagevault_core::page::Fork;
use pagevault_core::rekey::file::{
    Batch, BeginResult, End, FileState, MAX_ROUNDS, StepResult, Storage,
};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use super::file::{self, Images, Target};
use crate::fault;
use crate::keys::store::directory;
use crate::keys::usage::authenticated;
use crate::keys::usage::data_keys;
use crate::pg::locks::{self, Rewriting};
use crate::pg::pages::{Held, Ring};
use crate::pg::process;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::policy;
use crate::verify;

const LOCK: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;

/// Encrypts a table, its indexes, TOAST table and owned sequences. In files that already have the
/// required cipher, only plaintext pages are rewritten.
pub(crate) fn encrypt(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    policy::pending::note_encryption();
    encrypt_members(&relation::family(oid, LOCK), cipher)
}

/// Like [`encrypt`], for what is in plaintext, under the key of the database: a transaction that is
/// rolled back may put nothing into a key group, because keys are not rolled back.
pub(crate) fn encrypt_outside_groups(oid: Oid, cipher: CipherId) -> Result<()> {
    policy::pending::note_encryption();
    rewrite(&relation::family(oid, LOCK), |held| {
        let file = held.file();
        verify::refuse_destroyed(file)?;
        match directory::current_cipher(file) {
            Some(_) => Ok(None),
            None => file::seal_outside_groups(held, cipher).map(Some),
        }
    })
}

/// Encrypts a relation that this transaction has given a new file, without those that follow it.
pub(crate) fn encrypt_alone(facts: &Facts) -> Result<()> {
    policy::pending::note_encryption();
    encrypt_members(std::slice::from_ref(facts), None)
}

/// Like [`encrypt`], for a catalog. The locks are released at once: what is encrypted stays so,
/// even if the transaction is rolled back.
pub(crate) fn encrypt_catalog(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    let members = relation::family(oid, LOCK);
    encrypt_members(&members, cipher)?;
    relation::unlock(&members, LOCK);
    Ok(())
}

fn encrypt_members(members: &[Facts], cipher: Option<CipherId>) -> Result<()> {
    rewrite(members, |held| begin_version(held, cipher))
}

/// Switches a relation to encryption with this cipher; if none is named, any present cipher is
/// kept. `None` if nothing changes.
fn begin_version(held: &Held, cipher: Option<CipherId>) -> Result<Option<Target>> {
    let file = held.file();
    verify::refuse_destroyed(file)?;
    let current = directory::current_cipher(file);
    let is_right = current.is_some() && cipher.is_none_or(|cipher| current == Some(cipher));
    if is_right && !policy::is_in_other_key_group(&relation::require(held.oid())?)? {
        return Ok(None);
    }
    let kept = current.filter(|cipher| cipher.is_for_new_keys());
    let cipher = cipher.or(kept).unwrap_or_else(authenticated::default_cipher);
    file::seal(held, cipher).map(Some)
}

/// Encrypts new writes to a catalog, and leaves its old pages and its indexes alone.
pub(crate) fn seal_new_pages(oid: Oid, cipher: Option<CipherId>) -> Result<()> {
    const LOCK: pg_sys::LOCKMODE = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    let members = relation::family(oid, LOCK);
    if let Some(table) = members.first().and_then(|table| Held::open(table.oid)) {
        // Without the right to rewrite it: a job may take long, and detects that the key has
        // changed.
        begin_version(&table, cipher)?;
    }
    relation::unlock(&members, LOCK);
    Ok(())
}

/// For each file: calls `switch`, which sets the state of new writes or leaves it, and rewrites the
/// pages on disk that differ. A file is begun only after the one before is complete, so the state
/// of the last file tells about all.
fn rewrite(members: &[Facts], switch: impl Fn(&Held) -> Result<Option<Target>>) -> Result<()> {
    for member in members.iter().filter(|member| member.kind.has_storage()) {
        let Some(held) = Held::open(member.oid) else { continue };
        let _right = right_to_rewrite(&held)?;
        let has_switched = switch(&held)?.is_some();
        // A file without pages cannot have pages in an old state. In any other case it is unknown
        // whether an earlier switch has waited for writers until the end.
        if held.forks().iter().any(|(_, blocks)| *blocks > 0) {
            file::await_writers(held.file())?;
        }
        rewrite_file(&held, has_switched)?;
    }
    Ok(())
}

/// Rewrites all pages of a file that are not in the present state of new writes. The caller holds a
/// lock that prevents the file from being replaced or truncated, and the right to rewrite it, and
/// has waited for writers.
pub(crate) fn rewrite_wholly(held: &Held) -> Result<()> {
    rewrite_file(held, false)
}

/// `has_switched`: the caller has just changed the state of new writes.
fn rewrite_file(held: &Held, has_switched: bool) -> Result<()> {
    let target = file::present(held.file());
    let images = match has_switched {
        true => Images::after_switch(held, target),
        false => Images::continued(target)?,
    };
    let mut locked = Locked { held, ring: Ring::new(), images, rewritten: false, begun: 0 };
    let mut state = FileState::START;
    loop {
        match state.step(&mut locked)? {
            StepResult::Ended(End::NeverEnds) => return Err(file::never_ends(held.oid())),
            StepResult::Ended(_) => return Ok(()),
            _ => {}
        }
    }
}

/// A file that the command has locked.
struct Locked<'a> {
    held: &'a Held,
    ring: Ring,
    images: Images,
    rewritten: bool,
    begun: u32,
}

impl Locked<'_> {
    fn blocks_of(&self, fork: Fork) -> u32 {
        let fork = file::number_of(fork);
        let forks = self.held.forks();
        forks.iter().find(|(known, _)| *known == fork).map_or(0, |(_, blocks)| *blocks)
    }
}

impl Storage for Locked<'_> {
    type Error = Report;
    const IS_LOCKED: bool = true;

    fn take_right(&mut self) -> Result<bool> {
        Ok(true)
    }

    /// The key may change once meanwhile, for new pages of a catalog ([`seal_new_pages`]). Repeated
    /// changes are refused, because rewriting would not end.
    fn begin(&mut self, _: Option<RelFile>) -> Result<BeginResult> {
        self.begun += 1;
        if self.begun > MAX_ROUNDS {
            return Err(file::never_ends(self.held.oid()));
        }
        let target = file::present(self.held.file());
        if self.begun > 1 {
            self.images = Images::continued(target)?;
        }
        Ok(BeginResult::Target(target))
    }

    fn look(&mut self, file: RelFile, fork: Fork, blocks: Range<u32>) -> Result<bool> {
        verify::refuse_lost_versions(file, file::number_of(fork), blocks)
    }

    fn writers_are_done(&mut self, _: Target) -> Result<bool> {
        Ok(true)
    }

    fn rewrite(&mut self, target: Target, fork: Fork, blocks: Range<u32>) -> Result<Batch> {
        let blocks = blocks.start..blocks.end.min(self.blocks_of(fork));
        if blocks.is_empty() {
            return Ok(Batch::End);
        }
        let range = blocks.clone();
        let rewritten = file::rewrite(self.held, target, self.images, fork, range, &self.ring)?;
        self.rewritten |= rewritten > 0;
        Ok(Batch::Done { pages: blocks.end - blocks.start, rewritten })
    }

    fn flush(&mut self, _: Target) -> Result<bool> {
        self.held.flush();
        fault::point("rekey.flushed");
        Ok(true)
    }

    /// Syncs the whole file when called for its first segment.
    fn sync(&mut self, _: Target, fork: Fork, segment: u32) -> Result<bool> {
        if fork == Fork::Main && segment == 0 {
            self.held.sync();
            fault::point("rekey.synced");
        }
        Ok(false)
    }

    fn is_proven(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<(bool, bool)> {
        process::check_for_interrupts();
        let more = blocks.end < self.blocks_of(fork);
        let (proven, _) = verify::are_fresh(target, file::number_of(fork), blocks)?;
        Ok((proven, more))
    }

    fn finish(&mut self, target: Target) -> Result<bool> {
        if self.rewritten {
            return file::finish(target, self.images.prove());
        }
        data_keys::record_rewritten(target.file, target.version, self.images.prove())
    }

    fn is_present(&mut self, target: Target) -> Result<bool> {
        Ok(target == file::present(target.file))
    }
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
