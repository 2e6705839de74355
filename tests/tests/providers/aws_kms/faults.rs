//! Errors of AWS KMS, temporary and permanent, and a server that does not reply.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::free_port;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{Credentials, REGION, without_ambient_credentials};
use serde_json::{Value, json};

use super::wrapped_by;
use crate::Test;
use crate::contract::{CONTEXT, SECRET};

pub(super) const TESTS: &[Test] = &[
    Test { name: "aws_kms::passing_errors_are_tried_again", needs: &[], run: passing_errors },
    Test { name: "aws_kms::requests_name_key_and_context", needs: &[], run: requests_name_them },
    Test { name: "aws_kms::lasting_errors_are_not", needs: &[], run: lasting_errors },
    Test { name: "aws_kms::nobody_there_is_unreachable", needs: &[], run: nobody_there },
    Test { name: "aws_kms::a_silent_server_costs_the_deadline", needs: &[], run: silent_server },
    Test { name: "aws_kms::answers_of_others_are_no_answers", needs: &[], run: answers_of_others },
    Test {
        name: "aws_kms::ciphertexts_name_their_key",
        needs: &[],
        run: ciphertexts_name_their_key,
    },
];

fn provider(endpoint: &str, credentials: &Credentials, deadline_ms: u64) -> Provider {
    let options = json!({"region": REGION, "endpoint": endpoint,
        "insecure_loopback_http": true, "credentials_file": credentials.path()});
    let mut provider = without_ambient_credentials(Provider::new("aws_kms", options));
    provider.deadline_ms = deadline_ms;
    provider
}

fn arn() -> String {
    format!("arn:aws:kms:{REGION}:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab")
}

fn other() -> String {
    arn().replace("1234abcd", "00000000")
}

fn unwrap() -> Value {
    json!({"unwrap": {"wrapped": wrapped_by(&arn(), 20_260_101_000_000, b"ciphertext")}})
}

fn passing_errors() -> Result<()> {
    let root = Credentials::root()?;
    for (status, code, class) in [
        (400, "ThrottlingException", "throttled"),
        (400, "LimitExceededException", "throttled"),
        (500, "KMSInternalException", "unreachable"),
        (500, "DependencyTimeoutException", "unreachable"),
        (500, "KeyUnavailableException", "unreachable"),
        // This says nothing about the key itself: its external key store is unavailable.
        (400, "KMSInvalidStateException", "unreachable"),
    ] {
        let kms = Canned::error(status, code)?;
        let reply = provider(&kms.endpoint, &root, 3000).refused("k", CONTEXT, unwrap(), class)?;
        ensure!(reply["retry"] == true, "{reply}");
        let detail = reply["detail"].as_str().unwrap_or_default();
        ensure!(detail.contains(code) && detail.contains("canned-1"), "{reply}");
        // Retries come from pagevault and not also from the SDK. On a busy machine the last reply
        // may come too late.
        let made = kms.requests();
        let counted = |tries| detail.ends_with(&format!("Tried {tries} times."));
        ensure!(made > 1 && (counted(made) || counted(made - 1)), "{reply}: {made}");
    }
    Ok(())
}

/// No emulator would detect missing fields in these requests.
fn requests_name_them() -> Result<()> {
    let root = Credentials::root()?;
    let kms = Canned::actions(|action| match action {
        "describekey" => {
            let key = json!({"KeyId": "1", "Arn": arn(), "CreationDate": 1_767_225_600,
                "KeyState": "Enabled", "KeyUsage": "ENCRYPT_DECRYPT"});
            (200, json!({"KeyMetadata": key}))
        }
        "listkeyrotations" => (200, json!({"Rotations": [], "Truncated": false})),
        "decrypt" => (200, json!({"KeyId": other(), "Plaintext": SECRET})),
        _ => (200, json!({"KeyId": arn(), "SourceKeyId": other(), "CiphertextBlob": "AAAA"})),
    })?;
    let provider = provider(&kms.endpoint, &root, 5000);
    let other = other();
    let wrapped = json!(wrapped_by(&other, 20_250_101_000_000, b"\0\0\0"));
    let (context, arn) = (json!({"pagevault": CONTEXT}), arn());

    ensure!(
        provider.wrap("alias/x", CONTEXT, SECRET)?.0
            == wrapped_by(&arn, 20_260_101_000_000, b"\0\0\0")
    );
    provider.unwrap("alias/x", CONTEXT, &wrapped)?;
    provider.rewrap("alias/y", "alias/x", CONTEXT, &wrapped)?;
    let described = ["describekey", "listkeyrotations"].map(str::to_owned);
    let seen = kms.seen();
    let actions: Vec<&str> = seen.iter().map(|asked| asked.action.as_str()).collect();
    ensure!(actions[..2] == described && actions[4..6] == described, "{actions:?}");
    let expected = [
        (2, "encrypt", json!({"KeyId": arn, "Plaintext": SECRET, "EncryptionContext": context})),
        (
            3,
            "decrypt",
            json!({"KeyId": other, "CiphertextBlob": "AAAA",
            "EncryptionContext": context}),
        ),
        (
            6,
            "reencrypt",
            json!({"SourceKeyId": other, "DestinationKeyId": arn,
            "CiphertextBlob": "AAAA", "SourceEncryptionContext": context,
            "DestinationEncryptionContext": context}),
        ),
    ];
    for (at, action, body) in expected {
        ensure!(seen[at].action == action && seen[at].body == body, "{:?}", seen[at]);
    }
    ensure!(seen.len() == 7);
    Ok(())
}

fn lasting_errors() -> Result<()> {
    let root = Credentials::root()?;
    for (code, class) in [
        ("AccessDeniedException", "denied"),
        ("ExpiredTokenException", "unauthenticated"),
        ("InvalidSignatureException", "unauthenticated"),
        ("UnrecognizedClientException", "unauthenticated"),
        ("NotFoundException", "key_missing"),
        ("DisabledException", "key_disabled"),
        ("InvalidCiphertextException", "wrong_ciphertext"),
        // No emulator here returns this error for a ciphertext of another key.
        ("IncorrectKeyException", "wrong_ciphertext"),
    ] {
        let kms = Canned::error(400, code)?;
        let reply = provider(&kms.endpoint, &root, 5000).refused("k", CONTEXT, unwrap(), class)?;
        ensure!(reply["retry"] == false && kms.requests() == 1, "{reply}");
        // The server's message about signatures may contain a session token.
        let is_repeated = reply.to_string().contains("said by the server");
        ensure!(!(is_repeated && class == "unauthenticated"), "{reply}");
    }
    Ok(())
}

fn nobody_there() -> Result<()> {
    let root = Credentials::root()?;
    let endpoint = format!("http://127.0.0.1:{}", free_port()?);
    let reply = provider(&endpoint, &root, 3000).refused("k", CONTEXT, unwrap(), "unreachable")?;
    ensure!(reply["message"].as_str().is_some_and(|text| text.contains(&endpoint)), "{reply}");
    let detail = reply["detail"].as_str().unwrap_or_default();
    ensure!(detail.starts_with("Connection refused"), "{reply}");

    let unknown = "https://kms.invalid";
    let reply = provider(unknown, &root, 3000).refused("k", CONTEXT, unwrap(), "unreachable")?;
    ensure!(reply["message"].as_str().is_some_and(|text| text.contains(unknown)), "{reply}");
    Ok(())
}

fn silent_server() -> Result<()> {
    let (root, silent) = (Credentials::root()?, Canned::silent()?);
    let start = Instant::now();
    let asked = provider(&silent.endpoint, &root, 3000);
    let reply = asked.refused("k", CONTEXT, unwrap(), "deadline")?;
    let took = start.elapsed();
    ensure!(took < Duration::from_secs(10), "took {took:?}");
    ensure!(silent.requests() == 1 && reply["retry"] == true, "{reply}");
    ensure!(
        reply["message"].as_str().is_some_and(|text| text.contains(&silent.endpoint)),
        "{reply}"
    );

    // A check ends in time too, and reports its steps so far.
    let reply = provider(&silent.endpoint, &root, 3000).ask("k", CONTEXT, json!("check"))?;
    let last = reply["checked"]["findings"].as_array().and_then(|findings| findings.last());
    ensure!(last.is_some_and(|last| last["what"] == "AWS KMS replies"), "{reply}");
    ensure!(last.is_some_and(|last| last["failure"]["class"] == "deadline"), "{reply}");
    Ok(())
}

fn answers_of_others() -> Result<()> {
    let root = Credentials::root()?;
    let page = "<html>said by the server</html>";
    for (status, class, retry) in [
        (200, "unreachable", true),
        (404, "unreachable", true),
        (429, "throttled", true),
        (503, "unreachable", true),
    ] {
        let other = Canned::answer(status, "text/html", page.into())?;
        let reply =
            provider(&other.endpoint, &root, 3000).refused("k", CONTEXT, unwrap(), class)?;
        ensure!(reply["retry"] == retry, "{reply}");
        ensure!(!reply.to_string().contains("said by the server"), "{reply}");
    }
    // Replies without required fields.
    let empty = Canned::answer(200, "application/x-amz-json-1.1", "{}".into())?;
    let asked = provider(&empty.endpoint, &root, 3000);
    for action in [unwrap(), json!({"wrap": {"plaintext": "AAAA"}})] {
        asked.refused("k", CONTEXT, action, "unreachable")?;
    }
    Ok(())
}

fn ciphertexts_name_their_key() -> Result<()> {
    let (root, silent) = (Credentials::root()?, Canned::silent()?);
    let asked = provider(&silent.endpoint, &root, 2000);
    let elsewhere = arn().replace(REGION, "us-east-1");
    for (arn, class) in
        [("", "wrong_ciphertext"), ("k", "wrong_ciphertext"), (&elsewhere, "bad_options")]
    {
        let action = json!({"unwrap": {"wrapped": wrapped_by(arn, 1, b"ciphertext")}});
        asked.refused("k", CONTEXT, action, class)?;
    }
    ensure!(silent.requests() == 0);
    Ok(())
}
