//! Wrapping and unwrapping, names of keys, their states.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::kms::{Credentials, Emulator};
use serde_json::{Value, json};

use crate::Test;
use crate::contract::{CONTEXT, SECRET};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "aws_kms::a_key_has_four_names",
        needs: &[Server::Ministack],
        run: a_key_has_four_names,
    },
    Test {
        name: "aws_kms::a_key_to_be_deleted_says_so",
        needs: &[Server::Ministack],
        run: a_key_to_be_deleted_says_so,
    },
    Test {
        name: "aws_kms::a_missing_key_says_so",
        needs: &[Server::Ministack],
        run: a_missing_key_says_so,
    },
    Test {
        name: "aws_kms::keys_of_another_kind_are_refused",
        needs: &[Server::Moto],
        run: keys_of_another_kind_are_refused,
    },
    Test {
        name: "aws_kms::check_tells_what_works",
        needs: &[Server::Ministack],
        run: check_tells_what_works,
    },
    Test {
        name: "aws_kms::a_multi_region_key_opens_in_its_other_region",
        needs: &[Server::Ministack],
        run: a_multi_region_key_opens_in_its_other_region,
    },
];

fn unwrap(wrapped: &Value) -> Value {
    json!({"unwrap": {"wrapped": wrapped}})
}

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

fn a_key_has_four_names() -> Result<()> {
    let (kms, root) = (Emulator::ministack()?, Credentials::root()?);
    let (provider, arn) = (kms.provider(&root), kms.create_key()?);
    kms.aws("kms", "create_alias", json!({"AliasName": "alias/main", "TargetKeyId": arn}))?;
    let (account, id) = arn.split_once(":key/").context("no ARN")?;
    let alias_arn = format!("{account}:alias/main");
    for name in [id, &arn, "alias/main", &alias_arn] {
        let (wrapped, _) = provider.wrap(name, CONTEXT, SECRET)?;
        // The stored form contains the key's ARN.
        let bytes = STANDARD.decode(wrapped.as_str().context("no text")?)?;
        ensure!(bytes[3..].starts_with(arn.as_bytes()), "wrapped by {name}");
        ensure!(provider.unwrap("alias/gone", CONTEXT, &wrapped)? == SECRET);
        let reply = provider.ask(name, CONTEXT, json!("check"))?;
        let findings = reply["checked"]["findings"].as_array().context("no findings")?;
        let found = findings.iter().find(|found| found["what"] == "the key exists");
        let summary = found.and_then(|found| found["seen"].as_str()).context("no summary")?;
        let expected = "in eu-central-1, customer managed, material from KMS";
        ensure!(summary.contains(&arn) && summary.ends_with(expected), "{summary}");
    }
    let elsewhere = arn.replace("eu-central-1", "eu-west-1");
    let reply = provider.refused(&elsewhere, CONTEXT, wrap(), "bad_options")?;
    ensure!(reply["detail"] == "Its region is eu-west-1.", "{reply}");
    Ok(())
}

fn a_key_to_be_deleted_says_so() -> Result<()> {
    // moto continues to decrypt with such a key.
    let (kms, root) = (Emulator::ministack()?, Credentials::root()?);
    let (provider, key) = (kms.provider(&root), kms.create_key()?);
    let (wrapped, _) = provider.wrap(&key, CONTEXT, SECRET)?;
    kms.aws("kms", "schedule_key_deletion", json!({"KeyId": key, "PendingWindowInDays": 7}))?;
    for action in [wrap(), unwrap(&wrapped)] {
        let reply = provider.refused(&key, CONTEXT, action, "key_disabled")?;
        ensure!(reply["detail"].as_str().is_some_and(|text| text.contains("pending deletion")));
    }
    kms.aws("kms", "cancel_key_deletion", json!({"KeyId": key}))?;
    kms.aws("kms", "enable_key", json!({"KeyId": key}))?;
    ensure!(provider.unwrap(&key, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn a_missing_key_says_so() -> Result<()> {
    let (kms, root) = (Emulator::ministack()?, Credentials::root()?);
    let (provider, arn) = (kms.provider(&root), kms.create_key()?);
    let (account, _) = arn.split_once(":key/").context("no ARN")?;
    let missing = format!("{account}:key/00000000-0000-0000-0000-000000000000");
    for key in ["alias/nothing", "00000000-0000-0000-0000-000000000000", &missing] {
        let reply = provider.refused(key, CONTEXT, wrap(), "key_missing")?;
        ensure!(reply["message"].as_str().is_some_and(|text| text.contains(key)), "{reply}");
    }
    Ok(())
}

fn keys_of_another_kind_are_refused() -> Result<()> {
    // ministack cannot create such keys.
    let (kms, root) = (Emulator::moto()?, Credentials::root()?);
    let parameters = json!({"KeyUsage": "ENCRYPT_DECRYPT", "KeySpec": "RSA_2048"});
    let made = kms.aws("kms", "create_key", parameters)?;
    let key = made["KeyMetadata"]["KeyId"].as_str().context("no key")?;
    let reply = kms.provider(&root).refused(key, CONTEXT, wrap(), "bad_options")?;
    ensure!(reply["detail"].as_str().is_some_and(|text| text.contains("RSA_2048")), "{reply}");
    Ok(())
}

fn check_tells_what_works() -> Result<()> {
    let (kms, root) = (Emulator::ministack()?, Credentials::root()?);
    let (provider, key) = (kms.provider(&root), kms.create_key()?);
    let reply = provider.ask(&key, CONTEXT, json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
    ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
    let what: Vec<&str> = findings.iter().filter_map(|finding| finding["what"].as_str()).collect();
    let expected = [
        "the AWS region is known",
        "credentials are available",
        "AWS KMS replies",
        "the credentials are accepted",
        "the key exists",
        "the key wraps and unwraps",
        "wrapped keys are bound to their database",
    ];
    ensure!(what == expected, "{what:?}");
    let credentials = findings[1]["seen"].as_str().context("nothing seen")?;
    ensure!(credentials == "from a profile, access key ID test", "{credentials}");
    Ok(())
}

fn a_multi_region_key_opens_in_its_other_region() -> Result<()> {
    let (kms, root) = (Emulator::ministack()?, Credentials::root()?);
    let made = kms.aws("kms", "create_key", json!({"MultiRegion": true}))?;
    let arn = made["KeyMetadata"]["Arn"].as_str().context("no key")?;
    kms.aws("kms", "replicate_key", json!({"KeyId": arn, "ReplicaRegion": "eu-west-1"}))?;
    let mut provider = kms.provider(&root);
    let (wrapped, _) = provider.wrap(arn, CONTEXT, SECRET)?;
    provider.options["region"] = json!("eu-west-1");
    ensure!(provider.unwrap(arn, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}
