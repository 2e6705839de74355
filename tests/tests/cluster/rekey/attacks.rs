//! Objects that any user may create. pagevault must not mistake them for its own, or run them as
//! another user.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::{Cluster, Settings};

const TABLE: &str =
    "CREATE TABLE own AS SELECT repeat('x', 500) AS text FROM generate_series(1, 200)";
const ENCRYPT: &str = "SECURITY LABEL FOR pagevault ON TABLE own IS 'encrypted'";
const IS_SUPERUSER: &str = "SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'";
/// Makes mallory a superuser if a superuser runs it.
const TAKE_OVER: &str = "CREATE FUNCTION pagevault.take_over() RETURNS bigint LANGUAGE plpgsql AS
        $$BEGIN EXECUTE 'ALTER ROLE mallory SUPERUSER'; RETURN 1; END$$;
    CREATE FUNCTION pagevault.on_row() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN PERFORM pagevault.take_over(); RETURN NEW; END$$";

/// Jobs for all relations.
fn cluster() -> Result<Cluster> {
    let settings =
        Settings::default().conf("pagevault.rekey_threshold = 0").conf("log_min_messages = debug1");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE ROLE mallory LOGIN")?;
    cluster.sql("CREATE DATABASE other OWNER mallory")?;
    Ok(cluster)
}

fn mallory(cluster: &Cluster, database: &str) -> Result<postgres::Client> {
    let mut client = cluster.client_to(database)?;
    run_sql(&mut client, "SET SESSION AUTHORIZATION mallory")?;
    Ok(client)
}

/// Where the extension is not installed, any user may create a schema and a table of any name.
#[test]
fn a_table_named_rekey_jobs_creates_no_jobs() -> Result<()> {
    let cluster = cluster()?;
    let mut other = mallory(&cluster, "other")?;
    run_sql(&mut other, &format!("CREATE SCHEMA pagevault; {TAKE_OVER}"))?;
    run_sql(
        &mut other,
        "CREATE TABLE pagevault.rekey_jobs (
             id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, relation oid, relation_name text, kind text,
             cipher text, state text DEFAULT 'waiting', begun jsonb DEFAULT '{}', pages_done bigint DEFAULT 0,
             pages_total bigint DEFAULT 0, bytes_per_second float8, started_at timestamptz, finished_at timestamptz,
             error text);
         CREATE TRIGGER takes_over BEFORE INSERT OR UPDATE ON pagevault.rekey_jobs
             FOR EACH ROW EXECUTE FUNCTION pagevault.on_row()",
    )?;
    run_sql(&mut other, TABLE)?;
    let error = expect_error(&mut other, ENCRYPT)?;
    ensure!(cluster.text(IS_SUPERUSER)? == "f", "mallory is superuser");
    ensure!(
        error.sqlstate == "55000"
            && error.message
                == "cannot rekey in the background: extension pagevault is not installed in this database"
            && error.detail.contains("rekey_threshold")
            && error.hint.contains("CREATE EXTENSION"),
        "{error}"
    );
    drop(other);
    cluster.finish()
}

/// If workers looked for jobs in every database, they would read whatever has the right name there.
#[test]
fn a_view_named_rekey_jobs_is_not_read() -> Result<()> {
    let cluster = cluster()?;
    let mut other = mallory(&cluster, "other")?;
    run_sql(&mut other, &format!("CREATE SCHEMA pagevault; {TAKE_OVER}"))?;
    run_sql(
        &mut other,
        "CREATE VIEW pagevault.rekey_jobs AS
             SELECT pagevault.take_over() AS id, 'waiting'::text AS state, 0::oid AS relation, 'encrypt'::text AS kind,
                    NULL::text AS cipher",
    )?;
    drop(other);
    cluster.restart()?;
    cluster.sql(TABLE)?;
    cluster.sql(ENCRYPT)?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('own'::regclass)")? == "t");
    ensure!(cluster.text(IS_SUPERUSER)? == "f", "mallory is superuser");
    // One worker, for the only job.
    cluster.eventually_that("the worker has ended", || {
        let ended = cluster.log().matches("background worker \"pagevault rekey\" (PID").count();
        ensure!(ended == 1, "{ended} workers have ended");
        Ok(())
    })?;
    cluster.finish()
}

/// Any user may get the extension's objects: by REASSIGN OWNED, if the user who installed it
/// leaves.
#[test]
fn owning_the_extensions_objects_gives_no_control_of_jobs() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql("CREATE ROLE installer SUPERUSER")?;
    cluster.sql("ALTER DATABASE other OWNER TO installer")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "SET SESSION AUTHORIZATION installer; CREATE EXTENSION pagevault")?;
    run_sql(&mut other, "RESET SESSION AUTHORIZATION; REASSIGN OWNED BY installer TO mallory")?;
    let tables = "SELECT count(*) FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.classid = 'pg_class'::regclass
         WHERE d.deptype = 'e' AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pagevault')
           AND c.relkind <> 'v'";
    ensure!(text(&mut other, tables)? == "0", "the extension has tables");
    // mallory replaces the objects by other ones.
    let mut his = mallory(&cluster, "other")?;
    run_sql(&mut his, TAKE_OVER)?;
    run_sql(
        &mut his,
        "CREATE OR REPLACE VIEW pagevault.rekey_jobs AS
             SELECT pagevault.take_over() AS job, NULL::regclass AS relation, NULL::text AS kind, NULL::text AS state,
                    0::bigint AS pages_done, 0::bigint AS pages_total, 0::numeric AS percent, 0::numeric AS mb_per_second,
                    NULL::interval AS eta, NULL::text AS requested_by, NULL::timestamptz AS requested_at,
                    NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at, NULL::text AS error,
                    NULL::int[] AS waits_for, NULL::timestamptz AS waits_since",
    )?;
    run_sql(&mut his, TABLE)?;
    run_sql(&mut his, ENCRYPT)?;
    ensure!(text(&mut his, "SELECT pagevault.wait_for_rekey('own'::regclass)")? == "t");
    ensure!(cluster.text(IS_SUPERUSER)? == "f", "mallory is superuser");
    drop((other, his));
    cluster.finish()
}

/// Subscribers without pagevault must be able to apply changes of FOR ALL TABLES.
#[test]
fn jobs_are_not_published() -> Result<()> {
    let (publisher, _keys) = Cluster::with_keys(
        &Settings::default().conf("wal_level = logical").conf("pagevault.rekey_threshold = 0"),
    )?;
    let mut subscriber = Cluster::start(&Settings::default().without_preload())?;
    publisher.sql(&format!("{TABLE}; ALTER TABLE own REPLICA IDENTITY FULL; CREATE PUBLICATION everything FOR ALL TABLES"))?;
    subscriber.allow_log("terminating logical replication worker");
    subscriber.sql("CREATE TABLE own (text text)")?;
    subscriber.sql(&format!(
        "CREATE SUBSCRIPTION follows CONNECTION 'host={} user=postgres dbname=postgres' PUBLICATION everything",
        publisher.directory().display()
    ))?;
    subscriber.eventually("SELECT count(*) FROM own", "200")?;
    publisher.sql(ENCRYPT)?;
    ensure!(publisher.text("SELECT pagevault.wait_for_rekey('own'::regclass)")? == "t");
    publisher.sql("SELECT pagevault.rotate_data_key('own')")?;
    publisher.sql("INSERT INTO own VALUES ('last')")?;
    subscriber.eventually("SELECT count(*) FROM own", "201")?;
    let published =
        publisher.text("SELECT string_agg(tablename, ' ') FROM pg_publication_tables")?;
    ensure!(published == "own", "{published}");
    subscriber.sql("DROP SUBSCRIPTION follows")?;
    subscriber.finish()?;
    publisher.finish()
}
