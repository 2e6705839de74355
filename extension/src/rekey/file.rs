//! The steps of rekeying one relation file that need PostgreSQL, each in the caller's transaction
//! and under its lock. [`pagevault_core::rekey::file`] defines their order.
//!
//! The file is readable at any time, because each page contains its key version.

use std::ops::Range;

use pagevault_cipher::{CipherId, Lsn};
use pagevault_core::page::Fork;
pub(crate) use pagevault_core::page::Target;
use pagevault_core::policy::Sealing;
use pagevault_core::rekey::file::LOOK;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{ForkNumber, Oid};

use crate::fault;
use crate::keys::store::directory;
use crate::keys::usage::data_keys::{self, Pages};
use crate::pg::pages::{Held, Ring};
use crate::pg::report::{Report, Result};
use crate::pg::{process, relation};
use crate::policy;
use crate::verify;
use crate::writers::{self, Activity};

/// The present state of new writes to a file, as a target.
pub(super) fn present(file: RelFile) -> Target {
    Target { file, version: directory::current_version(file) }
}

/// PostgreSQL's number of a fork.
pub(super) fn number_of(fork: Fork) -> ForkNumber::Type {
    fork as ForkNumber::Type
}

/// Switches a file with pages to a new key version, unless the keystore has lost the key of a page.
/// Writers that have not seen the new version may still be active: see [`await_writers`].
pub(crate) fn seal(held: &Held, cipher: CipherId) -> Result<Target> {
    check(held)?;
    seal_checked(held, cipher)
}

/// Like [`seal`], under the key of the database.
pub(super) fn seal_outside_groups(held: &Held, cipher: CipherId) -> Result<Target> {
    check(held)?;
    begin(held, Sealing { cipher, group: None })
}

/// Refuses a file with pages under lost keys.
fn check(held: &Held) -> Result<()> {
    let file = held.file();
    for fork in verify::ALL_FORKS {
        for first in (0..).step_by(LOOK as usize) {
            process::check_for_interrupts();
            if !verify::refuse_lost_versions(file, fork, first..first.saturating_add(LOOK))? {
                break;
            }
        }
    }
    Ok(())
}

/// Like [`seal`], for a file that was already checked for lost keys.
///
/// The file need not be locked during that check: pages written meanwhile have existing keys. If
/// the relation has another file by now, the caller has not checked that one.
pub(super) fn seal_checked(held: &Held, cipher: CipherId) -> Result<Target> {
    begin(held, policy::sealing_with(&relation::require(held.oid())?, cipher)?)
}

fn begin(held: &Held, sealing: Sealing) -> Result<Target> {
    let file = held.file();
    data_keys::next_version(file, sealing, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(present(file))
}

/// Switches the file to plaintext; like [`seal`].
pub(super) fn unseal(held: &Held) -> Result<Target> {
    let file = held.file();
    data_keys::write_plaintext(file, pages_of(held))?;
    fault::point("rekey.switched");
    Ok(present(file))
}

fn pages_of(held: &Held) -> Pages {
    if held.is_logged() { Pages::Logged } else { Pages::Unlogged }
}

/// Waits until no process writes under the state before [`seal`] or [`unseal`]. Otherwise a page
/// added without shared buffers could reach the file after the proof.
pub(crate) fn await_writers(file: RelFile) -> Result<()> {
    writers::await_others(Activity::Writing, Some(file.relation))?;
    fault::point("rekey.barrier_passed");
    Ok(())
}

/// Of which pages a run gives WAL an image, so that servers that replay it have no page in
/// plaintext any more, nor one under a former key, whatever they have written before.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Images {
    /// Of those that are not in the target state on this server's disk.
    Stale,
    /// Also of those that no WAL record has changed since the file was switched. Redo may have
    /// written them in the target state on this server: with some of their changes first, and with
    /// the rest after that ([`page::io::target_over`](crate::page::io::target_over)).
    UnchangedSince(Lsn),
    /// Of all: on disk a page may still be zero that another server has written already.
    All {
        /// Servers that replay this are known to have no other pages, see [`proves_everywhere`].
        proves: bool,
    },
}

impl Images {
    /// For a run that has itself switched the file to this target.
    pub(super) fn after_switch(held: &Held, target: Target) -> Images {
        Images::All { proves: target.version.is_some() && proves_everywhere(held) }
    }

    /// For a run that finds the file in this state. If it continues another one, that has made
    /// images already, which are not repeated.
    pub(super) fn continued(target: Target) -> Result<Images> {
        if !data_keys::is_mixed(target.file)? {
            return Ok(Images::Stale);
        }
        // On a server on which that group was given up, a page is lost until it gets an image.
        if data_keys::has_left_key_group(target.file)? {
            return Ok(Images::All { proves: false });
        }
        let since = data_keys::switched_at(target.file)?;
        Ok(since.map_or(Images::All { proves: false }, Images::UnchangedSince))
    }

    /// Whether other servers are known to have no page in another state when the run has ended.
    pub(super) fn prove(self) -> bool {
        self == Images::All { proves: true }
    }
}

/// Whether images of all pages prove that no server has others.
///
/// - Not of system catalogs. A page that is refused there would keep everybody out, so that nobody
///   could decrypt them to accept it.
/// - Not of relations that `wal_level = minimal` keeps out of WAL. Of unlogged relations only the
///   init fork is in WAL; the other forks exist on this server only, and are made anew after a
///   crash.
/// - Not without data checksums, where this has not been tried.
fn proves_everywhere(held: &Held) -> bool {
    !held.is_catalog() && (held.is_logged() || held.is_unlogged()) && process::data_checksums()
}

/// Rewrites those of the blocks that [`Images`] says. Nobody is refused a page of a map. Returns
/// the number of pages.
pub(super) fn rewrite(
    held: &Held,
    target: Target,
    images: Images,
    fork: Fork,
    blocks: Range<u32>,
    ring: &Ring,
) -> Result<u32> {
    // Maps, too: a server takes a visibility map under a former key for an empty one.
    let is_imaged = fork == Fork::Init || held.is_logged();
    let images = if is_imaged { images } else { Images::Stale };
    let fork = number_of(fork);
    let stale = match images {
        Images::All { .. } => blocks.collect(),
        Images::UnchangedSince(lsn) => verify::stale_blocks(target, fork, blocks, Some(lsn))?,
        Images::Stale => verify::stale_blocks(target, fork, blocks, None)?,
    };
    for &block in &stale {
        process::check_for_interrupts();
        held.rewrite(fork, block, ring);
        fault::point("rekey.page_done");
    }
    Ok(stale.len() as u32)
}

/// Records that the file has no pages of older versions, as was proven; `everywhere`: on no server
/// ([`Images::prove`]). False if the file has entered another state since.
pub(super) fn finish(target: Target, everywhere: bool) -> Result<bool> {
    fault::point("rekey.proved");
    let finished = data_keys::record_rewritten(target.file, target.version, everywhere)?;
    fault::point("rekey.rewritten");
    Ok(finished)
}

/// The error for a file whose rewriting does not end.
pub(super) fn never_ends(oid: Oid) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("pages of {} keep being written under an old key", relation::qualified_name(oid)),
    )
    .detail(
        "They were rewritten, flushed, and read back from disk several times. No key was retired.",
    )
}
