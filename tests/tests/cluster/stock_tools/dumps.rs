//! Dumps are plaintext with labels: restored relations are sealed from the first page on, or the
//! restore reports why not.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::{Cluster, KeyFile, Settings};
use postgres::Client;

use super::complaints;
use crate::wal::switch;

/// The database `app`: labels of every kind, and `{canary}` in all relations that these encrypt.
const APP: &str = "
    CREATE EXTENSION pagevault;
    CREATE SCHEMA sealed; SECURITY LABEL FOR pagevault ON SCHEMA sealed IS 'encrypted';
    CREATE TABLE sealed.notes (id serial PRIMARY KEY, name text UNIQUE, wide text);
    ALTER TABLE sealed.notes ALTER wide SET STORAGE EXTERNAL;
    CREATE TABLE lone (id int GENERATED ALWAYS AS IDENTITY, name text);
    SECURITY LABEL FOR pagevault ON TABLE lone IS 'encrypted aes-128-xts';
    CREATE TABLE parts (id int, name text) PARTITION BY RANGE (id);
    SECURITY LABEL FOR pagevault ON TABLE parts IS 'encrypted';
    CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (1000);
    CREATE INDEX ON parts (name);
    CREATE TABLE free (id int); SECURITY LABEL FOR pagevault ON TABLE free IS 'plaintext';
    INSERT INTO sealed.notes (name, wide)
        SELECT '{canary}' || i, repeat('{canary}', 200) FROM generate_series(1, 100) i;
    INSERT INTO lone (name) SELECT '{canary}' || i FROM generate_series(1, 100) i;
    INSERT INTO parts SELECT i, '{canary}' || i FROM generate_series(1, 100) i;
    INSERT INTO free SELECT generate_series(1, 100);
    CREATE MATERIALIZED VIEW sealed.seen AS SELECT * FROM sealed.notes;
    SELECT lo_from_bytea(4711, '{canary}');
    ANALYZE";

const LABELS: &str = "SELECT concat_ws(' ', objtype, objname, label) FROM pg_seclabels
    WHERE provider = 'pagevault' AND objtype NOT IN ('database', 'tablespace') ORDER BY 1";

/// State of each user relation. TOAST tables have numbers in their names.
const STATES: &str = "
    SELECT regexp_replace(relation::text, '\\d+', 'N') || ' ' || coalesce(cipher, 'plain') AS state
    FROM pagevault.relations WHERE relation::oid >= 16384 ORDER BY 1";

const ROWS: &str = "
    SELECT concat_ws(' ', (SELECT md5(string_agg(n::text, '' ORDER BY id)) FROM sealed.notes n),
        (SELECT md5(string_agg(n::text, '' ORDER BY id)) FROM sealed.seen n),
        (SELECT md5(string_agg(l::text, '' ORDER BY id)) FROM lone l),
        (SELECT md5(string_agg(p::text, '' ORDER BY id)) FROM parts p),
        (SELECT sum(id) FROM free), md5(lo_get(4711)))";

/// A cluster that encrypts everything, with the database `app`; and the canary.
fn cluster() -> Result<(Cluster, KeyFile, Canary)> {
    let settings = Settings::default().wal_segment_size(1);
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    switch(&cluster, true)?;
    let canary = Canary::text("dumped");
    cluster.sql("CREATE DATABASE app")?;
    run_sql(&mut cluster.client_to("app")?, &APP.replace("{canary}", canary.as_str()))?;
    Ok((cluster, keys, canary))
}

/// The contents of a database to compare.
fn contents(client: &mut Client) -> Result<(Vec<String>, Vec<String>, String)> {
    // Jobs of the label `plaintext` run after the end of its transaction.
    column(client, "SELECT pagevault.wait_for_rekey(job)::text FROM pagevault.rekey_jobs")?;
    let drift = column(client, "SELECT d::text FROM pagevault.drift(true) d")?;
    ensure!(drift.is_empty(), "not what labels want: {drift:?}");
    Ok((column(client, LABELS)?, column(client, STATES)?, text(client, ROWS)?))
}

fn dump(cluster: &Cluster, name: &str, options: &[&str]) -> Result<PathBuf> {
    let file = cluster.directory().join(name);
    run(cluster.program("pg_dump").args(options).args(["--dbname=app", "--file"]).arg(&file))?;
    Ok(file)
}

fn restore(cluster: &Cluster, database: &str, options: &[&str], file: &Path) -> Command {
    let mut command = cluster.program("pg_restore");
    command.args(options).args(["--dbname", database]).arg(file);
    command
}

#[test]
fn relations_restored_from_every_format_are_sealed() -> Result<()> {
    let (cluster, _keys, canary) = cluster()?;
    let original = contents(&mut cluster.client_to("app")?)?;
    ensure!(original.0.len() == 4, "{:?}", original.0);
    let scanner = Scanner::new([&canary]);
    for (database, dumped, restored) in [
        ("custom", &["--format=custom"][..], &["--single-transaction"][..]),
        ("directory", &["--format=directory", "--jobs=2"], &["--exit-on-error", "--jobs=2"]),
        ("tar", &["--format=tar"], &["--exit-on-error"]),
        ("plain", &["--compress=0"], &[]),
    ] {
        let file = dump(&cluster, &format!("dump-{database}"), dumped)?;
        run(cluster.program("createdb").arg(database))?;
        if restored.is_empty() {
            ensure!(!scanner.scan(&std::fs::read(&file)?).is_empty(), "the scanner is blind");
            let mut psql = cluster.program("psql");
            psql.args(["-q", "-v", "ON_ERROR_STOP=1", "-d", database, "-f"]).arg(&file);
            run(&mut psql)?;
        } else {
            run(&mut restore(&cluster, database, restored, &file))?;
        }
        let mut client = cluster.client_to(database)?;
        let copy = contents(&mut client)?;
        ensure!(copy == original, "{database}:\n{original:#?}\n{copy:#?}");
    }
    cluster.sql("CHECKPOINT")?;
    let found = scanner.scan_trees(&[&cluster.data_directory()])?;
    ensure!(found.is_empty(), "{}", report(&found));
    cluster.finish()
}

#[test]
fn pg_dumpall_moves_a_whole_cluster() -> Result<()> {
    let (old, _old_keys, canary) = cluster()?;
    old.sql("CREATE ROLE keeper; GRANT pagevault_admin TO keeper")?;
    let place = old.directory().join("place");
    std::fs::create_dir(&place)?;
    old.installation().give(&place)?;
    old.sql(&format!("CREATE TABLESPACE place LOCATION '{}'", place.display()))?;
    old.sql("SECURITY LABEL FOR pagevault ON TABLESPACE place IS 'encrypted'")?;
    old.sql("ALTER DATABASE app SET pagevault.cipher = 'aes-256-xts-auth'")?;
    let mut app = old.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE TABLE placed (id int) TABLESPACE place; INSERT INTO placed VALUES (1)",
    )?;
    run_sql(&mut app, "SELECT pagevault.encrypt_database()")?;
    let original = contents(&mut app)?;
    drop(app);
    let file = old.directory().join("everything");
    run(old.program("pg_dumpall").args(["--no-sync", "--file"]).arg(&file))?;

    let settings = Settings::default().wal_segment_size(1);
    let (new, _new_keys) = Cluster::with_keys(&settings)?;
    switch(&new, true)?;
    // The dump contains these. Keys and providers belong to the cluster and stay. Two roles exist
    // already.
    new.sql("DROP EXTENSION pagevault; DROP SCHEMA pagevault")?;
    let all = std::fs::read_to_string(&file)?;
    let (from, to) = (old.directory().join("place"), new.directory().join("place"));
    std::fs::create_dir(&to)?;
    new.installation().give(&to)?;
    let all = all.replace(&*from.to_string_lossy(), &to.to_string_lossy());
    let all = all.replace("CREATE ROLE postgres;", "").replace("CREATE ROLE pagevault_admin;", "");
    std::fs::write(&file, all)?;
    run(new.program("psql").args(["-q", "-v", "ON_ERROR_STOP=1", "-f"]).arg(&file))?;
    let mut app = new.client_to("app")?;
    let copy = contents(&mut app)?;
    ensure!(copy == original, "{original:#?}\n{copy:#?}");
    const SHARED: &str =
        "SELECT string_agg(concat_ws(' ', objtype, objname, label), ', ' ORDER BY objtype)
        FROM pg_seclabels WHERE provider = 'pagevault' AND objtype IN ('database', 'tablespace')";
    let shared = text(&mut app, SHARED)?;
    ensure!(shared == "database app encrypted, tablespace place encrypted", "{shared}");
    ensure!(text(&mut app, "SELECT pg_has_role('keeper', 'pagevault_admin', 'usage')")? == "t");
    drop(app);
    new.sql("CHECKPOINT")?;
    let found = Scanner::new([&canary]).scan_trees(&[&new.data_directory(), &to])?;
    ensure!(found.is_empty(), "{}", report(&found));
    new.finish()?;
    old.finish()
}

#[test]
fn a_server_without_pagevault_reports_what_is_missing() -> Result<()> {
    let (old, _keys, _canary) = cluster()?;
    let rows = text(&mut old.client_to("app")?, ROWS)?;
    let file = dump(&old, "dump", &["--format=custom"])?;
    let mut stock = Cluster::start(&Settings::default().without_preload())?;
    stock.allow_log("pagevault");
    run(stock.program("createdb").arg("app"))?;
    let output = complaints(&mut restore(&stock, "app", &[], &file))?;
    ensure!(output.contains("security label provider \"pagevault\" is not loaded"), "{output}");
    ensure!(output.contains("errors ignored on restore: 4"), "{output}");
    ensure!(text(&mut stock.client_to("app")?, ROWS)? == rows, "rows");
    run(stock.program("createdb").arg("strict"))?;
    complaints(&mut restore(&stock, "strict", &["--exit-on-error"], &file))?;
    let none = text(&mut stock.client_to("strict")?, "SELECT to_regclass('sealed.notes') IS NULL")?;
    ensure!(none == "t", "a table was made in plaintext");
    // Restored on purpose without labels and extension.
    run(stock.program("createdb").arg("meant"))?;
    let list = run(stock.program("pg_restore").arg("--list").arg(&file))?;
    let kept: Vec<_> = list.lines().filter(|line| !line.contains("pagevault")).collect();
    let chosen = stock.directory().join("list");
    std::fs::write(&chosen, kept.join("\n"))?;
    let mut chosen_only =
        restore(&stock, "meant", &["--exit-on-error", "--no-security-labels"], &file);
    run(chosen_only.arg("--use-list").arg(&chosen))?;
    ensure!(text(&mut stock.client_to("meant")?, ROWS)? == rows, "rows");
    stock.finish()?;
    old.finish()
}

#[test]
fn without_a_master_key_a_restore_stops_before_the_first_row() -> Result<()> {
    let (old, _keys, _canary) = cluster()?;
    let file = dump(&old, "dump", &["--format=custom"])?;
    let mut new = Cluster::start(&Settings::default())?;
    new.allow_log("pagevault");
    const NO_KEY: &str = "cannot encrypt: no master key is set";
    const TABLES: &str = "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND oid >= 16384
        AND relnamespace <> to_regnamespace('pagevault')";
    let strict = ["--exit-on-error", "--single-transaction"];
    for options in [&strict[..1], &strict[1..], &["--exit-on-error", "--jobs=2"]] {
        run(new.program("createdb").arg("app"))?;
        let output = complaints(&mut restore(&new, "app", options, &file))?;
        ensure!(output.contains(NO_KEY) && output.contains("set_cluster_master_key()"), "{output}");
        let tables = text(&mut new.client_to("app")?, TABLES)?;
        ensure!(tables == "0", "{options:?}: {tables} tables");
        run(new.program("dropdb").arg("app"))?;
    }
    // Restores that continue after errors can have every table refused.
    run(new.program("createdb").arg("app"))?;
    new.sql("ALTER DATABASE app SET pagevault.default_encryption = on")?;
    let output = complaints(&mut restore(&new, "app", &[], &file))?;
    ensure!(output.contains(NO_KEY) && output.contains("errors ignored on restore"), "{output}");
    let tables = text(&mut new.client_to("app")?, TABLES)?;
    ensure!(tables == "0", "{tables} tables");
    new.finish()?;
    old.finish()
}
