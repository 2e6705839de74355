//! `pagevault-keyring doctor`, `report` and `init`, run by a superuser, run nothing that the owner
//! of a database has written.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings};

use crate::doctor::keyring;

/// Where a trap leaves its mark.
fn mark(cluster: &Cluster) -> PathBuf {
    cluster.directory().join("mark")
}

/// A function that writes the mark: also in a read-only transaction, and only as a superuser.
fn trap(cluster: &Cluster) -> String {
    let command = format!("touch {}", mark(cluster).display());
    format!(
        "CREATE FUNCTION public.trap() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
             EXECUTE format('COPY (SELECT 1) TO PROGRAM %L', '{command}');
             RETURN true;
         END $$;
         GRANT USAGE ON SCHEMA public TO PUBLIC;"
    )
}

/// Runs all that look at a database. `init` must refuse it.
fn look(cluster: &Cluster, database: &str) -> Result<()> {
    let report = cluster.directory().join("r.json").display().to_string();
    let keys = cluster.directory().join("keys").display().to_string();
    let (_, _, errors) = keyring(cluster, "postgres", &["doctor", "--dbname", database])?;
    ensure!(errors.is_empty(), "doctor: {errors}");
    let arguments = ["report", "--json", &report, "--dbname", database];
    let (code, _, errors) = keyring(cluster, "postgres", &arguments)?;
    ensure!(code == 0, "report: {errors}");
    ensure!(!mark(cluster).exists(), "something in {database} was run by doctor or report");
    for more in [&["--apply"][..], &[]] {
        let arguments = ["init", "--key-file", &keys, "--dbname", database];
        let (code, output, errors) =
            keyring(cluster, "postgres", &[&arguments[..], more].concat())?;
        ensure!(code == 1 && output.is_empty(), "init: {output}{errors}");
        ensure!(errors.contains("Hint: Check "), "init: {errors}");
    }
    ensure!(!mark(cluster).exists(), "something in {database} was run by init");
    Ok(())
}

#[test]
fn objects_in_the_place_of_the_extension_are_not_run() -> Result<()> {
    let settings = Settings::default().conf("max_worker_processes = 24");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE ROLE mallory")?;
    cluster.sql("CREATE DATABASE app OWNER mallory")?;
    // Also whatever is called without a schema.
    cluster.sql("ALTER DATABASE app SET search_path = mine, pg_catalog")?;
    let mut client = cluster.client_to("app")?;
    run_sql(
        &mut client,
        &format!(
            "SET ROLE mallory; {}
             CREATE SCHEMA mine;
             CREATE SCHEMA pagevault;
             GRANT USAGE ON SCHEMA mine, pagevault TO PUBLIC;
             CREATE DOMAIN mine.jsonb AS text CHECK (public.trap());
             CREATE FUNCTION mine.current_database() RETURNS name
                 RETURN (SELECT 'app'::name WHERE public.trap());
             CREATE VIEW mine.pg_settings AS SELECT 'x' AS name, 'x' AS setting
                 WHERE public.trap();
             CREATE VIEW pagevault.status AS
                 SELECT public.trap() AS loaded, '/etc/hostname' AS keyring_command;
             CREATE FUNCTION pagevault.report(boolean) RETURNS pg_catalog.jsonb
                 RETURN (SELECT '{{}}'::pg_catalog.jsonb WHERE public.trap());
             CREATE FUNCTION pagevault.add_provider(text, text, text) RETURNS boolean
                 RETURN public.trap();
             CREATE FUNCTION pagevault.set_cluster_master_key(text, text) RETURNS boolean
                 RETURN public.trap()",
            trap(&cluster)
        ),
    )?;
    look(&cluster, "app")?;
    cluster.finish()
}

/// Who creates the extension owns its functions, and keeps them as an ordinary role.
#[test]
fn objects_of_a_former_superuser_are_not_run() -> Result<()> {
    let settings = Settings::default().conf("max_worker_processes = 24");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE ROLE former SUPERUSER")?;
    cluster.sql("CREATE DATABASE app")?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "SET ROLE former; CREATE EXTENSION pagevault; RESET ROLE")?;
    run_sql(&mut client, "ALTER ROLE former NOSUPERUSER; GRANT CREATE ON SCHEMA public TO former")?;
    run_sql(
        &mut client,
        &format!(
            "SET ROLE former; {}
             CREATE OR REPLACE FUNCTION pagevault.report(check_files boolean DEFAULT false)
                 RETURNS jsonb STABLE RETURN (SELECT '{{}}'::jsonb WHERE public.trap())",
            trap(&cluster).replace("GRANT USAGE ON SCHEMA public TO PUBLIC;", "")
        ),
    )?;
    look(&cluster, "app")?;
    let (_, output, _) = keyring(&cluster, "postgres", &["doctor"])?;
    ensure!(output.contains("critical  database \"app\": \"former\" can replace"), "{output}");
    let (code, _, errors) = keyring(&cluster, "postgres", &["init", "--key-file", "/k"])?;
    ensure!(code == 1 && errors.contains("\"/k\" is missing"), "{errors}");
    cluster.finish()
}

/// Without the library a database may have a setting of the name of ours.
#[test]
fn the_file_of_a_setting_of_a_database_is_not_read() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().without_preload())?;
    cluster.sql("CREATE DATABASE app")?;
    cluster.sql("ALTER DATABASE app SET pagevault.keyring_command = '/etc/hostname'")?;
    let report = cluster.directory().join("r.json").display().to_string();
    let arguments = ["report", "--json", &report, "--dbname", "app"];
    let (code, _, errors) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 0, "{errors}");
    let document: serde_json::Value = serde_json::from_str(&fs::read_to_string(&report)?)?;
    ensure!(document["installed"]["helper"].is_null(), "{}", document["installed"]);
    ensure!(document["installed"]["library"].is_string(), "{}", document["installed"]);
    cluster.finish()
}
