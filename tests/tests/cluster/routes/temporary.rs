//! Temporary relations need no label.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings};

use super::survey;

const CANARY: &str = "kanarienvogel-temporary";

#[test]
fn temporary_relations_are_sealed_with_or_without_a_choice() -> Result<()> {
    let settings = Settings::default().conf("temp_buffers = 800kB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE secret (name text); SELECT pagevault.encrypt('secret')")?;
    for default in ["off", "on"] {
        let mut client = cluster.client()?;
        run_sql(&mut client, &format!("SET pagevault.default_encryption = {default}"))?;
        for (table, statements) in [
            ("kept", "CREATE TEMP TABLE kept (id serial PRIMARY KEY, name text)"),
            ("emptied", "CREATE TEMP TABLE emptied (name text) ON COMMIT DELETE ROWS"),
            ("rewritten", "CREATE TEMP TABLE rewritten (name text); VACUUM FULL rewritten"),
            ("later", "DISCARD TEMP; CREATE TEMP TABLE later (name text)"),
            ("last", "DISCARD ALL; CREATE TEMP TABLE last (name text)"),
        ] {
            for statement in statements.split("; ") {
                run_sql(&mut client, statement)?;
            }
            // More rows than fit into the session's buffers, so that pages get to disk.
            run_sql(
                &mut client,
                &format!(
                    "INSERT INTO {table} (name)
                     SELECT repeat('{CANARY}', 20) FROM generate_series(1, 5000) i"
                ),
            )?;
            run_sql(&mut client, &format!("CREATE INDEX ON {table} (name)"))?;
            let found = survey::files_with(&cluster, CANARY)?;
            ensure!(found.is_empty(), "{table}, by default {default}: the canary is in {found:?}");
        }
    }
    cluster.finish()
}
