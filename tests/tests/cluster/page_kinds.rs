//! Every kind of page that PostgreSQL's own access methods write, sealed and opened.

use anyhow::{Context, Result, ensure};
use pagevault_tests::sealing::{Pages, ensure_pages_survive};
use pagevault_tests::{Cluster, Settings};

const TABLES: &str = "
    CREATE TABLE t (id int PRIMARY KEY, number int, words text[], span int4range, dot point,
        long text);
    ALTER TABLE t ALTER long SET STORAGE EXTERNAL;
    CREATE INDEX t_btree ON t (number) INCLUDE (id);
    CREATE INDEX t_hash ON t USING hash (number);
    CREATE INDEX t_gin ON t USING gin (words);
    CREATE INDEX t_gist ON t USING gist (span);
    CREATE INDEX t_spgist ON t USING spgist (dot);
    CREATE INDEX t_brin ON t USING brin (number) WITH (pages_per_range = 1);
    CREATE UNLOGGED TABLE u (id int PRIMARY KEY, words text[]);
    CREATE INDEX u_gin ON u USING gin (words);
    CREATE SEQUENCE s";

/// Fills all of them, leaves dead rows and deleted pages, and fills them again.
const ROWS: &str = "
    INSERT INTO t SELECT i, i % 300, ARRAY['word' || i % 40, 'rare' || i], int4range(i, i + 9),
            point(i % 71, i % 59), CASE WHEN i % 50 = 0 THEN repeat('long ' || i, 900) END
        FROM generate_series({from}, {from} + 5999) i;
    INSERT INTO u SELECT i, ARRAY['word' || i % 40] FROM generate_series({from}, {from} + 999) i;
    SELECT nextval('s')";

#[test]
fn each_survives_every_cipher() -> Result<()> {
    let settings =
        Settings::default().conf("pagevault.default_encryption = off").conf("autovacuum = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(TABLES)?;
    let fill = |from: &str| cluster.sql(&ROWS.replace("{from}", from));
    let look = |what: &str| -> Result<Pages> {
        cluster.sql("CHECKPOINT")?;
        let mut all = Pages::default();
        for relation in ["t", "u", "s"] {
            let files = match relation {
                "s" => cluster.files(relation)?,
                _ => cluster.family_files(relation)?,
            };
            let found = ensure_pages_survive(&files).with_context(|| what.to_owned())?;
            ensure!(found.full > 0, "{what}: {relation}");
            (all.full, all.short) = (all.full + found.full, all.short + found.short);
        }
        Ok(all)
    };
    look("empty")?;
    fill("1")?;
    look("filled")?;
    cluster.sql("DELETE FROM t WHERE id % 3 > 0 OR id BETWEEN 1000 AND 3000")?;
    cluster.sql("UPDATE t SET number = number + 1, words = words || 'more'::text")?;
    look("changed")?;
    cluster.sql("VACUUM t")?;
    fill("10001")?;
    cluster.sql("VACUUM (FREEZE) t")?;
    look("filled again")?;
    cluster.sql("VACUUM FULL t")?;
    let pages = look("packed")?;
    ensure!(pages.short < pages.full / 10, "{pages:?}");
    cluster.finish()
}
