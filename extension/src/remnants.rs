//! Clearing what deleted rows leave of sampled values: in the catalogs of statistics of this
//! database, and in their TOAST tables, whose files go on under new keys.
//!
//! While others read and write them. A file at a time:
//!
//! 1. If it is sealed it gets another data key, as in rekeying ([`crate::rekey`]).
//! 2. Every page is cleared ([`crate::pg::remnants`]), with an image in WAL. The table comes before
//!    its TOAST table: who still finds a deleted row finds no reference to a value in it, before
//!    the value is gone.
//! 3. It is written and synced, and every page on disk is found to be under the new key.
//!
//! Then the keys before the new ones can be destroyed ([`crate::keys::usage::destruction`]), so
//! that older copies of the pages, in blocks of the disk that were given back, say, cannot be
//! opened either. Each step may be the last: all of it can be done again.

use std::time::{Duration, Instant};

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::keys::store::directory;
use crate::pg::locks::Rewriting;
use crate::pg::pages::{Held, Ring};
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::remnants::{Before, Kept};
use crate::pg::report::Result;
use crate::pg::{process, statistics};
use crate::{fault, rekey};

/// How long others are waited for altogether: who reads a page, holds a lock, or rekeys. They may
/// wait for the caller, whose locks the detection of deadlocks does not know them to wait for.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether they are done.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Keeps VACUUM away, which shortens files, and whatever makes new ones.
const LOCK: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;

/// The one error of a new key that does not keep anybody from shredding.
const NO_ROOM: i32 = PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED as i32;

/// One file, and what became of it.
pub(crate) struct Cleared {
    pub(crate) name: String,
    pub(crate) file: RelFile,
    pub(crate) state: State,
    /// Until the former keys are destroyed nobody else changes the key.
    _right: Option<Rewriting>,
}

/// How far a file was cleared.
pub(crate) enum State {
    /// All its pages were looked at.
    Done {
        pages: u32,
        /// Deleted rows in pages that others were reading: these keep their values.
        left: u32,
        key: Key,
    },
    /// Nothing was done: others had it locked.
    Locked,
    /// Its keys are destroyed anyway.
    Destroyed,
}

/// How a file goes on.
pub(crate) enum Key {
    /// Under a new key of this version; the former ones can be destroyed.
    New(DataKeyVersion),
    /// Under the one that it had: there is no room for another, for this reason.
    AsBefore(String),
    /// In plaintext.
    None,
}

impl Cleared {
    /// The last of the former keys, if they are to be destroyed.
    pub(crate) fn last_former_version(&self) -> Option<DataKeyVersion> {
        match self.state {
            State::Done { key: Key::New(version), .. } => DataKeyVersion::new(version.get() - 1),
            _ => None,
        }
    }
}

/// Clears all catalogs of statistics. What cannot be had in time is left out, and said so.
///
/// # Errors
/// When a file gets no new key, or a process does not end its writing of a page. Raises ERROR: a
/// page cannot be read or opened, a key is locked, the disk is full, this session is told to stop.
pub(crate) fn clear_statistics() -> Result<Vec<Cleared>> {
    let patience = Patience { until: Instant::now() + PATIENCE };
    let before = Before::now();
    let mut cleared = Vec::new();
    for (catalog, kept) in statistics::CATALOGS {
        let family = relation::family_as_it_is(catalog);
        for member in family.into_iter().filter(|member| member.kind != RelationKind::Index) {
            let kept = if member.kind == RelationKind::Toast { Kept::Lengths } else { kept };
            cleared.push(clear(&member, kept, &before, &patience)?);
        }
    }
    fault::point("remnants.cleared");
    Ok(cleared)
}

fn clear(member: &Facts, kept: Kept, before: &Before, patience: &Patience) -> Result<Cleared> {
    let oid = member.oid;
    let done = |file, state, _right| {
        Ok(Cleared { name: relation::quoted_name(member), file, state, _right })
    };
    if patience.wait_for(|| relation::try_lock(oid, LOCK).then_some(())).is_none() {
        return done(member.file, State::Locked, None);
    }
    let Some(held) = Held::open(oid) else { return done(member.file, State::Locked, None) };
    let file = held.file();
    if directory::is_destroyed(file) {
        return done(file, State::Destroyed, None);
    }
    let right = patience.wait_for(|| Rewriting::try_for_transaction(oid, held.is_shared()));
    if right.is_none() {
        return done(file, State::Locked, None);
    }
    let key = new_key(&held)?;
    let has_new_key = matches!(key, Key::New(_));
    let ring = Ring::new();
    let (mut pages, mut left) = (0, 0);
    for (fork, blocks) in held.forks() {
        for block in 0..blocks {
            process::check_for_interrupts();
            if fork == ForkNumber::MAIN_FORKNUM {
                left +=
                    held.clear_page(block, kept, before, &ring, has_new_key, || patience.wait());
                pages += 1;
                fault::point("remnants.page_cleared");
            } else if has_new_key {
                held.rewrite(fork, block, &ring);
            }
        }
    }
    held.flush();
    held.sync();
    fault::point("remnants.synced");
    if has_new_key {
        rekey::at_once::rewrite_wholly(&held)?;
    }
    done(file, State::Done { pages, left, key }, right)
}

/// Has a file that is sealed written under a new key from now on, and nobody under another one.
fn new_key(held: &Held) -> Result<Key> {
    let file = held.file();
    let Some(cipher) = directory::current_cipher(file) else { return Ok(Key::None) };
    match rekey::file::seal(held, cipher) {
        Ok(_) => {}
        Err(report) if report.code() == NO_ROOM => {
            return Ok(Key::AsBefore(report.message().to_owned()));
        }
        Err(report) => return Err(report),
    }
    rekey::file::await_writers(file)?;
    Ok(directory::current_version(file).map_or(Key::None, Key::New))
}

/// Time that is left for waiting.
struct Patience {
    until: Instant,
}

impl Patience {
    /// Waits a moment; false if there is no time left.
    fn wait(&self) -> bool {
        let goes_on = Instant::now() < self.until;
        if goes_on {
            process::sleep(LOOK_AGAIN);
        }
        goes_on
    }

    fn wait_for<T>(&self, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            match attempt() {
                None if self.wait() => {}
                outcome => return outcome,
            }
        }
    }
}
