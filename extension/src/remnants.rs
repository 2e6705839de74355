//! Clearing sampled values that deleted rows leave in pages: of the statistics catalogs of this
//! database and of their TOAST tables, whose files continue under new keys.
//!
//! Other sessions keep reading and writing them. For each file:
//!
//! 1. If it is encrypted, it gets another data key, as in rekeying ([`crate::rekey`]).
//! 2. All pages are cleared ([`crate::pg::remnants`]), with an image in WAL. The table is cleared
//!    before its TOAST table, so that a reader that still finds a deleted row finds no reference to
//!    a removed value.
//! 3. The file is written and synced, and all pages on disk are verified to be under the new key.
//!
//! Then the former keys can be destroyed ([`crate::keys::usage::destruction`]), so that older
//! copies of the pages, for example in freed blocks of the disk, cannot be decrypted either. All of
//! it can be interrupted at any step and repeated.

use std::time::{Duration, Instant};

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::keys::store::directory;
use crate::pg::locks::Rewriting;
use crate::pg::pages::{Held, Ring};
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::remnants::{Before, KeptBytes};
use crate::pg::report::Result;
use crate::pg::{process, statistics};
use crate::{fault, rekey};

/// Total time to wait for others: readers of a page, holders of locks, rekeying. Limited because
/// they may be waiting for the caller's locks, and the deadlock detector does not know that the
/// caller waits for them.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Polling interval while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Excludes VACUUM, which truncates files, and commands that create new files.
const LOCK: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;

/// The only error in creating a key that does not prevent shredding.
const NO_ROOM: i32 = PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED as i32;

/// One file, and the result.
pub(crate) struct Cleared {
    pub(crate) name: String,
    pub(crate) file: RelFile,
    pub(crate) state: State,
    /// Prevents others from changing the key until the former keys are destroyed.
    _right: Option<Rewriting>,
}

/// Result of clearing a file.
pub(crate) enum State {
    /// All its pages were processed.
    Done {
        pages: u32,
        /// Deleted rows in pages that others were reading: these keep their values.
        left: u32,
        key: Key,
    },
    /// Nothing was done, because others held locks.
    Locked,
    /// Its keys are already destroyed.
    Destroyed,
}

/// The key under which a file continues.
pub(crate) enum Key {
    /// A new key of this version; the former ones can be destroyed.
    New(DataKeyVersion),
    /// The same key as before: there is no room for another, for this reason.
    AsBefore(String),
    /// None: plaintext.
    None,
}

impl Cleared {
    /// The last former version, if the former keys are to be destroyed.
    pub(crate) fn last_former_version(&self) -> Option<DataKeyVersion> {
        match self.state {
            State::Done { key: Key::New(version), .. } => DataKeyVersion::new(version.get() - 1),
            _ => None,
        }
    }
}

/// Clears all statistics catalogs. Files that cannot be locked in time are skipped and reported.
///
/// # Errors
/// If a file gets no new key, or a process does not finish writing a page. Raises ERROR if a page
/// cannot be read or decrypted, a key is locked, the disk is full, or this session is cancelled.
pub(crate) fn clear_statistics() -> Result<Vec<Cleared>> {
    let limit = WaitLimit { until: Instant::now() + MAX_WAIT };
    let before = Before::now();
    let mut cleared = Vec::new();
    for (catalog, kept) in statistics::CATALOGS {
        let family = relation::family_unlocked(catalog);
        for member in family.into_iter().filter(|member| member.kind != RelationKind::Index) {
            let kept = if member.kind == RelationKind::Toast { KeptBytes::Lengths } else { kept };
            cleared.push(clear(&member, kept, &before, &limit)?);
        }
    }
    fault::point("remnants.cleared");
    Ok(cleared)
}

fn clear(member: &Facts, kept: KeptBytes, before: &Before, limit: &WaitLimit) -> Result<Cleared> {
    let oid = member.oid;
    let done = |file, state, _right| {
        Ok(Cleared { name: relation::quoted_name(member), file, state, _right })
    };
    if limit.wait_for(|| relation::try_lock(oid, LOCK).then_some(())).is_none() {
        return done(member.file, State::Locked, None);
    }
    let Some(held) = Held::open(oid) else { return done(member.file, State::Locked, None) };
    let file = held.file();
    if directory::is_destroyed(file) {
        return done(file, State::Destroyed, None);
    }
    let right = limit.wait_for(|| Rewriting::try_for_transaction(oid, held.is_shared()));
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
                left += held.clear_page(block, kept, before, &ring, has_new_key, || limit.wait());
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

/// Switches an encrypted file to a new key, and waits until no process writes under another one.
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

/// The time left for waiting.
struct WaitLimit {
    until: Instant,
}

impl WaitLimit {
    /// Waits a moment; false if no time is left.
    fn wait(&self) -> bool {
        let goes_on = Instant::now() < self.until;
        if goes_on {
            process::sleep(POLL_INTERVAL);
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
