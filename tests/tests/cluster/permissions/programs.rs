//! Programs that a provider runs because of a file, such as an AWS profile. They run only if the
//! user who defined the provider may run programs; that is recorded in its definition.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::{expect_error, run_sql};

use super::cluster;

/// An AWS credentials file of AWS that runs a program, which creates a marker file.
fn trap(cluster: &Cluster) -> Result<(PathBuf, PathBuf)> {
    let (file, mark) =
        (cluster.directory().join("credentials"), cluster.directory().join("sprung"));
    let program = cluster.script("trap", &format!("touch '{}'", mark.display()))?;
    pagevault_tests::key_servers::write_file(
        &file,
        &format!("[default]\ncredential_process = {program}\n"),
        0o600,
    )?;
    Ok((file, mark))
}

#[test]
fn in_profiles_of_aws() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let (file, mark) = trap(&cluster)?;
    // Nothing listens there; the connection is never attempted.
    let options = format!(
        "{{\"region\": \"eu-central-1\", \"endpoint\": \"https://127.0.0.1:9\", \"credentials_file\": \"{}\"}}",
        file.display()
    );
    let add =
        |name: &str| format!("SELECT pagevault.add_provider('{name}', 'aws_kms', '{options}')");
    let use_it =
        |name: &str| format!("SELECT pagevault.set_cluster_master_key('{name}', 'alias/x')");
    let mut keeper = cluster.client()?;
    run_sql(&mut keeper, "SET SESSION AUTHORIZATION keeper")?;

    let error = expect_error(&mut keeper, &add("theirs"))?;
    ensure!(error.sqlstate == "F0000", "{error}");
    ensure!(
        error.text().contains("runs a program, which is not allowed for this provider"),
        "{error}"
    );
    ensure!(error.detail.contains("credential_process"), "{error}");
    ensure!(error.hint.contains("pg_execute_server_program"), "{error}");

    // The program may be added to the file later; that makes no difference.
    let text = fs::read_to_string(&file)?;
    fs::write(&file, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n")?;
    run_sql(&mut keeper, &add("theirs"))?;
    fs::write(&file, &text)?;
    let error = expect_error(&mut keeper, &use_it("theirs"))?;
    ensure!(error.sqlstate == "F0000", "{error}");
    // Use by a superuser does not change the recorded right.
    let error = cluster.error(&use_it("theirs"))?;
    ensure!(error.sqlstate == "F0000", "{error}");
    cluster.sql("SELECT * FROM pagevault.check_provider('theirs')")?;
    ensure!(!mark.exists(), "the program was run");

    // A user who may run programs defines it, and all key administrators can use it.
    cluster.sql(&format!("SELECT pagevault.alter_provider('theirs', '{options}')"))?;
    let error = expect_error(&mut keeper, &use_it("theirs"))?;
    ensure!(error.sqlstate == "28000", "{error}");
    ensure!(mark.exists(), "the program was not run");
    fs::remove_file(&mark)?;

    // A definition by a user with fewer rights lowers the recorded right again.
    fs::write(&file, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n")?;
    run_sql(&mut keeper, &format!("SELECT pagevault.alter_provider('theirs', '{options}')"))?;
    fs::write(&file, &text)?;
    let error = cluster.error(&use_it("theirs"))?;
    ensure!(error.sqlstate == "F0000" && !mark.exists(), "{error}");

    // The role alone is sufficient.
    cluster.sql("GRANT pg_execute_server_program TO keeper")?;
    run_sql(&mut keeper, &add("ours"))?;
    let error = expect_error(&mut keeper, &use_it("ours"))?;
    ensure!(error.sqlstate == "28000" && mark.exists(), "{error}");
    cluster.finish()
}
