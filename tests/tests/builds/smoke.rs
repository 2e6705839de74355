//! The shortest test of everything that pagevault replaces in a server.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

const CONTENT: &str =
    "SELECT concat_ws(' ', count(*), sum(id), sum(length(body)), max(note)) FROM t";

/// A table with an index and TOAST, sequences, temporary data and WAL are sealed; the server is
/// killed twice, once between a checkpoint and a commit; nothing is lost, checksums agree.
pub(crate) fn encrypted_through_kill(installation: &'static Installation) -> Result<()> {
    let settings = Settings::default()
        .on(installation)
        .conf("shared_buffers = 1MB")
        .conf("temp_buffers = 800kB")
        .conf("pagevault.default_encryption = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let (first, second) = (Canary::text("before the checkpoint"), Canary::text("after it"));
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql(&format!(
        "CREATE TABLE t (id serial PRIMARY KEY, body text, note text);
         ALTER TABLE t ALTER body SET STORAGE EXTERNAL;
         INSERT INTO t (body, note) SELECT repeat('{0}', i % 150), '{0}' FROM generate_series(1, 3000) i;
         CREATE INDEX ON t (note, id);
         CHECKPOINT",
        first.as_str()
    ))?;
    // More than fits into memory: a sort on disk, a temporary table that leaves its buffers.
    cluster.sql(&format!(
        "SET work_mem = '64kB';
         CREATE TEMPORARY TABLE brief AS SELECT id, '{0}' || id AS note FROM t ORDER BY note;
         SELECT count(*) FROM brief a JOIN brief b USING (note);
         INSERT INTO t (body, note) SELECT '{0}', '{0}' FROM generate_series(1, 500) i;
         UPDATE t SET note = '{0}' WHERE id % 3 = 0",
        second.as_str()
    ))?;
    cluster.sql("VACUUM t")?;
    let before = cluster.text(CONTENT)?;
    cluster.kill()?;
    cluster.start_server()?;
    let after = cluster.text(CONTENT)?;
    ensure!(after == before, "{after} after the crash, {before} before it");

    cluster.sql("CHECKPOINT")?;
    for file in cluster.family_files("t")? {
        for (page, state) in file.states()?.into_iter().enumerate() {
            let plain = state == PageState::Plaintext;
            ensure!(!plain, "page {page} of {} is not sealed", file.path.display());
        }
    }
    let states = "SELECT string_agg(DISTINCT state, ' ') FROM pagevault.verify('t')
                  WHERE state NOT IN ('encrypted', 'empty')";
    let others = cluster.text(states)?;
    ensure!(others.is_empty(), "pagevault.verify finds pages that are {others}");
    let mut sealed = 0;
    for segment in Segment::all(&cluster.data_directory().join("pg_wal"))? {
        sealed += segment.pages()?.iter().filter(|p| matches!(p, WalPage::Sealed(_))).count();
    }
    ensure!(sealed > 100, "{sealed} pages of WAL are sealed");
    cluster.sql("DELETE FROM t WHERE id % 7 = 0")?;
    let before = cluster.text(CONTENT)?;
    cluster.kill()?;
    let data = cluster.data_directory();
    let found = Scanner::new([&first, &second]).scan_trees(&[data.as_path()])?;
    ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
    cluster.start_server()?;
    let after = cluster.text(CONTENT)?;
    ensure!(after == before, "{after} after the second crash, {before} before it");
    cluster.end()?;
    let mut cluster = cluster;
    cluster.keep_quiet();
    Ok(())
}

/// The server does not start with pagevault, and says why. Without pagevault it starts.
pub(crate) fn refused(installation: &'static Installation) -> Result<()> {
    let cluster = Cluster::create(&Settings::default().on(installation))?;
    let said = format!("{:#}", cluster.start_server().err().context("the server starts")?);
    for part in [
        "FATAL:  pagevault cannot work with this server: cannot find table \"smgrsw\"",
        "DETAIL:  The server's compiler has replaced calls through the table by direct calls",
        "HINT:  Ask for a server that was built by GCC, or by clang with -fwrapv-pointer",
    ] {
        ensure!(said.contains(part), "it does not say {part:?} but {said}");
    }
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    let mut cluster = cluster;
    cluster.stop(StopMode::Fast)?;
    cluster.keep_quiet();
    Ok(())
}
