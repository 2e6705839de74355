//! Other tokens than SoftHSM: a TPM, and those of this machine.
//!
//! `PAGEVAULT_TOKENS` names a file that describes tokens of this machine, such as an HSM, or those
//! that `tools/tokens` makes: `{"NAME": {"options": {...}, "key": "db-kek"}}`. The test makes new
//! versions of the key, and uses one wrong PIN.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::tpm::Tpm;
use pagevault_tests::key_servers::{Server, write_file};
use pagevault_tests::{Cluster, Settings};
use serde_json::{Value, json};

use super::{CONTEXT, OTHER, SECRET, findings, unwrap, wrap};
use crate::Test;
use crate::bench::{TABLES, add_provider, readable};

pub(crate) fn tests() -> Vec<Test> {
    let tpm = |name, run| Test { name, needs: &[Server::Tpm], run };
    vec![
        tpm("pkcs11::a_tpm_keeps_the_contract", a_tpm),
        tpm("pkcs11::keys_live_in_a_tpm", in_a_tpm),
        Test {
            name: "pkcs11::tokens_of_this_machine_keep_the_contract",
            needs: &[Server::Tokens],
            run: of_this_machine,
        },
    ]
}

fn a_tpm() -> Result<()> {
    let tpm = Tpm::start()?;
    let provider = |options| {
        let mut provider = Provider::new("pkcs11", options);
        provider.data_directory = tpm.path("data");
        provider.deadline_ms = 60_000;
        provider
    };
    keeps_the_contract(&provider, &tpm.options(), "db-kek")
}

fn in_a_tpm() -> Result<()> {
    let tpm = Tpm::start()?;
    let cluster = Cluster::start(&Settings::default())?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("tpm", "pkcs11", &tpm.options()))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('tpm', 'db-kek')")?;
    cluster.sql(TABLES)?;
    ensure!(cluster.text("SELECT pagevault.rotate_cluster_master_key()")? == "2");
    cluster.crash()?;
    readable(&cluster)?;
    cluster.restart()?;
    readable(&cluster)?;
    cluster.finish()
}

fn of_this_machine() -> Result<()> {
    let path = std::env::var("PAGEVAULT_TOKENS").context("PAGEVAULT_TOKENS")?;
    let tokens: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let directory = tempfile::tempdir()?;
    pagevault_tests::Installation::get()?.give(directory.path())?;
    for (name, token) in tokens.as_object().context("not an object")? {
        let provider = |options| {
            let mut provider = Provider::new("pkcs11", options);
            provider.data_directory = directory.path().to_owned();
            provider.deadline_ms = 60_000;
            provider
        };
        let key = token["key"].as_str().context("key")?;
        keeps_the_contract(&provider, &token["options"], key).with_context(|| name.clone())?;
        eprintln!("{name} keeps the contract");
    }
    Ok(())
}

/// Wraps, unwraps, rotates, and refuses; the key stays usable.
fn keeps_the_contract(
    provider: &dyn Fn(Value) -> Provider,
    options: &Value,
    key: &str,
) -> Result<()> {
    let good = provider(options.clone());
    let outcome = good.ask(key, "", json!("check"))?;
    ensure!(findings(&outcome)?.iter().all(|(_, well)| *well), "{outcome}");
    let (wrapped, version) = good.wrap(key, CONTEXT, SECRET)?;
    ensure!(good.unwrap(key, CONTEXT, &wrapped)? == SECRET);
    good.refused(key, OTHER, unwrap(&wrapped), "wrong_ciphertext")?;
    good.refused("no such key", CONTEXT, wrap(), "key_missing")?;

    // Each eighth byte: an HSM need not be fast.
    let bytes = STANDARD.decode(wrapped.as_str().context("text")?)?;
    let mut wrong: Vec<Vec<u8>> = (0..bytes.len())
        .step_by(8)
        .map(|at| {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            changed
        })
        .collect();
    wrong.push(bytes[..bytes.len() - 1].to_vec());
    let actions = wrong.iter().map(|bytes| unwrap(&json!(STANDARD.encode(bytes)))).collect();
    for (outcome, bytes) in good.ask_all(key, CONTEXT, actions)?.iter().zip(&wrong) {
        let class = outcome["failed"]["class"].as_str();
        let refused = matches!(class, Some("wrong_ciphertext" | "key_missing"));
        ensure!(refused, "{bytes:02x?}: {outcome}");
    }

    let newer = good.rotate(key, &wrapped)?;
    ensure!(newer > version && good.rotate(key, &wrapped)? == newer, "{newer}");
    let (again, newest) = good.wrap(key, CONTEXT, SECRET)?;
    ensure!(newest == newer && good.unwrap(key, CONTEXT, &again)? == SECRET);
    ensure!(good.unwrap(key, CONTEXT, &wrapped)? == SECRET);

    let mut changed = options.clone();
    let wrong_pin = good.data_directory.join("wrong-pin");
    changed["pin_file"] = json!(write_file(&wrong_pin, "00000000", 0o600)?);
    let bad = provider(changed);
    let actions = vec![wrap(), unwrap(&wrapped), wrap()];
    let outcomes = bad.ask_all(key, CONTEXT, actions)?;
    for outcome in outcomes {
        let failure = &outcome["failed"];
        ensure!(failure["class"] == "unauthenticated" && failure["retry"] == false, "{outcome}");
    }
    // Which resets the token's counter.
    ensure!(good.unwrap(key, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}
