//! A server that is away, slow, throttling, or says something that is not KMIP. None of it says
//! anything about a key.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::pykmip::PyKmip;
use serde_json::json;

use crate::Test;
use crate::pkcs11::{CONTEXT, SECRET, says, unwrap, wrap};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::PyKmip], run };
    vec![
        test("kmip::an_outage_is_no_refusal", outage),
        test("kmip::what_is_not_kmip_is_an_outage", hostile),
        test("kmip::a_server_that_is_away_or_slow_is_waited_for", away),
    ]
}

fn outage() -> Result<()> {
    let server = PyKmip::start()?;
    let good = server.provider(server.options());
    let (wrapped, _) = good.wrap("db-kek", CONTEXT, SECRET)?;
    let mut provider = server.provider(server.options());
    provider.deadline_ms = 3000;
    // Invalid Message, Cryptographic Failure, General Failure, Internal Server Error, Protection
    // Storage Unavailable: the key cannot even unwrap what it wraps.
    for reason in [0x04, 0x0A, 0x100, 0x2A, 0x44] {
        server.also(&json!({"refuse": {"Decrypt": [reason, 1000]}}))?;
        let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unreachable")?;
        ensure!(failure["retry"] == true, "{failure}");
        // It fails once, and then no more: that is no refusal either.
        server.also(&json!({"refuse": {"Decrypt": [reason, 1]}}))?;
        ensure!(good.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET, "{reason}");
    }
    for operation in ["Locate", "GetAttributes", "Encrypt"] {
        server.also(&json!({"refuse": {operation: [0x100, 1000]}}))?;
        provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
        server.also(&json!({"refuse": {operation: [0x100, 2]}}))?;
        ensure!(good.wrap("db-kek", CONTEXT, SECRET).is_ok(), "{operation}");
    }
    Ok(())
}

fn hostile() -> Result<()> {
    let server = PyKmip::start()?;
    let mut provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    provider.deadline_ms = 1500;
    for reply in ["garbage", "truncated", "huge", "drip", "close"] {
        server.also(&json!({"reply": reply}))?;
        for action in [wrap(), unwrap(&wrapped), json!({"rotate": {"wrapped": wrapped}})] {
            let start = Instant::now();
            let outcome = provider.ask("db-kek", CONTEXT, action)?;
            let failure = &outcome["failed"];
            let class = failure["class"].as_str().unwrap_or_default();
            ensure!(matches!(class, "unreachable" | "deadline"), "{reply}: {outcome}");
            ensure!(!failure.to_string().contains("hunter2"), "{reply}: {outcome}");
            ensure!(start.elapsed() < Duration::from_secs(30), "{reply}: {:?}", start.elapsed());
        }
    }
    server.also(&json!({}))?;
    provider.deadline_ms = 60_000;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn away() -> Result<()> {
    let mut server = PyKmip::start()?;
    let mut provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    provider.deadline_ms = 1500;
    server.freeze()?;
    provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "deadline")?;
    provider.deadline_ms = 120_000;
    // It answers during the request.
    std::thread::scope(|scope| -> Result<()> {
        let asking = scope.spawn(|| provider.unwrap("db-kek", CONTEXT, &wrapped));
        std::thread::sleep(Duration::from_millis(500));
        ensure!(!asking.is_finished(), "it did not wait");
        server.wake()?;
        ensure!(asking.join().map_err(|_| anyhow::anyhow!("panic"))?? == SECRET);
        Ok(())
    })?;
    provider.deadline_ms = 1500;
    server.stop();
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unreachable")?;
    says(&failure, &server.address())?;
    // It returns during the request, with the same keys.
    provider.deadline_ms = 120_000;
    std::thread::scope(|scope| -> Result<()> {
        let asking = scope.spawn(|| provider.unwrap("db-kek", CONTEXT, &wrapped));
        server.restart()?;
        ensure!(asking.join().map_err(|_| anyhow::anyhow!("panic"))?? == SECRET);
        Ok(())
    })
}
