//! Relations that the script of an extension creates.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

use super::driver::SECRET;
use super::survey::{self, Expected};
use crate::labels::expect_no_drift;

/// The script of the first version. `{canary}` occurs in every relation.
const SCRIPT: &str = "
    CREATE TABLE config (id serial PRIMARY KEY, name text UNIQUE, wide text);
    ALTER TABLE config ALTER wide SET STORAGE EXTERNAL;
    INSERT INTO config (name, wide)
        SELECT '{canary}-' || i, repeat('{canary}', 150) FROM generate_series(1, 30) i;
    SELECT pg_catalog.pg_extension_config_dump('config', '');
    CREATE MATERIALIZED VIEW seen AS SELECT * FROM config;
    CREATE INDEX ON seen USING hash (name);
    CREATE SEQUENCE counter; SELECT nextval('counter');
    CREATE TABLE parts (id int, name text) PARTITION BY LIST (id);
    CREATE TABLE part PARTITION OF parts FOR VALUES IN (1);
    CREATE INDEX ON parts (name);
    INSERT INTO parts VALUES (1, '{canary}');";

const UPDATE: &str = "
    CREATE TABLE more AS SELECT * FROM config;
    ALTER TABLE config ADD COLUMN later boolean DEFAULT clock_timestamp() > '2000-01-01';
    TRUNCATE parts; INSERT INTO parts VALUES (1, '{canary}');
    REFRESH MATERIALIZED VIEW seen;
    DROP TABLE part; CREATE TABLE part PARTITION OF parts DEFAULT; INSERT INTO parts VALUES (1, '{canary}');";

/// A server with this extension; from 18 on, without changes of the installation.
fn cluster_with_extension(name: &str) -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let directory = if cluster.installation().major >= 18 {
        let path = cluster.directory().join("share");
        cluster.append_conf(&format!("extension_control_path = '$system:{}'", path.display()))?;
        cluster.restart()?;
        path.join("extension")
    } else {
        cluster.installation().share_directory().join("extension")
    };
    std::fs::create_dir_all(&directory)?;
    for (file, text) in [
        ("--1.0.sql", SCRIPT),
        ("--1.0--1.1.sql", UPDATE),
        (".control", "default_version = '1.0'\nrelocatable = true\n"),
    ] {
        let path = directory.join(format!("{name}{file}"));
        std::fs::write(path, text.replace("{canary}", SECRET))?;
    }
    Ok((cluster, keys))
}

#[test]
fn new_relations_of_extensions() -> Result<()> {
    let name = format!("pagevault_test_{}", std::process::id());
    let (cluster, _keys) = cluster_with_extension(&name)?;
    let outcome = run_rows(&cluster, &name);
    if cluster.installation().major < 18 {
        for file in ["--1.0.sql", "--1.0--1.1.sql", ".control"] {
            let directory = cluster.installation().share_directory().join("extension");
            std::fs::remove_file(directory.join(format!("{name}{file}")))?;
        }
    }
    outcome?;
    cluster.finish()
}

fn run_rows(cluster: &Cluster, name: &str) -> Result<()> {
    // Statistics are sealed from the first encrypted relation on.
    cluster.sql("CREATE TABLE gone (id int); SELECT pagevault.encrypt('gone'); DROP TABLE gone")?;
    for (schema, label, session, expected) in [
        ("plain", "NULL", "", Expected::PlainCopy),
        ("labelled", "'encrypted'", "", Expected::Sealed),
        ("by_default", "NULL", "SET pagevault.default_encryption = on;", Expected::Sealed),
    ] {
        cluster.sql(&format!(
            "CREATE SCHEMA {schema}; SECURITY LABEL FOR pagevault ON SCHEMA {schema} IS {label}"
        ))?;
        for step in [
            format!("CREATE EXTENSION {name} SCHEMA {schema}"),
            format!("ALTER EXTENSION {name} UPDATE TO '1.1'"),
        ] {
            cluster.sql(&format!("{session} {step}"))?;
            cluster.crash()?;
            expect_no_drift(cluster)?;
            cluster.restart()?;
            let expect =
                |of: &str, _: &str| (of == schema).then(|| (format!("{schema}, {step}"), expected));
            survey::check(cluster, expect, true)?;
            let rows =
                format!("SELECT count(*) FROM {schema}.config c JOIN {schema}.seen USING (name)");
            ensure!(cluster.text(&rows)? == "30", "{schema}: rows");
        }
        cluster.sql(&format!("DROP EXTENSION {name}"))?;
    }
    Ok(())
}
