//! Runs `pagevault-keyring` like the server does: one request, one reply, as the server user.

use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::Installation;

/// A provider as SQL defines it.
#[derive(Clone, Debug)]
pub struct Provider {
    /// `vault`, `aws_kms`, `command`.
    pub kind: String,
    /// Its options.
    pub options: Value,
    /// Environment variables of the helper.
    pub environment: Vec<(String, String)>,
    /// The server's data directory, as passed to the helper.
    pub data_directory: PathBuf,
    /// Whether the provider may run programs, as recorded with it.
    pub programs: bool,
    /// Deadline of a request, in milliseconds.
    pub deadline_ms: u64,
}

impl Provider {
    /// A provider with ten seconds for each request.
    #[must_use]
    pub fn new(kind: &str, options: Value) -> Provider {
        Provider {
            kind: kind.into(),
            options,
            environment: Vec::new(),
            data_directory: PathBuf::from("/nonexistent/data"),
            programs: true,
            deadline_ms: 10_000,
        }
    }

    /// One more variable in the helper's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Provider {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Performs one action on one key and returns the outcome.
    ///
    /// # Errors
    /// When the helper gives no reply.
    pub fn ask(&self, key: &str, context: &str, action: Value) -> Result<Value> {
        let mut outcomes = self.ask_all(key, context, vec![action])?;
        outcomes.pop().context("no outcome")
    }

    /// Performs actions on one key, in one request, and returns their outcomes.
    ///
    /// # Errors
    /// When the helper gives no reply.
    pub fn ask_all(&self, key: &str, context: &str, actions: Vec<Value>) -> Result<Vec<Value>> {
        let provider = json!({"name": "under-test", "kind": self.kind, "options": self.options,
            "programs": self.programs});
        let operation = |action| json!({"provider": provider, "key": key, "context": context, "action": action});
        let operations: Vec<Value> = actions.into_iter().map(operation).collect();
        let expected = operations.len();
        let request = json!({"version": 1, "deadline_ms": self.deadline_ms,
            "data_directory": self.data_directory, "operations": operations});
        let mut child = Installation::get()?
            .command("pagevault-keyring")
            .arg("serve")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().context("no pipe")?;
        input.write_all(request.to_string().as_bytes())?;
        drop(input);
        let output = child.wait_with_output()?;
        let response = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{:?}: {response}", output.status);
        ensure!(response.is_empty(), "the helper says: {response}");
        let mut reply: Value = serde_json::from_slice(&output.stdout)?;
        let outcomes: Vec<Value> = serde_json::from_value(reply["results"].take())?;
        ensure!(outcomes.len() == expected, "{} outcomes", outcomes.len());
        Ok(outcomes)
    }

    /// Wraps `plaintext`; returns the result in base64, with the version of the key.
    ///
    /// # Errors
    /// When the provider refuses.
    pub fn wrap(&self, key: &str, context: &str, plaintext: &str) -> Result<(Value, u64)> {
        wrapped(&self.ask(key, context, json!({"wrap": {"plaintext": plaintext}}))?)
    }

    /// Rewraps `wrapped`.
    ///
    /// # Errors
    /// When the provider refuses.
    pub fn rewrap(
        &self,
        from: &str,
        key: &str,
        context: &str,
        what: &Value,
    ) -> Result<(Value, u64)> {
        let action = json!({"rewrap": {"from_key": from, "wrapped": what}});
        wrapped(&self.ask(key, context, action)?)
    }

    /// Unwraps and returns the plaintext in base64.
    ///
    /// # Errors
    /// When the provider refuses.
    pub fn unwrap(&self, key: &str, context: &str, what: &Value) -> Result<String> {
        let outcome = self.ask(key, context, json!({"unwrap": {"wrapped": what}}))?;
        let plaintext = outcome["unwrapped"]["plaintext"].as_str();
        plaintext.map(str::to_owned).with_context(|| format!("{outcome}"))
    }

    /// Adds a version to `key`.
    ///
    /// # Errors
    /// When the provider refuses.
    pub fn rotate(&self, key: &str, what: &Value) -> Result<u64> {
        let outcome = self.ask(key, "", json!({"rotate": {"wrapped": what}}))?;
        outcome["rotated"]["key_version"].as_u64().with_context(|| format!("{outcome}"))
    }

    /// Performs an action that must fail, with an error of `class`.
    ///
    /// # Errors
    /// When it succeeds or fails otherwise; also when DETAIL or HINT is missing.
    pub fn refused(&self, key: &str, context: &str, action: Value, class: &str) -> Result<Value> {
        let mut outcome = self.ask(key, context, action)?;
        let failure = outcome["failed"].take();
        if failure["class"] != class {
            bail!("expected {class}, got {failure} {outcome}");
        }
        for part in ["message", "detail", "hint"] {
            ensure!(
                failure[part].as_str().is_some_and(|text| !text.is_empty()),
                "no {part}: {failure}"
            );
        }
        Ok(failure)
    }
}

fn wrapped(outcome: &Value) -> Result<(Value, u64)> {
    let done = &outcome["wrapped"];
    let version = done["key_version"].as_u64().with_context(|| format!("{outcome}"))?;
    Ok((done["wrapped"].clone(), version))
}
