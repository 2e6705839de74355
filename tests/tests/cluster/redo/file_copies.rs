//! A database is copied by files during a backup, and then its template is rekeyed. Redo copies the
//! template in its later state, as PostgreSQL does with any change
//! (docs/design/0010-what-redo-reads.md). The copy has no keys for those pages, and reading them
//! must be an error.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings};

use super::{backup, cluster};

const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(t::text)::bigint) FROM t";

/// A backup during which the database `copy` was created from `model`, `model` was rekeyed, and
/// then `afterwards` ran in `copy`.
fn copied_meanwhile(afterwards: &str) -> Result<(Cluster, Cluster, String)> {
    let cluster = cluster(Settings::default())?;
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    run_sql(
        &mut model,
        "CREATE EXTENSION pagevault;
         CREATE TABLE t AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 1000) i;
         SELECT pagevault.encrypt('t')",
    )?;
    drop(model);
    let restored = backup(&cluster, || {
        cluster.sql("CREATE DATABASE copy TEMPLATE model STRATEGY file_copy")?;
        let mut model = cluster.client_to("model")?;
        run_sql(&mut model, "SELECT pagevault.rotate_data_key('t')")?;
        let done = text(&mut model, "SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
        ensure!(done == "t", "the job does not end");
        run_sql(&mut cluster.client_to("copy")?, afterwards)?;
        cluster.sql("CHECKPOINT")
    })?;
    let sum = text(&mut cluster.client_to("copy")?, SUM)?;
    Ok((cluster, restored, sum))
}

#[test]
fn pages_copied_from_a_later_state_are_not_opened_with_a_wrong_key() -> Result<()> {
    let (cluster, mut restored, sum) = copied_meanwhile("SELECT 1")?;
    for output in ["specified neither", "no data key of version", "could not read blocks"] {
        restored.allow_log(output);
    }
    restored.start_server()?;
    ensure!(text(&mut restored.client_to("model")?, SUM)? == sum, "the template");
    let error = expect_error(&mut restored.client_to("copy")?, SUM)?;
    // With asynchronous reads (PostgreSQL 18) the message is the server's own.
    let reported = ["no data key of version 2 for block 0", "Required key not available"];
    ensure!(reported.iter().any(|reported| error.message.contains(reported)), "{}", error.message);
    restored.sql("DROP DATABASE copy")?;
    restored.sql("CREATE DATABASE copy TEMPLATE model STRATEGY file_copy")?;
    ensure!(text(&mut restored.client_to("copy")?, SUM)? == sum, "the second copy");
    restored.finish()?;
    cluster.finish()
}

#[test]
fn pages_copied_from_a_later_state_are_not_overwritten() -> Result<()> {
    let (cluster, mut restored, _) =
        copied_meanwhile("UPDATE t SET name = name WHERE id % 10 = 0")?;
    for output in ["specified neither", "WAL has not brought", "startup process", "shutting down"] {
        restored.allow_log(output);
    }
    let output = restored.start_server().err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(output.contains("WAL has not brought the data key of version 2"), "{output}");
    restored.finish()?;
    cluster.finish()
}
