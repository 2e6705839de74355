//! pg_surgery, which changes pages without the access methods.

use anyhow::{Result, ensure};
use pagevault_tests::Settings;
use pagevault_tests::datafile::assert_sealed;

use crate::Test;
use crate::inspection::twins;

pub(crate) const TESTS: &[Test] =
    &[Test { name: "pg_surgery", needs: &["pg_surgery", "amcheck"], run: surgery }];

fn surgery() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["pg_surgery", "amcheck"])?;
    cluster.sql(
        "CREATE TABLE places AS SELECT id, ctid AS place FROM sealed;
         SELECT heap_force_kill('sealed', array_agg(place)) FROM places WHERE id < 20;
         SELECT heap_force_freeze('sealed', array_agg(place)) FROM places WHERE id BETWEEN 30 AND 40",
    )?;
    cluster.sql("REINDEX TABLE sealed")?;
    cluster.sql("VACUUM sealed")?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT min(id) >= 20 FROM sealed")? == "t", "killed rows are there");
    ensure!(cluster.text("SELECT count(*) FROM verify_heapam('sealed')")? == "0", "damage");
    cluster.restart()?;
    assert_sealed(&cluster.family_files("sealed")?)?;
    cluster.finish()
}
