//! All ways in which PostgreSQL creates or replaces a file, and the required result.
//!
//! A [`Row`] is one such way. [`driver`] runs each row in all modes, in pairs: in a schema whose
//! relations are encrypted, by label or by `pagevault.default_encryption`, and in a twin with
//! nothing encrypted. [`survey`] then reads the files: all of the one must be sealed, all of the
//! other plaintext, and both must contain the same rows. The rows are in [`creating`],
//! [`indexing`], [`rewriting`] and [`sequences`]. What does not fit into one session has separate
//! tests, as have access methods of other extensions (tests/ecosystem).

mod creating;
pub(crate) mod driver;
mod extensions;
mod indexing;
mod replication;
mod rewriting;
mod sequences;
pub(crate) mod survey;
mod temporary;
mod two_phase;
mod whole_database;

/// One way to create or replace storage.
pub(super) struct Row {
    name: &'static str,
    /// First major version of PostgreSQL that has it.
    since: u32,
    role: Role,
    /// Statements before the route; the label is set on the objects they create.
    setup: &'static [&'static str],
    /// Inserts data into these objects.
    data: &'static [&'static str],
    /// The statements that create files.
    route: &'static [&'static str],
    /// Tables, views and sequences that the route creates; for these the setting decides.
    new: &'static [&'static str],
    /// False for statements that PostgreSQL refuses inside a transaction block.
    in_transaction: bool,
    /// A query that uses an index, with the same result in both schemas.
    reads: &'static str,
}

/// Roles that may run a route.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Owner,
    Superuser,
}

/// A route on the table `t`, which has an index, a sequence, and values in TOAST.
const ON_TABLE: Row = Row {
    name: "",
    since: 15,
    role: Role::Owner,
    setup: &[
        "CREATE TABLE t (id serial PRIMARY KEY, name text, wide text)",
        "ALTER TABLE t ALTER wide SET STORAGE EXTERNAL",
        "CREATE INDEX t_name ON t (name)",
    ],
    data: &[FILL_T],
    route: &[],
    new: &[],
    in_transaction: true,
    reads: "SELECT count(*) FROM t WHERE name > 'k'",
};

/// A route that needs no objects and creates `made`.
const MAKES: Row = Row {
    setup: &[],
    data: &[],
    new: &["made"],
    reads: "SELECT count(*) FROM made WHERE name > 'k'",
    ..ON_TABLE
};

const FILL_T: &str = "INSERT INTO t (name, wide)
    SELECT '{canary}-' || i, CASE WHEN i % 10 = 0 THEN repeat('{canary}', 150) END
    FROM generate_series(1, 30) i";

const FILL_MADE: &str = "INSERT INTO made (name, wide)
    SELECT '{canary}-' || i, CASE WHEN i % 10 = 0 THEN repeat('{canary}', 150) END
    FROM generate_series(1, 30) i";
