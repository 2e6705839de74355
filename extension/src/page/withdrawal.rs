//! Pages that are sealed under refused keys leave shared buffers.
//!
//! The storage manager refuses users what it would have to read
//! ([`crate::page::io::check_access`]), for whatever it is wanted: a query, a utility command, a
//! function that goes to the buffers itself. So nothing needs to know who asks, as long as nothing
//! is in the buffers. When a key is refused, what is there is written, under the key that is still
//! in memory, and dropped.
//!
//! Once is not enough: a page that a statement is using stays until it lets go; who began to read a
//! moment before comes a moment after; recovery and replay go on reading pages, to change them. So
//! this is repeated for as long as a key is refused.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use crate::keys::store::directory;
use crate::pg::report::Report;
use crate::pg::{buffers, process};
use crate::shmem;

/// The pause between two looks at all buffers, at least.
const PAUSE: Duration = Duration::from_secs(1);
/// A look takes no more than one part in so many of the time of a processor.
const SHARE: u32 = 10;

/// What the worker knows of its looks since a key was refused.
#[derive(Default)]
pub(crate) struct Withdrawal {
    /// When to look again.
    next: Option<Instant>,
    /// Whether it was said that pages have left, and if so, that all have.
    said: Option<bool>,
    /// Whether it was said that one cannot be written.
    said_stuck: bool,
}

impl Withdrawal {
    /// How long until the next look; `None` while no key is refused.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let left = |next: Instant| next.saturating_duration_since(Instant::now());
        shmem::anything_refused().then(|| self.next.map_or(Duration::ZERO, left))
    }

    /// Looks, if it is time.
    pub(crate) fn go_on(&mut self) {
        match self.due_in() {
            None => *self = Withdrawal::default(),
            Some(Duration::ZERO) => {
                let began = Instant::now();
                let (gone, in_use, stuck) = withdraw();
                self.next = Some(Instant::now() + PAUSE.max(began.elapsed() * SHARE));
                match stuck {
                    Some(stuck) => self.tell_stuck(&stuck),
                    None => self.tell(gone, in_use),
                }
            }
            Some(_) => {}
        }
    }

    /// Once: the checkpointer fails on it, too, and says so each time.
    fn tell_stuck(&mut self, stuck: &Report) {
        if !std::mem::replace(&mut self.said_stuck, true) {
            Report::new(
                PgSqlErrorCode::ERRCODE_IO_ERROR,
                "pagevault: a page of a locked relation stays in shared buffers, because it cannot be written",
            )
            .detail(stuck.message())
            .hint("It is tried again every second. Remove the cause, on which checkpoints fail as well.")
            .send(PgLogLevel::WARNING);
        }
    }

    /// Once how it began, and once that it is done: others go on putting pages there, and using
    /// them.
    fn tell(&mut self, gone: usize, in_use: usize) {
        let is_done = in_use == 0;
        if self.said == Some(true) || self.said == Some(is_done) {
            return;
        }
        self.said = Some(is_done);
        let message = match gone {
            1 => "pagevault: 1 page of locked relations has left shared buffers".to_owned(),
            _ => format!("pagevault: {gone} pages of locked relations have left shared buffers"),
        };
        Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message)
            .detail(match in_use {
                0 => "None is left.".to_owned(),
                1 => "1 more is in use, and leaves when the statement that uses it is done with it.".to_owned(),
                _ => format!("{in_use} more are in use, and leave when the statements that use them are done with them."),
            })
            .send(PgLogLevel::LOG);
    }
}

/// How many pages have left shared buffers, how many are in use, and why one of the others stays.
fn withdraw() -> (usize, usize, Option<Report>) {
    let (mut gone, mut in_use, mut stuck) = (0, 0, None);
    let mut refused: HashMap<RelFile, bool> = HashMap::new();
    for index in 0..buffers::count() {
        if process::is_told_to_stop() {
            break;
        }
        let Some(file) = buffers::file_at(index) else { continue };
        if *refused.entry(file).or_insert_with(|| directory::refused_scope(file).is_some()) {
            match buffers::evict(index) {
                Ok(true) => gone += 1,
                Ok(false) => in_use += 1,
                // The others are to leave all the same.
                Err(report) => stuck = stuck.or(Some(report)),
            }
        }
    }
    buffers::close_files();
    (gone, in_use, stuck)
}
