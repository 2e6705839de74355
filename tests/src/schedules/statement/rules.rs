//! Which statements fit.

use super::{Change, Context, Statement};
use crate::schedules::database::{Database, Job, Kind, Label};

impl Statement {
    /// Whether the model has what it needs, and knows what comes of it.
    pub(in crate::schedules) fn suits(&self, database: &Database, context: &Context) -> bool {
        let table_of = |number: &u8| database.tables.get(number);
        let readable = |number: &u8| table_of(number).is_some() && !database.is_shredded(*number);
        let stored = |number: &u8| {
            readable(number) && table_of(number).is_some_and(|t| t.kind != Kind::Partitioned)
        };
        let heap = |number: &u8| {
            readable(number) && table_of(number).is_some_and(|t| t.kind == Kind::Heap)
        };
        // Secrets are copied only where they stay secret.
        let copied = |table: &u8, of: &u8| {
            let mut after = database.clone();
            self.apply(&mut after, context);
            let secret = database.is_secret(*of);
            database.has_one_marker(*of)
                && (!secret || after.tables.get(table).is_some_and(|table| table.sealed))
        };
        match self {
            Statement::Create { table, .. } | Statement::CreatePartitioned { table, .. } => {
                table_of(table).is_none()
            }
            Statement::CreatePartition { table, of, .. } => {
                table_of(table).is_none()
                    && table_of(of).is_some_and(|of| of.kind == Kind::Partitioned)
            }
            Statement::CreateAs { table, of, .. } => {
                table_of(table).is_none() && readable(of) && copied(table, of)
            }
            Statement::CreateView { table, of, .. } => {
                table_of(table).is_none()
                    && heap(of)
                    && table_of(of).is_some_and(|of| of.logged)
                    && copied(table, of)
            }
            Statement::Refresh { table, .. } => {
                readable(table)
                    && table_of(table).is_some_and(|view| match view.kind {
                        Kind::View(of) => readable(&of),
                        Kind::Heap | Kind::Partitioned => false,
                    })
            }
            Statement::Attach { table, to } => {
                heap(table)
                    && table_of(table).is_some_and(|table| table.parent.is_none())
                    && table_of(to).is_some_and(|to| to.kind == Kind::Partitioned)
                    && !database.is_shredded(*to)
            }
            Statement::Detach { table } => {
                readable(table) && table_of(table).is_some_and(|table| table.parent.is_some())
            }
            Statement::Drop { table } => {
                table_of(table).is_some()
                    && !database.is_viewed(*table)
                    && database.partitions(*table).count() == 0
            }
            Statement::Change { table, change } => {
                let viewed = database.is_viewed(*table);
                let logs = !viewed || *change != Change::Unlogged;
                // Only TRUNCATE and DROP are for what was shredded.
                let whole = *change == Change::Truncate || !database.is_shredded(*table);
                logs && whole && table_of(table).is_some_and(|table| change.suits(table, viewed))
            }
            Statement::Insert { table, .. }
            | Statement::Update { table, .. }
            | Statement::Delete { table, .. } => heap(table),
            Statement::Sort { table } => readable(table),
            Statement::LargeObject { object } => {
                !database.objects.contains(&Statement::oid(*object))
            }
            Statement::Label { table, label } => {
                let Some(found) = table_of(table) else { return false };
                let free = match label {
                    // It is refused while a job runs that does the same already.
                    Some(Label::Encrypted) => {
                        matches!(found.job, None | Some(Job::Decrypt))
                    }
                    Some(Label::Plaintext) => {
                        !found.secret && found.job.is_none() && found.kind != Kind::Partitioned
                    }
                    None => found.job.is_none(),
                };
                free && readable(table)
            }
            Statement::RewriteCatalog { .. } => true,
            Statement::RotateDataKey { table } => {
                stored(table) && table_of(table).is_some_and(|t| t.sealed && t.job.is_none())
            }
            Statement::Shred { table } => {
                let sealed = |number: &u8| {
                    stored(number) && table_of(number).is_some_and(|t| t.sealed && t.job.is_none())
                };
                match table_of(table).map(|table| table.kind) {
                    Some(Kind::Partitioned) => {
                        database.partitions(*table).count() > 0
                            && database.partitions(*table).all(|partition| sealed(&partition))
                    }
                    _ => sealed(table),
                }
            }
        }
    }
}
