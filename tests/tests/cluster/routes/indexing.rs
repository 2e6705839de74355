//! Routes that create or rebuild indexes.

use anyhow::Result;

use super::{FILL_T, ON_TABLE, Row, driver};

#[test]
fn new_indexes() -> Result<()> {
    driver::run_rows(&MADE)
}

#[test]
fn rebuilt_indexes() -> Result<()> {
    driver::run_rows(&MADE_ANEW)
}

#[test]
fn indexes_of_partitions() -> Result<()> {
    driver::run_rows(&OF_PARTITIONS)
}

const MADE: [Row; 18] = [
    Row { name: "CREATE INDEX", route: &["CREATE INDEX ON t (name, id)"], ..ON_TABLE },
    Row {
        name: "CREATE INDEX with parallel workers",
        route: &["ALTER TABLE t SET (parallel_workers = 2)", "CREATE INDEX ON t (name, id)"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX on an expression, partial",
        route: &["CREATE INDEX ON t (lower(name)) INCLUDE (id, name) WHERE id % 3 = 0"],
        reads: "SELECT count(*) FROM t WHERE lower(name) > 'k' AND id % 3 = 0",
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX USING hash",
        route: &["DROP INDEX t_name", "CREATE INDEX ON t USING hash (name)", FILL_T],
        reads: "SELECT count(*) FROM t WHERE name = '{canary}-7'",
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX USING gin",
        route: &[
            "DROP INDEX t_name",
            "CREATE INDEX t_gin ON t USING gin ((ARRAY[name, wide]))",
            FILL_T,
        ],
        reads: "SELECT count(*) FROM t WHERE ARRAY[name, wide] @> ARRAY['{canary}-7']",
        ..ON_TABLE
    },
    Row {
        name: "the pending list of a gin index",
        setup: &[
            "CREATE TABLE t (id serial PRIMARY KEY, name text, wide text)",
            "CREATE INDEX t_gin ON t USING gin ((ARRAY[name])) WITH (fastupdate = on)",
        ],
        route: &[FILL_T, "SELECT gin_clean_pending_list('t_gin')", FILL_T],
        reads: "SELECT count(*) FROM t WHERE ARRAY[name] @> ARRAY['{canary}-7']",
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX USING gist",
        route: &[
            "DROP INDEX t_name",
            "CREATE INDEX ON t USING gist (to_tsvector('simple', name))",
            FILL_T,
        ],
        reads: "SELECT count(*) FROM t WHERE to_tsvector('simple', name) @@ plainto_tsquery('simple', '{canary}-7')",
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX USING spgist",
        route: &["DROP INDEX t_name", "CREATE INDEX ON t USING spgist (name)", FILL_T],
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX USING brin",
        route: &[
            "DROP INDEX t_name",
            "CREATE INDEX t_brin ON t USING brin (name)",
            FILL_T,
            "SELECT brin_summarize_new_values('t_brin')",
        ],
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX in a tablespace",
        route: &["CREATE INDEX ON t (name, id) TABLESPACE space"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX CONCURRENTLY",
        route: &["DROP INDEX t_name", "CREATE INDEX CONCURRENTLY ON t (name, id)"],
        in_transaction: false,
        ..ON_TABLE
    },
    Row {
        name: "ADD PRIMARY KEY",
        route: &["ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (name)"],
        ..ON_TABLE
    },
    Row {
        name: "ADD PRIMARY KEY USING INDEX",
        route: &[
            "ALTER TABLE t DROP CONSTRAINT t_pkey",
            "CREATE UNIQUE INDEX t_key ON t (name)",
            "ALTER TABLE t ADD PRIMARY KEY USING INDEX t_key",
        ],
        ..ON_TABLE
    },
    Row { name: "ADD UNIQUE", route: &["ALTER TABLE t ADD UNIQUE (name, id)"], ..ON_TABLE },
    Row {
        name: "ADD COLUMN UNIQUE",
        route: &["ALTER TABLE t ADD COLUMN extra text UNIQUE", "UPDATE t SET extra = name"],
        reads: "SELECT count(*) FROM t WHERE extra > 'k'",
        ..ON_TABLE
    },
    Row {
        name: "ADD EXCLUDE",
        route: &["ALTER TABLE t ADD EXCLUDE USING gist (int4range(id, id + 1) WITH &&)"],
        reads: "SELECT count(name) FROM t WHERE int4range(id, id + 1) && int4range(3, 9)",
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX on an unlogged table",
        setup: &["CREATE UNLOGGED TABLE t (id serial PRIMARY KEY, name text, wide text)"],
        route: &[
            "CREATE INDEX ON t (name)",
            "CREATE INDEX ON t USING gin ((ARRAY[name]))",
            "CREATE INDEX ON t USING gist (to_tsvector('simple', name))",
            "CREATE INDEX ON t USING brin (name)",
        ],
        ..ON_TABLE
    },
    Row {
        name: "CREATE INDEX on a materialized view",
        setup: &[
            "CREATE TABLE t (id int, name text, wide text)",
            "CREATE MATERIALIZED VIEW seen AS SELECT * FROM t",
        ],
        data: &[FILL_T, "REFRESH MATERIALIZED VIEW seen"],
        route: &["CREATE INDEX ON seen (name)"],
        reads: "SELECT count(*) FROM seen WHERE name > 'k'",
        ..ON_TABLE
    },
];

const MADE_ANEW: [Row; 9] = [
    Row { name: "REINDEX INDEX", route: &["REINDEX INDEX t_name"], ..ON_TABLE },
    Row { name: "REINDEX TABLE", route: &["REINDEX TABLE t"], ..ON_TABLE },
    Row {
        name: "REINDEX TABLE in a tablespace",
        route: &["REINDEX (TABLESPACE space) TABLE t"],
        ..ON_TABLE
    },
    Row {
        name: "REINDEX INDEX CONCURRENTLY",
        route: &["REINDEX INDEX CONCURRENTLY t_name"],
        in_transaction: false,
        ..ON_TABLE
    },
    Row {
        name: "REINDEX TABLE CONCURRENTLY",
        route: &["REINDEX TABLE CONCURRENTLY t", "REINDEX (TABLESPACE space) TABLE CONCURRENTLY t"],
        in_transaction: false,
        ..ON_TABLE
    },
    Row {
        name: "REINDEX SCHEMA",
        route: &["REINDEX SCHEMA {schema}"],
        in_transaction: false,
        ..ON_TABLE
    },
    Row {
        name: "REINDEX SCHEMA CONCURRENTLY",
        route: &["REINDEX SCHEMA CONCURRENTLY {schema}"],
        in_transaction: false,
        ..ON_TABLE
    },
    Row {
        name: "ALTER INDEX SET TABLESPACE",
        route: &[
            "ALTER INDEX t_name SET TABLESPACE space",
            "ALTER INDEX t_pkey SET TABLESPACE space",
        ],
        ..ON_TABLE
    },
    Row {
        name: "ALTER TABLE ALTER TYPE of an indexed column",
        route: &[
            "ALTER TABLE t ALTER name TYPE varchar(100)",
            "ALTER TABLE t ALTER name TYPE text COLLATE \"POSIX\"",
        ],
        ..ON_TABLE
    },
];

/// Two partitions, one of them not yet attached.
const ON_PARTITIONS: Row = Row {
    setup: &[
        "CREATE TABLE parts (id int, name text, wide text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE t (id serial, name text, wide text)",
    ],
    data: &[
        "INSERT INTO parts SELECT i, '{canary}-' || i, repeat('{canary}', 150)
         FROM generate_series(1, 20) i",
        "INSERT INTO t SELECT 100 + i, '{canary}-' || i, repeat('{canary}', 150)
         FROM generate_series(1, 20) i",
    ],
    reads: "SELECT count(*) FROM parts WHERE name > 'k'",
    ..ON_TABLE
};

const ATTACH: &str = "ALTER TABLE parts ATTACH PARTITION t FOR VALUES FROM (100) TO (200)";

const OF_PARTITIONS: [Row; 9] = [
    Row {
        name: "CREATE INDEX on a partitioned table",
        route: &["CREATE INDEX ON parts (name)", "CREATE INDEX ON parts USING hash (name)"],
        ..ON_PARTITIONS
    },
    Row {
        name: "ADD PRIMARY KEY to a partitioned table",
        route: &["ALTER TABLE parts ADD PRIMARY KEY (id, name)"],
        reads: "SELECT count(*) FROM parts WHERE id > 0",
        ..ON_PARTITIONS
    },
    Row {
        name: "ATTACH PARTITION, which makes its indexes",
        route: &["CREATE INDEX ON parts (name)", "ALTER TABLE parts ADD UNIQUE (id, name)", ATTACH],
        ..ON_PARTITIONS
    },
    Row {
        name: "ATTACH PARTITION with its index there",
        route: &[
            "CREATE INDEX parts_name ON ONLY parts (name)",
            "CREATE INDEX part_name ON part (name)",
            "ALTER INDEX parts_name ATTACH PARTITION part_name",
            "CREATE INDEX t_name ON t (name)",
            ATTACH,
        ],
        ..ON_PARTITIONS
    },
    Row {
        name: "DETACH PARTITION",
        route: &[
            "CREATE INDEX ON parts (name)",
            "ALTER TABLE parts DETACH PARTITION part",
            "CREATE INDEX ON part (name, id)",
        ],
        reads: "SELECT count(*) FROM part WHERE name > 'k'",
        ..ON_PARTITIONS
    },
    Row {
        name: "DETACH PARTITION CONCURRENTLY",
        route: &[
            "CREATE INDEX ON parts (name)",
            "ALTER TABLE parts DETACH PARTITION part CONCURRENTLY",
            "REINDEX TABLE part",
        ],
        in_transaction: false,
        reads: "SELECT count(*) FROM part WHERE name > 'k'",
        ..ON_PARTITIONS
    },
    Row {
        name: "TRUNCATE of a partitioned table",
        route: &[
            "CREATE INDEX ON parts (name)",
            "TRUNCATE parts",
            "INSERT INTO parts SELECT i, '{canary}', repeat('{canary}', 150) FROM generate_series(1, 9) i",
        ],
        ..ON_PARTITIONS
    },
    Row {
        name: "ALTER TABLE of a partitioned table, which rewrites partitions",
        route: &[
            "CREATE INDEX ON parts (name)",
            "ALTER TABLE parts ALTER name TYPE varchar USING name || '+'",
        ],
        ..ON_PARTITIONS
    },
    Row {
        name: "REINDEX of a partitioned table",
        route: &["CREATE INDEX ON parts (name)", "REINDEX TABLE parts"],
        in_transaction: false,
        ..ON_PARTITIONS
    },
];
