//! Large transactions in logical replication: spilled by the decoder, or streamed and stored in
//! files by the subscriber.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings};

use super::{CANARY, Found, check, files_below, spilled};

struct Pair {
    publisher: Cluster,
    subscriber: Cluster,
}

impl Pair {
    fn start(streaming: &str) -> Result<Pair> {
        let settings = Settings::default()
            .conf("wal_level = logical")
            .conf("logical_decoding_work_mem = 64kB");
        let (publisher, _) = Cluster::with_keys(&settings)?;
        let (subscriber, _) = Cluster::with_keys(&settings)?;
        for cluster in [&publisher, &subscriber] {
            cluster.sql("CREATE TABLE birds (id int, t text)")?;
        }
        publisher.sql("CREATE PUBLICATION all_birds FOR TABLE birds")?;
        subscriber.sql(&format!(
            "CREATE SUBSCRIPTION sub CONNECTION 'host={} user=postgres dbname=postgres'
             PUBLICATION all_birds WITH (streaming = {streaming})",
            publisher.directory().display()
        ))?;
        subscriber
            .eventually("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", "0")?;
        Ok(Pair { publisher, subscriber })
    }

    fn set(&self, setting: &str) -> Result<()> {
        for cluster in [&self.publisher, &self.subscriber] {
            cluster.set(&[("pagevault.temp_encryption", setting)])?;
        }
        Ok(())
    }

    /// Runs a transaction with a subtransaction that fails. Repeats `look` until it succeeds before
    /// the end, and waits until the subscriber has the transaction.
    fn transaction(&self, look: impl Fn() -> Result<()>) -> Result<()> {
        let mut client = self.publisher.client()?;
        let insert = |from: i32| {
            format!(
                "INSERT INTO birds SELECT i, '{CANARY} ' || repeat(i::text, i % 40)
                 FROM generate_series({from}, {from} + 2999) i;"
            )
        };
        run_sql(&mut client, "BEGIN")?;
        run_sql(&mut client, &insert(1))?;
        run_sql(&mut client, "SAVEPOINT s")?;
        run_sql(&mut client, &insert(100_000))?;
        self.publisher.eventually_that("files", &look)?;
        run_sql(&mut client, "ROLLBACK TO s")?;
        run_sql(&mut client, &insert(200_000))?;
        run_sql(&mut client, "COMMIT")?;
        const SUM: &str =
            "SELECT count(*) || ' ' || coalesce(sum(hashtext(t)::bigint + id), 0) FROM birds";
        self.subscriber.eventually(SUM, &self.publisher.text(SUM)?)
    }

    fn finish(mut self) -> Result<()> {
        self.subscriber
            .allow_log("terminating logical replication worker due to administrator command");
        self.subscriber.sql("DROP SUBSCRIPTION sub")?;
        self.subscriber.finish()?;
        self.publisher.finish()
    }
}

/// Files of the publisher's slot with changes.
fn changes(publisher: &Cluster) -> Vec<Found> {
    let mut files = files_below(&publisher.data_directory().join("pg_replslot"));
    files.retain(|file| file.path.extension().is_some_and(|extension| extension == "spill"));
    files
}

#[test]
fn spilled_transactions_are_sealed() -> Result<()> {
    let pair = Pair::start("off")?;
    for sealed in [false, true] {
        let setting = if sealed { "auto" } else { "off" };
        pair.set(setting)?;
        pair.transaction(|| check(&changes(&pair.publisher), sealed)).with_context(|| setting)?;
        pair.publisher.eventually_that("spill files", || {
            ensure!(changes(&pair.publisher).is_empty(), "they are left");
            Ok(())
        })?;
    }
    pair.finish()
}

/// The failed subtransaction is truncated from the file.
#[test]
fn streamed_transactions_are_sealed_where_they_arrive() -> Result<()> {
    let pair = Pair::start("on")?;
    for sealed in [false, true] {
        let setting = if sealed { "auto" } else { "off" };
        pair.set(setting)?;
        pair.transaction(|| {
            let mut files = spilled(&pair.subscriber);
            files.retain(|file| file.path.to_string_lossy().contains(".changes."));
            check(&files, sealed)
        })
        .with_context(|| setting)?;
    }
    pair.finish()
}
