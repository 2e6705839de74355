use pagevault_keystore::protocol::*;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

fn spec() -> ProviderSpec {
    let options = json!({"path": "/etc/pagevault/keys"});
    let Value::Object(options) = options else { unreachable!() };
    ProviderSpec { name: "disk".into(), kind: "file".into(), options, programs: false }
}

fn operation(action: Action) -> Operation {
    let (key, context) = ("main".into(), "pagevault/1/00/5".into());
    Operation { provider: spec(), key, context, action, once: false }
}

pub(crate) fn request() -> Request {
    let actions = vec![
        Action::Wrap { plaintext: SecretBytes::from_slice(&[0xA5; 32]) },
        Action::Unwrap { wrapped: Base64(vec![1, 2, 3]) },
        Action::Rewrap { from_key: "old".into(), wrapped: Base64(vec![1, 2, 3]) },
        Action::Rotate { wrapped: Base64(vec![1, 2, 3]) },
        Action::Check,
        Action::CheckOptions,
    ];
    let operations = actions.into_iter().map(operation).collect();
    Request::new(5000, "/var/lib/postgresql/17/main".into(), operations)
}

pub(crate) fn failure() -> Failure {
    Failure {
        class: ErrorClass::KeyMissing,
        message: "provider \"disk\" has no key \"main\"".into(),
        detail: Some("The key file holds no key of that name.".into()),
        hint: None,
        retry: false,
    }
}

pub(crate) fn reply() -> Reply {
    let results = vec![
        Outcome::Wrapped { wrapped: Base64(vec![1, 2, 3]), key_version: 3 },
        Outcome::Unwrapped { plaintext: SecretBytes::from_slice(&[0xA5; 32]), key_version: 3 },
        Outcome::Rotated { key_version: 4 },
        Outcome::OptionsOk,
        Outcome::Failed(failure()),
        Outcome::Checked {
            findings: vec![
                Finding { what: "the place".into(), seen: "there".into(), failure: None },
                Finding { what: "the key".into(), seen: String::new(), failure: Some(failure()) },
            ],
        },
    ];
    let elapsed_us = (1..=results.len() as u64).collect();
    Reply::new(results, elapsed_us)
}

#[test]
fn messages_are_read_again() {
    let text = request().to_json().unwrap();
    let read = Request::from_json(&text).unwrap();
    assert_eq!(*read.to_json().unwrap(), *text);
    let Action::Wrap { plaintext } = &read.operations[0].action else { panic!() };
    assert_eq!(plaintext.expose(), [0xA5; 32]);

    let text = reply().to_json().unwrap();
    let read = Reply::from_json(&text, 6).unwrap();
    assert_eq!(*read.to_json().unwrap(), *text);
    assert!(matches!(&read.results[4], Outcome::Failed(found) if *found == failure()));
}

#[test]
fn secrets_are_not_shown() {
    let shown = format!("{:?} {:?}", request(), reply());
    assert!(shown.contains("SecretBytes(32 bytes)"), "{shown}");
    assert!(!shown.contains("165") && !shown.contains("paWl") && !shown.contains("/etc/pagevault"));
}

#[test]
fn unreadable_messages_are_not_quoted() {
    let secrets = [
        json!({"version": 1, "deadline_ms": "hunter2", "data_directory": "", "operations": []}),
        json!({"version": 1, "deadline_ms": 1, "data_directory": "", "operations": [],
               "hunter2": 1}),
        json!({"version": 1, "hunter2": 1}),
        json!({"version": "hunter2"}),
    ];
    for text in secrets {
        let error = Request::from_json(text.to_string().as_bytes()).unwrap_err();
        assert!(matches!(error, ProtocolError::Malformed { line: 1, .. }), "{error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }
    let mut text = request().to_json().unwrap().to_vec();
    let at = text.windows(4).position(|window| window == b"paWl").unwrap();
    text[at] = b'!';
    let error = Request::from_json(&text).unwrap_err();
    assert!(!format!("{error} {error:?}").contains("WlpaWl"));
}

#[test]
fn the_version_is_checked_before_the_rest() {
    let text = br#"{"version": 2, "news": {"from": ["the", "future"]}}"#;
    let error = Request::from_json(text).unwrap_err();
    assert!(matches!(error, ProtocolError::Version { found: 2 }));
    assert_eq!(error.to_string(), "unsupported protocol version 2, expected version 1");
    assert!(matches!(Reply::from_json(text, 1), Err(ProtocolError::Version { found: 2 })));
}

#[test]
fn size_is_limited_both_ways() {
    let long = vec![b' '; SIZE_LIMIT + 1];
    assert!(matches!(Request::from_json(&long), Err(ProtocolError::TooLarge)));
    let plaintext = SecretBytes::from_slice(&vec![0; SIZE_LIMIT]);
    let large = Request::new(1, String::new(), vec![operation(Action::Wrap { plaintext })]);
    assert!(matches!(large.to_json(), Err(ProtocolError::TooLarge)));
    // Larger than the first buffer, within the limit.
    let plaintext = SecretBytes::from_slice(&vec![7; 100_000]);
    let request = Request::new(1, String::new(), vec![operation(Action::Wrap { plaintext })]);
    let read = Request::from_json(&request.to_json().unwrap()).unwrap();
    let Action::Wrap { plaintext } = &read.operations[0].action else { panic!() };
    assert_eq!(plaintext.expose(), [7; 100_000]);
    // The JSON parser limits nesting.
    let deep = format!("{{\"version\":1,\"x\":{}", "[".repeat(100_000));
    assert!(Request::from_json(deep.as_bytes()).is_err());
}

#[test]
fn a_reply_needs_one_outcome_for_each_operation() {
    let text = reply().to_json().unwrap();
    let error = Reply::from_json(&text, 5).unwrap_err();
    assert!(matches!(error, ProtocolError::Count { expected: 5, found: 6 }));
    let untimed = Reply::new(vec![Outcome::OptionsOk], vec![]).to_json().unwrap();
    assert!(matches!(Reply::from_json(&untimed, 1), Err(ProtocolError::Count { .. })));
    let none = Reply::new(vec![], vec![]).to_json().unwrap();
    let error = Reply::from_json(&none, 1).unwrap_err();
    assert!(matches!(error, ProtocolError::Count { expected: 1, found: 0 }));

    let refusal = Failure { class: ErrorClass::BadRequest, ..failure() };
    let text = Reply::new(vec![Outcome::Failed(refusal.clone())], vec![0]).to_json().unwrap();
    let error = Reply::from_json(&text, 5).unwrap_err();
    assert!(matches!(error, ProtocolError::Refused(found) if found == refusal));
    let other = Reply::new(vec![Outcome::Failed(failure())], vec![0]).to_json().unwrap();
    assert!(matches!(Reply::from_json(&other, 5), Err(ProtocolError::Count { .. })));
}

#[test]
fn class_names_are_those_of_the_protocol() {
    use ErrorClass::*;
    let all = [
        Unreachable,
        Tls,
        Unauthenticated,
        Denied,
        KeyMissing,
        KeyDisabled,
        Sealed,
        Throttled,
        Deadline,
        WrongCiphertext,
        BadOptions,
        BadRequest,
        Insecure,
        Internal,
    ];
    for class in all {
        assert_eq!(serde_json::to_value(class).unwrap(), json!(class.name()));
    }
}

proptest! {
    #[test]
    fn any_text_is_refused_without_panic(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert!(Request::from_json(&bytes).is_err());
        prop_assert!(Reply::from_json(&bytes, 1).is_err());
    }

    #[test]
    fn damaged_messages_never_panic(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut text = reply().to_json().unwrap().to_vec();
        let at = at.index(text.len());
        text[at] = byte;
        let _ = Reply::from_json(&text, 6);
    }

    #[test]
    fn secret_bytes_of_any_length_are_read_again(bytes in vec(any::<u8>(), 0..300)) {
        let text = serde_json::to_vec(&SecretBytes::from_slice(&bytes)).unwrap();
        let read: SecretBytes = serde_json::from_slice(&text).unwrap();
        prop_assert_eq!(read.expose(), &bytes[..]);
    }
}
