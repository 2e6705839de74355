//! The steps of rekeying one relation file that need PostgreSQL, each in the caller's transaction
//! and under its lock. [`pagevault_core::rekey::file`] defines their order.
//!
//! The file is readable at any time, because each page contains its key version.

use std::ops::Range;

use pagevault_cipher::CipherId;
use pagevault_core::page::Fork;
pub(crate) use pagevault_core::page::Target;
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
    let file = held.file();
    for fork in verify::ALL_FORKS {
        for first in (0..).step_by(LOOK as usize) {
            process::check_for_interrupts();
            if !verify::refuse_lost_versions(file, fork, first..first.saturating_add(LOOK))? {
                break;
            }
        }
    }
    seal_checked(held, cipher)
}

/// Like [`seal`], for a file that was already checked for lost keys.
///
/// The file need not be locked during that check: pages written meanwhile have existing keys. If
/// the relation has another file by now, the caller has not checked that one.
pub(super) fn seal_checked(held: &Held, cipher: CipherId) -> Result<Target> {
    let file = held.file();
    let sealing = policy::sealing_with(&relation::require(held.oid())?, cipher)?;
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

/// Whether a run that has itself switched a file to this target gives WAL an image of every page.
/// Servers that replay these have no page in plaintext any more, nor one under a former key,
/// whatever they have written before.
///
/// - Not of system catalogs. A page that is refused there would keep everybody out, so that nobody
///   could decrypt them to accept it.
/// - Not of relations that `wal_level = minimal` keeps out of WAL. Of unlogged relations only the
///   init fork is in WAL; the other forks exist on this server only, and are made anew after a
///   crash.
/// - Not without data checksums, where this has not been tried.
pub(super) fn images_everything(held: &Held, target: Target) -> bool {
    target.version.is_some()
        && !held.is_catalog()
        && (held.is_logged() || held.is_unlogged())
        && process::data_checksums()
}

/// Rewrites those of the blocks that are not in the target state on disk, or all: see
/// [`images_everything`]. Nobody is refused a page of a map. Returns the number of pages.
pub(super) fn rewrite(
    held: &Held,
    target: Target,
    all: bool,
    fork: Fork,
    blocks: Range<u32>,
    ring: &Ring,
) -> Result<u32> {
    // Maps, too: a server takes a visibility map under a former key for an empty one.
    let is_imaged = fork == Fork::Init || held.is_logged();
    let fork = number_of(fork);
    // On disk a page may still be zero that another server has written already.
    let stale = match all && is_imaged {
        true => blocks.collect(),
        false => verify::stale_blocks(target, fork, blocks)?,
    };
    for &block in &stale {
        process::check_for_interrupts();
        held.rewrite(fork, block, ring);
        fault::point("rekey.page_done");
    }
    Ok(stale.len() as u32)
}

/// Records that the file has no pages of older versions, as was proven; `everywhere`: on no server
/// ([`images_everything`]). False if the file has entered another state since.
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
