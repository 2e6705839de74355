//! Routes that create tables and materialized views.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, DataFile, Settings};

use crate::assert_sealed;

use super::{FILL_MADE, MAKES, ON_TABLE, Role, Row, driver, survey};

#[test]
fn new_tables_and_views() -> Result<()> {
    driver::run_rows(&ROWS)
}

/// With wal_level = minimal a transaction does not log the pages of relations it creates, but syncs
/// them at commit.
#[test]
fn new_tables_and_views_without_wal() -> Result<()> {
    let settings = Settings::default()
        .conf("wal_level = minimal")
        .conf("max_wal_senders = 0")
        .conf("wal_skip_threshold = 0");
    driver::run_rows_with(&settings, &ROWS)
}

/// COPY FREEZE writes frozen rows and sets the visibility map at once. There are more rows than
/// shared buffers hold; the server is killed before and after the commit.
#[test]
fn copy_freeze_and_a_crash() -> Result<()> {
    const ROWS: &str = "PROGRAM 'seq -f \"%.0f,kanarienvogel\" 1 50000' WITH (FORMAT csv, FREEZE)";
    let minimal = Settings::default()
        .conf("wal_level = minimal")
        .conf("max_wal_senders = 0")
        .conf("wal_skip_threshold = 0");
    for settings in [Settings::default(), minimal] {
        let (cluster, _keys) = Cluster::with_keys(&settings.conf("shared_buffers = 1MB"))?;
        cluster
            .sql("CREATE SCHEMA app; SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted'")?;
        for making in ["CREATE TABLE app.t (id int PRIMARY KEY, name text)", "TRUNCATE app.t"] {
            for end in ["", "COMMIT"] {
                let before = cluster.text("SELECT to_regclass('app.t') IS NOT NULL")?;
                let mut client = cluster.client()?;
                run_sql(&mut client, &format!("BEGIN; {making}; COPY app.t FROM {ROWS}; {end}"))?;
                cluster.crash()?;
                if end.is_empty() && before == "f" {
                    ensure!(
                        cluster.text("SELECT to_regclass('app.t') IS NULL")? == "t",
                        "the table"
                    );
                    continue;
                }
                let found = "SELECT count(*) || ' ' || count(name) || ' ' || max(id) FROM app.t";
                ensure!(cluster.text(found)? == "50000 50000 50000", "{}", cluster.text(found)?);
                cluster.sql("CHECKPOINT")?;
                let files = cluster.family_files("app.t")?;
                let map = |file: &DataFile| file.path.to_string_lossy().ends_with("_vm");
                ensure!(files.iter().any(map), "no visibility map");
                assert_sealed(&files)?;
                drop(client);
            }
        }
        let leaks = survey::files_with(&cluster, "kanarienvogel")?;
        ensure!(leaks.is_empty(), "in plaintext: {leaks:?}");
        cluster.finish()?;
    }
    Ok(())
}

/// After a crash they are reset from their init forks.
#[test]
fn unlogged_tables_are_sealed_again_after_a_crash() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE UNLOGGED TABLE t (id serial PRIMARY KEY, name text, wide text);
         CREATE INDEX ON t USING hash (name);
         CREATE INDEX ON t USING gin ((ARRAY[name]));
         CREATE INDEX ON t USING gist (to_tsvector('simple', name));
         CREATE INDEX ON t USING spgist (name);
         CREATE INDEX ON t USING brin (name);
         ALTER TABLE t ALTER wide SET STORAGE EXTERNAL",
    )?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    for _ in 0..2 {
        cluster.sql(
            "INSERT INTO t (name, wide)
             SELECT 'name ' || i, repeat('wide', 1000) FROM generate_series(1, 100) i",
        )?;
        cluster.crash()?;
        ensure!(cluster.text("SELECT count(*) FROM t")? == "0", "rows are left");
    }
    cluster.sql("INSERT INTO t (name, wide) VALUES ('name', repeat('wide', 1000))")?;
    cluster.restart()?;
    assert_sealed(&cluster.family_files("t")?)?;
    assert_sealed(&cluster.files("t_id_seq")?)?;
    ensure!(cluster.text("SELECT length(wide) FROM t")? == "4000", "the row");
    cluster.finish()
}

const ROWS: [Row; 20] = [
    Row {
        name: "CREATE TABLE",
        route: &[
            "CREATE TABLE made (id serial PRIMARY KEY, name text UNIQUE, wide text)",
            FILL_MADE,
        ],
        ..MAKES
    },
    Row {
        name: "CREATE UNLOGGED TABLE",
        route: &[
            "CREATE UNLOGGED TABLE made (id serial PRIMARY KEY, name text UNIQUE, wide text)",
            "CREATE INDEX made_hash ON made USING hash (name)",
            "CREATE INDEX made_spgist ON made USING spgist (name)",
            FILL_MADE,
        ],
        ..MAKES
    },
    Row {
        name: "CREATE TABLE with identity",
        route: &[
            "CREATE TABLE made (id int GENERATED ALWAYS AS IDENTITY, name text UNIQUE, wide text)",
            FILL_MADE,
        ],
        ..MAKES
    },
    Row {
        name: "CREATE TABLE USING another name of heap",
        route: &["CREATE TABLE made (name text, wide text) USING heap_too", FILL_MADE],
        ..MAKES
    },
    Row {
        name: "CREATE TABLE in a tablespace",
        route: &[
            "CREATE TABLE made (id serial, name text, wide text) TABLESPACE space",
            "CREATE INDEX made_name ON made (name) TABLESPACE space",
            FILL_MADE,
        ],
        ..MAKES
    },
    Row {
        name: "CREATE TABLE OF",
        setup: &["CREATE TYPE form AS (id int, name text, wide text)"],
        route: &["CREATE TABLE made OF form (UNIQUE (name))", FILL_MADE],
        ..MAKES
    },
    Row {
        name: "CREATE TABLE AS",
        route: &["CREATE TABLE made AS SELECT * FROM t"],
        new: &["made"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE TABLE AS WITH NO DATA",
        route: &["CREATE TABLE made AS SELECT name, wide FROM t WITH NO DATA", FILL_MADE],
        new: &["made"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE TABLE AS EXECUTE",
        route: &[
            "PREPARE plan AS SELECT * FROM t",
            "CREATE TABLE made AS EXECUTE plan",
            "DEALLOCATE plan",
        ],
        new: &["made"],
        ..ON_TABLE
    },
    Row { name: "SELECT INTO", route: &["SELECT * INTO made FROM t"], new: &["made"], ..ON_TABLE },
    Row {
        name: "CREATE TABLE LIKE INCLUDING ALL",
        setup: &[
            "CREATE TABLE model (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                 name text, wide text, EXCLUDE USING btree (name WITH =))",
            "ALTER TABLE model ALTER wide SET STORAGE EXTERNAL",
        ],
        data: &["INSERT INTO model (name) VALUES ('{canary}')"],
        route: &["CREATE TABLE made (LIKE model INCLUDING ALL)", FILL_MADE],
        ..MAKES
    },
    Row {
        name: "CREATE TABLE INHERITS",
        route: &["CREATE TABLE made (UNIQUE (name)) INHERITS (t)", FILL_MADE],
        new: &["made"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE TABLE PARTITION OF",
        setup: &[
            "CREATE TABLE parts (id serial, name text, wide text, UNIQUE (name))
                 PARTITION BY RANGE (name)",
            "CREATE INDEX ON parts USING hash (name)",
        ],
        route: &["CREATE TABLE made PARTITION OF parts DEFAULT", FILL_MADE],
        // The sequence belongs to the partitioned table, which has no label.
        new: &["made", "parts"],
        ..MAKES
    },
    Row {
        name: "CREATE SCHEMA with its tables",
        route: &[
            "CREATE SCHEMA {schema}_inner
                 CREATE TABLE made (id serial PRIMARY KEY, name text, wide text)
                 CREATE INDEX made_name ON made (name)",
            "INSERT INTO {schema}_inner.made (name, wide)
                 SELECT '{canary}-' || i, CASE WHEN i % 10 = 0 THEN repeat('{canary}', 150) END
                 FROM generate_series(1, 30) i",
        ],
        reads: "SELECT count(*) FROM {schema}_inner.made WHERE name > 'k'",
        ..MAKES
    },
    Row {
        name: "CREATE TABLE in a function that catches errors",
        setup: &["CREATE FUNCTION make() RETURNS void LANGUAGE plpgsql AS $$
             BEGIN
                 BEGIN
                     CREATE TABLE made (id int PRIMARY KEY);
                     PERFORM 1 / 0;
                 EXCEPTION WHEN division_by_zero THEN
                     CREATE TABLE made (id serial PRIMARY KEY, name text UNIQUE, wide text);
                 END;
             END $$"],
        route: &["SELECT make()", FILL_MADE],
        ..MAKES
    },
    Row {
        name: "COPY FREEZE",
        role: Role::Superuser,
        route: &["CREATE TABLE made (name text); CREATE INDEX ON made (name);
                  COPY made FROM PROGRAM 'yes {canary} | head -30' WITH (FREEZE)"],
        ..MAKES
    },
    Row {
        name: "DROP TABLE and CREATE TABLE of the same name",
        setup: &["CREATE TABLE made (id serial PRIMARY KEY, name text, wide text)"],
        route: &[
            "DROP TABLE made",
            "CREATE TABLE made (id serial PRIMARY KEY, name text UNIQUE, wide text)",
            FILL_MADE,
        ],
        ..MAKES
    },
    Row {
        name: "CREATE MATERIALIZED VIEW",
        route: &[
            "CREATE MATERIALIZED VIEW made AS SELECT * FROM t",
            "CREATE UNIQUE INDEX made_name ON made (name)",
        ],
        new: &["made"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE MATERIALIZED VIEW WITH NO DATA",
        route: &[
            "CREATE MATERIALIZED VIEW made AS SELECT * FROM t WITH NO DATA",
            "CREATE UNIQUE INDEX made_name ON made (name)",
            "REFRESH MATERIALIZED VIEW made",
        ],
        new: &["made"],
        ..ON_TABLE
    },
    Row {
        name: "CREATE MATERIALIZED VIEW in a tablespace",
        route: &["CREATE MATERIALIZED VIEW made TABLESPACE space AS SELECT * FROM t"],
        new: &["made"],
        ..ON_TABLE
    },
];
