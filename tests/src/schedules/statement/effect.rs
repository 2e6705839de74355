//! What statements do to the model.

use super::{Asked, Change, Context, Statement};
use crate::schedules::database::{Database, Job, Kind, Label, Table};

impl Statement {
    /// What it does to the model.
    pub(in crate::schedules) fn apply(&self, database: &mut Database, context: &Context) {
        let new = |database: &mut Database, number: u8, asked: Asked, table: Table| {
            let default = context.default || asked == Asked::BySetting;
            let label = (asked == Asked::ByLabel).then_some(Label::Encrypted);
            let mut table = Table { label, ..table };
            table.sealed = database.wants(&table, default);
            database.tables.insert(number, table);
        };
        let empty = |kind, schema: usize| Table {
            kind,
            schema,
            parent: None,
            in_other_space: None,
            rows: Default::default(),
            label: None,
            sealed: false,
            secret: false,
            logged: true,
            always_logged: true,
            shredded: false,
            job: None,
            in_doubt: false,
        };
        // Of those that are sealed from the beginning every other one is never decrypted.
        let keep_secret = |database: &mut Database, number: u8| {
            if let Some(table) = database.tables.get_mut(&number) {
                table.secret = table.sealed && number % 2 == 1;
            }
        };
        match self {
            Statement::Create { table, asked, schema, unlogged } => {
                let made = Table {
                    logged: !unlogged,
                    always_logged: !unlogged,
                    ..empty(Kind::Heap, usize::from(*schema))
                };
                new(database, *table, *asked, made);
                keep_secret(database, *table);
            }
            Statement::CreatePartitioned { table, asked, schema } => {
                new(database, *table, *asked, empty(Kind::Partitioned, usize::from(*schema)));
            }
            Statement::CreatePartition { table, of, asked } => {
                let schema = database.tables.get(of).map_or(0, |of| of.schema);
                let made = Table { parent: Some(*of), ..empty(Kind::Heap, schema) };
                new(database, *table, *asked, made);
                keep_secret(database, *table);
            }
            Statement::CreateAs { table, of, asked, schema } => {
                let (rows, secret) = (database.rows(*of), database.is_secret(*of));
                let made = empty(Kind::Heap, usize::from(*schema));
                new(database, *table, *asked, Table { rows, secret, ..made });
            }
            Statement::CreateView { table, of, asked, schema } => {
                let (rows, secret) = (database.rows(*of), database.is_secret(*of));
                let made = empty(Kind::View(*of), usize::from(*schema));
                new(database, *table, *asked, Table { rows, secret, ..made });
            }
            Statement::Refresh { table, concurrently } => {
                let Some(Kind::View(of)) = database.tables.get(table).map(|table| table.kind)
                else {
                    return;
                };
                let rows = database.rows(of);
                if let Some(view) = database.tables.get_mut(table) {
                    view.rows = rows;
                }
                if !concurrently {
                    database.rewrite(*table, context.default);
                }
            }
            Statement::Drop { table } => {
                database.tables.remove(table);
            }
            Statement::LargeObject { object } => {
                database.objects.insert(Statement::oid(*object));
            }
            Statement::Sort { .. } | Statement::RewriteCatalog { .. } => {}
            Statement::Change { table, change } => {
                database.spread |= matches!(change, Change::SpaceOther | Change::SpaceDefault);
                let Some(found) = database.tables.get_mut(table) else { return };
                let rewrites = change.rewrites(found);
                {
                    let table = found;
                    match change {
                        Change::Truncate => {
                            table.rows.clear();
                            table.shredded = false;
                        }
                        Change::Logged => table.logged = true,
                        Change::Unlogged => (table.logged, table.always_logged) = (false, false),
                        Change::SchemaOpen => table.schema = 0,
                        Change::SchemaVault => table.schema = 1,
                        _ => {}
                    }
                }
                if rewrites {
                    database.rewrite(*table, context.default);
                }
                if matches!(change, Change::SpaceOther | Change::SpaceDefault) {
                    let other = *change == Change::SpaceOther;
                    database.move_to_space(*table, other, context.default, context.at_once);
                }
            }
            Statement::Shred { table } => {
                let all: Vec<u8> = database.partitions(*table).chain([*table]).collect();
                for table in all {
                    if let Some(table) = database.tables.get_mut(&table) {
                        table.shredded = table.kind != Kind::Partitioned;
                    }
                }
            }
            Statement::Attach { table, .. }
            | Statement::Detach { table }
            | Statement::Insert { table, .. }
            | Statement::Update { table, .. }
            | Statement::Delete { table, .. }
            | Statement::Label { table, .. }
            | Statement::RotateDataKey { table } => {
                if let Some(table) = database.tables.get_mut(table) {
                    self.apply_to(table, context);
                }
            }
        }
    }

    fn apply_to(&self, table: &mut Table, context: &Context) {
        match self {
            Statement::Attach { to, .. } => table.parent = Some(*to),
            Statement::Detach { .. } => table.parent = None,
            Statement::Insert { rows, .. } => {
                let ids = context.first..context.first + i64::from(*rows);
                table.rows.extend(ids.map(|id| (id, id % 97)));
            }
            Statement::Update { of_three, .. } => {
                let chosen =
                    table.rows.iter_mut().filter(|(id, _)| *id % 3 == i64::from(*of_three));
                chosen.for_each(|(_, n)| *n += 1000);
            }
            Statement::Delete { of_five, .. } => {
                table.rows.retain(|id, _| id % 5 != i64::from(*of_five));
            }
            Statement::Label { label, .. } => {
                table.label = *label;
                match label {
                    _ if table.kind == Kind::Partitioned => {}
                    // A job looks at every page even if it finds nothing to do.
                    Some(Label::Encrypted) if context.at_once && table.job.is_none() => {
                        table.sealed = true;
                    }
                    Some(Label::Encrypted) => table.job = Some(Job::Encrypt),
                    Some(Label::Plaintext) => {
                        table.sealed = false;
                        table.in_doubt = false;
                        table.job = Some(Job::Decrypt);
                    }
                    None => {}
                }
            }
            Statement::RotateDataKey { .. } => table.job = Some(Job::Rotate),
            _ => {}
        }
    }
}
