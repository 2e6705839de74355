//! The protocol: one request, one reply, for any input.

use std::fs;
use std::io::Write;

use serde_json::{Value, json};

use crate::bench::{
    Bench, CONTEXT, chmod, command, failure, plaintext, reply, rest, rotate_action, serve_text,
    unwrap_action, wrap_action,
};

#[test]
fn a_batch_is_answered_in_order() {
    let bench = Bench::new();
    let secret = [7; 32];
    let wrapped = bench.wrap(&secret);
    let results = bench.serve(vec![
        bench.operation(wrap_action(&[1; 32])),
        bench.operation(rotate_action()),
        bench.operation(unwrap_action(&wrapped)),
        bench.operation(wrap_action(&secret)),
        bench.operation(json!("check_options")),
        bench.operation(json!("check")),
    ]);
    assert_eq!(results[0]["wrapped"]["key_version"], 1);
    assert_eq!(results[1], json!({"rotated": {"key_version": 2}}));
    assert_eq!(results[2]["unwrapped"]["key_version"], 1);
    assert_eq!(plaintext(&results[2]), secret);
    assert_eq!(results[3]["wrapped"]["key_version"], 2);
    assert_eq!(results[4], "options_ok");
    let found = &results[5]["checked"]["findings"];
    let there = found.as_array().unwrap().iter().find(|found| found["what"] == "the key exists");
    let summary = there.unwrap()["seen"].as_str().unwrap();
    assert!(summary.starts_with("wraps with version 2, unwraps versions from 1 on; "), "{summary}");
    assert!(summary.contains(bench.key_file().to_str().unwrap()), "{summary}");
}

#[test]
fn secrets_of_every_length_come_back() {
    let bench = Bench::new();
    for length in [0, 1, 31, 32, 64, 100_000] {
        let secret: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
        let wrapped = bench.wrap(&secret);
        assert_eq!(plaintext(&bench.unwrap(&wrapped)), secret);
    }
}

#[test]
fn the_same_secret_never_wraps_to_the_same_bytes() {
    let bench = Bench::new();
    assert_ne!(bench.wrap(&[1; 32]), bench.wrap(&[1; 32]));
}

/// Files made by vectors/generate.py, another implementation of the same formats.
#[test]
fn golden_files_can_be_unwrapped() {
    let bench = Bench::empty();
    let path = bench.key_file();
    fs::write(&path, include_str!("../../vectors/key_file_1.json")).unwrap();
    chmod(&path, 0o600);
    let vectors: Value =
        serde_json::from_str(include_str!("../../vectors/file_wrapped_1.json")).unwrap();
    let vectors = vectors.as_array().unwrap();
    assert_eq!(vectors.len(), 4);
    for vector in vectors {
        let text = |part: &str| vector[part].as_str().unwrap();
        let action = unwrap_action(&vector["wrapped"]);
        let outcome = bench.one(bench.operation_on(&path, text("key"), text("context"), action));
        assert_eq!(outcome["unwrapped"]["plaintext"], vector["plaintext"], "{outcome}");
        assert_eq!(outcome["unwrapped"]["key_version"], vector["key_version"]);
    }
}

#[test]
fn no_operations_no_results() {
    let bench = Bench::empty();
    assert_eq!(bench.serve(vec![]), Vec::<Value>::new());
}

#[test]
fn one_bad_operation_spoils_no_other() {
    let bench = Bench::new();
    let mut unknown = bench.operation(wrap_action(&[1; 32]));
    unknown["provider"]["kind"] = json!("tape");
    let results = bench.serve(vec![
        unknown,
        bench.operation_on(&bench.key_file(), "nobody", CONTEXT, wrap_action(&[1; 32])),
        bench.operation(wrap_action(&[1; 32])),
    ]);
    let refused = failure(&results[0], "bad_options");
    assert_eq!(
        refused.message,
        "master key \"main\" of provider \"disk\": unknown provider kind \"tape\""
    );
    assert_eq!(
        refused.hint,
        "Known kinds: file, vault, aws_kms, gcp_kms, azure_key_vault, pkcs11, kmip, command."
    );
    failure(&results[1], "key_missing");
    assert_eq!(results[2]["wrapped"]["key_version"], 1);
}

#[test]
fn names_cannot_forge_log_lines() {
    let bench = Bench::new();
    let forged = format!("x\nFATAL: forged\x1b[0m{}", "y".repeat(1000));
    let mut operation =
        bench.operation_on(&bench.key_file(), &forged, CONTEXT, wrap_action(&[1; 32]));
    operation["provider"]["name"] = json!(forged);
    let failed = failure(&bench.one(operation), "key_missing");
    for text in [failed.message, failed.detail, failed.hint] {
        assert!(!text.chars().any(char::is_control) && text.len() < 1000, "{text}");
    }
}

#[track_caller]
fn refused(request: &[u8]) -> String {
    let reply = reply(&serve_text(request));
    assert_eq!(reply["results"].as_array().unwrap().len(), 1);
    failure(&reply["results"][0], "bad_request").message
}

#[test]
fn garbage_is_refused() {
    for garbage in [&b"\n"[..], b"hello", b"{", b"[]", b"null", b"\xff\xfe\x00", b"{\"version\":1}"]
    {
        let message = refused(garbage);
        assert!(message.starts_with("message cannot be read at line"), "{message}");
    }
}

#[test]
fn every_truncation_is_refused() {
    let bench = Bench::new();
    let text = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    for length in (1..text.len()).step_by(17) {
        refused(&text.as_bytes()[..length]);
    }
}

#[test]
fn bytes_after_the_request_are_not_read() {
    let bench = Bench::new();
    let text = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    let reply = reply(&serve_text(format!("\n {text}\n{text}}}").as_bytes()));
    assert_eq!(reply["results"].as_array().unwrap().len(), 1);
}

#[test]
fn the_caller_may_keep_its_end_open() {
    let bench = Bench::new();
    let request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    let mut child = command(&["serve"]).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(request.as_bytes()).unwrap();
    let output = rest(child.stdout.take().unwrap());
    assert!(output.contains("wrapped"), "{output}");
    assert!(child.wait().unwrap().success());
    drop(input);
}

#[test]
fn refused_requests_are_not_repeated() {
    let bench = Bench::new();
    let mut request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]);
    request["operations"][0]["action"] = json!({"wrap": {"plaintext": "S3CRET-not-base64"}});
    assert!(!refused(request.to_string().as_bytes()).contains("S3CRET"));
    request["operations"][0]["action"] = json!({"S3CRET": 1});
    assert!(!refused(request.to_string().as_bytes()).contains("S3CRET"));
}

#[test]
fn too_much_is_refused() {
    let bench = Bench::new();
    let mut request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    request.pop();
    request.push_str(&" ".repeat((1 << 20) - request.len()));
    assert_eq!(refused(format!("{request}}}").as_bytes()), "message is larger than 1048576 bytes");
    request.pop();
    reply(&serve_text(format!("{request}}}").as_bytes()));
    assert_eq!(refused(&vec![b'{'; 8 << 20]), "message is larger than 1048576 bytes");
}

#[test]
fn deep_nesting_is_refused() {
    refused(&vec![b'['; 1 << 20]);
    let deep = format!("{{\"version\":1,\"x\":{}", "[".repeat(1 << 19));
    refused(deep.as_bytes());
}

#[test]
fn another_version_is_named() {
    let bench = Bench::new();
    for version in [0, 2, u64::from(u32::MAX)] {
        let mut request = bench.request(1000, vec![]);
        request["version"] = json!(version);
        request["new"] = json!("a field of that version");
        let output = serve_text(request.to_string().as_bytes());
        let refused = failure(&reply(&output)["results"][0], "bad_request");
        let expected = format!("unsupported protocol version {version}, expected version 1");
        assert_eq!(refused.message, expected);
        assert!(refused.hint.contains("pagevault.keyring_command"), "{refused:?}");
    }
}

#[test]
fn unknown_fields_are_refused() {
    let bench = Bench::new();
    let good = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]);
    for pointer in ["", "/operations/0", "/operations/0/provider"] {
        let mut request = good.clone();
        request.pointer_mut(pointer).unwrap()["surprise"] = json!(1);
        refused(request.to_string().as_bytes());
    }
}

/// A request as large as possible, of operations that fail, for a provider with this name.
fn failing(bench: &Bench, name: &str) -> (usize, String) {
    let mut missing = bench.operation(wrap_action(&[1; 32]));
    missing["provider"] = json!({"name": name, "kind": "k", "options": {}});
    let count = (1 << 20) / (missing.to_string().len() + 1) - 1;
    (count, bench.request(20_000, vec![missing; count]).to_string())
}

#[test]
fn a_reply_that_would_be_too_large_has_short_failures() {
    let (count, request) = failing(&Bench::empty(), "p");
    let reply = reply(&serve_text(request.as_bytes()));
    let results = reply["results"].as_array().unwrap();
    assert_eq!(results.len(), count);
    for outcome in results {
        let failed = failure(outcome, "bad_options");
        assert!(failed.message.ends_with("unknown provider kind \"k\""), "{failed:?}");
        assert_eq!((failed.detail.as_str(), failed.hint.as_str()), ("", ""));
    }
}

#[test]
fn a_reply_that_is_too_large_even_so_says_so() {
    // Each character is longer in messages.
    let (_, request) = failing(&Bench::empty(), &"\u{7f}".repeat(200));
    assert_eq!(refused(request.as_bytes()), "reply would be too large");
}
