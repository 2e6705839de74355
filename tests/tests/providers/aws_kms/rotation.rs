//! New key material, other keys, moved aliases.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{
    Credentials, Emulator, REGION, without_ambient_credentials,
};
use serde_json::{Value, json};

use super::wrapped_by;
use crate::Test;
use crate::contract::{CONTEXT, SECRET};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "aws_kms::a_moved_alias_is_the_rotation",
        needs: &[Server::Moto],
        run: a_moved_alias_is_the_rotation,
    },
    Test {
        name: "aws_kms::what_cannot_be_rotated_says_how_to_go_on",
        needs: &[Server::Ministack],
        run: what_cannot_be_rotated_says_how_to_go_on,
    },
    Test {
        name: "aws_kms::a_rotation_is_waited_for_until_the_deadline",
        needs: &[],
        run: a_rotation_is_waited_for_until_the_deadline,
    },
    Test {
        name: "aws_kms::the_limit_of_rotations_says_how_to_go_on",
        needs: &[],
        run: the_limit_of_rotations_says_how_to_go_on,
    },
    Test {
        name: "aws_kms::what_cannot_be_seen_to_complete_is_not_begun",
        needs: &[],
        run: what_cannot_be_seen_to_complete_is_not_begun,
    },
];

/// Waits for the next second, because versions are times in seconds.
fn next_second() {
    sleep(Duration::from_millis(1100));
}

fn a_moved_alias_is_the_rotation() -> Result<()> {
    let (kms, root) = (Emulator::moto()?, Credentials::root()?);
    let (provider, old) = (kms.provider(&root), kms.create_key()?);
    kms.aws("kms", "create_alias", json!({"AliasName": "alias/main", "TargetKeyId": old}))?;
    let (wrapped, first) = provider.wrap("alias/main", CONTEXT, SECRET)?;
    next_second();
    let new = kms.create_key()?;
    kms.aws("kms", "update_alias", json!({"AliasName": "alias/main", "TargetKeyId": new}))?;
    ensure!(provider.unwrap("alias/main", CONTEXT, &wrapped)? == SECRET);

    let second = provider.rotate("alias/main", &wrapped)?;
    ensure!(second > first, "{first}, {second}");
    for key in [&old, &new] {
        let reply = kms.aws("kms", "list_key_rotations", json!({"KeyId": key}))?;
        ensure!(reply["Rotations"] == json!([]), "{key} was rotated itself");
    }
    let (again, version) = provider.rewrap("alias/main", "alias/main", CONTEXT, &wrapped)?;
    ensure!(version == second);
    ensure!(provider.unwrap("alias/main", CONTEXT, &again)? == SECRET);
    // Now the alias is unchanged, so the new key itself is rotated.
    next_second();
    ensure!(provider.rotate("alias/main", &again)? > second);
    Ok(())
}

fn what_cannot_be_rotated_says_how_to_go_on() -> Result<()> {
    // ministack does not support rotation on demand, like AWS KMS for keys in a custom key store.
    let (kms, root) = (Emulator::ministack()?, Credentials::root()?);
    let (provider, key) = (kms.provider(&root), kms.create_key()?);
    let (wrapped, _) = provider.wrap(&key, CONTEXT, SECRET)?;
    let action = json!({"rotate": {"wrapped": wrapped}});
    let response = provider.refused(&key, CONTEXT, action, "denied")?;
    let message = response["message"].as_str().unwrap_or_default();
    ensure!(message.ends_with("key cannot be rotated on demand"), "{response}");
    let hint = response["hint"].as_str().unwrap_or_default();
    ensure!(
        hint.contains("move the alias") && hint.contains("set_database_master_key()"),
        "{response}"
    );
    ensure!(provider.unwrap(&key, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

const ARN: &str = "arn:aws:kms:eu-central-1:1:key/1";

/// A key from 2026-01-01. `rotations` returns its list of rotations, given the number of requests
/// for it, and `rotated` is the reply to a rotation on demand.
fn rotating(
    rotated: (u16, Value),
    rotations: impl Fn(usize) -> (u16, Value) + Send + 'static,
) -> Result<Canned> {
    let asked = AtomicUsize::new(0);
    Canned::actions(move |action| match action {
        "describekey" => {
            let key = json!({"KeyId": "1", "Arn": ARN, "CreationDate": 1_767_225_600,
                "KeyState": "Enabled", "KeyUsage": "ENCRYPT_DECRYPT"});
            (200, json!({"KeyMetadata": key}))
        }
        "listkeyrotations" => rotations(asked.fetch_add(1, Ordering::SeqCst)),
        _ => rotated.clone(),
    })
}

fn error(code: &str) -> (u16, Value) {
    (400, json!({"__type": code, "message": "said by the server"}))
}

fn rotation(state: &str) -> (u16, Value) {
    let entry = json!({"KeyId": ARN, "RotationDate": 1_767_312_000, "KeyMaterialState": state});
    (200, json!({"Rotations": [entry], "Truncated": false}))
}

fn asking(kms: &Canned, root: &Credentials) -> (Provider, Value) {
    let options = json!({"region": REGION, "endpoint": kms.endpoint,
        "insecure_loopback_http": true, "credentials_file": root.path()});
    let wrapped = json!(wrapped_by(ARN, 20_260_101_000_000, b"ciphertext"));
    (without_ambient_credentials(Provider::new("aws_kms", options)), wrapped)
}

fn a_rotation_is_waited_for_until_the_deadline() -> Result<()> {
    let root = Credentials::root()?;
    // The second reply is for a caller that was interrupted and asks again.
    for begun in [(200, json!({"KeyId": ARN})), error("ConflictException")] {
        let kms = rotating(begun.clone(), |asked| match asked {
            0..3 => rotation("PENDING_ROTATION"),
            _ => rotation("CURRENT"),
        })?;
        let (provider, wrapped) = asking(&kms, &root);
        ensure!(provider.rotate("k", &wrapped)? == 20_260_102_000_000);

        let kms = rotating(begun, |_| rotation("PENDING_ROTATION"))?;
        let (mut provider, wrapped) = asking(&kms, &root);
        provider.deadline_ms = 4000;
        let action = json!({"rotate": {"wrapped": wrapped}});
        let response = provider.refused("k", CONTEXT, action, "deadline")?;
        let message = response["message"].as_str().unwrap_or_default();
        ensure!(message.ends_with("has begun and is not complete yet"), "{response}");
    }
    Ok(())
}

fn the_limit_of_rotations_says_how_to_go_on() -> Result<()> {
    let root = Credentials::root()?;
    let none = || (200, json!({"Rotations": [], "Truncated": false}));
    let kms = rotating(error("LimitExceededException"), move |_| none())?;
    let (provider, wrapped) = asking(&kms, &root);
    let response =
        provider.refused("k", CONTEXT, json!({"rotate": {"wrapped": wrapped}}), "denied")?;
    ensure!(
        response["hint"].as_str().is_some_and(|text| text.contains("move the alias")),
        "{response}"
    );
    // Elsewhere this code means too many requests; here a retry is useless.
    ensure!(response["retry"] == false && kms.requests() == 4, "{response}: {}", kms.requests());
    Ok(())
}

fn what_cannot_be_seen_to_complete_is_not_begun() -> Result<()> {
    let root = Credentials::root()?;
    let answer = json!({"KeyId": ARN, "CiphertextBlob": "AAAA"});
    let kms = rotating((200, answer), |_| error("AccessDeniedException"))?;
    let (provider, wrapped) = asking(&kms, &root);
    // Otherwise the key can be used.
    let (_, version) = provider.wrap("k", CONTEXT, SECRET)?;
    ensure!(version == 20_260_101_000_000, "{version}");
    let response =
        provider.refused("k", CONTEXT, json!({"rotate": {"wrapped": wrapped}}), "denied")?;
    ensure!(response["message"].as_str().is_some_and(|text| text.contains("kms:ListKeyRotations")));
    // DescribeKey, ListKeyRotations and Encrypt to wrap; the first two to rotate, and the list that
    // would have to show the rotation.
    ensure!(kms.requests() == 3 + 3, "{} requests", kms.requests());
    Ok(())
}
