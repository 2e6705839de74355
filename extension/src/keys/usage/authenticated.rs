//! What authenticated pages need of the server. A torn page is refused, so recovery must restore
//! every page that may be torn.

use pagevault_cipher::{CipherId, PageFormat};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use crate::keys::store::directory;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, process};
use crate::shmem;

const NEEDED: &str = "A page that is torn when the server or the machine crashes is refused, so WAL must have an image of each changed page: that needs full_page_writes, a wal_level other than minimal, and data checksums or wal_log_hints.";

/// The cipher of new data keys where nobody names one. With `pagevault.cipher` = `auto`, pages are
/// authenticated unless recovery would not restore torn ones.
pub(crate) fn default_cipher() -> CipherId {
    guc::cipher().unwrap_or_else(|| {
        if process::torn_pages_are_restored() {
            CipherId::Aes256XtsAuth
        } else {
            CipherId::Aes256Xts
        }
    })
}

/// Whether a new file may have the cipher of another one, which nobody names. It has the default
/// instead of one that would be refused: nobody has asked for that, and TRUNCATE must work.
pub(crate) fn may_inherit(cipher: CipherId) -> bool {
    PageFormat::of(cipher) != PageFormat::V2 || process::torn_pages_are_restored()
}

/// Refuses to make a key for authenticated pages if recovery would not restore torn pages.
/// pg_upgrade takes over keys that exist.
pub(crate) fn require_untorn_pages(cipher: CipherId) -> Result<()> {
    if may_inherit(cipher) || process::is_binary_upgrade() {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot encrypt with {cipher}: torn pages would not be restored"),
    )
    .detail(NEEDED)
    .hint("Turn these on, or choose a cipher that does not authenticate pages, such as aes-256-xts (pagevault.cipher, or the label)."))
}

/// Says in the log that `auto` means a cipher that does not authenticate pages, and why.
pub(crate) fn log_auto() {
    if guc::cipher().is_none() && !process::torn_pages_are_restored() {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            "pagevault: new data keys do not authenticate pages",
        )
        .detail(NEEDED)
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
        let unauthenticated = !restored && guc::cipher().is_none();
        if unauthenticated && !self.unauthenticated && has_master_key() {
            log_auto();
        }
        self.unauthenticated = unauthenticated;
    }
}

/// Without one there are no data keys. The first of a cluster is reported when it is set.
pub(crate) fn has_master_key() -> bool {
    shmem::get().is_some_and(|shared| !shared.secrets.is_empty())
}
