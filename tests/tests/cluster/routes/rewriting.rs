//! Routes that replace the files of tables and materialized views.

use anyhow::Result;

use super::{FILL_T, ON_TABLE, Row, driver};

#[test]
fn rewritten_tables() -> Result<()> {
    driver::run_rows(&REWRITTEN)
}

#[test]
fn truncated_tables() -> Result<()> {
    driver::run_rows(&EMPTIED)
}

#[test]
fn refreshed_materialized_views() -> Result<()> {
    driver::run_rows(&VIEWS)
}

const REWRITTEN: [Row; 18] = [
    Row { name: "VACUUM FULL", route: &["VACUUM FULL t"], in_transaction: false, ..ON_TABLE },
    Row { name: "CLUSTER", route: &["CLUSTER t USING t_name", "CLUSTER t"], ..ON_TABLE },
    Row {
        name: "REPACK",
        route: &["REPACK t", "REPACK (ANALYZE) t USING INDEX t_name", "REPACK t USING INDEX"],
        in_transaction: false,
        since: 19,
        ..ON_TABLE
    },
    Row {
        name: "REPACK (CONCURRENTLY)",
        route: &[
            "REPACK (CONCURRENTLY) t",
            "UPDATE t SET wide = wide || '{canary}'",
            "REPACK (CONCURRENTLY) t USING INDEX t_name",
        ],
        in_transaction: false,
        since: 19,
        ..ON_TABLE
    },
    Row {
        name: "REPACK (CONCURRENTLY) of a table that was never written",
        data: &[],
        route: &["REPACK (CONCURRENTLY) t", FILL_T],
        in_transaction: false,
        since: 19,
        ..ON_TABLE
    },
    Row {
        name: "ALTER TABLE ALTER TYPE",
        route: &[
            "ALTER TABLE t ALTER id TYPE bigint",
            "ALTER TABLE t ALTER name TYPE varchar USING name || '+'",
        ],
        ..ON_TABLE
    },
    Row {
        name: "ADD COLUMN with a volatile default",
        route: &["ALTER TABLE t ADD COLUMN later boolean DEFAULT clock_timestamp() > '2000-01-01'"],
        ..ON_TABLE
    },
    Row {
        name: "ADD COLUMN GENERATED, stored",
        route: &["ALTER TABLE t ADD COLUMN twice text GENERATED ALWAYS AS (name || name) STORED"],
        ..ON_TABLE
    },
    Row {
        name: "SET ACCESS METHOD",
        route: &[
            "ALTER TABLE t SET ACCESS METHOD heap_too",
            "ALTER TABLE t SET ACCESS METHOD heap",
        ],
        ..ON_TABLE
    },
    Row { name: "SET UNLOGGED", route: &["ALTER TABLE t SET UNLOGGED"], ..ON_TABLE },
    Row {
        name: "SET UNLOGGED, SET LOGGED",
        route: &["ALTER TABLE t SET UNLOGGED", "ALTER TABLE t SET LOGGED"],
        ..ON_TABLE
    },
    Row {
        name: "SET LOGGED",
        setup: &[
            "CREATE UNLOGGED TABLE t (id serial PRIMARY KEY, name text, wide text)",
            "CREATE INDEX t_name ON t USING hash (name)",
        ],
        route: &["ALTER TABLE t SET LOGGED"],
        reads: "SELECT count(*) FROM t WHERE name = '{canary}-7'",
        ..ON_TABLE
    },
    Row {
        name: "ALTER TABLE SET TABLESPACE",
        route: &["ALTER TABLE t SET TABLESPACE space"],
        ..ON_TABLE
    },
    Row {
        name: "ALTER TABLE SET TABLESPACE and back",
        route: &[
            "ALTER TABLE t SET TABLESPACE space",
            "ALTER TABLE t SET TABLESPACE pg_default",
            "ALTER INDEX t_name SET TABLESPACE space",
        ],
        ..ON_TABLE
    },
    Row {
        name: "SET TABLESPACE of an unlogged table",
        setup: &[
            "CREATE UNLOGGED TABLE t (id serial PRIMARY KEY, name text, wide text)",
            "CREATE INDEX t_name ON t (name)",
        ],
        route: &["ALTER TABLE t SET TABLESPACE space", "ALTER INDEX t_name SET TABLESPACE space"],
        ..ON_TABLE
    },
    Row {
        name: "ADD COLUMN that makes the TOAST table",
        setup: &[
            "CREATE TABLE t (id serial PRIMARY KEY, name varchar(20))",
            "CREATE INDEX ON t (name)",
        ],
        data: &["INSERT INTO t (name) SELECT '{canary}' FROM generate_series(1, 30) i"],
        route: &[
            "ALTER TABLE t ADD COLUMN wide text STORAGE EXTERNAL",
            "UPDATE t SET wide = repeat('{canary}', 150) WHERE id % 10 = 0",
        ],
        since: 16,
        ..ON_TABLE
    },
    Row {
        name: "ALTER TYPE that makes the TOAST table",
        setup: &[
            "CREATE TABLE t (id serial PRIMARY KEY, name text, wide varchar(5))",
            "CREATE INDEX ON t (name)",
        ],
        data: &["INSERT INTO t (name) SELECT '{canary}' FROM generate_series(1, 30) i"],
        route: &["ALTER TABLE t ALTER wide TYPE text USING repeat('{canary}', 150)"],
        ..ON_TABLE
    },
    Row {
        name: "several changes, then a DROP COLUMN and VACUUM FULL",
        route: &[
            "ALTER TABLE t ALTER id TYPE bigint, ADD COLUMN later serial, ADD UNIQUE (later, name)",
            "ALTER TABLE t DROP COLUMN wide",
            "VACUUM FULL t",
        ],
        in_transaction: false,
        ..ON_TABLE
    },
];

const EMPTIED: [Row; 8] = [
    Row { name: "TRUNCATE", route: &["TRUNCATE t", FILL_T], ..ON_TABLE },
    Row {
        name: "TRUNCATE twice",
        route: &["TRUNCATE t", FILL_T, "TRUNCATE t", FILL_T],
        ..ON_TABLE
    },
    Row {
        name: "TRUNCATE RESTART IDENTITY",
        route: &["TRUNCATE t RESTART IDENTITY", FILL_T],
        ..ON_TABLE
    },
    Row {
        name: "TRUNCATE CASCADE",
        setup: &[
            "CREATE TABLE t (id serial PRIMARY KEY, name text, wide text)",
            "CREATE TABLE child (id serial, t int REFERENCES t, name text, wide text)",
            "CREATE INDEX ON child (name)",
        ],
        route: &[
            "TRUNCATE t RESTART IDENTITY CASCADE",
            FILL_T,
            "INSERT INTO child (t, name, wide) SELECT id, name, wide FROM t",
        ],
        reads: "SELECT count(*) FROM child WHERE name > 'k'",
        ..ON_TABLE
    },
    Row {
        name: "TRUNCATE of several tables",
        setup: &[
            "CREATE TABLE t (id serial PRIMARY KEY, name text, wide text)",
            "CREATE TABLE other (id serial, name text UNIQUE, wide text)",
        ],
        route: &["TRUNCATE t, other", FILL_T, "INSERT INTO other SELECT * FROM t"],
        reads: "SELECT count(*) FROM other WHERE name > 'k'",
        ..ON_TABLE
    },
    Row {
        name: "TRUNCATE of an unlogged table",
        setup: &[
            "CREATE UNLOGGED TABLE t (id serial PRIMARY KEY, name text, wide text)",
            "CREATE INDEX ON t USING spgist (name)",
        ],
        route: &["TRUNCATE t", FILL_T],
        ..ON_TABLE
    },
    Row {
        name: "DELETE and VACUUM, which cuts off the end",
        route: &["DELETE FROM t", "VACUUM t", FILL_T],
        in_transaction: false,
        ..ON_TABLE
    },
    Row {
        name: "a cursor WITH HOLD over a TRUNCATE",
        route: &[
            "BEGIN",
            "DECLARE held CURSOR WITH HOLD FOR SELECT * FROM t",
            "COMMIT",
            "TRUNCATE t",
            FILL_T,
            "FETCH ALL FROM held",
            "CLOSE held",
        ],
        in_transaction: false,
        ..ON_TABLE
    },
];

/// A materialized view over a table; both are encrypted.
const ON_VIEW: Row = Row {
    setup: &[
        "CREATE TABLE t (id serial, name text, wide text)",
        "CREATE MATERIALIZED VIEW seen AS SELECT * FROM t",
        "CREATE UNIQUE INDEX seen_name ON seen (name)",
    ],
    data: &[FILL_T, "REFRESH MATERIALIZED VIEW seen"],
    reads: "SELECT count(*) FROM seen WHERE name > 'k'",
    ..ON_TABLE
};

const VIEWS: [Row; 7] = [
    Row { name: "REFRESH", route: &["REFRESH MATERIALIZED VIEW seen"], ..ON_VIEW },
    Row {
        name: "REFRESH CONCURRENTLY",
        route: &[
            "UPDATE t SET wide = '{canary}' WHERE id < 10",
            "REFRESH MATERIALIZED VIEW CONCURRENTLY seen",
        ],
        ..ON_VIEW
    },
    Row {
        name: "REFRESH WITH NO DATA and with data",
        route: &["REFRESH MATERIALIZED VIEW seen WITH NO DATA", "REFRESH MATERIALIZED VIEW seen"],
        ..ON_VIEW
    },
    Row { name: "CLUSTER of a view", route: &["CLUSTER seen USING seen_name"], ..ON_VIEW },
    Row {
        name: "VACUUM FULL of a view",
        route: &["VACUUM FULL seen", "REFRESH MATERIALIZED VIEW seen"],
        in_transaction: false,
        ..ON_VIEW
    },
    Row {
        name: "SET TABLESPACE of a view",
        route: &[
            "ALTER MATERIALIZED VIEW seen SET TABLESPACE space",
            "REFRESH MATERIALIZED VIEW seen",
        ],
        ..ON_VIEW
    },
    Row {
        name: "SET ACCESS METHOD of a view",
        route: &["ALTER MATERIALIZED VIEW seen SET ACCESS METHOD heap_too"],
        ..ON_VIEW
    },
];
