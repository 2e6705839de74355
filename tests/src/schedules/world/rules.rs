//! Which operations fit.

use super::{MAIN, Transaction, World};
use crate::schedules::database::{Database, Kind, Table};
use crate::schedules::operation::{Operation, Order, Process, Target};
use crate::schedules::statement::Statement;

impl World {
    /// Whether a statement can be carried out, and foreseen, while a base backup is taken.
    pub(in crate::schedules) fn allows_in_backup(&self, statement: &Statement) -> bool {
        self.lets(MAIN, None, statement) && !statement.wants_quiet()
    }

    /// Whether `statement` can be run there now, and what comes of it is known.
    fn lets(&self, database: u8, session: Option<u8>, statement: &Statement) -> bool {
        let seen = match session {
            Some(session) => self.seen_by(session),
            None => match self.databases.get(&database) {
                Some(found) => found.clone(),
                None => return false,
            },
        };
        let in_transaction = session.and_then(|s| self.session(s)?.transaction.as_ref()).is_some();
        let (shared, owned) = (statement.shares(), statement.owns(&seen));
        statement.suits(&seen, &self.context)
            && (self.setup.tablespace || !statement.wants_tablespace())
            && !(in_transaction && statement.is_alone())
            // A job moves a table into its key group then.
            && !(in_transaction
                && self.setup.key_groups
                && matches!(statement, Statement::Label { .. }))
            && (!statement.wants_quiet() || self.is_quiet())
            && self.others(database, session).all(|other| other.lets(shared, &owned))
            && !self.makes_twice(database, session, statement, &seen)
    }

    /// Whether it makes a table that somebody else is making.
    fn makes_twice(
        &self,
        database: u8,
        session: Option<u8>,
        statement: &Statement,
        seen: &Database,
    ) -> bool {
        let made = |transaction: &Transaction, table: u8| {
            transaction.owned.contains(&table) && !seen.tables.contains_key(&table)
        };
        let object = matches!(statement, Statement::LargeObject { .. })
            && self.others(database, session).next().is_some();
        object
            || statement
                .table()
                .is_some_and(|table| self.others(database, session).any(|other| made(other, table)))
    }

    /// Whether the operation can be carried out now, and what comes of it is known. What does not
    /// fit any more, because operations before it were dropped, is passed over.
    pub(in crate::schedules) fn allows(&self, operation: &Operation) -> bool {
        let in_transaction =
            |session: &u8| self.session(*session).is_some_and(|s| s.transaction.is_some());
        let has = |database: &u8| self.databases.contains_key(database);
        let unlocked = !self.locked;
        let reachable = !self.keys_away;
        match operation {
            Operation::Run { session, statement } => {
                let Some(found) = self.session(*session) else { return false };
                unlocked && self.lets(found.database, Some(*session), statement)
            }
            Operation::Begin { session } => {
                unlocked && self.session(*session).is_some() && !in_transaction(session)
            }
            Operation::Savepoint { session }
            | Operation::Commit { session }
            | Operation::Rollback { session } => in_transaction(session),
            Operation::RollbackTo { session } => self
                .session(*session)
                .and_then(|session| session.transaction.as_ref()?.savepoint)
                .is_some(),
            Operation::Prepare { session } => {
                let Some(session) = self.session(*session) else { return false };
                let Some(transaction) = &session.transaction else { return false };
                let seen = transaction.within(&self.databases[&session.database]);
                self.prepared.is_none()
                    && session.database == MAIN
                    && transaction.done.iter().all(|(statement, _)| {
                        let logged = |table| seen.tables.get(&table).is_none_or(|t| t.logged);
                        !matches!(statement, Statement::Sort { .. } | Statement::Refresh { .. })
                            && statement.table().is_none_or(logged)
                    })
            }
            Operation::FinishPrepared { .. } => self.prepared.is_some() && unlocked,
            Operation::Connect { session, database } => {
                has(database) && !in_transaction(session) && self.session(*session).is_some()
            }
            Operation::Default { .. } | Operation::Jobs { .. } => self.is_quiet() && unlocked,
            Operation::SchemaLabel { database, .. } | Operation::DatabaseLabel { database, .. } => {
                has(database) && self.is_quiet() && unlocked
            }
            Operation::Crawl { .. } | Operation::Checkpoint => unlocked,
            Operation::WaitForJobs => self.is_quiet() && unlocked && !self.crawling && !self.paused,
            Operation::Order { order } => {
                let any = match order {
                    Order::Pause => self.has_jobs() && !self.paused,
                    Order::Resume => self.paused,
                    Order::Cancel => self.has_jobs(),
                };
                any && self.is_quiet() && unlocked
            }
            Operation::RotateAllDataKeys { database } | Operation::EncryptDatabase { database } => {
                has(database) && self.is_quiet() && unlocked && !self.has_jobs()
            }
            Operation::Forbidden { database, table } => {
                let Some(found) = self.databases.get(database) else { return false };
                self.is_quiet()
                    && unlocked
                    && found.tables.get(table).is_some_and(|table| {
                        found.wants(table, self.context.default)
                            && table.kind != Kind::Partitioned
                            && table.sealed
                            && !table.shredded
                            && table.job.is_none()
                    })
            }
            Operation::RotateClusterMasterKey | Operation::MoveClusterMasterKey => {
                unlocked && reachable
            }
            Operation::RotateKeyGroupMasterKey { .. } | Operation::RotateKeyGroupKey { .. } => {
                self.setup.key_groups && unlocked && reachable
            }
            Operation::RotateWalKey => unlocked && reachable && self.wal_encryption,
            Operation::WalEncryption { on } => unlocked && reachable && *on != self.wal_encryption,
            Operation::RotateDatabaseKey { database } | Operation::OwnMasterKey { database } => {
                has(database) && unlocked && reachable
            }
            Operation::RotateDatabaseMasterKey { database } => {
                unlocked
                    && reachable
                    && self.databases.get(database).is_some_and(|d| d.own_master_key)
            }
            Operation::ShredFormerFiles { database } => {
                has(database) && unlocked && self.is_quiet() && !self.has_jobs()
            }
            Operation::Unforeseen { .. } | Operation::Judge => true,
            // A locked server neither writes nor reads encrypted WAL.
            Operation::Restart => reachable || !self.wal_was_encrypted,
            // Without keys there is no recovery.
            Operation::StopImmediately | Operation::Crash | Operation::CrashInRecovery { .. } => {
                reachable
            }
            Operation::CrashWithoutGroups { .. } => reachable && self.setup.key_groups,
            Operation::Kill { process } => {
                unlocked && (*process != Process::Postmaster || reachable)
            }
            Operation::CrashAt { operation, .. } => {
                // Session 0 is the player's own, outside of all sessions.
                let in_main = !matches!(**operation, Operation::Run { .. })
                    || self.sessions.first().is_some_and(|session| session.database == MAIN);
                let copies = match &**operation {
                    Operation::Run { statement, .. } => {
                        statement.copies_before_label(&self.databases[&MAIN])
                    }
                    _ => false,
                };
                reachable && self.is_quiet() && in_main && !copies && self.allows(operation)
            }
            Operation::Together { statements, kill_after } => {
                let Some(seen) = self.databases.get(&MAIN) else { return false };
                let objects = statements
                    .iter()
                    .filter(|s| matches!(s, Statement::LargeObject { .. }))
                    .count();
                let mut before = Transaction::default();
                let apart = statements.iter().all(|statement| {
                    let (shared, owned) = (statement.shares(), statement.owns(seen));
                    let apart = before.lets(shared, &owned)
                        && !statement.wants_quiet()
                        && self.lets(MAIN, None, statement);
                    before.add(statement, seen, self.context);
                    apart
                });
                let copies = |statement: &Statement| statement.copies_before_label(seen);
                apart
                    && !statements.is_empty()
                    && (kill_after.is_none() || !statements.iter().any(copies))
                    && objects < 2
                    && unlocked
                    && self.is_quiet()
                    && (reachable || kill_after.is_none())
            }
            Operation::KeysAway => reachable && unlocked,
            Operation::KeysBack => self.keys_away,
            Operation::MakeStandby => {
                !self.has_standby && unlocked && reachable && !self.setup.minimal_wal
            }
            Operation::CrashStandby => self.has_standby && reachable,
            Operation::MakeSlot => {
                self.setup.logical_wal
                    && self.slot.is_none()
                    && self.is_quiet()
                    && unlocked
                    && reachable
            }
            Operation::Decode => self.slot.is_some() && unlocked && reachable,
            Operation::Promote { rewind, .. } => {
                // Before 17 pg_rewind takes a tablespace without symbolic link for a mistake.
                let can_rewind = !self.setup.tablespace;
                self.has_standby && unlocked && reachable && (can_rewind || !rewind)
            }
            Operation::BackUp { meanwhile } => {
                let mut world = self.clone();
                let fits = meanwhile.iter().all(|statement| {
                    let fits = world.allows_in_backup(statement);
                    if fits {
                        world.commit(MAIN, statement);
                    }
                    fits
                });
                fits && unlocked && self.backups.len() < 2 && !self.setup.minimal_wal
            }
            Operation::Mark => unlocked && !self.backups.is_empty(),
            Operation::Restore { backup, to } => {
                let found = self.backups.get(usize::from(*backup));
                let there = found.is_some_and(|backup| match to {
                    Target::Itself => true,
                    Target::Mark => backup.follows && backup.mark.is_some(),
                    Target::Present => backup.follows,
                });
                there && reachable && unlocked
            }
            Operation::CreateDatabase { database, template, .. } => {
                !has(database) && has(template) && self.is_quiet() && unlocked && !self.has_jobs()
            }
            Operation::Dump { database, of } => {
                let Some(found) = self.databases.get(of) else { return false };
                let restored = found.restored(self.context.default, self.context.at_once);
                let hidden = |t: &Table| !t.secret || t.sealed;
                !has(database)
                    && self.is_quiet()
                    && unlocked
                    && !self.has_jobs()
                    && found.tables.values().all(|table| !table.shredded)
                    && restored.tables.values().all(hidden)
            }
            Operation::MoveDatabase { database, .. } | Operation::DropDatabase { database } => {
                // `movedb` (dbcommands.c) refuses a database with relations in the new tablespace.
                let moves = |d: &Database| self.setup.tablespace && !d.spread;
                let ready = matches!(operation, Operation::DropDatabase { .. })
                    || self.databases.get(database).is_some_and(moves);
                ready
                    && *database != MAIN
                    && has(database)
                    && self.is_quiet()
                    && unlocked
                    && !self.has_jobs()
            }
            Operation::ShredSchema { database, schema } => {
                let Some(found) = self.databases.get(database) else { return false };
                let within = |t: &&Table| t.schema == usize::from(*schema);
                let ready =
                    |t: &Table| t.kind == Kind::Partitioned || (t.sealed && t.job.is_none());
                let stored = |t: &Table| t.kind != Kind::Partitioned && !t.shredded;
                unlocked
                    && self.is_quiet()
                    && found.tables.values().filter(within).all(ready)
                    && found.tables.values().filter(within).any(stored)
                    // Partitions elsewhere go with their table.
                    && found.tables.values().all(|t| t.parent.is_none())
            }
            Operation::ShredDatabase { database } => {
                let stored = |t: &Table| t.kind != Kind::Partitioned && t.sealed && !t.shredded;
                *database != MAIN
                    && unlocked
                    && self.is_quiet()
                    && !self.has_jobs()
                    && self.databases.get(database).is_some_and(|d| d.tables.values().any(stored))
            }
            Operation::DropExtension { database } => {
                self.is_quiet()
                    && unlocked
                    && self.databases.get(database).is_some_and(|database| {
                        database.tables.values().any(|t| t.sealed && t.kind != Kind::Partitioned)
                    })
            }
        }
    }
}
