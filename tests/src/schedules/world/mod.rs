//! The model: what must be readable by whom, and what must not be in plaintext.

mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::database::{Database, Job, Kind};
use super::operation::{Operation, Order, Setup};
use super::statement::{Context, Statement};

pub(super) const SESSIONS: u8 = 3;
/// The ids that a statement may use up.
pub(super) const NEW_ROWS: i64 = 10_000;
/// The database `postgres`.
pub(super) const MAIN: u8 = 0;

pub(super) fn database_name(database: u8) -> String {
    if database == MAIN { "postgres".into() } else { format!("d{database}") }
}

/// Statements of a transaction that is not committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Transaction {
    done: Vec<(Statement, Context)>,
    savepoint: Option<usize>,
    shared: Vec<u8>,
    owned: Vec<u8>,
}

impl Transaction {
    fn add(&mut self, statement: &Statement, database: &Database, context: Context) {
        self.shared.extend(statement.shares());
        self.owned.extend(statement.owns(database));
        self.done.push((statement.clone(), context));
    }

    /// The database as it is within.
    fn within(&self, database: &Database) -> Database {
        let mut database = database.clone();
        let mut locked = BTreeSet::new();
        for (statement, context) in &self.done {
            locked.extend(statement.owns(&database));
            statement.apply(&mut database, context);
            let sealed = |number: &u8| database.tables.get(number).is_some_and(|t| t.sealed);
            let Some(table) = statement.replaces() else { continue };
            let in_doubt = locked.iter().any(|other| *other != table && sealed(other));
            if let Some(table) = database.tables.get_mut(&table) {
                table.in_doubt |= in_doubt;
            }
        }
        database
    }

    fn lets(&self, shared: Option<u8>, owned: &[u8]) -> bool {
        let own = |table: &u8| self.owned.contains(table);
        !shared.iter().any(own) && !owned.iter().any(|t| own(t) || self.shared.contains(t))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) database: u8,
    pub(super) transaction: Option<Transaction>,
}

/// What the world was like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Backup {
    /// When it was taken.
    pub(super) then: World,
    /// The primary has the WAL since then.
    pub(super) follows: bool,
    /// So would the standby, if it took over.
    pub(super) standby_follows: bool,
    /// At the last restore point since, and the number of that.
    pub(super) mark: Option<(u8, World)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct World {
    /// What is committed.
    pub(super) databases: BTreeMap<u8, Database>,
    pub(super) sessions: Vec<Session>,
    /// A prepared transaction of the database `postgres`.
    pub(super) prepared: Option<Transaction>,
    pub(super) context: Context,
    pub(super) crawling: bool,
    /// Jobs may be paused.
    pub(super) paused: bool,
    /// WAL is encrypted from now on.
    pub(super) wal_encryption: bool,
    /// WAL was encrypted at some time.
    pub(super) wal_was_encrypted: bool,
    pub(super) keys_away: bool,
    /// The server was started while the keys were away.
    pub(super) locked: bool,
    pub(super) has_standby: bool,
    /// The first id of rows that are inserted since there is a slot for logical decoding.
    pub(super) slot: Option<i64>,
    /// Ids of rows that were rolled back.
    pub(super) undone: Vec<Range<i64>>,
    pub(super) backups: Vec<Backup>,
    pub(super) marks: u8,
    pub(super) master_keys: u8,
    pub(super) setup: Setup,
}

impl World {
    pub(super) fn new(setup: Setup) -> World {
        World {
            databases: BTreeMap::from([(
                MAIN,
                Database { other_space_encrypts: setup.labelled_tablespace, ..Database::default() },
            )]),
            sessions: vec![Session::default(); usize::from(SESSIONS)],
            prepared: None,
            context: Context {
                first: 1,
                default: false,
                at_once: true,
                key_groups: setup.key_groups,
            },
            crawling: false,
            paused: false,
            wal_encryption: setup.wal_encryption,
            wal_was_encrypted: setup.wal_encryption,
            keys_away: false,
            locked: false,
            has_standby: false,
            slot: None,
            undone: Vec::new(),
            backups: Vec::new(),
            marks: 0,
            master_keys: 1,
            setup,
        }
    }

    fn session(&self, number: u8) -> Option<&Session> {
        self.sessions.get(usize::from(number))
    }

    /// The database of a session as it sees it.
    pub(super) fn seen_by(&self, session: u8) -> Database {
        let Some(session) = self.session(session) else { return Database::default() };
        let database = self.databases.get(&session.database).cloned().unwrap_or_default();
        session.transaction.as_ref().map_or_else(|| database.clone(), |t| t.within(&database))
    }

    /// Transactions that others have open in a database.
    fn others(&self, database: u8, except: Option<u8>) -> impl Iterator<Item = &Transaction> {
        let of_sessions = self.sessions.iter().enumerate().filter_map(move |(number, session)| {
            let other = Some(number) != except.map(usize::from) && session.database == database;
            session.transaction.as_ref().filter(|_| other)
        });
        of_sessions.chain(self.prepared.as_ref().filter(|_| database == MAIN))
    }

    /// Whether somebody has locked a table so that it cannot be read.
    pub(super) fn is_held(&self, database: u8, table: u8) -> bool {
        self.others(database, None).any(|other| other.owned.contains(&table))
    }

    /// No transaction is open anywhere.
    pub(super) fn is_quiet(&self) -> bool {
        self.prepared.is_none() && self.sessions.iter().all(|s| s.transaction.is_none())
    }

    pub(super) fn has_jobs(&self) -> bool {
        self.databases.values().any(|d| d.tables.values().any(|table| table.job.is_some()))
    }

    /// A statement takes effect.
    pub(super) fn commit(&mut self, database: u8, statement: &Statement) {
        let context = self.context;
        if let Some(database) = self.databases.get_mut(&database) {
            statement.apply(database, &context);
        }
        self.context.first += NEW_ROWS;
    }

    fn commit_transaction(&mut self, database: u8, transaction: &Transaction) {
        if let Some(database) = self.databases.get_mut(&database) {
            *database = transaction.within(database);
        }
    }

    /// As a server has it that is restored up to now.
    fn elsewhere(&self) -> World {
        let mut then = World { backups: Vec::new(), has_standby: false, ..self.clone() };
        then.crash();
        then
    }

    /// Everything that is not committed is gone, and what is in unlogged tables.
    pub(super) fn crash(&mut self) {
        self.end_sessions();
        for database in self.databases.values_mut() {
            database.crash();
        }
    }

    /// Sessions are disconnected.
    pub(super) fn end_sessions(&mut self) {
        for number in 0..self.sessions.len() {
            let session = &mut self.sessions[number];
            let database = session.database;
            if let Some(transaction) = session.transaction.take() {
                self.undo(database, &transaction.done);
            }
        }
    }

    /// Statements have been rolled back.
    fn undo(&mut self, database: u8, statements: &[(Statement, Context)]) {
        for (statement, context) in statements {
            if let Statement::Insert { rows, .. } = statement {
                self.undone.push(context.first..context.first + i64::from(*rows));
            }
            if let Some(database) = self.databases.get_mut(&database) {
                database.undo(statement);
            }
        }
    }

    /// Ids of rows that logical decoding must have seen.
    pub(super) fn decoded(&self) -> BTreeSet<i64> {
        let since = self.slot.unwrap_or(i64::MAX);
        let tables = self.databases.get(&MAIN).into_iter().flat_map(|d| d.tables.values());
        let tables = tables.filter(|table| table.kind == Kind::Heap && table.always_logged);
        tables.flat_map(|table| table.rows.keys().copied().filter(|id| *id >= since)).collect()
    }

    fn end_sessions_of(&mut self, database: u8) {
        for session in self.sessions.iter_mut().filter(|s| s.database == database) {
            *session = Session::default();
        }
    }

    /// What comes of an operation that went well.
    pub(super) fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Run { session, statement } => {
                let seen = self.seen_by(*session);
                let context = self.context;
                let number = usize::from(*session);
                match &mut self.sessions[number].transaction {
                    Some(transaction) => {
                        transaction.add(statement, &seen, context);
                        self.context.first += NEW_ROWS;
                    }
                    None => {
                        let database = self.sessions[number].database;
                        self.commit(database, statement);
                    }
                }
            }
            Operation::Begin { session } => {
                self.sessions[usize::from(*session)].transaction = Some(Transaction::default());
            }
            Operation::Savepoint { session } => {
                if let Some(transaction) = &mut self.sessions[usize::from(*session)].transaction {
                    transaction.savepoint = Some(transaction.done.len());
                }
            }
            Operation::RollbackTo { session } => {
                if let Some(transaction) = &mut self.sessions[usize::from(*session)].transaction
                    && let Some(savepoint) = transaction.savepoint
                {
                    let undone = transaction.done.split_off(savepoint);
                    let database = self.sessions[usize::from(*session)].database;
                    self.undo(database, &undone);
                }
            }
            Operation::Commit { session } => {
                let session = &mut self.sessions[usize::from(*session)];
                let database = session.database;
                if let Some(transaction) = session.transaction.take() {
                    self.commit_transaction(database, &transaction);
                }
            }
            Operation::Rollback { session } => {
                let session = &mut self.sessions[usize::from(*session)];
                let database = session.database;
                if let Some(transaction) = session.transaction.take() {
                    self.undo(database, &transaction.done);
                }
            }
            Operation::Prepare { session } => {
                self.prepared = self.sessions[usize::from(*session)].transaction.take();
            }
            Operation::FinishPrepared { commit } => match self.prepared.take() {
                Some(transaction) if *commit => self.commit_transaction(MAIN, &transaction),
                Some(transaction) => self.undo(MAIN, &transaction.done),
                None => {}
            },
            Operation::Connect { session, database } => {
                self.sessions[usize::from(*session)].database = *database;
            }
            Operation::Default { on } => self.context.default = *on,
            Operation::SchemaLabel { database, schema, label } => {
                if let Some(database) = self.databases.get_mut(database) {
                    database.labels_of_schemas[usize::from(*schema)] = *label;
                }
            }
            Operation::DatabaseLabel { database, on } => {
                if let Some(database) = self.databases.get_mut(database) {
                    database.labelled = *on;
                    database.catalogs = true;
                }
            }
            Operation::Jobs { always } => self.context.at_once = !always,
            Operation::Crawl { on } => self.crawling = *on,
            Operation::WaitForJobs => {
                self.databases.values_mut().for_each(Database::finish_jobs);
            }
            Operation::Order { order } => {
                self.paused = *order == Order::Pause;
                if *order == Order::Cancel {
                    self.databases.values_mut().for_each(Database::cancel_jobs);
                }
            }
            Operation::RotateAllDataKeys { database } => {
                if let Some(database) = self.databases.get_mut(database) {
                    database.stored().for_each(|table| table.job = Some(Job::Rotate));
                }
            }
            Operation::EncryptDatabase { database } => {
                let Context { default, at_once, .. } = self.context;
                if let Some(database) = self.databases.get_mut(database) {
                    database.encrypt(default, at_once);
                }
            }
            Operation::WalEncryption { on } => {
                self.wal_encryption = *on;
                self.wal_was_encrypted |= on;
            }
            Operation::Dump { database, of } => {
                let Context { default, at_once, .. } = self.context;
                let copy = self.databases[of].restored(default, at_once);
                self.databases.insert(*database, copy);
            }
            Operation::OwnMasterKey { database } => {
                if let Some(database) = self.databases.get_mut(database) {
                    database.own_master_key = true;
                }
            }
            Operation::MoveClusterMasterKey => self.master_keys += 1,
            Operation::Restart => {
                self.end_sessions();
                self.locked = self.keys_away;
            }
            Operation::StopImmediately
            | Operation::Crash
            | Operation::CrashInRecovery { .. }
            | Operation::CrashWithoutGroups { .. }
            | Operation::Kill { .. } => self.crash(),
            Operation::Together { statements, kill_after } => {
                for statement in statements {
                    self.commit(MAIN, statement);
                }
                if kill_after.is_some() {
                    self.crash();
                }
            }
            Operation::CrashAt { operation, .. } => {
                let own = |world: &World| -> BTreeMap<u8, bool> {
                    let databases = world.databases.iter();
                    databases.map(|(number, known)| (*number, known.own_master_key)).collect()
                };
                let before = own(self);
                self.apply(operation);
                // Whether it has a key is not known then, and not asked.
                for (number, own) in before {
                    if let Some(database) = self.databases.get_mut(&number) {
                        database.own_master_key = own;
                    }
                }
                self.crash();
            }
            Operation::KeysAway => self.keys_away = true,
            Operation::KeysBack => (self.keys_away, self.locked) = (false, false),
            Operation::MakeStandby => self.has_standby = true,
            Operation::MakeSlot => self.slot = Some(self.context.first),
            Operation::Promote { rewind, .. } => {
                self.crash();
                for backup in &mut self.backups {
                    backup.follows &= backup.standby_follows;
                    backup.standby_follows = false;
                }
                self.has_standby = *rewind;
                self.slot = None;
            }
            Operation::BackUp { meanwhile } => {
                for statement in meanwhile {
                    self.commit(MAIN, statement);
                }
                let then = self.elsewhere();
                self.backups.push(Backup {
                    then,
                    follows: true,
                    standby_follows: self.has_standby,
                    mark: None,
                });
            }
            Operation::Mark => {
                let (number, then) = (self.marks, self.elsewhere());
                for backup in &mut self.backups {
                    backup.mark = Some((number, then.clone()));
                }
                self.marks += 1;
            }
            Operation::Restore { backup, .. } => {
                self.backups.remove(usize::from(*backup));
            }
            Operation::CreateDatabase { database, template, .. } => {
                let mut copy = self.databases[template].clone();
                copy.own_master_key = false;
                copy.labelled = false;
                self.end_sessions_of(*template);
                self.databases.insert(*database, copy);
            }
            Operation::MoveDatabase { database, to_other } => {
                self.end_sessions_of(*database);
                if let Some(database) = self.databases.get_mut(database) {
                    database.in_other_space = *to_other;
                    // Those that are rewritten there.
                    database.catalogs |= self.setup.labelled_tablespace;
                }
            }
            Operation::ShredSchema { database, schema } => {
                let tables = self.databases.get_mut(database).into_iter();
                for table in tables.flat_map(|database| database.tables.values_mut()) {
                    if table.schema == usize::from(*schema) && table.kind != Kind::Partitioned {
                        table.shredded = true;
                    }
                }
            }
            Operation::DropDatabase { database } | Operation::ShredDatabase { database } => {
                self.databases.remove(database);
                self.end_sessions_of(*database);
            }
            Operation::RotateClusterMasterKey
            | Operation::RotateDatabaseMasterKey { .. }
            | Operation::RotateDatabaseKey { .. }
            | Operation::RotateKeyGroupMasterKey { .. }
            | Operation::RotateKeyGroupKey { .. }
            | Operation::RotateWalKey
            | Operation::ShredFormerFiles { .. }
            | Operation::Checkpoint
            | Operation::CrashStandby
            | Operation::Decode
            | Operation::Forbidden { .. }
            | Operation::DropExtension { .. }
            | Operation::Unforeseen { .. }
            | Operation::Judge => {}
        }
    }
}
