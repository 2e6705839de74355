//! Checks of replies, errors of the service, and replies of others.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::gcp::Gcp;
use pagevault_tests::key_servers::rest::Fault;
use serde_json::{Value, json};

use super::error;
use crate::Test;
use crate::contract::{CONTEXT, KEY, NEXT, SECRET, Subject, bytes, says, unwrap, wrap};

pub(super) const TESTS: &[Test] = &[
    Test { name: "gcp_kms::requests_name_version_and_context", needs: &[], run: requests },
    Test { name: "gcp_kms::replies_with_wrong_checksums_are_not_used", needs: &[], run: checksums },
    Test {
        name: "gcp_kms::what_was_changed_on_the_way_is_sent_again",
        needs: &[],
        run: sent_again,
    },
    Test { name: "gcp_kms::each_error_has_its_class", needs: &[], run: errors },
    Test { name: "gcp_kms::replies_of_others_are_outages", needs: &[], run: others },
    Test { name: "gcp_kms::golden_files_name_their_key", needs: &[], run: golden },
];

fn requests() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let (wrapped, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version == 1);
    let key = gcp.name(KEY);
    let seen = gcp.server.seen();
    let paths: Vec<&str> = seen.iter().map(|asked| asked.path.as_str()).collect();
    let encrypt = format!("/v1/{key}/cryptoKeyVersions/1:encrypt");
    ensure!(paths == ["/token", format!("/v1/{key}").as_str(), &encrypt], "{paths:?}");
    let body = seen[2].json();
    let fields: Vec<&String> = body.as_object().context("no object")?.keys().collect();
    let expected = [
        "additionalAuthenticatedData",
        "additionalAuthenticatedDataCrc32c",
        "plaintext",
        "plaintextCrc32c",
    ];
    ensure!(fields == expected, "{fields:?}");
    ensure!(body["plaintext"] == SECRET && body["plaintextCrc32c"].is_string(), "{body}");
    provider.unwrap(KEY, CONTEXT, &wrapped)?;
    let paths = gcp.server.paths();
    ensure!(paths == ["POST /token".to_owned(), format!("POST /v1/{key}:decrypt")], "{paths:?}");
    // The stored form names the key (docs/formats.md).
    ensure!(bytes(&wrapped)?[3..].starts_with(key.as_bytes()));
    // A complete name is the same key.
    ensure!(provider.unwrap(&key, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

type Change = fn(&mut Value);

fn checksums() -> Result<()> {
    let gcp = Gcp::start()?;
    let mut provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    provider.deadline_ms = 2000;
    let changes: [(&str, Change); 8] = [
        (":encrypt", |reply| reply["ciphertextCrc32c"] = json!("1")),
        (":encrypt", |reply| reply["ciphertextCrc32c"] = json!(null)),
        (":encrypt", |reply| reply["ciphertext"] = json!("AAAA")),
        (":encrypt", |reply| reply["verifiedPlaintextCrc32c"] = json!(false)),
        (":encrypt", |reply| reply["verifiedAdditionalAuthenticatedDataCrc32c"] = json!(false)),
        (":decrypt", |reply| reply["plaintextCrc32c"] = json!("-1")),
        (":decrypt", |reply| reply["plaintextCrc32c"] = json!(null)),
        (":decrypt", |reply| reply["plaintext"] = json!("AAAA")),
    ];
    for (number, (path, change)) in changes.into_iter().enumerate() {
        gcp.server.fault(path, usize::MAX, Fault::Change(change));
        let action = if path == ":encrypt" { wrap() } else { unwrap(&wrapped) };
        let failure = provider.refused(KEY, CONTEXT, action, "unreachable")?;
        ensure!(failure["retry"] == true, "{number}: {failure}");
        says(&failure, "checksum")?;
        gcp.server.repair();
    }
    Ok(())
}

fn sent_again() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let text =
        "The checksum in field ciphertext_crc32c did not match the data in field ciphertext.";
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    gcp.server.fault(":decrypt", 1, error(400, "INVALID_ARGUMENT", text));
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    // A checksum as a number is accepted.
    gcp.server.fault(
        ":decrypt",
        1,
        Fault::Change(|reply| {
            let sum = reply["plaintextCrc32c"].as_str().and_then(|sum| sum.parse::<u64>().ok());
            reply["plaintextCrc32c"] = json!(sum);
        }),
    );
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn errors() -> Result<()> {
    let gcp = Gcp::start()?;
    let mut provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    provider.deadline_ms = 2000;
    for (status, code, message, class, retry) in [
        (401, "UNAUTHENTICATED", "expired", "unauthenticated", false),
        (403, "PERMISSION_DENIED", "denied", "denied", false),
        (404, "NOT_FOUND", "CryptoKey not found.", "key_missing", false),
        (400, "INVALID_ARGUMENT", "Invalid name", "bad_options", false),
        (
            400,
            "FAILED_PRECONDITION",
            "k is not enabled, current state is: DESTROYED.",
            "key_missing",
            false,
        ),
        (
            400,
            "FAILED_PRECONDITION",
            "The external key manager is not reachable.",
            "unreachable",
            true,
        ),
        (409, "ABORTED", "x", "unreachable", true),
        (500, "INTERNAL", "x", "unreachable", true),
        (503, "UNAVAILABLE", "x", "unreachable", true),
        (504, "DEADLINE_EXCEEDED", "x", "unreachable", true),
    ] {
        gcp.server.fault(":decrypt", usize::MAX, error(status, code, message));
        let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), class)?;
        ensure!(failure["retry"] == retry, "{code}: {failure}");
        gcp.server.repair();
    }
    gcp.with_key(NEXT, |key| key.set_purpose("ASYMMETRIC_DECRYPT"))?;
    let failure = provider.refused(NEXT, CONTEXT, wrap(), "bad_options")?;
    says(&failure, "ASYMMETRIC_DECRYPT")?;
    gcp.with_key(KEY, |key| key.set_primary(None))?;
    let failure = provider.refused(KEY, CONTEXT, wrap(), "key_disabled")?;
    says(&failure, "has no primary version")
}

/// What is not Google's says nothing about the key, whatever its status.
fn others() -> Result<()> {
    let gcp = Gcp::start()?;
    let mut provider = Subject::provider(&gcp);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    provider.deadline_ms = 2000;
    let long = format!("{{\"x\": \"{}\"}}", "x".repeat(2 << 20));
    for (status, body) in [
        (200, "<html>".to_owned()),
        (200, "{}".to_owned()),
        (200, long),
        (302, String::new()),
        (400, "<html>".to_owned()),
        (401, "login".to_owned()),
        (403, "{\"error\": \"denied\"}".to_owned()),
        (404, "default backend - 404".to_owned()),
        (
            404,
            "{\"error\": {\"code\": 403, \"status\": \"NOT_FOUND\", \"message\": \"x\"}}"
                .to_owned(),
        ),
        (502, String::new()),
    ] {
        for path in [":decrypt", "/token"] {
            gcp.server.fault(path, usize::MAX, Fault::Reply(status, body.clone()));
            let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), "unreachable")?;
            ensure!(failure["retry"] == true, "{status} {path}: {failure}");
            gcp.server.repair();
        }
    }
    Ok(())
}

fn golden() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let vectors = include_str!("../../../../keyring/vectors/gcp_kms_wrapped_1.json");
    let vectors: Vec<Value> = serde_json::from_str(vectors)?;
    for vector in vectors {
        let failure =
            provider.refused(KEY, CONTEXT, unwrap(&vector["wrapped"]), "wrong_ciphertext")?;
        says(&failure, vector["key"].as_str().context("no key")?)?;
    }
    super::nothing_sent(&gcp)
}
