//! Forgetting keys: those of files that are gone, and those that were replaced.
//!
//! A primary looks for files that have keys and do not exist, and a worker in each such database
//! confirms that they were dropped ([`super::dropped`]). When the last checkpoint began after a
//! file was gone, so that no start of this server replays anything about it, the primary records
//! that ([`Record::FormerFiles`]). Each server that has the record forgets the keys when it had it
//! for `pagevault.keep_former_keys` ([`super::unneeded`]). Former WAL keys have a setting of their
//! own, `pagevault.keep_former_wal_keys`: for ever by default, because this server cannot know who
//! has WAL under them.
//!
//! Other copies of the data directory may replay WAL from an earlier address with the keys of now:
//! base backups that began before, and servers that `pg_rewind` has taken back. They must not be
//! older than `pagevault.keep_former_keys`. If one is, it refuses to start ([`crate::keys::load`]),
//! instead of replaying changes of files whose keys it does not have.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use pagevault_keystore::{DataKeyVersion, Lsn, Record, RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::dropped::{missing, still_missing};
use super::unneeded::Unneeded;
use crate::keys::store::former::{self, Candidates, Forgotten};
use crate::keys::store::{database_keys, persist};
use crate::pg::guc::forgetting::Keep;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{control_file, heap, process, processes, wal};
use crate::{backups, shmem};

/// Pauses between rounds.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(3600);

/// Pause on a standby.
const ON_STANDBY: Duration = Duration::from_secs(60);

/// Pause before a database is asked again about files of which it did not say that they were
/// dropped. It doubles each time, up to [`LONGEST`].
const FIRST_PAUSE: Duration = Duration::from_secs(2);

/// How long a worker waits for transactions, at most; as long as the pause before, otherwise.
const MOST_PATIENCE: Duration = Duration::from_secs(600);

/// Instead of a database: which ones exist. Comes first.
pub(crate) const ALL_DATABASES: u32 = 0;

/// `template1`, which initdb makes (`Template1DbOid`, pg_database.dat).
const TEMPLATE: u32 = 1;

/// A round looks at each key, and asks the file system about each file. A pause is this many times
/// as long as that took, at least.
const PAUSE_PER_ROUND: u32 = 50;

/// A file that was found to be gone. It does not come back with this key: a file that uses its
/// number again gets another one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Gone {
    /// Its last key then. With another one, the number is in use again.
    last: DataKeyVersion,
    /// End of WAL then, or later.
    wal_end: Lsn,
}

/// What a worker is asked: which files of a database were dropped; of [`ALL_DATABASES`], which
/// databases were.
pub(crate) struct Question {
    pub(crate) database: u32,
    /// How long it waits for transactions that run then.
    pub(crate) patience: Duration,
}

/// What the worker remembers.
#[derive(Default)]
pub(crate) struct Watch {
    gone: HashMap<RelFile, Gone>,
    unneeded: Unneeded,
    /// The end of the last round, and how long it has looked, without what it has waited for.
    last_round: Option<(Instant, Duration)>,
    looking: Duration,
    was_too_early: bool,
    /// Databases about which a worker was asked: when, and when to ask again.
    asked: BTreeMap<u32, (Instant, Duration)>,
    /// Databases about which one is to be asked now.
    wanted: BTreeSet<u32>,
    /// A worker is running that was asked.
    is_asking: bool,
}

impl Watch {
    /// When the next round is due.
    pub(crate) fn due_in(&self) -> Duration {
        let keep = Keep::now().shorter();
        let pause = match process::in_recovery() {
            _ if self.was_too_early => SHORTEST,
            true => keep.map_or(ON_STANDBY, |keep| keep.clamp(SHORTEST, ON_STANDBY)),
            false => keep.map_or(ON_STANDBY, |keep| (keep / 24).clamp(SHORTEST, LONGEST)),
        };
        let due_in = |(end, took): (Instant, Duration)| {
            pause.max(took * PAUSE_PER_ROUND).saturating_sub(end.elapsed())
        };
        self.last_round.map_or(Duration::ZERO, due_in)
    }

    /// In the worker, outside of transactions.
    pub(crate) fn run_if_due(&mut self) {
        if !self.due_in().is_zero() {
            return;
        }
        self.looking = Duration::ZERO;
        let done = self.run().unwrap_or_else(|report| {
            report.send(PgLogLevel::WARNING);
            true
        });
        self.last_round = Some((Instant::now(), self.looking));
        self.was_too_early = !done;
    }

    /// False if it was too early for a round.
    fn run(&mut self) -> Result<bool> {
        let keep = Keep::now();
        if keep.shorter().is_none() || !shmem::any_database_key() {
            return Ok(true);
        }
        let in_recovery = process::in_recovery();
        if in_recovery && wal::replayed() == Lsn::INVALID {
            return Ok(false); // pg_control may still be that of another server
        }
        let Some(control) = control_file::read() else { return Ok(false) };
        // A backup may have begun before a key was not needed any more, and copy the key file now.
        // One that begins from here on starts at this checkpoint, or a later one.
        if backups::any() {
            return Ok(true);
        }
        // After a power cut the server must not start from an earlier checkpoint.
        if control_file::sync().is_err() {
            return Ok(true);
        }
        // What is noted counts in the round that follows the last answer.
        if keep.others.is_some() && !in_recovery && !self.is_asking && self.wanted.is_empty() {
            self.look()?;
            if self.gone.values().any(|gone| gone.wal_end <= control.redo) {
                self.record(control.redo)?;
            }
        }
        let start = Instant::now();
        self.unneeded.look(control.redo, keep)?;
        self.looking += start.elapsed();
        // Who decodes changes of a file must see that its key is locked.
        let slots = processes::needed_by_logical_slots();
        forget(self.unneeded.due(keep, control.redo, slots))?;
        Ok(true)
    }

    /// Notes which files with keys do not exist: not those that are just being made.
    fn look(&mut self) -> Result<()> {
        let start = Instant::now();
        let found = missing(|_| true)?;
        self.looking += start.elapsed();
        self.gone.retain(|file, gone| found.get(file).is_some_and(|(_, last)| *last == gone.last));
        if found.len() == self.gone.len() {
            return Ok(());
        }
        let found = still_missing(found, |_| true)?;
        let wal_end = wal::end();
        for (file, (_, last)) in found {
            self.gone.entry(file).or_insert(Gone { last, wal_end });
        }
        Ok(())
    }

    /// About which database a worker is to be asked now; `None` if there is none.
    pub(crate) fn next_question(&mut self) -> Option<Question> {
        let next = self.wanted.pop_first();
        self.is_asking = next.is_some();
        next.map(|database| {
            let asked = self.asked.get(&database).map(|(_, pause)| *pause);
            let patience = asked.unwrap_or_default().min(MOST_PATIENCE);
            Question { database, patience }
        })
    }

    /// A worker has looked at the last database of [`Self::next_question`].
    pub(crate) fn answered(&mut self) {
        self.is_asking = false;
        if self.wanted.is_empty() {
            self.last_round = None;
        }
    }

    /// Databases with files that do not exist, and of which it is not known that they were dropped.
    fn ask(&mut self, doubtful: BTreeSet<u32>) {
        self.asked.retain(|database, _| doubtful.contains(database));
        for database in doubtful {
            let asked = self.asked.get(&database).copied();
            if asked.is_some_and(|(at, pause)| at.elapsed() < pause) {
                continue;
            }
            let pause = asked.map_or(FIRST_PAUSE, |(_, pause)| (2 * pause).min(LONGEST));
            self.asked.insert(database, (Instant::now(), pause));
            // Shared files are known to every database.
            self.wanted.insert(if database == 0 { TEMPLATE } else { database });
        }
        if !self.wanted.is_empty() {
            self.wanted.insert(ALL_DATABASES);
        }
    }

    /// Records former files that are known to be dropped. [`Self::look`] has just seen that they do
    /// not exist. With the same last key they never will.
    fn record(&mut self, redo: Lsn) -> Result<()> {
        let lock = KeystoreLock::acquire();
        let shared = shmem::required()?;
        let directory = &shared.directory;
        let recorded = former::known(&lock)?;
        let mut doubtful = BTreeSet::new();
        // By database: numbers that are gone, with their last version, and those in use. A database
        // that has moved has files with the same number in several tablespaces.
        let mut due: BTreeMap<u32, BTreeMap<u32, DataKeyVersion>> = BTreeMap::new();
        let mut in_use: HashMap<u32, BTreeSet<u32>> = HashMap::new();
        // While a file system was not there, WAL may have got more about a file.
        let wal_end = wal::end();
        for info in directory.files()? {
            let info = info?;
            let last = directory.last_version(info.slot)?;
            let known = self.gone.get(&info.file);
            let known = known.filter(|gone| gone.wal_end <= redo && Some(gone.last) == last);
            let is_dropped = |gone: &&Gone| shared.dropped.is_noted(info.slot, gone.last);
            let asked = known.filter(is_dropped);
            shared.dropped.clear(info.slot);
            if known.is_some() && recorded.was_gone(info.file, last, Lsn::MAX) {
                continue;
            }
            if known.is_some() && asked.is_none() {
                doubtful.insert(info.file.database);
            }
            match asked {
                Some(gone) => {
                    let numbers = due.entry(info.file.database).or_default();
                    let through = numbers.entry(info.file.relation).or_insert(gone.last);
                    *through = (*through).max(gone.last);
                }
                None => {
                    in_use.entry(info.file.database).or_default().insert(info.file.relation);
                }
            }
        }
        self.ask(doubtful);
        for (database, mut numbers) in due {
            let in_use = in_use.remove(&database).unwrap_or_default();
            numbers.retain(|number, _| !in_use.contains(number));
            let ranges = recorded.with(database, &numbers, &in_use, wal_end);
            let records: Vec<_> = ranges.into_iter().map(Record::FormerFiles).collect();
            if records.is_empty() {
                continue;
            }
            former::require_room(&lock, &records)?;
            persist::append_durably(&lock, Scope::database(database), &records, None)?;
        }
        Ok(())
    }
}

/// Forgets what nothing has needed for long.
fn forget(candidates: BTreeMap<Scope, Candidates>) -> Result<()> {
    for (scope, mut candidates) in candidates {
        let lock = KeystoreLock::acquire();
        if !candidates.replaced.database_keys.is_empty() {
            let wrapping = database_keys::wrapping()?;
            candidates.replaced.database_keys.retain(|key| !wrapping.contains(key));
        }
        let forgotten = former::forget(&lock, scope, candidates)?;
        drop(lock);
        let Forgotten { files, keys, replaced } = forgotten;
        if files > 0 {
            log(format!("{keys} data keys of {files} files of {} that are gone", scope.name()));
        }
        if replaced > 0 {
            log(format!("{replaced} keys of {} that were replaced", scope.name()));
        }
        if files > 0 || replaced > 0 {
            heap::give_back();
        }
    }
    Ok(())
}

fn log(what: String) {
    let message = format!("pagevault: forgot {what}");
    Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message).send(PgLogLevel::LOG);
}
