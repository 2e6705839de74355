//! Modules: which are loaded, and those with defects.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::installation::run;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::softhsm::{PIN, SoftHsm};
use serde_json::json;

use super::{CONTEXT, SECRET, findings, says, unwrap, wrap, written};
use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::SoftHsm], run };
    vec![
        test("pkcs11::only_a_safe_module_is_loaded", safe_module),
        test("pkcs11::only_the_module_with_the_hash_is_loaded", hash),
        test("pkcs11::a_module_that_prints_harms_nothing", printing),
        test("pkcs11::a_module_that_crashes_is_told", crashing),
        test("pkcs11::a_module_that_hangs_ends_at_the_deadline", hanging),
        test("pkcs11::processes_of_a_module_end_with_the_request", forking),
        test("pkcs11::a_cancelled_request_ends_the_module", cancelled),
        test("pkcs11::check_explains_each_step", check),
        test("pkcs11::the_operator_can_try_it_out", operator),
    ]
}

fn safe_module() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let options = hsm.faulty(&[])?;
    let module = hsm.path("module.so");
    let provider = hsm.provider(options.clone());
    provider.wrap("db-kek", CONTEXT, SECRET)?;

    let mark = hsm.path("child");
    let path = mark.to_str().context("path")?;
    let marked = hsm.provider(hsm.faulty(&[("LOAD", "fork"), ("CHILD", path)])?);
    let mode = |mode| run(std::process::Command::new("chmod").arg(mode).arg(&module));
    for action in [wrap(), json!("check_options")] {
        mode("666")?;
        let failure = marked.refused("db-kek", CONTEXT, action, "insecure")?;
        says(&failure, "can be changed by other users")?;
        ensure!(!mark.exists(), "the module was loaded");
    }
    mode("644")?;
    marked.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(mark.exists(), "the test proves nothing");

    // In the data directory, also before it exists.
    let mut inside = options.clone();
    inside["module"] = json!(hsm.path("data/module.so"));
    let outside = hsm.provider(inside);
    for existing in [false, true] {
        if existing {
            fs::copy(&module, hsm.path("data/module.so"))?;
        }
        let failure = outside.refused("", "", json!("check_options"), "insecure")?;
        says(&failure, "inside the data directory")?;
    }
    // A link of our own is followed; one through a directory of others is not.
    std::os::unix::fs::symlink(&module, hsm.path("link.so"))?;
    Installation::get()?.give(&hsm.path("link.so")).ok();
    hsm.make_directory("open")?;
    std::os::unix::fs::symlink(&module, hsm.path("open/link.so"))?;
    run(std::process::Command::new("chmod").arg("777").arg(hsm.path("open")))?;
    let mut linked = options.clone();
    linked["module"] = json!(hsm.path("link.so"));
    hsm.provider(linked.clone()).wrap("db-kek", CONTEXT, SECRET)?;
    linked["module"] = json!(hsm.path("open/link.so"));
    hsm.provider(linked).refused("db-kek", CONTEXT, wrap(), "insecure")?;

    // Not modules.
    hsm.write("text.so", "no library", 0o644)?;
    for (wrong, why) in [
        (hsm.path("missing.so"), "No such file"),
        (hsm.path("text.so"), "cannot be loaded"),
        (hsm.path("tokens"), "not a regular file"),
        (libm()?, "C_GetFunctionList"),
    ] {
        let mut options = options.clone();
        options["module"] = json!(wrong);
        let outcome = hsm.provider(options).ask("db-kek", CONTEXT, wrap())?;
        says(&outcome, why)?;
        ensure!(outcome["failed"]["retry"] == false, "{outcome}");
    }
    Ok(())
}

/// A shared library that is no module.
fn libm() -> Result<std::path::PathBuf> {
    let maps = run(std::process::Command::new("ldd").arg("/bin/ls"))?;
    let path = maps.split_whitespace().find(|word| word.starts_with("/") && word.contains("libc"));
    Ok(Path::new(path.context("ldd")?).canonicalize()?)
}

fn hash() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let mut options = hsm.faulty(&[])?;
    let module = hsm.path("module.so");
    let sum = |path: &Path| -> Result<String> {
        let line = run(std::process::Command::new("sha256sum").arg(path))?;
        Ok(line.split_whitespace().next().context("sha256sum")?.to_owned())
    };
    let right = sum(&module)?;
    options["module_sha256"] = json!(right.to_uppercase());
    let provider = hsm.provider(options.clone());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    says(&provider.ask("db-kek", "", json!("check"))?, &right)?;

    // It is replaced by another that works: not loaded, although the path is the same.
    fs::remove_file(&module)?;
    fs::copy(hsm.module(), &module)?;
    Installation::get()?.give(&module)?;
    for action in [unwrap(&wrapped), json!("check_options")] {
        let failure = provider.refused("db-kek", CONTEXT, action, "insecure")?;
        says(&failure, &sum(&module)?)?;
        says(&failure, &right)?;
    }
    options["module_sha256"] = json!(sum(&module)?);
    ensure!(hsm.provider(options).unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn printing() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.faulty(&[("LOAD", "print")])?);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    // What it printed helps to find out why it does not work, before it got the PIN.
    let faults = [("LOAD", "print"), ("FAULT", "Initialize=6")];
    let mut provider = hsm.provider(hsm.faulty(&faults)?);
    provider.deadline_ms = 1000;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "The module printed: \\\"{}noise\\\"")?;
    let faults = [("LOAD", "print"), ("FAULT", "Login=6")];
    let mut provider = hsm.provider(hsm.faulty(&faults)?);
    provider.deadline_ms = 1000;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    ensure!(!failure.to_string().contains("noise"), "{failure}");
    Ok(())
}

fn crashing() -> Result<()> {
    let hsm = SoftHsm::start()?;
    for faults in [[("LOAD", "crash"), ("X", "")], [("FAULT", "Encrypt=crash"), ("X", "")]] {
        let provider = hsm.provider(hsm.faulty(&faults)?);
        let outcomes = provider.ask_all("db-kek", CONTEXT, vec![wrap(), wrap()])?;
        for outcome in outcomes {
            let failure = &outcome["failed"];
            ensure!(failure["class"] == "unreachable" && failure["retry"] == false, "{outcome}");
            says(&outcome, "SIGABRT")?;
        }
    }
    Ok(())
}

fn is_alive(number: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{number}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

fn ends(number: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    while is_alive(number) {
        ensure!(Instant::now() < end, "process {number} lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn hanging() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let child = hsm.path("child");
    let path = child.to_str().context("path")?;
    for fault in [("LOAD", "hang"), ("FAULT", "Login=hang"), ("FAULT", "Encrypt=hang")] {
        hsm.write("child", "", 0o600)?;
        let mut provider = hsm.provider(hsm.faulty(&[fault, ("CHILD", path)])?);
        provider.deadline_ms = 2000;
        let start = Instant::now();
        let failure = provider.refused("db-kek", CONTEXT, wrap(), "deadline")?;
        says(&failure, "did not answer in time")?;
        ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        ends(&written(&child)?)?;
    }
    Ok(())
}

fn forking() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let child = hsm.path("child");
    hsm.write("child", "", 0o600)?;
    let path = child.to_str().context("path")?;
    let provider = hsm.provider(hsm.faulty(&[("LOAD", "fork"), ("CHILD", path)])?);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ends(&written(&child)?)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

/// The server kills its helper when a session is cancelled.
fn cancelled() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let child = hsm.path("child");
    hsm.write("child", "", 0o600)?;
    let path = child.to_str().context("path")?;
    let options = hsm.faulty(&[("FAULT", "Login=hang"), ("CHILD", path)])?;
    let mut check = Installation::get()?
        .command("pagevault-keyring")
        .args(["check", "--provider-kind=pkcs11", "--key=db-kek", "--options"])
        .arg(options.to_string())
        .stdout(std::process::Stdio::null())
        .spawn()?;
    let number = written(&child)?;
    ensure!(is_alive(&number), "the test proves nothing");
    check.kill()?;
    check.wait()?;
    ends(&number)
}

fn check() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let steps = [
        "the module is safe to load",
        "the module can be loaded",
        "the token is present",
        "the PIN can be read",
        "the token accepts the login",
        "the key exists",
        "the key wraps and unwraps",
        "wrapped keys are bound to their database",
    ];
    let options = hsm.options();
    let with = |name: &str, value: &str| {
        let mut options = options.clone();
        options[name] = json!(value);
        options
    };
    let wrong_pin = hsm.write("wrong", "0000", 0o600)?;
    let cases = [
        (0, with("module", "/nowhere/module.so"), "db-kek"),
        (1, with("module", hsm.write("text.so", "x", 0o644)?.to_str().context("path")?), "db-kek"),
        (2, with("token", "other"), "db-kek"),
        (3, with("pin_file", "/nowhere/pin"), "db-kek"),
        (4, with("pin_file", wrong_pin.to_str().context("path")?), "db-kek"),
        (5, options.clone(), "typo"),
        (6, hsm.faulty(&[("FAULT", "Encrypt=30")])?, "db-kek"),
        (steps.len(), options.clone(), "db-kek"),
    ];
    for (good, options, key) in cases {
        let outcome = hsm.provider(options).ask(key, "", json!("check"))?;
        let seen = findings(&outcome)?;
        let mut expected: Vec<(String, bool)> =
            steps[..good].iter().map(|step| ((*step).to_owned(), true)).collect();
        expected.extend(steps.get(good).map(|step| ((*step).to_owned(), false)));
        ensure!(seen == expected, "{outcome}");
        ensure!(!outcome.to_string().contains(PIN), "{outcome}");
    }
    // Two keys in one request: each check begins anew.
    let provider = hsm.provider(options.clone());
    for outcome in provider.ask_all("db-kek", "", vec![json!("check"), json!("check")])? {
        ensure!(findings(&outcome)?.len() == steps.len(), "{outcome}");
    }
    Ok(())
}

fn operator() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let check = |key: &str| -> Result<(bool, String)> {
        let output = Installation::get()?
            .command("pagevault-keyring")
            .args(["check", "--provider-kind", "pkcs11", "--key", key, "--options"])
            .arg(hsm.options().to_string())
            .output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (well, response) = check("db-kek")?;
    ensure!(well && response.contains("All checks passed"), "{response}");
    let (well, response) = check("typo")?;
    ensure!(!well && response.contains("token has no key"), "{response}");
    Ok(())
}
