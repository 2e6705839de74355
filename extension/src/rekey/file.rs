//! The steps of rekeying one relation file that need PostgreSQL, each in the caller's transaction
//! and under its lock. [`pagevault_core::rekey::file`] defines their order.
//!
//! The file is readable at any time, because each page contains its key version.

use std::ops::Range;

use pagevault_cipher::{CipherId, Lsn};
use pagevault_core::page::Fork;
pub(crate) use pagevault_core::page::Target;
use pagevault_core::rekey::file::{LOOK, Proof};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{ForkNumber, Oid};

use crate::fault;
use crate::keys::store::directory;
use crate::keys::usage::data_keys::{self, Pages};
use crate::pg::pages::{Held, Ring};
use crate::pg::report::{Report, Result};
use crate::pg::{process, relation};
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
    data_keys::next_version(file, cipher, pages_of(held))?;
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

/// How pages show that they are in the target state on every server that replays this server's WAL:
/// they were changed, by a record in WAL, after all servers had entered that state.
#[derive(Clone, Copy)]
pub(super) struct Since {
    lsn: Lsn,
    /// Else only the init fork is in WAL. The other forks of an unlogged relation exist on this
    /// server only, and are made anew after a crash.
    is_logged: bool,
}

impl Since {
    /// For a file with a target. `None` if nothing is to be proven, or can be:
    ///
    /// - System catalogs. A page that is refused there would keep everybody out, so that nobody
    ///   could decrypt them to accept it.
    /// - Relations that `wal_level = minimal` keeps out of WAL.
    /// - Without data checksums: a record about visibility (`heap_xlog_visible`, heapam.c) may then
    ///   change the LSN of a page here and not on a standby that has another setting of
    ///   `wal_log_hints`. There the page would keep its former state
    ///   ([`page::io::target_over`](crate::page::io::target_over)).
    /// - Without `full_page_writes`: see [`process::new_lsns_are_replayed`].
    pub(super) fn of(held: &Held, target: Target) -> Result<Option<Since>> {
        let Some(version) = target.version else { return Ok(None) };
        let is_logged = held.is_logged();
        let is_possible = !held.is_catalog() && (is_logged || held.is_unlogged());
        if !is_possible || !process::new_lsns_are_replayed() {
            return Ok(None);
        }
        let lsn = data_keys::changed_since(target.file, version)?;
        Ok(lsn.map(|lsn| Since { lsn, is_logged }))
    }

    /// Pages of this fork that are to be rewritten were changed at this LSN or before.
    fn of_fork(self, fork: Fork) -> Option<Lsn> {
        (self.is_logged || fork == Fork::Init).then_some(self.lsn)
    }

    /// Pages of maps may have no LSN. Nobody is refused because of them.
    fn of_proof(self, fork: Fork) -> Option<Lsn> {
        self.of_fork(fork).filter(|_| matches!(fork, Fork::Main | Fork::Init))
    }
}

/// What these blocks on disk prove, and whether there may be more behind them.
pub(super) fn prove(
    target: Target,
    since: Option<Since>,
    fork: Fork,
    blocks: Range<u32>,
) -> Result<(Proof, bool)> {
    let after = since.and_then(|since| since.of_proof(fork));
    let (fresh, later, more) = verify::are_fresh(target, after, number_of(fork), blocks)?;
    let proof = match (fresh, since) {
        (false, _) => Proof::None,
        (true, Some(_)) if later => Proof::Everywhere,
        (true, _) => Proof::Here,
    };
    Ok((proof, more))
}

/// Rewrites those of the blocks that are not in the target state on disk, or may not be on other
/// servers. Returns their number.
pub(super) fn rewrite(
    held: &Held,
    target: Target,
    since: Option<Since>,
    fork: Fork,
    blocks: Range<u32>,
    ring: &Ring,
) -> Result<u32> {
    let after = since.and_then(|since| since.of_fork(fork));
    let fork = number_of(fork);
    let stale = verify::stale_blocks(target, after, fork, blocks)?;
    for &block in &stale {
        process::check_for_interrupts();
        held.rewrite(fork, block, ring);
        fault::point("rekey.page_done");
    }
    Ok(stale.len() as u32)
}

/// Records that the file has no pages of older versions, as was proven. False if the file has
/// entered another state since.
pub(super) fn finish(target: Target, proof: Proof) -> Result<bool> {
    fault::point("rekey.proved");
    // The setting may have changed since.
    let everywhere = proof == Proof::Everywhere && process::new_lsns_are_replayed();
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
