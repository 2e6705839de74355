//! What authenticated pages need of the server. A torn page is refused, so recovery must restore
//! every page that may be torn.

use pagevault_cipher::{CipherId, PageFormat};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use crate::keys::store::directory;
use crate::pg::process;
use crate::pg::report::{Report, Result};

const NEEDED: &str = "A page that is torn when the server or the machine crashes is refused, so WAL must have an image of each changed page: that needs full_page_writes, and data checksums or wal_log_hints.";

/// Refuses to make a key for authenticated pages if recovery would not restore torn pages.
/// pg_upgrade turns `full_page_writes` off, and a crash during it means to begin again.
pub(crate) fn require_untorn_pages(cipher: CipherId) -> Result<()> {
    let is_possible = PageFormat::of(cipher) != PageFormat::V2
        || process::torn_pages_are_restored()
        || process::is_binary_upgrade();
    if is_possible {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot encrypt with {cipher}: torn pages would not be restored"),
    )
    .detail(NEEDED)
    .hint("Turn these on, or choose a cipher that does not authenticate pages, such as aes-256-xts (pagevault.cipher, or the label)."))
}

/// The last state that [`Conditions::log_change`] has seen.
pub(crate) struct Conditions {
    are_met: bool,
}

impl Default for Conditions {
    fn default() -> Self {
        Self { are_met: true }
    }
}

impl Conditions {
    /// Logs a warning if there are authenticated pages, and torn ones would not be restored any
    /// more. Called at server start and when settings may have changed.
    pub(crate) fn log_change(&mut self) {
        let are_met =
            process::torn_pages_are_restored() || !directory::any_of_format(PageFormat::V2);
        if self.are_met && !are_met {
            Report::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                "pagevault: authenticated pages that a crash tears would be lost",
            )
            .detail(NEEDED)
            .hint("Turn these on again.")
            .send(PgLogLevel::WARNING);
        }
        self.are_met = are_met;
    }
}
