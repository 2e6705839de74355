//! What is due, for the launcher of rekey workers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pagevault_keystore::{RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::Task;
use super::ages::{self, Age};
use crate::keys::store::persist;
use crate::keys::usage::interim;
use crate::pg::guc::{self, KeyKind};
use crate::pg::report::{Report, Result};
use crate::pg::{catalog, process, relation_files};
use crate::rekey::scheduled::{self, Reason};

/// Longest time between two looks.
const LOOK: Duration = Duration::from_secs(60);

/// The same while files may have pages under interim keys: their group may be unlocked any time.
const LOOK_FOR_INTERIM: Duration = Duration::from_secs(5);

/// Pause before a rotation that has failed is tried again. It doubles with each failure, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Seconds before a key log is read again that could not be read.
const AFTER_ERROR: i64 = 3600;

const KINDS: [KeyKind; 4] = [KeyKind::Master, KeyKind::Database, KeyKind::Wal, KeyKind::Data];

/// Ages and window.
type Settings = ([Option<Duration>; 4], String);

/// What the launcher remembers.
#[derive(Default)]
pub(crate) struct Schedule {
    /// With which settings it has looked last.
    settings: Settings,
    next_look: Option<Instant>,
    /// Tasks that were done and are still due: how often, and when to try again.
    tried: BTreeMap<Task, (u32, Instant)>,
    /// By database, 0 for shared files: when the first of its data keys is due, or later.
    data_keys: BTreeMap<u32, i64>,
    /// Databases that were named in the server log because nobody can connect to them.
    closed: BTreeSet<u32>,
    /// The files with pages under interim keys that could be rekeyed when it looked last.
    interim_files: BTreeSet<RelFile>,
}

impl Schedule {
    /// Time until the next look; `None` if nothing is ever due.
    pub(crate) fn due_in(&mut self) -> Option<Duration> {
        let settings = (KINDS.map(guc::rotate_after), guc::rotation_window());
        if settings != self.settings {
            *self = Schedule { settings, ..Schedule::default() };
        }
        let is_on = KINDS.iter().any(|kind| guc::rotate_after(*kind).is_some()) || interim::any();
        let due = self.next_look.map(|at| at.saturating_duration_since(Instant::now()));
        is_on.then(|| due.unwrap_or_default())
    }

    /// A task has ended. It was done if it is not due any more.
    pub(crate) fn ended(&mut self, task: Task) {
        let count = self.tried.get(&task).map_or(0, |(count, _)| *count);
        let pause = FIRST_PAUSE.saturating_mul(1 << count.min(16)).min(LONGEST_PAUSE);
        self.tried.insert(task, (count.saturating_add(1), Instant::now() + pause));
        self.next_look = None;
    }

    /// What is to be done now. `databases`: those that one can connect to.
    pub(crate) fn next(&mut self, databases: impl FnOnce() -> Vec<u32>) -> Result<Option<Task>> {
        if self.due_in().is_none_or(|pause| !pause.is_zero()) {
            return Ok(None);
        }
        self.next_look = Some(Instant::now() + LOOK);
        let now = process::now();
        let mut due = Vec::new();
        let mut next = i64::MAX;
        let databases = databases();
        if interim::any() {
            due.extend(self.interim_pages(&databases)?);
        }
        if guc::is_rotation_window_open() {
            for age in ages::of_cluster()? {
                match age.due_at() {
                    Some(at) if at <= now => due.push(task(&age)),
                    Some(at) => next = next.min(at),
                    None => {}
                }
            }
            if guc::rotate_after(KeyKind::Data).is_some() {
                due.extend(self.databases_due(&databases, now)?);
                next = self.data_keys.values().filter(|at| **at > now).fold(next, |a, b| a.min(*b));
            }
        }
        self.tried.retain(|task, _| due.contains(task));
        let wait = u64::try_from(next.saturating_sub(now)).unwrap_or(0);
        let look = if interim::any() { LOOK_FOR_INTERIM } else { LOOK };
        self.next_look = Some(Instant::now() + Duration::from_secs(wait.max(1)).min(look));
        Ok(self.first_ready(&due))
    }

    /// The first task that was not tried in vain a short time ago, those that were tried least
    /// before others.
    fn first_ready(&mut self, due: &[Task]) -> Option<Task> {
        let now = Instant::now();
        let tried = |task: &Task| self.tried.get(task).copied();
        let ready = due.iter().filter(|task| tried(task).is_none_or(|(_, again)| again <= now));
        let first = ready.min_by_key(|task| (tried(task).map_or(0, |(count, _)| count), **task));
        let retry = due.iter().filter_map(|task| tried(task).map(|(_, again)| again)).min();
        self.next_look = self.next_look.into_iter().chain(retry).min();
        first.copied()
    }

    /// Databases with files that have pages under their interim keys, but for those with jobs that
    /// see to that.
    fn interim_pages(&mut self, databases: &[u32]) -> Result<Vec<Task>> {
        interim::log_emptied_maps()?;
        let mut due = Vec::new();
        if interim::any_unmarked() {
            due.push(Task::FindInterimPages);
        }
        let files: BTreeSet<_> = interim::to_rekey()?.into_iter().collect();
        // Another group was unlocked: files that a crash has left in the database are not to delay
        // its jobs.
        for file in files.difference(&self.interim_files) {
            self.tried.remove(&Task::InterimPages(file.database));
        }
        let having: BTreeSet<u32> = files.iter().map(|file| file.database).collect();
        self.interim_files = files;
        for database in having {
            if !databases.contains(&database) {
                self.note_closed(database);
            } else if !scheduled::any_in(Some(database), Some(Reason::InterimPages))? {
                due.push(Task::InterimPages(database));
            }
        }
        Ok(due)
    }

    fn note_closed(&mut self, database: u32) {
        if let Some(name) = catalog::database_name(database)
            && self.closed.insert(database)
        {
            Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("relations in database \"{name}\" have pages under interim keys"),
            )
            .detail("They cannot be given new data keys, because the database allows no connections.")
            .hint("ALTER DATABASE ... ALLOW_CONNECTIONS true, until the server log says that no page is under an interim key any more.")
            .send(PgLogLevel::WARNING);
        }
    }

    /// Databases with data keys that are due, but for those with jobs that see to that. Reads the
    /// log of a database when it is new here, and when its keys may be due.
    fn databases_due(&mut self, databases: &[u32], now: i64) -> Result<Vec<Task>> {
        self.data_keys.retain(|database, _| *database == 0 || databases.contains(database));
        let mut due = Vec::new();
        for &database in databases.iter().chain(&[0]) {
            let scope = Scope::database(database);
            let is_later = self.data_keys.get(&database).is_some_and(|at| *at > now);
            if is_later
                || !persist::has_keys_of(scope)?
                || scheduled::any_in(Some(database).filter(|database| *database != 0), None)?
            {
                continue;
            }
            let first = match ages::of_files(scope) {
                Ok(ages) => first_due(ages),
                // Others are not to wait for it.
                Err(report) => {
                    report.send(PgLogLevel::WARNING);
                    now + AFTER_ERROR
                }
            };
            self.data_keys.insert(database, first);
            if first <= now {
                due.push(Task::DataKeys(database));
            }
        }
        // Any database can see to shared files; one is enough.
        if due.contains(&Task::DataKeys(0)) {
            due.retain(|task| *task != Task::DataKeys(0));
            due.extend(databases.iter().map(|database| Task::SharedDataKeys(*database)));
        }
        Ok(due)
    }
}

fn task(age: &Age) -> Task {
    match age.kind {
        KeyKind::Master => Task::MasterKey(age.scope),
        KeyKind::Database => Task::DatabaseKey(age.scope),
        KeyKind::Wal | KeyKind::Data => Task::WalKey,
    }
}

/// When the first of these data keys is due whose file exists; `i64::MAX` if none is.
fn first_due(mut ages: Vec<Age>) -> i64 {
    ages.sort_by_key(|age| age.since);
    let exists = |age: &&Age| age.file.is_some_and(relation_files::may_exist);
    ages.iter().find(exists).and_then(Age::due_at).unwrap_or(i64::MAX)
}
