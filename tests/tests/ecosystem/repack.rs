//! pg_repack: copies a table while it is in use, and exchanges the files in the end.

use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::datafile::{assert_plain, assert_sealed};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use crate::Test;
use crate::inspection::twins;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "pg_repack", needs: &["pg_repack"], run: of_tables },
    Test { name: "pg_repack_under_way", needs: &["pg_repack"], run: under_way },
];

const DIGEST: &str =
    "SELECT count(*) || ' ' || md5(string_agg(s::text, '' ORDER BY id)) FROM sealed s";

/// pg_repack of `sealed` in the background.
fn start(cluster: &Cluster) -> Result<Child> {
    let mut command = cluster.program("pg_repack");
    command.args(["--table=sealed", "postgres"]).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.spawn()?)
}

fn check(cluster: &Cluster, what: &str) -> Result<()> {
    cluster.restart()?;
    assert_sealed(&cluster.family_files("sealed")?).context(what.to_owned())?;
    assert_plain(&cluster.family_files("open")?).context(what.to_owned())?;
    let drift = column(&mut cluster.client()?, "SELECT r::text FROM pagevault.drift(true) r")?;
    ensure!(drift.is_empty(), "{what}: {drift:?}");
    Ok(())
}

fn of_tables() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_repack"])?;
    let space = cluster.directory().join("space");
    std::fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
    let rows = cluster.text(DIGEST)?;
    for arguments in [
        &["--table=sealed", "--table=open"][..],
        &["--table=sealed", "--order-by=name", "--jobs=2"],
        &["--table=sealed", "--only-indexes"],
        &["--index=sealed_pkey"],
        &["--table=sealed", "--tablespace=space", "--moveidx"],
        &["--all"],
    ] {
        let before = cluster.text("SELECT pg_relation_filepath('sealed_pkey')")?;
        run(cluster.program("pg_repack").args(arguments).env("PGDATABASE", "postgres"))?;
        check(&cluster, &format!("{arguments:?}"))?;
        let after = cluster.text("SELECT pg_relation_filepath('sealed_pkey')")?;
        ensure!(before != after, "{arguments:?} did nothing");
        ensure!(cluster.text(DIGEST)? == rows, "{arguments:?}: rows");
    }
    cluster.crash()?;
    ensure!(cluster.text(DIGEST)? == rows, "rows after a crash");
    cluster.finish()
}

/// While it waits for an old transaction: the copy, the log of changes, and what belongs to them.
fn under_way() -> Result<()> {
    let (mut cluster, _keys) = twins(&Settings::default(), &["pg_repack"])?;
    cluster.allow_log("terminating connection");
    let mut old = cluster.client()?;
    run_sql(&mut old, "BEGIN; SELECT count(*) FROM open")?;
    let mut child = start(&cluster)?;
    let table = cluster.text("SELECT 'sealed'::regclass::oid")?;
    // The copy is filled when its index is there.
    cluster.eventually(
        &format!("SELECT count(*) FROM pg_index WHERE indrelid = to_regclass('repack.table_{table}') AND indisvalid"),
        "1",
    )?;
    cluster.sql("UPDATE sealed SET name = repeat('changed', 100) WHERE id % 3 = 0")?;
    cluster.sql("CHECKPOINT")?;
    for relation in [format!("repack.table_{table}"), format!("repack.log_{table}")] {
        assert_sealed(&cluster.family_files(&relation)?).context(relation)?;
    }
    assert_sealed(&cluster.files(&format!("repack.log_{table}_id_seq"))?)?;
    let rows = cluster.text(DIGEST)?;
    run_sql(&mut old, "COMMIT")?;
    ensure!(child.wait()?.success(), "pg_repack failed");
    ensure!(cluster.text(DIGEST)? == rows, "rows");
    drop(old);
    check(&cluster, "under way")?;

    // Killed under way, it leaves its tables; they are sealed, and go with the extension.
    let mut old = cluster.client()?;
    run_sql(&mut old, "BEGIN; SELECT count(*) FROM open")?;
    let mut child = start(&cluster)?;
    cluster.eventually(
        &format!("SELECT count(*) FROM pg_index WHERE indrelid = to_regclass('repack.table_{table}') AND indisvalid"),
        "1",
    )?;
    child.kill()?;
    child.wait()?;
    drop(old);
    cluster.crash()?;
    check(&cluster, "killed")?;
    cluster.sql("DROP EXTENSION pg_repack CASCADE")?;
    ensure!(cluster.text(DIGEST)? == rows, "rows after the crash");
    cluster.finish()
}
