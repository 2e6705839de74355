//! What a session does to a database: as SQL, and to the model.

mod change;
mod effect;
mod rules;
mod sql;

use serde::{Deserialize, Serialize};

pub(super) use change::Change;

use super::database::{Database, Kind, Label};

/// How a new relation is asked to be encrypted, besides what holds anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Asked {
    Not,
    ByLabel,
    BySetting,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Statement {
    Create {
        table: u8,
        asked: Asked,
        schema: u8,
        unlogged: bool,
    },
    CreatePartitioned {
        table: u8,
        asked: Asked,
        schema: u8,
    },
    CreatePartition {
        table: u8,
        of: u8,
        asked: Asked,
    },
    CreateAs {
        table: u8,
        of: u8,
        asked: Asked,
        schema: u8,
    },
    CreateView {
        table: u8,
        of: u8,
        asked: Asked,
        schema: u8,
    },
    Refresh {
        table: u8,
        concurrently: bool,
    },
    Attach {
        table: u8,
        to: u8,
    },
    Detach {
        table: u8,
    },
    Drop {
        table: u8,
    },
    Change {
        table: u8,
        change: Change,
    },
    Insert {
        table: u8,
        rows: u16,
    },
    Update {
        table: u8,
        of_three: u8,
    },
    Delete {
        table: u8,
        of_five: u8,
    },
    /// Reads by a sort that does not fit into memory, into a temporary table.
    Sort {
        table: u8,
    },
    LargeObject {
        object: u8,
    },
    Label {
        table: u8,
        label: Option<Label>,
    },
    RotateDataKey {
        table: u8,
    },
    Shred {
        table: u8,
    },
    /// New files for a catalog that VACUUM FULL can rewrite.
    RewriteCatalog {
        catalog: Catalog,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Catalog {
    Attribute,
    Class,
    Largeobject,
    Seclabel,
    Statistic,
}

impl Catalog {
    pub(super) const ALL: [Catalog; 5] = [
        Catalog::Attribute,
        Catalog::Class,
        Catalog::Largeobject,
        Catalog::Seclabel,
        Catalog::Statistic,
    ];

    fn name(self) -> &'static str {
        match self {
            Catalog::Attribute => "pg_attribute",
            Catalog::Class => "pg_class",
            Catalog::Largeobject => "pg_largeobject",
            Catalog::Seclabel => "pg_seclabel",
            Catalog::Statistic => "pg_statistic",
        }
    }
}

/// What a statement depends on besides its database; remembered with the statements of a
/// transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Context {
    /// The first id of new rows.
    pub(super) first: i64,
    /// `pagevault.default_encryption`.
    pub(super) default: bool,
    /// Whether small relations are encrypted at once.
    pub(super) at_once: bool,
    /// See `Setup`.
    pub(super) key_groups: bool,
}

impl Context {
    /// The text of a label on a table.
    pub(super) fn label(&self, table: u8, label: Option<Label>) -> Option<String> {
        let label = label?;
        let group = table % (GROUPS + 1);
        let text = label.text();
        Some(match label {
            Label::Encrypted if self.key_groups && group > 0 => {
                format!("{text} key_group={}", group_name(group))
            }
            _ => text.to_owned(),
        })
    }

    fn label_sql(&self, table: u8, label: Option<Label>) -> String {
        self.label(table, label).map_or_else(|| "NULL".to_owned(), |label| format!("'{label}'"))
    }
}

/// Key groups have the numbers from one on. Every third table is in none.
pub(super) const GROUPS: u8 = 2;

pub(super) fn group_name(group: u8) -> String {
    format!("tenant{group}")
}

impl Statement {
    fn oid(object: u8) -> u32 {
        900_000 + u32::from(object)
    }

    /// The table that it is about.
    pub(super) fn table(&self) -> Option<u8> {
        match self {
            Statement::Create { table, .. }
            | Statement::CreatePartitioned { table, .. }
            | Statement::CreatePartition { table, .. }
            | Statement::CreateAs { table, .. }
            | Statement::CreateView { table, .. }
            | Statement::Refresh { table, .. }
            | Statement::Attach { table, .. }
            | Statement::Detach { table }
            | Statement::Drop { table }
            | Statement::Change { table, .. }
            | Statement::Insert { table, .. }
            | Statement::Update { table, .. }
            | Statement::Delete { table, .. }
            | Statement::Sort { table }
            | Statement::Label { table, .. }
            | Statement::RotateDataKey { table }
            | Statement::Shred { table } => Some(*table),
            Statement::LargeObject { .. } | Statement::RewriteCatalog { .. } => None,
        }
    }

    /// Tables that others may only read and add rows to as long as its transaction is open.
    pub(super) fn shares(&self) -> Option<u8> {
        match self {
            Statement::Insert { table, .. } | Statement::Sort { table } => Some(*table),
            _ => None,
        }
    }

    /// Tables that nobody else may touch as long as its transaction is open. Those that are copied
    /// are among them: the model repeats the statements when they are committed, and then the
    /// same rows must be there.
    pub(super) fn owns(&self, database: &Database) -> Vec<u8> {
        let with_partitions = |table: u8| database.partitions(table).chain([table]);
        let parent = |table: &u8| database.tables.get(table).and_then(|table| table.parent);
        let mut owned: Vec<u8> = match self {
            Statement::Insert { .. } | Statement::Sort { .. } => return Vec::new(),
            Statement::CreateAs { of, .. } | Statement::CreateView { of, .. } => {
                with_partitions(*of).collect()
            }
            Statement::Refresh { table, .. } => match database.tables.get(table).map(|t| t.kind) {
                Some(Kind::View(of)) => with_partitions(of).collect(),
                _ => Vec::new(),
            },
            Statement::CreatePartition { of, .. } => vec![*of],
            Statement::Attach { to, .. } => vec![*to],
            Statement::Detach { table } | Statement::Drop { table } => {
                parent(table).into_iter().collect()
            }
            Statement::Shred { table } | Statement::Change { table, .. } => {
                database.partitions(*table).collect()
            }
            _ => Vec::new(),
        };
        owned.extend(self.table());
        owned
    }

    /// The table of which it makes new files without saying so: a rewritten table and its TOAST
    /// table are created like others, but their indexes, and what TRUNCATE and the like leave,
    /// are not.
    pub(super) fn replaces(&self) -> Option<u8> {
        use Change::{
            Cluster, Logged, Reindex, Rewrite, SpaceDefault, SpaceOther, Truncate, Unlogged,
        };
        match self {
            Statement::Refresh { table, concurrently: false } => Some(*table),
            Statement::Change { table, change } => {
                let replaces = matches!(
                    change,
                    Cluster
                        | Logged
                        | Reindex
                        | Rewrite
                        | SpaceDefault
                        | SpaceOther
                        | Truncate
                        | Unlogged
                );
                replaces.then_some(*table)
            }
            _ => None,
        }
    }

    /// Whether PostgreSQL or pagevault refuses it in a transaction block.
    pub(super) fn is_alone(&self) -> bool {
        use Change::{IndexConcurrently, ReindexConcurrently, Vacuum, VacuumFull};
        match self {
            Statement::Shred { .. } | Statement::RewriteCatalog { .. } => true,
            Statement::Change { change, .. } => {
                matches!(change, IndexConcurrently | ReindexConcurrently | Vacuum | VacuumFull)
            }
            _ => false,
        }
    }

    /// Whether it waits for the end of all transactions.
    pub(super) fn wants_quiet(&self) -> bool {
        use Change::{IndexConcurrently, ReindexConcurrently};
        match self {
            Statement::Shred { .. } | Statement::RewriteCatalog { .. } => true,
            Statement::Change { change, .. } => {
                matches!(change, IndexConcurrently | ReindexConcurrently)
            }
            _ => false,
        }
    }

    /// Whether it copies secrets into a table that is encrypted only when its label is there. A
    /// crash before that leaves a file in plaintext.
    pub(super) fn copies_before_label(&self, database: &Database) -> bool {
        match self {
            Statement::CreateAs { of, asked: Asked::ByLabel, .. }
            | Statement::CreateView { of, asked: Asked::ByLabel, .. } => database.is_secret(*of),
            _ => false,
        }
    }

    pub(super) fn wants_tablespace(&self) -> bool {
        matches!(self, Statement::Change { change: Change::SpaceOther, .. })
    }
}
