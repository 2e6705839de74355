//! Keys of other tools, keys that can leave the token, and tokens that are alike.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::softhsm::{SoftHsm, TOKEN};
use serde_json::json;

use super::make;
use super::{CONTEXT, SECRET, findings, says, unwrap, wrap};
use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::SoftHsm], run };
    vec![
        test("pkcs11::keys_of_other_tools_have_versions", other_tools),
        test("pkcs11::keys_with_the_same_id_unwrap_but_do_not_wrap", same_id),
        test("pkcs11::a_key_that_can_leave_the_token_does_not_wrap", extractable),
        test("pkcs11::a_key_that_may_not_be_used_is_disabled", disabled),
        test("pkcs11::tokens_with_the_same_label_need_a_serial_number", same_label),
    ]
}

const USE: &[&str] = &["encrypt=true", "decrypt=true"];

fn other_tools() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let id = "6e616d65206f66206b6579"; // a text of 11 bytes
    for (label, id, version) in [
        ("none", "none", 1),
        ("text", id, 1),
        ("short", "07", 7),
        ("long", "0000000000000102", 258),
    ] {
        make(&hsm, label, id, USE)?;
        let (wrapped, found) = provider.wrap(label, CONTEXT, SECRET)?;
        ensure!(found == version, "{label}: {found}");
        ensure!(provider.rotate(label, &wrapped)? == version + 1, "{label}");
        let (_, newest) = provider.wrap(label, CONTEXT, SECRET)?;
        ensure!(newest == version + 1 && provider.unwrap(label, CONTEXT, &wrapped)? == SECRET);
    }
    Ok(())
}

fn same_id() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    // The right one is tried, whichever it is.
    for _ in 0..3 {
        hsm.make_key("db-kek")?;
    }
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "01, 01")?;
    // A version by another id of the same number is as ambiguous.
    make(&hsm, "twice", "02", USE)?;
    make(&hsm, "twice", "0002", USE)?;
    let failure = provider.refused("twice", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "0002")?;
    // The advice is right.
    make(&hsm, "twice", "03", USE)?;
    ensure!(provider.wrap("twice", CONTEXT, SECRET)?.1 == 3);
    Ok(())
}

fn extractable() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let key = [5_u8; 32].map(|byte| format!("{byte:02x}")).concat();
    let value = format!("value={key}");
    let safe = ["sensitive=true", "extractable=false", "encrypt=true", "decrypt=true", &value];
    hsm.object(TOKEN, &[&["make", "x", "01"], &safe[..]].concat())?;
    let (wrapped, _) = provider.wrap("x", CONTEXT, SECRET)?;
    // check tells that it was made elsewhere.
    let outcome = provider.ask("x", "", json!("check"))?;
    says(&outcome, "imported, or extractable in the past")?;
    for (unsafe_attributes, reason) in [
        (["sensitive=true", "extractable=true"], "CKA_EXTRACTABLE is true"),
        (["sensitive=false", "extractable=false"], "CKA_SENSITIVE is false"),
    ] {
        hsm.drop_key("x")?;
        let arguments = [&["make", "x", "01"], &unsafe_attributes[..], &safe[2..]].concat();
        hsm.object(TOKEN, &arguments)?;
        let failure = provider.refused("x", CONTEXT, wrap(), "insecure")?;
        says(&failure, reason)?;
        let outcome = provider.ask("x", "", json!("check"))?;
        let last = findings(&outcome)?.pop().context("no finding")?;
        ensure!(last == ("the key exists".to_owned(), false), "{outcome}");
        // What it wrapped is not lost.
        ensure!(provider.unwrap("x", CONTEXT, &wrapped)? == SECRET);
    }
    Ok(())
}

fn disabled() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let off = ["encrypt=false", "decrypt=false", "wrap=false", "unwrap=false"];
    hsm.object(TOKEN, &[&["set", "db-kek", "01"], &off[..]].concat())?;
    provider.refused("db-kek", CONTEXT, wrap(), "key_disabled")?;
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "key_disabled")?;
    says(&failure, "CKA_DECRYPT")?;
    hsm.object(TOKEN, &["set", "db-kek", "01", "decrypt=true"])?;
    // An old version may unwrap only.
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    provider.refused("db-kek", CONTEXT, wrap(), "key_disabled")?;
    hsm.object(TOKEN, &["set", "db-kek", "01", "encrypt=true"])?;
    provider.wrap("db-kek", CONTEXT, SECRET)?;
    Ok(())
}

fn same_label() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let (wrapped, _) = hsm.provider(hsm.options()).wrap("db-kek", CONTEXT, SECRET)?;
    let serial = hsm.serial()?;
    hsm.make_token(TOKEN)?;
    let provider = hsm.provider(hsm.options());
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "bad_options")?;
    says(&failure, &serial)?;
    let mut options = hsm.options();
    options["serial"] = json!(serial);
    ensure!(hsm.provider(options.clone()).unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    options["serial"] = json!("0");
    let mut provider = hsm.provider(options);
    provider.deadline_ms = 1000;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, &serial)
}
