//! Programs that a provider comes to by way of a file: for who may run programs, and for nobody
//! else, as recorded when the provider was set.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::{expect_error, run_sql};

use super::cluster;

/// A credentials file of AWS that runs a program, which leaves a mark.
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
    // Nobody listens there; it is not come to.
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

    // The file may become so later; that changes nothing.
    let text = fs::read_to_string(&file)?;
    fs::write(&file, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n")?;
    run_sql(&mut keeper, &add("theirs"))?;
    fs::write(&file, &text)?;
    let error = expect_error(&mut keeper, &use_it("theirs"))?;
    ensure!(error.sqlstate == "F0000", "{error}");
    // Nor does it become a superuser's by being used by one.
    let error = cluster.error(&use_it("theirs"))?;
    ensure!(error.sqlstate == "F0000", "{error}");
    cluster.sql("SELECT * FROM pagevault.check_provider('theirs')")?;
    ensure!(!mark.exists(), "the program was run");

    // Who may run programs sets it, and everybody who may manage keys uses it.
    cluster.sql(&format!("SELECT pagevault.alter_provider('theirs', '{options}')"))?;
    let error = expect_error(&mut keeper, &use_it("theirs"))?;
    ensure!(error.sqlstate == "28000", "{error}");
    ensure!(mark.exists(), "the program was not run");
    fs::remove_file(&mark)?;

    // What one of lesser rights sets anew is theirs again.
    fs::write(&file, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n")?;
    run_sql(&mut keeper, &format!("SELECT pagevault.alter_provider('theirs', '{options}')"))?;
    fs::write(&file, &text)?;
    let error = cluster.error(&use_it("theirs"))?;
    ensure!(error.sqlstate == "F0000" && !mark.exists(), "{error}");

    // And the role alone will do.
    cluster.sql("GRANT pg_execute_server_program TO keeper")?;
    run_sql(&mut keeper, &add("ours"))?;
    let error = expect_error(&mut keeper, &use_it("ours"))?;
    ensure!(error.sqlstate == "28000" && mark.exists(), "{error}");
    cluster.finish()
}
