//! Extensions that read pages in shared buffers.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, KeyFile, Settings};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "amcheck", needs: &["amcheck"], run: amcheck },
    Test { name: "pgstattuple", needs: &["pgstattuple"], run: pgstattuple },
    Test { name: "pageinspect", needs: &["pageinspect"], run: pageinspect },
    Test { name: "pg_visibility", needs: &["pg_visibility"], run: visibility },
    Test { name: "pg_freespacemap", needs: &["pg_freespacemap"], run: freespacemap },
    Test { name: "pg_buffercache", needs: &["pg_buffercache", "pg_prewarm"], run: buffercache },
    Test {
        name: "pg_prewarm_at_start",
        needs: &["pg_prewarm", "pg_buffercache"],
        run: autoprewarm,
    },
    Test { name: "pgrowlocks", needs: &["pgrowlocks"], run: rowlocks },
];

/// A cluster with an encrypted table and its plaintext twin, both on disk, and these extensions.
pub(crate) fn twins(settings: &Settings, extensions: &[&str]) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(settings)?;
    for extension in extensions {
        cluster.sql(&format!("CREATE EXTENSION {extension}"))?;
    }
    for (table, encrypt) in [("sealed", "SELECT pagevault.encrypt('sealed')"), ("open", "")] {
        cluster.sql(&format!(
            "CREATE TABLE {table} (id int PRIMARY KEY, name text, wide text);
             ALTER TABLE {table} ALTER wide SET STORAGE EXTERNAL;
             {encrypt};
             INSERT INTO {table} SELECT i, 'name ' || i, CASE WHEN i % 50 = 0 THEN repeat('wide', 1000) END
             FROM generate_series(1, 2000) i;
             DELETE FROM {table} WHERE id % 7 = 0"
        ))?;
        cluster.sql(&format!("VACUUM (FREEZE) {table}"))?;
        cluster.sql(&format!("DELETE FROM {table} WHERE id % 11 = 0"))?;
    }
    cluster.restart()?;
    assert_sealed(&cluster.family_files("sealed")?)?;
    Ok((cluster, keys))
}

/// Both tables must give the same result; `{t}` represents the table.
fn same(cluster: &Cluster, query: &str) -> Result<String> {
    let sealed = cluster.text(&query.replace("{t}", "sealed"))?;
    let open = cluster.text(&query.replace("{t}", "open"))?;
    ensure!(sealed == open, "{query}: {sealed}, of the plain twin {open}");
    Ok(sealed)
}

fn amcheck() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["amcheck"])?;
    cluster.sql(
        "SELECT bt_index_check('sealed_pkey', true), bt_index_parent_check('sealed_pkey', true, true)",
    )?;
    let damage = "SELECT count(*) FROM verify_heapam('{t}', check_toast => true)";
    ensure!(same(&cluster, damage)? == "0", "damage");
    run(cluster.program("pg_amcheck").args(["--heapallindexed", "--rootdescend", "postgres"]))?;
    cluster.finish()
}

fn pgstattuple() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pgstattuple"])?;
    for query in [
        "SELECT pgstattuple('{t}')",
        "SELECT pgstattuple('{t}_pkey')",
        "SELECT pgstatindex('{t}_pkey')",
        "SELECT pgstattuple_approx('{t}')",
        "SELECT pgstattuple(reltoastrelid) FROM pg_class WHERE relname = '{t}'",
    ] {
        same(&cluster, query)?;
    }
    cluster.finish()
}

/// A superuser sees pages as in shared buffers: in plaintext.
fn pageinspect() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pageinspect"])?;
    // Rows without TOAST values, whose positions differ (HEAP_HASEXTERNAL).
    for query in [
        "SELECT md5(string_agg(t_data::text, ' ' ORDER BY lp)) FROM heap_page_items(get_raw_page('{t}', 0))
         WHERE lp_flags = 1 AND t_infomask & 4 = 0",
        "SELECT (bt_page_stats('{t}_pkey', 1)).live_items",
        "SELECT string_agg(data, ' ' ORDER BY itemoffset) FROM bt_page_items('{t}_pkey', 1)",
        "SELECT (page_header(get_raw_page('{t}', 0))).pagesize",
        "SELECT (page_header(get_raw_page('{t}', 0))).flags",
    ] {
        same(&cluster, query)?;
    }
    let page = cluster.text("SELECT encode(get_raw_page('sealed', 0), 'escape')")?;
    ensure!(page.contains("name 2"), "plaintext, as in shared buffers");
    // pd_checksum is that of the page as PostgreSQL would have written it.
    ensure!(
        cluster.text(
            "SELECT p.checksum = page_checksum(get_raw_page('sealed', 0), 0)
             FROM page_header(get_raw_page('sealed', 0)) p"
        )? == "t",
        "the checksum of the plaintext page"
    );
    cluster.sql("CREATE ROLE stranger")?;
    let error = cluster.error("SET ROLE stranger; SELECT get_raw_page('sealed', 0)")?;
    ensure!(error.sqlstate == "42501", "{error}");
    cluster.finish()
}

fn visibility() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_visibility"])?;
    for query in [
        "SELECT count(*) || ' ' || count(*) FILTER (WHERE all_visible) || ' ' || count(*) FILTER (WHERE all_frozen)
         FROM pg_visibility_map('{t}')",
        "SELECT count(*) FILTER (WHERE pd_all_visible) FROM pg_visibility('{t}')",
        "SELECT pg_visibility_map_summary('{t}')",
        "SELECT count(*) FROM pg_check_visible('{t}')",
        "SELECT count(*) FROM pg_check_frozen('{t}')",
    ] {
        same(&cluster, query)?;
    }
    cluster.sql("SELECT pg_truncate_visibility_map('sealed')")?;
    cluster.sql("VACUUM sealed")?;
    cluster.restart()?;
    assert_sealed(&cluster.family_files("sealed")?)?;
    cluster.finish()
}

fn freespacemap() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_freespacemap"])?;
    let free = same(
        &cluster,
        "SELECT string_agg(avail::text, ' ' ORDER BY blkno) FROM pg_freespace('{t}')",
    )?;
    ensure!(free.bytes().any(|digit| (b'1'..=b'9').contains(&digit)), "no free space in {free}");
    cluster.finish()
}

fn buffercache() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_buffercache", "pg_prewarm"])?;
    for mode in ["prefetch", "read", "buffer"] {
        for fork in ["main", "vm", "fsm"] {
            same(&cluster, &format!("SELECT pg_prewarm('{{t}}', '{mode}', '{fork}')"))?;
        }
    }
    let cached = same(
        &cluster,
        "SELECT count(*) FROM pg_buffercache WHERE relfilenode = pg_relation_filenode('{t}')",
    )?;
    ensure!(cached != "0", "nothing in shared buffers");
    ensure!(same(&cluster, "SELECT count(*), sum(id) FROM {t}")? != "0", "rows");
    cluster.finish()
}

/// The list of pages in shared buffers survives a restart, also if the server is locked afterwards.
fn autoprewarm() -> Result<()> {
    let settings = Settings::default()
        .conf("shared_preload_libraries = 'pagevault, pg_prewarm'")
        // Both extensions have background workers; eight are not enough.
        .conf("max_worker_processes = 16")
        .conf("pagevault.unlock_timeout = 1");
    let (mut cluster, keys) = twins(&settings, &["pg_prewarm", "pg_buffercache"])?;
    let prewarmed = |table: &str| {
        cluster.eventually(
            &format!(
                "SELECT count(*) > 5 FROM pg_buffercache
                 WHERE relfilenode = pg_relation_filenode('{table}') AND relforknumber = 0"
            ),
            "t",
        )
    };
    cluster.sql("SELECT pg_prewarm('sealed'), pg_prewarm('open')")?;
    cluster.restart()?;
    prewarmed("sealed")?;
    prewarmed("open")?;
    ensure!(same(&cluster, "SELECT count(*) FROM {t}")? != "0", "rows");
    keys.take_away()?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT state FROM pagevault.status")? == "locked", "not locked");
    let ended = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'autoprewarm worker'";
    cluster.eventually(ended, "0")?;
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.status", "unlocked")?;
    ensure!(same(&cluster, "SELECT count(*) FROM {t}")? != "0", "rows");
    for expected in ["locked", "unlock", "unwrap", "key file"] {
        cluster.allow_log(expected);
    }
    cluster.finish()
}

fn rowlocks() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pgrowlocks"])?;
    let mut holder = cluster.client()?;
    run_sql(&mut holder, "BEGIN")?;
    for table in ["sealed", "open"] {
        run_sql(&mut holder, &format!("SELECT FROM {table} WHERE id < 10 FOR UPDATE"))?;
    }
    ensure!(same(&cluster, "SELECT count(*) FROM pgrowlocks('{t}')")? == "8", "locks");
    drop(holder);
    cluster.finish()
}
