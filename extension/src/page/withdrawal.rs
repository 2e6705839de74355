//! Evicts pages that are sealed under refused keys from shared buffers.
//!
//! The storage manager refuses users every read of such a page ([`super::access::check_access`]),
//! whatever needs it: a query, a utility command, a function that uses buffers directly. So no
//! other check is necessary as long as no such page is in shared buffers. When a key is refused,
//! its pages are written, under the key that is still in memory, and dropped.
//!
//! Once is not enough: a page in use stays until it is unpinned; a read that began just before
//! finishes just after; recovery goes on reading pages in order to change them. So this is repeated
//! as long as a key is refused. So it is while a key group is locked, whose pages redo has brought
//! up to date ([`crate::keys::usage::interim`]).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::access;
use crate::keys::store::directory;
use crate::pg::report::Report;
use crate::pg::{buffers, process};
use crate::{shmem, writers};

/// Minimum pause between two scans of all buffers.
const PAUSE: Duration = Duration::from_secs(1);
/// A scan may take at most this fraction (1/SHARE) of the time of one CPU.
const SHARE: u32 = 10;

/// State of the worker since a key was refused.
#[derive(Default)]
pub(crate) struct Withdrawal {
    /// When the next scan is due.
    next: Option<Instant>,
    /// Whether evicted pages were logged, and if so, whether none was left.
    logged: Option<bool>,
    /// Whether a page that cannot be written was logged.
    logged_stuck: bool,
}

impl Withdrawal {
    /// Time until the next scan; `None` while no key is refused.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let left = |next: Instant| next.saturating_duration_since(Instant::now());
        let is_due = shmem::any_key_refused() || access::shows_locked();
        is_due.then(|| self.next.map_or(Duration::ZERO, left))
    }

    /// Scans all buffers if a scan is due.
    pub(crate) fn scan_if_due(&mut self) {
        match self.due_in() {
            None => *self = Withdrawal::default(),
            Some(Duration::ZERO) => {
                let began = Instant::now();
                let (gone, in_use, stuck) = evict_refused();
                self.next = Some(Instant::now() + PAUSE.max(began.elapsed() * SHARE));
                match stuck {
                    Some(stuck) => self.log_stuck(&stuck),
                    None => self.log_progress(gone, in_use),
                }
            }
            Some(_) => {}
        }
    }

    /// Logged once: the checkpointer fails too, and logs that each time.
    fn log_stuck(&mut self, stuck: &Report) {
        if !std::mem::replace(&mut self.logged_stuck, true) {
            Report::new(
                PgSqlErrorCode::ERRCODE_IO_ERROR,
                "pagevault: a page of a locked relation stays in shared buffers, because it cannot be written",
            )
            .detail(stuck.message())
            .hint("It is tried again every second. Remove the cause, on which checkpoints fail as well.")
            .send(PgLogLevel::WARNING);
        }
    }

    /// Logged once after the first scan, and once when no page is left. Not later: other processes
    /// keep reading and using such pages.
    fn log_progress(&mut self, gone: usize, in_use: usize) {
        // Of a locked group there is rarely any.
        if gone + in_use == 0 && !shmem::any_key_refused() {
            return;
        }
        let is_done = in_use == 0;
        if self.logged == Some(true) || self.logged == Some(is_done) {
            return;
        }
        self.logged = Some(is_done);
        let message = match gone {
            1 => "pagevault: 1 page of locked relations was removed from shared buffers".to_owned(),
            _ => format!(
                "pagevault: {gone} pages of locked relations were removed from shared buffers"
            ),
        };
        Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message)
            .detail(match in_use {
                0 => "None is left.".to_owned(),
                1 => "1 more is in use, and will be removed when the statement that uses it ends."
                    .to_owned(),
                _ => format!("{in_use} more are in use, and will be removed when the statements that use them end."),
            })
            .send(PgLogLevel::LOG);
    }
}

/// How many pages were evicted, how many are in use, and why one of the others stays.
fn evict_refused() -> (usize, usize, Option<Report>) {
    let (mut gone, mut in_use, mut stuck) = (0, 0, None);
    let mut refused: HashMap<RelFile, bool> = HashMap::new();
    for index in 0..buffers::count() {
        if process::is_told_to_stop() {
            break;
        }
        let Some(file) = buffers::file_at(index) else { continue };
        let is_refused = || {
            directory::refused_scope(file).is_some()
                || access::shows_locked() && directory::locked_group(file).is_some()
        };
        if *refused.entry(file).or_insert_with(is_refused) {
            match buffers::evict(index) {
                Ok(true) => gone += 1,
                Ok(false) => in_use += 1,
                // The remaining pages are still evicted.
                Err(report) => {
                    // The end of a transaction would do this.
                    writers::end_all();
                    stuck = stuck.or(Some(report));
                }
            }
        }
    }
    buffers::close_files();
    (gone, in_use, stuck)
}
