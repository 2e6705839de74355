//! Pages that are sealed under refused keys leave shared buffers.
//!
//! The storage manager refuses users what it would have to read ([`crate::page_io::check_access`]), for whatever it is wanted:
//! a query, a utility command, a function that goes to the buffers itself. So nothing needs to know who asks, as long as
//! nothing is in the buffers. When a key is refused, what is there is written, under the key that is still in memory, and dropped.
//!
//! Once is not enough: a page that a statement is using stays until it lets go; who began to read a moment before comes
//! a moment after; recovery and replay go on reading pages, to change them. So this is repeated for as long as a
//! key is refused.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::shared;
use crate::pg::report::Report;
use crate::pg::{buffers, process};

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
}

impl Withdrawal {
    /// How long until the next look; `None` while no key is refused.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let left = |next: Instant| next.saturating_duration_since(Instant::now());
        shared::anything_refused().then(|| self.next.map_or(Duration::ZERO, left))
    }

    /// Looks, if it is time.
    pub(crate) fn go_on(&mut self) {
        match self.due_in() {
            None => *self = Withdrawal::default(),
            Some(Duration::ZERO) => {
                let began = Instant::now();
                let (gone, in_use) = withdraw();
                self.next = Some(Instant::now() + PAUSE.max(began.elapsed() * SHARE));
                self.tell(gone, in_use);
            }
            Some(_) => {}
        }
    }

    /// Once how it began, and once that it is done: others go on putting pages there, and using them.
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

/// How many pages have left shared buffers, and how many could not.
fn withdraw() -> (usize, usize) {
    let (mut gone, mut in_use) = (0, 0);
    let mut refused: HashMap<RelFile, bool> = HashMap::new();
    for index in 0..buffers::count() {
        if process::is_told_to_stop() {
            break;
        }
        let Some(file) = buffers::file_at(index) else { continue };
        if *refused.entry(file).or_insert_with(|| shared::refused_scope(file).is_some()) {
            let count = if buffers::evict(index) { &mut gone } else { &mut in_use };
            *count += 1;
        }
    }
    buffers::close_files();
    (gone, in_use)
}
