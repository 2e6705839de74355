//! All paths of values to disk: kinds of relations and indexes, statistics, catalogs, large
//! objects.

use pagevault_tests::leaks::Canary;

use super::workload::Place::{Below, Path, Relation, Toast};
use super::workload::Workload;

/// Text around a value that is to be compressed, or moved out of the row.
const FILLER: &str = "string_agg(md5(i::text), '') FROM generate_series(1, 100) i";

pub(super) fn add(work: &mut Workload) {
    toast(work);
    indexes(work);
    relations(work);
    statistics(work);
    catalogs(work);
}

fn toast(work: &mut Workload) {
    let [outside, packed, inline] = [
        ("toasted", Toast("toasted")),
        ("toasted and compressed", Toast("compressed")),
        ("compressed in its row", Relation("inline")),
    ]
    .map(|(name, place)| work.text(name, place));
    for (table, storage, text, filler) in [
        ("toasted", "EXTERNAL", &outside, FILLER.to_owned()),
        ("compressed", "EXTENDED", &packed, format!("repeat('abc', 900) || {FILLER}")),
        ("inline", "MAIN", &inline, "repeat('abc', 2000)".to_owned()),
    ] {
        work.run(format!("CREATE TABLE {table} (t text)"));
        work.run(format!("ALTER TABLE {table} ALTER t SET STORAGE {storage}"));
        work.run(format!("INSERT INTO {table} SELECT '{text}' || {filler}"));
    }
    // Not every build has lz4.
    let text = work.text("compressed with lz4", Relation("lz4"));
    work.run("CREATE TABLE lz4 (t text)");
    work.run("ALTER TABLE lz4 ALTER t SET STORAGE MAIN");
    work.run(
        "DO $$ BEGIN ALTER TABLE lz4 ALTER t SET COMPRESSION lz4;
         EXCEPTION WHEN feature_not_supported THEN NULL; END $$",
    );
    work.run(format!("INSERT INTO lz4 SELECT '{text}' || repeat('abc', 2000)"));
}

/// Each index on a separate table, so that no other index contains its values.
fn indexes(work: &mut Workload) {
    for (method, kind, index, value) in [
        ("btree", "text", "(t)", "'{}'"),
        ("btree", "text", "(length(t)) INCLUDE (t)", "'{}'"),
        ("btree", "text", "(reverse(t))", "'{}'"),
        ("gin", "text[]", "(t)", "ARRAY['{}']"),
        ("gin", "jsonb", "(t)", "'{\"a\": \"{}\"}'"),
        ("gin", "tsvector", "(t) WITH (fastupdate = off)", "to_tsvector('simple', '{}')"),
        ("spgist", "text", "(t)", "'{}'"),
        ("brin", "text", "(t)", "'{}'"),
        ("gist", "textrange", "(t)", "textrange('{}', '~')"),
    ] {
        let number = work.statements.len();
        let (table, name): (&'static str, &'static str) =
            (String::leak(format!("t{number}")), String::leak(format!("t{number}_{method}")));
        let text = work.text(&format!("index {method} {kind} {index}"), Relation(name));
        work.run(format!("CREATE TABLE {table} (t {kind})"));
        work.run(format!("INSERT INTO {table} VALUES ({})", value.replace("{}", &text)));
        work.run(format!("CREATE INDEX {name} ON {table} USING {method} {index}"));
    }
    // A list of pending entries contains values as they are inserted.
    let text = work.text("pending list", Relation("pending_gin"));
    work.run("CREATE TABLE pending (t text[])");
    work.run("CREATE INDEX pending_gin ON pending USING gin (t)");
    work.run(format!("INSERT INTO pending VALUES (ARRAY['{text}'])"));
}

fn relations(work: &mut Workload) {
    let heap = work.text("updated away", Relation("updated"));
    work.run(format!(
        "CREATE TABLE updated AS SELECT i, '{heap}'::text t FROM generate_series(1, 10) i"
    ));
    work.run("UPDATE updated SET t = 'nothing'");
    let text = work.text("rolled back", Relation("rolled_back"));
    work.run("CREATE TABLE rolled_back (t text)");
    work.run(format!(
        "DO $$ BEGIN INSERT INTO rolled_back VALUES ('{text}'); RAISE 'back'; EXCEPTION WHEN OTHERS THEN NULL; END $$"
    ));
    let text = work.text("materialized view", Relation("seen"));
    work.run(format!("CREATE TABLE to_see AS SELECT '{text}'::text t"));
    work.run("CREATE MATERIALIZED VIEW seen AS SELECT t FROM to_see");
    // Its pages stay in memory: checkpoints do not write them.
    let text = work.text("unlogged", Relation("unlogged_t"));
    work.run(format!("CREATE UNLOGGED TABLE unlogged AS SELECT '{text}'::text t"));
    work.run("CREATE INDEX unlogged_t ON unlogged (t)");
    let number = Canary::number("sequence").1 & i64::MAX;
    work.stored("sequence", &number.to_le_bytes(), Relation("counter"));
    work.run("CREATE SEQUENCE counter");
    work.run(format!("SELECT setval('counter', {number})"));
    let text = work.text("large object", Relation("pg_largeobject"));
    work.run(format!("SELECT lo_from_bytea(0, '{text}')"));
    let text = work.text("partition", Relation("part_1"));
    work.run("CREATE TABLE part (i int, t text) PARTITION BY RANGE (i)");
    work.run("CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (1) TO (10)");
    work.run(format!("INSERT INTO part VALUES (1, '{text}')"));
    let text = work.text("tablespace", Path("/space/"));
    work.run("CREATE TABLE elsewhere (t text) TABLESPACE space");
    work.run(format!("INSERT INTO elsewhere VALUES ('{text}')"));
    let text = work.text("written again", Relation("rewritten"));
    work.run(format!("CREATE TABLE rewritten AS SELECT '{text}'::text t"));
    work.run("ALTER TABLE rewritten ADD x float DEFAULT random()");
    let text = work.text("prepared transaction", Relation("prepared"));
    work.run("CREATE TABLE prepared (t text)");
    work.run(format!("BEGIN; INSERT INTO prepared VALUES ('{text}'); PREPARE TRANSACTION 'p'"));
}

fn statistics(work: &mut Workload) {
    let common = work.text("most common value", Relation("pg_statistic"));
    let bound = work.text("histogram bound", Relation("pg_statistic"));
    work.run(format!(
        "CREATE TABLE analyzed AS
         SELECT '{common}'::text t, CASE i WHEN 50 THEN '{bound}' ELSE 'z' || i END b
         FROM generate_series(1, 100) i"
    ));
    let extended = work.text("extended statistics", Relation("pg_statistic_ext_data"));
    work.run(format!(
        "CREATE TABLE analyzed_too AS SELECT '{extended}'::text t, 1 i FROM generate_series(1, 100)"
    ));
    work.run("CREATE STATISTICS both_columns (mcv) ON t, i FROM analyzed_too");
    work.run("ANALYZE analyzed, analyzed_too");
}

/// Values in definitions: encrypted only with a label on the database.
fn catalogs(work: &mut Workload) {
    let [body, comment, default, label] = [
        ("function body", "pg_proc"),
        ("comment", "pg_description"),
        ("default", "pg_attrdef"),
        ("enum label", "pg_enum"),
    ]
    .map(|(name, catalog)| work.text(name, Relation(catalog)));
    work.run(format!("CREATE FUNCTION tell() RETURNS text LANGUAGE sql AS $$ SELECT '{body}' $$"));
    work.run(format!("COMMENT ON FUNCTION tell IS '{comment}'"));
    work.run(format!("CREATE TABLE with_default (t text DEFAULT '{default}')"));
    work.run(format!("CREATE TYPE mood AS ENUM ('{label}')"));
    let shared = work.text("comment on a database", Below("global"));
    work.run(format!("COMMENT ON DATABASE birds IS '{shared}'"));
    let setting = work.text("setting of a database", Below("global"));
    work.run(format!("ALTER DATABASE birds SET birds.name = '{setting}'"));
}
