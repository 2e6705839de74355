//! The `command` provider: the requests to programs, their answers, and the results.

use std::fs;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::bench::{
    CONTEXT, chmod, failure, plaintext, rotate_action, run, stdout, unwrap_action, what_is_well,
    wrap_action,
};
use crate::programs::{PLAIN, Programs, READ};

#[test]
fn a_program_unwraps_what_it_wrapped() {
    let programs = Programs::new(PLAIN);
    for length in [0, 1, 32, 64, 100_000] {
        let secret: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
        let outcome = programs.one(unwrap_action(&programs.wrap(&secret)));
        assert_eq!(plaintext(&outcome), secret);
        assert_eq!(outcome["unwrapped"]["key_version"], 1);
    }
}

#[test]
fn a_program_gets_these_fields_and_never_the_secret() {
    let programs = Programs::with("cat > \"$1\"; echo 'wrapped a:b'; echo 'key_version 7'");
    let secret = b"0123456789abcdef0123456789ABCDEF";
    let outcome = programs.one(wrap_action(secret));
    assert_eq!(outcome["wrapped"]["key_version"], 7, "{outcome}");
    let told = programs.noted();
    let (start, key) = told.trim_end().rsplit_once(' ').unwrap();
    assert_eq!(
        start,
        format!("pagevault-command 1\noperation wrap\nkey main\ncontext {CONTEXT}\nplaintext")
    );
    assert_eq!(STANDARD.decode(key).unwrap().len(), 32);
    assert!(!told.contains(&STANDARD.encode(secret)));

    // Each request has another key.
    programs.one(wrap_action(secret));
    assert_ne!(programs.noted(), told);

    programs.one(unwrap_action(&outcome["wrapped"]["wrapped"]));
    let expected = format!(
        "pagevault-command 1\noperation unwrap\nkey main\ncontext {CONTEXT}\nkey_version 7\n\
         wrapped a:b\n"
    );
    assert_eq!(programs.noted(), expected);
}

/// Files made by vectors/generate.py, another implementation of the same format.
#[test]
fn golden_files_can_be_unwrapped() {
    let programs = Programs::new(PLAIN);
    let vectors: Value =
        serde_json::from_str(include_str!("../../vectors/command_wrapped_1.json")).unwrap();
    let vectors = vectors.as_array().unwrap();
    assert_eq!(vectors.len(), 2);
    for vector in vectors {
        let text = |part: &str| vector[part].as_str().unwrap();
        let action = unwrap_action(&vector["wrapped"]);
        let operation =
            programs.operation_with(programs.options(), text("key"), text("context"), action);
        let outcome = programs.bench.one(operation);
        assert_eq!(outcome["unwrapped"]["plaintext"], vector["plaintext"], "{outcome}");
        assert_eq!(outcome["unwrapped"]["key_version"], vector["key_version"]);
    }
}

#[test]
fn a_wrapped_key_opens_in_its_context_and_under_its_name_only() {
    let programs = Programs::new(PLAIN);
    let wrapped = programs.wrap(&[5; 32]);
    for (key, context) in [("main", "pagevault/1/1"), ("other", CONTEXT), ("mainp", &CONTEXT[1..])]
    {
        let options = programs.options();
        let operation = programs.operation_with(options, key, context, unwrap_action(&wrapped));
        let failed = programs.failed(&programs.bench.one(operation), "wrong_ciphertext");
        assert!(failed.detail.contains("for another database"), "{failed:?}");
    }
    assert_eq!(plaintext(&programs.one(unwrap_action(&wrapped))), [5; 32]);
}

/// The worst program: it returns the right key for every request.
const FORGIVING: &str = "\
case $operation in
    wrap) echo \"$data\" > \"$1\"; echo 'wrapped opaque' ;;
    unwrap) echo \"plaintext $(cat \"$1\")\" ;;
esac
";

#[test]
fn every_changed_byte_of_a_wrapped_key_is_refused_whatever_the_program_does() {
    let programs = Programs::new(FORGIVING);
    let wrapped = programs.wrap(&[5; 32]);
    assert_eq!(plaintext(&programs.one(unwrap_action(&wrapped))), [5; 32]);
    let good = STANDARD.decode(wrapped.as_str().unwrap()).unwrap();
    assert_eq!(good.len(), 11 + "opaque".len() + 12 + 32 + 16);
    let mut bad: Vec<Vec<u8>> = (0..good.len()).map(|length| good[..length].to_vec()).collect();
    for at in 0..good.len() {
        let mut changed = good.clone();
        changed[at] ^= 2;
        bad.push(changed);
    }
    bad.push([good.as_slice(), &[0]].concat());
    let operations = bad
        .iter()
        .map(|bad| programs.operation(unwrap_action(&json!(STANDARD.encode(bad)))))
        .collect();
    for outcome in programs.bench.serve(operations) {
        failure(&outcome, "wrong_ciphertext");
    }
}

#[test]
fn the_wrong_key_from_a_program_is_noticed() {
    let programs = Programs::new(&PLAIN.replace("plaintext $data", "plaintext $(cat \"$1\")"));
    let wrapped = programs.wrap(&[5; 32]);
    fs::write(programs.note(), STANDARD.encode([0; 32])).unwrap();
    programs.failed(&programs.one(unwrap_action(&wrapped)), "wrong_ciphertext");
}

#[test]
fn exit_statuses_have_meanings() {
    for (status, class, passes, says) in [
        (10, "unreachable", true, "the key server or token cannot be reached"),
        (11, "unauthenticated", false, "its credentials were rejected"),
        (12, "denied", false, "it is not allowed to use the key"),
        (13, "key_missing", false, "there is no such key"),
        (14, "key_disabled", false, "the key is disabled or about to be deleted"),
        (15, "sealed", false, "the key server is sealed"),
        (16, "throttled", true, "the key server got too many requests"),
        (17, "wrong_ciphertext", false, "the wrapped key cannot be unwrapped"),
    ] {
        let programs = Programs::new(&format!("echo no >&2; exit {status}"));
        let request = programs.bench.request(1500, vec![programs.operation(wrap_action(&[1; 32]))]);
        let outcome = &served(&request)["results"][0];
        let failed = programs.failed(outcome, class);
        let path = programs.path();
        assert_eq!(failed.message, format!("program \"{}\" reports that {says}", path.display()));
        let detail = format!("Its exit status was {status}. {NOT_REPEATED}");
        assert!(failed.detail.starts_with(&detail), "{failed:?}");
        assert_eq!(outcome["failed"]["retry"].as_bool().unwrap_or_default(), passes, "{outcome}");
    }
}

fn served(request: &Value) -> Value {
    crate::bench::reply(&crate::bench::serve_text(request.to_string().as_bytes()))
}

#[test]
fn only_transient_failures_are_repeated() {
    for (status, times) in [(10, 3), (16, 3), (11, 1), (1, 1)] {
        let programs = Programs::new(&format!(
            "echo x >> \"$1\"; [ $(wc -l < \"$1\") -ge 3 ] || exit {status}; {PLAIN}"
        ));
        let outcome = programs.one(wrap_action(&[1; 32]));
        assert_eq!(programs.noted().lines().count(), times, "{outcome}");
        assert_eq!(outcome.get("wrapped").is_some(), times == 3, "{outcome}");
    }
}

#[test]
fn any_other_end_is_a_failure_of_the_program() {
    for (end, detail) in [
        ("exit 1", "Its exit status was 1. It printed nothing on standard error."),
        (
            "kill -KILL $$",
            "It was ended by SIGKILL (exit status 137). It printed nothing on standard error.",
        ),
        (
            "kill -TERM $$",
            "It was ended by SIGTERM (exit status 143). It printed nothing on standard error.",
        ),
    ] {
        let programs = Programs::new(end);
        let failed = programs.refused("unreachable");
        assert_eq!(failed.message, format!("program \"{}\" failed", programs.path().display()));
        assert_eq!(failed.detail, detail);
        assert!(failed.hint.contains("pagevault-keyring check"), "{failed:?}");
    }
}

#[test]
fn a_program_that_cannot_be_started_says_why() {
    for (text, why, cause) in [
        (
            "#!/nowhere/sh\n",
            "127: a program, or the interpreter of a script, does not exist",
            "No such file",
        ),
        (
            "\0\0\0\0",
            "126: it, or a program that it starts, cannot be executed",
            "Exec format error",
        ),
    ] {
        let programs = Programs::with("");
        crate::programs::install(&programs.path(), text);
        let failed = programs.refused("unreachable");
        assert_eq!(failed.detail, format!("Its exit status was {why}. {NOT_REPEATED}"));
        let shown = checked(&programs);
        assert!(shown.contains(&format!("It printed: \"could not be run: {cause}")), "{shown}");
    }
}

const NOT_REPEATED: &str =
    "What it printed on standard error is not repeated here, because it may contain secrets.";

/// What `pagevault-keyring check` prints, which does not succeed.
fn checked(programs: &Programs) -> String {
    let options = programs.options().to_string();
    let output =
        run(&["check", "--provider-kind", "command", "--options", &options, "--key", "main"]);
    assert!(!output.status.success());
    stdout(&output)
}

/// Whatever it is, and however it is spelled: errors of the server reach its log.
#[test]
fn standard_error_is_not_repeated_to_a_server() {
    let wrapped = Programs::new(PLAIN).wrap(&[1; 32]);
    let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    for script in [
        format!("set -ex; key={key}; false; echo \"plaintext $key\""),
        format!("echo {key} | base64 -d | od -An -tx1 | tr -d ' \\n' >&2; exit 1"),
        format!("echo 'plaintext {key}'; echo {key} | rev >&2; exit 17"),
        "echo 'curl: X-Vault-Token: hvs.S3CRET' >&2; exit 12".to_owned(),
    ] {
        let programs = Programs::new(&script);
        let request =
            programs.bench.request(1500, vec![programs.operation(unwrap_action(&wrapped))]);
        let outcome = &served(&request)["results"][0]["failed"];
        let detail = outcome["detail"].as_str().unwrap();
        assert!(detail.ends_with(NOT_REPEATED), "{script}: {outcome}");
        assert!(detail.starts_with("Its exit status was 1"), "{script}: {outcome}");
        assert!(detail.len() < 150, "{script}: {outcome}");
    }
}

#[test]
fn check_shows_the_last_line_of_standard_error() {
    for (script, told) in [
        ("echo first >&2; echo ' last ' >&2; echo >&2; echo '  ' >&2", "last".to_owned()),
        ("printf 'a\\033[31mFATAL\\007\\0b' >&2", "a\\u{1b}[31mFATAL\\u{7}\\u{0}b".to_owned()),
        ("printf 'x%.0s' $(seq 500) >&2", format!("{}...", "x".repeat(200))),
        ("seq 100000 >&2; echo end >&2", "end".to_owned()),
        ("printf '\\377\\376' >&2", "\u{fffd}\u{fffd}".to_owned()),
    ] {
        let programs = Programs::new(&format!("{script}; exit 13"));
        let shown = checked(&programs);
        let detail = format!("        Its exit status was 13. It printed: \"{told}\".\n");
        assert!(shown.contains(&detail), "{shown}");
    }
}

#[test]
fn check_does_not_show_a_known_key_on_standard_error() {
    let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    for script in [
        "echo \"could not wrap $data\" >&2; exit 1",
        // `set -x` prints what a shell is about to do; of a long line only the end is kept.
        &format!("echo 'plaintext {key}'; echo \"+ echo 'plaintext {key}'\" >&2; exit 1"),
        "printf '%s%s' \"$data\" \"$(printf 'x%.0s' $(seq 2006))\" >&2; exit 1",
    ] {
        let shown = checked(&Programs::new(script));
        assert!(shown.contains(NOT_REPEATED), "{shown}");
    }
}

#[test]
fn standard_error_of_a_success_is_ignored() {
    let programs = Programs::new(&format!("seq 100000 >&2\n{PLAIN}"));
    assert_eq!(plaintext(&programs.one(unwrap_action(&programs.wrap(&[1; 32])))), [1; 32]);
}

#[test]
fn an_answer_of_another_form_is_refused_and_not_repeated() {
    for (print, why) in [
        (":", "It lacks \"wrapped\"."),
        ("echo key_version 2", "It lacks \"wrapped\"."),
        (
            "echo S3CRET",
            "Its line 1 does not begin with \"wrapped\" or \"key_version\" and a space.",
        ),
        (
            "echo \"wrapped a\"; echo S3CRET",
            "Its line 2 does not begin with \"wrapped\" or \"key_version\" and a space.",
        ),
        (
            "echo \"plaintext S3CRET\"",
            "Its line 1 does not begin with \"wrapped\" or \"key_version\" and a space.",
        ),
        ("echo 'wrapped S3CRET S3CRET'", "Its \"wrapped\" is not printable ASCII without spaces."),
        ("printf 'wrapped '", "Its \"wrapped\" is not printable ASCII without spaces."),
        ("printf 'wrapped \\377'", "It is not text."),
        ("printf 'wrapped a\\nwrapped a'", "It gives \"wrapped\" twice."),
        (
            "printf 'wrapped a\\nkey_version 0'",
            "Its \"key_version\" is not a whole number from 1 to 9223372036854775807.",
        ),
        ("head -c 1000000 /dev/zero", "It has more than 65536 bytes."),
        ("cat /dev/zero", "It has more than 65536 bytes."),
        (
            "printf 'wrapped '; head -c 65529 /dev/zero | tr '\\0' a",
            "It has more than 65536 bytes.",
        ),
    ] {
        let programs = Programs::new(print);
        let failed = programs.refused("unreachable");
        let path = programs.path();
        let expected = format!("program \"{}\" returned an invalid answer", path.display());
        assert_eq!(failed.message, expected, "{print}");
        assert_eq!(failed.detail, why, "{print}");
        assert!(failed.hint.contains("base64 -w0"), "{failed:?}");
        assert!(!format!("{failed:?}").contains("S3CRET"));
    }
}

#[test]
fn an_answer_that_is_not_a_key_is_refused_and_not_repeated() {
    for (answer, why) in [
        ("", "It lacks \"plaintext\", 32 bytes in base64."),
        ("plaintext S3CRET", "Its \"plaintext\" is not 32 bytes in base64."),
        ("plaintext AAAA", "Its \"plaintext\" is not 32 bytes in base64."),
    ] {
        let unwrap = format!("printf '{answer}'");
        let programs = Programs::new(&PLAIN.replace("echo \"plaintext $data\"", &unwrap));
        let wrapped = programs.wrap(&[1; 32]);
        let failed = programs.failed(&programs.one(unwrap_action(&wrapped)), "unreachable");
        assert_eq!(failed.detail, why);
        assert!(!format!("{failed:?}").contains("S3CRET"));
    }
}

#[test]
fn the_largest_answer_is_accepted() {
    let programs = Programs::new(&format!(
        "[ $operation = wrap ] && data=$data,$(head -c 60000 /dev/zero | tr '\\0' a)\n\
         [ $operation = unwrap ] && data=${{data%%,*}}\n{PLAIN}"
    ));
    assert_eq!(plaintext(&programs.one(unwrap_action(&programs.wrap(&[1; 32])))), [1; 32]);
    // It does not matter if the program does not read the long request.
    let wrapped = programs.wrap(&[1; 32]);
    crate::programs::install(&programs.path(), "#!/bin/sh\nexec 0<&-\nexit 12");
    programs.failed(&programs.one(unwrap_action(&wrapped)), "denied");
}

#[test]
fn names_may_contain_anything_but_control_characters_and_outer_blanks() {
    let programs = Programs::new(PLAIN);
    let ask = |key: &str, context: &str| {
        let operation =
            programs.operation_with(programs.options(), key, context, wrap_action(&[1; 32]));
        programs.bench.one(operation)
    };
    for key in ["a b", "\u{e4}\u{1f511}", "'; rm -rf \"$HOME\"", "$(id)", "a=b", "-n", "\\n"] {
        assert!(ask(key, CONTEXT).get("wrapped").is_some(), "{key}");
    }
    for key in ["main\nplaintext x", "main\r", "\tmain", "main ", " main", "", "\u{85}", "\0"] {
        let failed = failure(&ask(key, CONTEXT), "bad_request");
        assert!(failed.message.ends_with("key cannot be passed to a program"), "{failed:?}");
    }
    failure(&ask("main", "a\nb"), "bad_request");
}

#[test]
fn rotation_is_done_by_a_program_of_its_own() {
    let programs = Programs::new(&format!(
        "v=$(cat \"$1\" 2>/dev/null || echo 1)\n\
         [ $operation = rotate ] && v=$((v + 1)) && echo $v > \"$1\"\n\
         [ $operation = unwrap ] || echo \"key_version $v\"\n{PLAIN}"
    ));
    let mut options = programs.options();
    options["rotate"] = options["wrap"].clone();
    let ask = |action: Value| {
        programs.bench.one(programs.operation_with(options.clone(), "main", CONTEXT, action))
    };
    let first = ask(wrap_action(&[1; 32]))["wrapped"].take();
    assert_eq!(first["key_version"], 1);
    let rotated = ask(json!({"rotate": {"wrapped": first["wrapped"]}}));
    assert_eq!(rotated, json!({"rotated": {"key_version": 2}}));
    // If it was interrupted before the rewrap, it continues there.
    assert_eq!(ask(json!({"rotate": {"wrapped": first["wrapped"]}})), rotated);
    let rewrap = json!({"rewrap": {"from_key": "main", "wrapped": first["wrapped"]}});
    let second = ask(rewrap)["wrapped"].take();
    assert_eq!(second["key_version"], 2);
    assert_eq!(ask(wrap_action(&[1; 32]))["wrapped"]["key_version"], 2);
    for (wrapped, version) in [(&first, 1), (&second, 2)] {
        let outcome = ask(unwrap_action(&wrapped["wrapped"]));
        assert_eq!(outcome["unwrapped"]["key_version"], version);
        assert_eq!(plaintext(&outcome), [1; 32]);
    }
}

#[test]
fn a_rotation_without_a_new_version_is_refused() {
    let programs =
        Programs::new(&format!("[ $operation = unwrap ] || echo \"key_version 5\"\n{PLAIN}"));
    let mut options = programs.options();
    options["rotate"] = options["wrap"].clone();
    let action = json!({"rotate": {"wrapped": programs.wrap(&[1; 32])}});
    let operation = programs.operation_with(options, "main", CONTEXT, action);
    let failed = programs.failed(&programs.bench.one(operation), "unreachable");
    assert_eq!(failed.detail, "It reports key version 5, which is not newer than the one in use.");
}

#[test]
fn without_such_a_program_rotations_by_other_tools_count() {
    let programs = Programs::new(&format!(
        "[ $operation = unwrap ] || echo \"key_version $(cat \"$1\")\"\n{PLAIN}"
    ));
    fs::write(programs.note(), "3\n").unwrap();
    let rotate = json!({"rotate": {"wrapped": programs.wrap(&[1; 32])}});
    let failed = programs.failed(&programs.one(rotate.clone()), "bad_options");
    assert_eq!(failed.message, "provider has no program that rotates keys");
    assert!(failed.hint.contains("set_database_master_key()"), "{failed:?}");
    failure(&programs.one(rotate_action()), "bad_options");
    fs::write(programs.note(), "4\n").unwrap();
    assert_eq!(programs.one(rotate), json!({"rotated": {"key_version": 4}}));
}

#[test]
fn check_reports_success() {
    let programs = Programs::new(PLAIN);
    let check = || {
        let options = programs.options().to_string();
        run(&["check", "--provider-kind", "command", "--options", &options, "--key", "main"])
    };
    let output = check();
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(
        what_is_well(&text),
        [
            "the options are valid",
            "the program for \"wrap\" is safe to run",
            "the program for \"unwrap\" is safe to run",
            "the key exists",
            "the key wraps and unwraps",
            "wrapped keys are bound to their database",
        ]
    );
    chmod(&programs.path(), 0o777);
    let output = check();
    assert!(!output.status.success());
    let text = stdout(&output);
    assert!(text.contains("not ok  the program for \"wrap\" is safe to run: program "), "{text}");
    assert!(text.contains("chmod go-w"), "{text}");
}

#[test]
fn requests_are_easy_to_read_in_a_shell() {
    // READ is in the documentation; values must pass through it unchanged.
    let programs = Programs::with(&format!("{READ}echo \"$key\" > \"$1\"\n{PLAIN}"));
    let operation =
        programs.operation_with(programs.options(), "a \\ b  'c", CONTEXT, wrap_action(&[1; 32]));
    assert!(programs.bench.one(operation).get("wrapped").is_some());
    assert_eq!(programs.noted(), "a \\ b  'c\n");
}
