//! What authenticated pages need of the server. A torn page is refused, so recovery must restore
//! every page that may be torn.

use pagevault_cipher::{CipherId, Lsn, PageFormat};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::withheld;
use crate::keys::store::directory;
use crate::pg::report::{Report, Result};
use crate::pg::{control_file, guc, process, wal};
use crate::shmem;

const NEEDED: &str = "A page that is torn when the server or the machine crashes is refused, so WAL must have an image of each changed page: that needs full_page_writes, a wal_level other than minimal, and data checksums or wal_log_hints.";

const AUTO: &str =
    "in a cluster with data checksums, while full_page_writes is on and wal_level is not minimal.";

/// The cipher of new data keys where nobody names one. With `pagevault.cipher` = `auto`, pages are
/// authenticated unless recovery would not restore torn ones.
pub(crate) fn default_cipher() -> CipherId {
    guc::cipher().unwrap_or_else(|| {
        if allows_auto() { CipherId::authenticating() } else { CipherId::Aes256Xts }
    })
}

/// Whether `auto` may authenticate pages. `wal_log_hints` is not enough for that: it is a setting
/// of each server. A standby without it writes hint bits without images, and has the keys of its
/// primary.
fn allows_auto() -> bool {
    process::torn_pages_are_restored() && process::data_checksums()
}

/// Whether a new file may have the cipher of another one, which nobody names. It has the default
/// instead of one that would be refused: nobody has asked for that, and TRUNCATE must work.
pub(crate) fn may_inherit(cipher: CipherId) -> bool {
    cipher.is_for_new_keys()
        && (PageFormat::of(cipher) != PageFormat::V2 || process::torn_pages_are_restored())
}

/// Refuses to make a key for authenticated pages if recovery would not restore torn pages.
/// pg_upgrade takes over keys that exist. `has_pages`: the file has pages, which may have been
/// changed since the last checkpoint.
pub(crate) fn require_untorn_pages(cipher: CipherId, has_pages: bool) -> Result<()> {
    if process::is_binary_upgrade() || PageFormat::of(cipher) != PageFormat::V2 {
        return Ok(());
    }
    if !process::torn_pages_are_restored() {
        return Err(not_restored(cipher));
    }
    if has_pages && !has_images() {
        withheld::note();
        return Err(not_yet(cipher));
    }
    Ok(())
}

/// Whether a new key may be refused until there are such images; of this cipher, or of one that
/// relations have.
pub(crate) fn may_wait_for_images(cipher: Option<CipherId>) -> bool {
    let authenticates = |cipher| PageFormat::of(cipher) == PageFormat::V2;
    !has_images() && (cipher.is_some_and(authenticates) || directory::any_of_format(PageFormat::V2))
}

/// Whether WAL has an image of each page that was changed since the last checkpoint.
fn has_images() -> bool {
    let Some(shared) = shmem::get() else { return true };
    let last = control_file::read_again();
    last.is_some_and(|last| {
        shared.control.has_images_from(last.redo, last.full_page_writes, wal::end())
    })
}

fn not_restored(cipher: CipherId) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot encrypt with {cipher}: torn pages would not be restored"),
    )
    .detail(NEEDED)
    .hint("Turn these on, or choose a cipher that does not authenticate pages, such as aes-256-xts (pagevault.cipher, or the label).")
}

fn not_yet(cipher: CipherId) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot encrypt with {cipher} yet: torn pages would not be restored"),
    )
    .detail("full_page_writes was off, and no checkpoint has been made since. WAL may have no image of a page that was changed meanwhile.")
    .hint("Run CHECKPOINT, and try again. If that does not help, turn full_page_writes off and on again, with a reload each time, and then run CHECKPOINT.")
}

/// Says in the log that `auto` means a cipher that does not authenticate pages, and why.
pub(crate) fn log_auto() {
    if guc::cipher().is_none() && !allows_auto() {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            "pagevault: new data keys do not authenticate pages",
        )
        .detail(format!("pagevault.cipher is auto. That is {} {AUTO}", CipherId::authenticating()))
        .hint("Turn these on; or set pagevault.cipher to aes-256-xts to accept this.")
        .send(PgLogLevel::LOG);
    }
}

/// The last state that [`Conditions::log_change`] has seen.
#[derive(Default)]
pub(crate) struct Conditions {
    endangered: bool,
    unauthenticated: bool,
}

impl Conditions {
    /// Logs a warning if there are authenticated pages, and torn ones would not be restored any
    /// more; and a line if new keys are of another cipher for that reason. Called at server start
    /// and when settings may have changed.
    pub(crate) fn log_change(&mut self) {
        let restored = process::torn_pages_are_restored();
        let endangered = !restored && directory::any_of_format(PageFormat::V2);
        if endangered && !self.endangered {
            Report::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                "pagevault: authenticated pages that a crash tears would be lost",
            )
            .detail(NEEDED)
            .hint("Turn these on again.")
            .send(PgLogLevel::WARNING);
        }
        self.endangered = endangered;
        let unauthenticated = guc::cipher().is_none() && !allows_auto();
        if unauthenticated && !self.unauthenticated && has_master_key() {
            log_auto();
        }
        self.unauthenticated = unauthenticated;
    }
}

/// `full_page_writes` has this value from now on; in the postmaster and the checkpointer. Off
/// counts before any process has the value. The checkpointer makes the value take effect, but may
/// never have one that was there for a moment; and what it has in recovery is replaced by what the
/// startup process has (`StartupXLOG` calls `UpdateFullPageWrites`, xlog.c). Then checkpoint
/// records tell what is in effect.
pub(crate) fn page_images_are(on: bool) {
    let Some(shared) = shmem::get() else { return };
    match (process::is_checkpointer(), on) {
        (true, true) => {
            shared.control.images_are_on(wal::reached());
            if process::in_recovery() {
                shared.control.images_are_doubtful();
            }
        }
        (true, false) => shared.control.images_are_off(),
        (false, false) => shared.control.images_are_doubtful(),
        (false, true) => {}
    }
}

/// The server starts.
pub(crate) fn page_images_at_start() {
    let Some(shared) = shmem::get() else { return };
    let clean = !process::replays_wal();
    shared.control.starts_clean_at(if clean { process::redo_start() } else { Lsn::INVALID });
    if !process::writes_page_images() {
        shared.control.images_are_off();
    }
}

/// All WAL is replayed; in the startup process. The value that it has takes effect next, and the
/// checkpoint that follows tells it.
pub(crate) fn page_images_after_redo() {
    if let Some(shared) = shmem::get() {
        shared.control.images_are_told_from(wal::replayed());
    }
}

/// Has the next checkpoint remove a doubt, before somebody asks for a key.
pub(crate) fn page_images_at_times() {
    if let Some(shared) = shmem::get().filter(|_| !process::in_recovery()) {
        shared.control.images_are_told_from(wal::end());
    }
}

/// Without one there are no data keys. The first of a cluster is reported when it is set.
pub(crate) fn has_master_key() -> bool {
    shmem::get().is_some_and(|shared| !shared.secrets.is_empty())
}
