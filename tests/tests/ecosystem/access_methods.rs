//! Index access methods and types of other extensions.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::{assert_plain, assert_sealed};
use pagevault_tests::sealing::ensure_pages_survive;
use pagevault_tests::{Cluster, Settings};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "bloom", needs: &["bloom"], run: bloom },
    Test { name: "rum", needs: &["rum"], run: rum },
    Test { name: "pgvector", needs: &["vector"], run: vector },
    Test { name: "postgis", needs: &["postgis"], run: postgis },
];

/// An index on the column `v` of a table of `id` and `v`.
struct Index {
    extension: &'static str,
    column: &'static str,
    /// SQL expression for the value in row `i`.
    value: &'static str,
    /// The rest of CREATE INDEX ... ON t.
    using: &'static [&'static str],
    query: &'static str,
    answer: &'static str,
}

fn walk(index: &Index) -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(&format!("CREATE EXTENSION {}", index.extension))?;
    let (column, value) = (index.column, index.value);
    for (table, encrypt) in [("sealed", "SELECT pagevault.encrypt('sealed')"), ("open", "")] {
        cluster.sql(&format!(
            "CREATE TABLE {table} (id int, v {column}); {encrypt};
             INSERT INTO {table} SELECT i, {value} FROM generate_series(1, 500) i"
        ))?;
    }
    for using in index.using {
        for step in [
            &format!("CREATE INDEX {{t}}_v ON {{t}} {using}"),
            &format!("INSERT INTO {{t}} SELECT i, {value} FROM generate_series(501, 600) i"),
            "DELETE FROM {t} WHERE id > 500",
            "VACUUM {t}",
            "REINDEX TABLE {t}",
            "VACUUM FULL {t}",
            "REINDEX INDEX CONCURRENTLY {t}_v",
            "TRUNCATE {t}",
            &format!("INSERT INTO {{t}} SELECT i, {value} FROM generate_series(1, 500) i"),
            "ALTER TABLE {t} SET UNLOGGED",
            "ALTER TABLE {t} SET LOGGED",
        ] {
            for table in ["sealed", "open"] {
                cluster.sql(&step.replace("{t}", table))?;
            }
            let what = || format!("{using}: {step}");
            cluster.sql("CHECKPOINT")?;
            if !step.starts_with("TRUNCATE") {
                assert_sealed(&cluster.family_files("sealed")?).with_context(what)?;
                let open = cluster.family_files("open")?;
                assert_plain(&open).with_context(what)?;
                ensure!(ensure_pages_survive(&open).with_context(what)?.full > 0);
            }
        }
        cluster.crash()?;
        for table in ["sealed", "open"] {
            let query = index.query.replace("{t}", table);
            let by_index = format!("SET enable_seqscan = off; {query}");
            let plan = cluster
                .text(&format!("SET enable_seqscan = off; EXPLAIN (FORMAT JSON) {query}"))?;
            ensure!(plan.contains(&format!("{table}_v")), "{using}: the index is not used: {plan}");
            let found = cluster.text(&by_index)?;
            ensure!(found == index.answer, "{using}, {table}: {found}");
        }
        cluster.sql("DROP INDEX sealed_v; DROP INDEX open_v")?;
    }
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    cluster.finish()
}

fn bloom() -> Result<()> {
    walk(&Index {
        extension: "bloom",
        column: "int",
        value: "i % 100",
        using: &["USING bloom (v)", "USING bloom (id, v) WITH (length = 80, col1 = 2)"],
        query: "SELECT count(*) FROM {t} WHERE v = 7",
        answer: "5",
    })
}

fn rum() -> Result<()> {
    walk(&Index {
        extension: "rum",
        column: "tsvector",
        value: "to_tsvector('simple', 'word' || i % 50)",
        using: &[
            "USING rum (v rum_tsvector_ops)",
            "USING rum (v rum_tsvector_addon_ops, id) WITH (attach = 'id', to = 'v')",
        ],
        query: "SELECT count(*) FROM {t} WHERE v @@ 'word7'::tsquery",
        answer: "10",
    })
}

fn vector() -> Result<()> {
    walk(&Index {
        extension: "vector",
        column: "vector(3)",
        value: "ARRAY[i, i % 7, 1]::vector",
        using: &[
            "USING hnsw (v vector_l2_ops)",
            "USING ivfflat (v vector_l2_ops) WITH (lists = 2)",
        ],
        query: "SELECT id FROM {t} ORDER BY v <-> '[40, 5, 1]' LIMIT 1",
        answer: "40",
    })
}

fn postgis() -> Result<()> {
    walk(&Index {
        extension: "postgis",
        column: "geometry(Point, 4326)",
        value: "ST_SetSRID(ST_MakePoint(i % 90, i % 45), 4326)",
        using: &["USING gist (v)", "USING spgist (v)", "USING brin (v)"],
        query: "SELECT count(*) FROM {t} WHERE v && ST_MakeEnvelope(6.5, 6.5, 7.5, 7.5, 4326)",
        answer: "6",
    })
}
