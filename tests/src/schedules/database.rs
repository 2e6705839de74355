//! What the model knows of one database.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::statement::{Change, Statement};

/// Stands in the rows of relations that are encrypted from their first row on, and nowhere else.
pub(super) const SECRET: &str = "kanarienvogel-hidden-2f7c";
/// Stands in all other rows.
pub(super) const OPEN: &str = "kanarienvogel-public-91ae";

/// The two schemas.
pub(super) const SCHEMAS: [&str; 2] = ["open", "vault"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Label {
    Encrypted,
    Plaintext,
}

impl Label {
    pub(super) fn text(self) -> &'static str {
        match self {
            Label::Encrypted => "encrypted",
            Label::Plaintext => "plaintext",
        }
    }

    /// As SQL writes it behind `IS`.
    pub(super) fn sql(label: Option<Label>) -> String {
        label.map_or_else(|| "NULL".to_owned(), |label| format!("'{}'", label.text()))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Heap,
    Partitioned,
    /// A materialized view of that table.
    View(u8),
}

/// A job that was asked for and may not be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    Encrypt,
    Decrypt,
    Rotate,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) kind: Kind,
    pub(super) schema: usize,
    pub(super) parent: Option<u8>,
    /// Whether it is in the other tablespace; if it is where its database is, none.
    pub(super) in_other_space: Option<bool>,
    /// By id.
    pub(super) rows: BTreeMap<i64, i64>,
    pub(super) label: Option<Label>,
    /// No page of it may be plaintext. False promises nothing.
    pub(super) sealed: bool,
    /// What stands in its rows.
    pub(super) secret: bool,
    pub(super) logged: bool,
    /// It never was unlogged, so all of its rows came by WAL.
    pub(super) always_logged: bool,
    pub(super) shredded: bool,
    pub(super) job: Option<Job>,
    /// It may be encrypted, in whole or part, though its label says plaintext: the transaction that
    /// gave it new files had locked something that is encrypted, a label that says encrypted was
    /// rolled back, or its decryption was given up.
    pub(super) in_doubt: bool,
}

impl Table {
    pub(super) fn marker(&self) -> &'static str {
        if self.secret { SECRET } else { OPEN }
    }

    /// For ALTER and SECURITY LABEL.
    pub(super) fn keyword(&self) -> &'static str {
        if matches!(self.kind, Kind::View(_)) { "MATERIALIZED VIEW" } else { "TABLE" }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Database {
    pub(super) tables: BTreeMap<u8, Table>,
    /// Of the database itself: encrypted or none.
    pub(super) labelled: bool,
    /// It is in the other tablespace.
    pub(super) in_other_space: bool,
    /// The other tablespace has a label: encrypted.
    pub(super) other_space_encrypts: bool,
    /// Some relation was moved to a tablespace by itself.
    pub(super) spread: bool,
    /// Catalogs are encrypted, so that nobody may be able to connect without keys.
    pub(super) catalogs: bool,
    pub(super) labels_of_schemas: [Option<Label>; 2],
    /// Large objects.
    pub(super) objects: BTreeSet<u32>,
    pub(super) own_master_key: bool,
}

impl Database {
    pub(super) fn partitions(&self, of: u8) -> impl Iterator<Item = u8> {
        self.tables
            .iter()
            .filter(move |(_, table)| table.parent == Some(of))
            .map(|(number, _)| *number)
    }

    pub(super) fn is_viewed(&self, number: u8) -> bool {
        self.tables.values().any(|table| table.kind == Kind::View(number))
    }

    /// What stands in a table, or in the partitions of one.
    pub(super) fn rows(&self, number: u8) -> BTreeMap<i64, i64> {
        let own = self.tables.get(&number).map(|table| table.rows.clone()).unwrap_or_default();
        self.partitions(number).fold(own, |mut all, partition| {
            all.extend(self.rows(partition));
            all
        })
    }

    /// Whether secrets stand in it.
    pub(super) fn is_secret(&self, number: u8) -> bool {
        self.tables.get(&number).is_some_and(|table| table.secret)
            || self.partitions(number).any(|partition| self.is_secret(partition))
    }

    /// Whether the same stands in all of its partitions.
    pub(super) fn has_one_marker(&self, number: u8) -> bool {
        let mut secrets = self.partitions(number).map(|partition| self.is_secret(partition));
        let first = secrets.next();
        secrets.all(|secret| Some(secret) == first)
    }

    /// Whether nobody may read it any more.
    pub(super) fn is_shredded(&self, number: u8) -> bool {
        self.tables.get(&number).is_some_and(|table| table.shredded)
            || self.partitions(number).any(|partition| self.is_shredded(partition))
    }

    /// Whether new storage of a table must be encrypted, by the nearest label or the setting.
    pub(super) fn wants(&self, table: &Table, default: bool) -> bool {
        let of_parent = || table.parent.and_then(|parent| self.tables.get(&parent)?.label);
        let nearest = table.label.or_else(of_parent).or(self.labels_of_schemas[table.schema]);
        let by_place = || default || self.labelled || self.is_in_encrypted_space(table);
        nearest.map_or_else(by_place, |label| label == Label::Encrypted)
    }

    fn is_in_encrypted_space(&self, table: &Table) -> bool {
        self.other_space_encrypts && table.in_other_space.unwrap_or(self.in_other_space)
    }

    /// A table moves to another tablespace, and gets a new file there. Its indexes follow it into
    /// encryption.
    pub(super) fn move_to_space(&mut self, number: u8, other: bool, default: bool, at_once: bool) {
        let place = Some(other).filter(|other| *other != self.in_other_space);
        let Some(table) = self.tables.get_mut(&number) else { return };
        if std::mem::replace(&mut table.in_other_space, place) == place {
            return;
        }
        let Some(table) = self.tables.get(&number) else { return };
        let must = self.wants(table, default) && !table.sealed;
        if let Some(table) = self.tables.get_mut(&number).filter(|_| must) {
            match table.job {
                None if at_once => table.sealed = true,
                _ => table.job = Some(Job::Encrypt),
            }
        }
    }

    /// A table gets new files: it stays as it is, unless its own label says plaintext, or more is
    /// wanted.
    pub(super) fn rewrite(&mut self, number: u8, default: bool) {
        let Some(table) = self.tables.get(&number) else { return };
        let stays = table.sealed && table.label != Some(Label::Plaintext);
        let sealed = stays || self.wants(table, default);
        if let Some(table) = self.tables.get_mut(&number) {
            table.sealed = sealed;
        }
    }

    /// What a crash takes away.
    pub(super) fn crash(&mut self) {
        for table in self.tables.values_mut().filter(|table| !table.logged) {
            table.rows.clear();
        }
    }

    /// A statement was rolled back. Pages that a label has encrypted stay encrypted, and a job that
    /// would have decrypted them is cancelled.
    pub(super) fn undo(&mut self, statement: &Statement) {
        let table = match statement {
            Statement::Label { table, label: Some(Label::Encrypted) } => table,
            Statement::Change { table, change: Change::SpaceDefault | Change::SpaceOther } => table,
            _ => return,
        };
        if let Some(table) = self.tables.get_mut(table) {
            table.in_doubt = true;
        }
    }

    /// What is true of both, where a server does not show the difference.
    pub(super) fn or(mut self, other: &Database) -> Database {
        for (number, table) in &mut self.tables {
            if let Some(other) = other.tables.get(number) {
                table.sealed &= other.sealed;
                table.job = table.job.or(other.job);
                table.in_doubt |= other.in_doubt;
            }
        }
        self
    }

    /// All jobs are done.
    pub(super) fn finish_jobs(&mut self) {
        for table in self.tables.values_mut() {
            if table.job.take() == Some(Job::Encrypt) {
                table.sealed = true;
            }
        }
    }

    /// Jobs are given up, unless they had ended.
    pub(super) fn cancel_jobs(&mut self) {
        for table in self.tables.values_mut() {
            table.in_doubt |= table.job.take().is_some();
        }
    }

    /// Tables that are on disk, and can be read.
    pub(super) fn stored(&mut self) -> impl Iterator<Item = &mut Table> {
        let tables = self.tables.values_mut();
        tables.filter(|table| table.kind != Kind::Partitioned && !table.shredded)
    }

    /// The database is labelled, and everything in it that has no nearer label is encrypted.
    pub(super) fn encrypt(&mut self, default: bool, at_once: bool) {
        (self.labelled, self.catalogs) = (true, true);
        let labelled = self.clone();
        for table in self.stored().filter(|table| labelled.wants(table, default)) {
            if at_once {
                table.sealed = true;
            } else if !table.sealed {
                table.job = Some(Job::Encrypt);
            }
        }
    }

    /// As a dump restores it: everything is new, and is as labels and the setting want it.
    pub(super) fn restored(&self, default: bool, at_once: bool) -> Database {
        let mut copy = Database {
            labelled: false,
            catalogs: false,
            own_master_key: false,
            in_other_space: false,
            ..self.clone()
        };
        for table in copy.tables.values_mut() {
            table.in_other_space = table.in_other_space.filter(|other| *other);
        }
        let labels = copy.clone();
        for table in copy.tables.values_mut() {
            // It is created before it is labelled, and even then has an index with a page: that of
            // its TOAST table.
            let label = table.label.take();
            let before = labels.wants(table, default);
            table.label = label;
            let wanted = labels.wants(table, default);
            table.sealed = wanted && (before || at_once);
            table.job = match label {
                _ if table.kind == Kind::Partitioned => None,
                Some(Label::Plaintext) if before => Some(Job::Decrypt),
                // A job looks at what is encrypted already, too.
                Some(Label::Encrypted) if !at_once => Some(Job::Encrypt),
                _ if wanted && !table.sealed => Some(Job::Encrypt),
                _ => None,
            };
            table.in_doubt = false;
            table.always_logged &= table.logged;
            if let Kind::View(of) = table.kind {
                table.rows = labels.rows(of);
            }
        }
        copy
    }
}
