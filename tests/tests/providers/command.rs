//! `command` with a program that uses OpenSSL.

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::program::Program;
use pagevault_tests::key_servers::write_program;
use serde_json::json;

use crate::Test;
use crate::bench::{TABLES, add_provider, impatient, readable};
use crate::pkcs11::{CONTEXT, SECRET, says, unwrap, wrap};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[], run };
    vec![
        test("command::without_a_program_for_it_rotation_is_a_move", no_rotation),
        test("command::refusals_have_a_class_a_cause_and_advice", refusals),
        test("command::keys_are_in_no_command_line", no_command_line),
        test("command::the_operator_can_try_it_out", check),
        test("command::keys_live_behind_a_program", server),
    ]
}

fn provider(program: &Program) -> Provider {
    let mut provider = Provider::new("command", program.options());
    // It must exist, because programs may not be in it.
    provider.data_directory = program.path("data");
    provider
}

fn no_rotation() -> Result<()> {
    let program = Program::new()?;
    program.make_key("db other")?;
    let provider = provider(&program);
    let (wrapped, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(version == 1);
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    let refused = provider.refused("db-kek", "", rotate, "bad_options")?;
    ensure!(
        refused["hint"].as_str().is_some_and(|hint| hint.contains("set_database_master_key()"))
    );
    let (moved, _) = provider.rewrap("db-kek", "db other", CONTEXT, &wrapped)?;
    ensure!(provider.unwrap("db other", CONTEXT, &moved)? == SECRET);
    Ok(())
}

fn refusals() -> Result<()> {
    let program = Program::new()?;
    let provider = provider(&program);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let failure = provider.refused("typo", CONTEXT, wrap(), "key_missing")?;
    says(&failure, "there is no such key")?;
    // What a program prints is for its operator.
    ensure!(!failure.to_string().contains("no key typo"), "{failure}");
    fs::rename(program.path("keys/credentials"), program.path("good"))?;
    for action in [wrap(), unwrap(&wrapped)] {
        let failure = provider.refused("db-kek", CONTEXT, action, "unauthenticated")?;
        says(&failure, "its credentials were rejected")?;
    }
    fs::rename(program.path("good"), program.path("keys/credentials"))?;

    // A possibly temporary failure is retried until the deadline.
    let mut impatient = provider.clone();
    impatient.deadline_ms = 3000;
    fs::rename(program.path("keys"), program.path("away"))?;
    let failure = impatient.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "the key server or token cannot be reached")?;
    ensure!(failure["retry"] == true, "{failure}");
    fs::rename(program.path("away"), program.path("keys"))?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);

    // Another key with the same name: what it unwraps is garbage.
    program.make_key("db-kek")?;
    let outcome = provider.ask("db-kek", CONTEXT, unwrap(&wrapped))?;
    let class = outcome["failed"]["class"].as_str().context("it was unwrapped")?;
    ensure!(matches!(class, "wrong_ciphertext" | "unreachable"), "{outcome}");
    Ok(())
}

fn no_command_line() -> Result<()> {
    let program = Program::new()?;
    let log = program.path("log");
    let script = fs::read_to_string(program.path("program"))?;
    let record = format!("#!/bin/sh\ntr '\\0' ' ' < /proc/$$/cmdline >> {}\n", log.display());
    write_program(&program.path("program"), &script.replacen("#!/bin/sh\n", &record, 1))?;
    let provider = provider(&program);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    provider.unwrap("db-kek", CONTEXT, &wrapped)?;
    let log = fs::read_to_string(log)?;
    ensure!(log.matches("/keys").count() == 2, "{log}");
    ensure!(!log.contains(SECRET) && !log.contains("plaintext"), "{log}");
    Ok(())
}

fn check() -> Result<()> {
    let program = Program::new()?;
    let check = |key: &str| -> Result<(bool, String)> {
        let output = Installation::get()?
            .command("pagevault-keyring")
            .args(["check", "--provider-kind", "command", "--key", key, "--options"])
            .arg(program.options().to_string())
            .output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (well, response) = check("db-kek")?;
    ensure!(well && response.contains("All checks passed"), "{response}");
    let (well, response) = check("typo")?;
    ensure!(!well && response.contains("there is no such key"), "{response}");
    Ok(())
}

fn server() -> Result<()> {
    let program = Program::new()?;
    program.make_key("db-next")?;
    let mut cluster = pagevault_tests::Cluster::start(&impatient())?;
    cluster.without_witness("at the end the program refuses the credentials");
    cluster.allow_log("pagevault");
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("own", "command", &program.options()))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('own', 'db-kek')")?;
    cluster.sql(TABLES)?;
    // These keys have no versions: rotation is a move to another key.
    let error = cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(error.hint.contains("set_cluster_master_key"), "{error}");
    cluster.sql("SELECT pagevault.set_cluster_master_key('own', 'db-next')")?;
    cluster.crash()?;
    readable(&cluster)?;
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('own', 'typo')")?;
    ensure!(error.sqlstate == "42704" && error.text().contains("own"), "{error}");
    fs::remove_file(program.path("keys/credentials"))?;
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('own', 'db-kek')")?;
    ensure!(error.sqlstate == "28000", "{error}");
    cluster.finish()
}
