//! The PIN: read, used once, never shown.

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::softhsm::{PIN, SoftHsm};
use pagevault_tests::key_servers::{Server, write_program};
use serde_json::{Value, json};

use super::{CONTEXT, SECRET, findings, says, unwrap, wrap, written};
use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::SoftHsm], run };
    vec![
        test("pkcs11::a_wrong_pin_is_used_once_in_a_request", once),
        test("pkcs11::the_last_attempt_is_not_used", last_attempt),
        test("pkcs11::a_request_logs_in_once", one_login),
        test("pkcs11::a_program_prints_the_pin", program),
        test("pkcs11::a_pin_that_others_can_read_is_refused", readable_pin),
        test("pkcs11::the_pin_is_nowhere_to_be_seen", hidden),
    ]
}

fn once() -> Result<()> {
    let hsm = SoftHsm::start()?;
    hsm.set_pin("11111111")?;
    let calls = hsm.path("calls");
    let path = calls.to_str().context("path")?;
    let provider = hsm.provider(hsm.faulty(&[("FAULT", "Login=call"), ("CALLS", path)])?);
    let blob = json!("AAAA");
    let actions = vec![
        wrap(),
        unwrap(&blob),
        json!("check"),
        wrap(),
        json!({"rotate": {"wrapped": blob}}),
        json!("check"),
    ];
    let outcomes = provider.ask_all("db-kek", CONTEXT, actions)?;
    for (at, outcome) in outcomes.iter().enumerate() {
        says(outcome, "CKR_PIN_INCORRECT")?;
        if at % 3 != 2 {
            ensure!(outcome["failed"]["class"] == "unauthenticated", "{outcome}");
            ensure!(outcome["failed"]["retry"] == false, "{outcome}");
        }
    }
    ensure!(fs::metadata(&calls)?.len() == 1, "the PIN was used again");
    // A check that begins explains each step up to the refusal.
    let outcome = provider.ask("db-kek", "", json!("check"))?;
    let seen = findings(&outcome)?;
    let last = seen.last().context("no finding")?;
    ensure!(*last == ("the token accepts the login".to_owned(), false), "{outcome}");
    ensure!(seen.len() == 5 && fs::metadata(&calls)?.len() == 2, "{outcome}");
    Ok(())
}

fn last_attempt() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let calls = hsm.path("calls");
    let path = calls.to_str().context("path")?;
    // CKF_USER_PIN_FINAL_TRY, CKF_USER_PIN_LOCKED.
    for (flags, what) in [("20000", "only one more attempt"), ("40000", "PIN is locked")] {
        let faults = [("TOKEN_FLAGS", flags), ("FAULT", "Login=call"), ("CALLS", path)];
        let provider = hsm.provider(hsm.faulty(&faults)?);
        let failure = provider.refused("db-kek", CONTEXT, wrap(), "unauthenticated")?;
        says(&failure, what)?;
        ensure!(!calls.exists(), "an attempt was made");
    }
    // CKF_USER_PIN_COUNT_LOW alone does not prevent anything; check tells it.
    let provider = hsm.provider(hsm.faulty(&[("TOKEN_FLAGS", "10000")])?);
    provider.wrap("db-kek", CONTEXT, SECRET)?;
    says(&provider.ask("db-kek", "", json!("check"))?, "a wrong PIN had been used")?;
    // CKR_PIN_LOCKED is not tried again either.
    let faults = [("FAULT", "Login=a4"), ("CALLS", path)];
    let provider = hsm.provider(hsm.faulty(&faults)?);
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "CKR_PIN_LOCKED")?;
    ensure!(fs::metadata(&calls)?.len() == 1);
    Ok(())
}

fn one_login() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let calls = hsm.path("calls");
    let path = calls.to_str().context("path")?;
    let provider = hsm.provider(hsm.faulty(&[("FAULT", "Login=call"), ("CALLS", path)])?);
    let mut actions = vec![wrap(); 20];
    // What concerns the key alone does not end the login.
    actions.insert(10, unwrap(&json!("AAAA")));
    let outcomes = provider.ask_all("db-kek", CONTEXT, actions)?;
    ensure!(outcomes.iter().filter(|outcome| outcome["wrapped"].is_object()).count() == 20);
    ensure!(fs::metadata(&calls)?.len() == 1);
    Ok(())
}

fn with_program(hsm: &SoftHsm, script: &str) -> Result<Value> {
    let program = hsm.path("print-pin");
    write_program(&program, &format!("#!/bin/sh\n{script}\n"))?;
    let mut options = hsm.options();
    options.as_object_mut().context("options")?.remove("pin_file");
    options["pin_command"] = json!([program, "argument"]);
    Ok(options)
}

fn program() -> Result<()> {
    let hsm = SoftHsm::start()?;
    // It gets its arguments, no input, and nothing of the module's environment.
    let script = format!(
        "[ \"$1\" = argument ] && ! read -r x && [ -z \"$SOFTHSM2_CONF\" ] && echo ' {PIN} '"
    );
    let provider = hsm.provider(with_program(&hsm, &script)?);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    says(&provider.ask("db-kek", "", json!("check"))?, "printed by ")?;

    let failing = [
        (format!("echo {PIN}; echo 'no {PIN}' >&2; exit 3"), "unreachable", "exit status was 3"),
        ("echo 'vault sealed' >&2; exit 1".to_owned(), "unreachable", "is not repeated here"),
        // The PIN is on standard error before it is on standard output, and spelled otherwise.
        (format!("set -ex; PIN={PIN}; false; echo $PIN"), "unreachable", "exit status was 1"),
        (format!("echo {PIN} | sed 's/./& /g' >&2; exit 4"), "unreachable", "exit status was 4"),
        ("true".to_owned(), "bad_options", "printed something else"),
        (format!("echo two {PIN}"), "bad_options", "printed something else"),
        ("printf '\\377\\n'".to_owned(), "bad_options", "printed something else"),
    ];
    for (script, class, says_this) in failing {
        let provider = hsm.provider(with_program(&hsm, &script)?);
        let failure = provider.refused("db-kek", CONTEXT, wrap(), class)?;
        says(&failure, says_this)?;
        ensure!(!failure.to_string().replace(' ', "").contains(PIN), "{failure}");
    }
    // Programs obey the rules of the provider `command`.
    let options = with_program(&hsm, "echo")?;
    hsm.write("print-pin", "", 0o777)?;
    let provider = hsm.provider(options.clone());
    provider.refused("db-kek", CONTEXT, wrap(), "insecure")?;
    provider.refused("", "", json!("check_options"), "insecure")?;
    fs::remove_file(hsm.path("print-pin"))?;
    // It may be installed later.
    let outcome = provider.ask("", "", json!("check_options"))?;
    ensure!(outcome == json!("options_ok"), "{outcome}");
    // Without a right to run programs nothing is loaded.
    let mut provider = hsm.provider(hsm.options());
    provider.programs = false;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "insecure")?;
    says(&failure, "pg_execute_server_program")
}

fn readable_pin() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    hsm.write("pin", PIN, 0o644)?;
    for action in [wrap(), json!("check_options")] {
        let failure = provider.refused("db-kek", CONTEXT, action, "insecure")?;
        says(&failure, "accessible to other users")?;
    }
    fs::remove_file(hsm.path("pin"))?;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "No such file")?;
    // Without any PIN this token is of no use.
    let mut options = hsm.options();
    options.as_object_mut().context("options")?.remove("pin_file");
    let failure = hsm.provider(options).refused("db-kek", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "requires a login")
}

/// While the module has the PIN, it is in no argument and no variable of any process.
fn hidden() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let child = hsm.path("child");
    hsm.write("child", "", 0o600)?;
    let path = child.to_str().context("path")?;
    let mut provider = hsm.provider(hsm.faulty(&[("FAULT", "Login=hang"), ("CHILD", path)])?);
    provider.deadline_ms = 5_000;
    let failure = std::thread::scope(|scope| -> Result<Value> {
        let asking = scope.spawn(|| provider.refused("db-kek", CONTEXT, wrap(), "deadline"));
        let number = written(&child)?;
        for of in ["cmdline", "environ"] {
            let text = fs::read(format!("/proc/{number}/{of}"))?;
            let text = String::from_utf8_lossy(&text);
            ensure!(text.contains(if of == "cmdline" { "pkcs11" } else { "SOFTHSM2_CONF" }));
            ensure!(!text.contains(PIN) && !text.contains(SECRET), "{of}: {text}");
        }
        asking.join().map_err(|_| anyhow::anyhow!("panic"))?
    })?;
    ensure!(!failure.to_string().contains(PIN), "{failure}");
    Ok(())
}
