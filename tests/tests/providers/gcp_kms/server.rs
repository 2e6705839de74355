//! A PostgreSQL whose master key is in Cloud KMS.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::gcp::Gcp;
use pagevault_tests::{Cluster, StopMode};

use crate::Test;
use crate::bench::{TABLES, add_provider, impatient, readable};
use crate::contract::KEY;

pub(super) const TESTS: &[Test] =
    &[Test { name: "gcp_kms::a_server_lives_on_it", needs: &[], run: lives }];

fn lives() -> Result<()> {
    let gcp = Gcp::start()?;
    let mut cluster = Cluster::start(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("gcp", "gcp_kms", &gcp.options()))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('gcp', 'db-kek')")?;
    cluster.sql(TABLES)?;
    ensure!(cluster.text("SELECT pagevault.rotate_cluster_master_key()")? == "2");
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.set_database_master_key('gcp', 'db-next')")?;
    let failed = "SELECT coalesce(string_agg(item, ' ') FILTER (WHERE NOT ok), '') FROM pagevault.check_provider('gcp')";
    let failed = cluster.text(failed)?;
    ensure!(failed.is_empty(), "{failed}");
    cluster.restart()?;
    readable(&cluster)?;
    // Its version is disabled: the server says so, and starts again when it is enabled.
    cluster.sql("SELECT pagevault.set_database_master_key('gcp', 'db-kek')")?;
    gcp.with_key(KEY, |key| key.set_state(2, "DISABLED"))?;
    let error = cluster.error("SELECT pagevault.rotate_database_key()")?;
    ensure!(error.detail.contains("current state is: DISABLED"), "{error}");
    gcp.with_key(KEY, |key| key.set_state(2, "ENABLED"))?;
    cluster.stop(StopMode::Immediate)?;
    cluster.start_server()?;
    readable(&cluster)?;
    cluster.finish()
}
