//! A program for the provider `command`: keys in files, used by OpenSSL.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Installation;

/// Wraps with AES-256-CTR, which authenticates nothing: pagevault does. The arguments are the
/// directory of the keys, one file each.
const SCRIPT: &str = r#"#!/bin/sh
set -u
while read -r name value; do
    case $name in
        operation) operation=$value ;;
        key) key=$value ;;
        plaintext | wrapped) data=$value ;;
    esac
done
[ -e "$1" ] || { echo "the key server is down" >&2; exit 10; }
[ -e "$1/$key" ] || { echo "no key $key" >&2; exit 13; }
[ -r "$1/credentials" ] || { echo "cannot log in" >&2; exit 11; }
crypt() { openssl enc -aes-256-ctr -pbkdf2 -a -A -pass "file:$1/$key" "$2"; }
case $operation in
    wrap) echo "wrapped $(printf %s "$data" | crypt "$1" -e)" ;;
    unwrap) echo "plaintext $(printf %s "$data" | crypt "$1" -d)" ;;
esac
"#;

/// The program, and the directory of its keys with the key `db-kek`.
pub struct Program {
    directory: TempDir,
}

impl Program {
    /// # Errors
    /// When it cannot be written.
    pub fn new() -> Result<Program> {
        let directory = tempfile::Builder::new().prefix("pagevault-program-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let program = Program { directory };
        for name in ["keys", "data"] {
            std::fs::create_dir(program.path(name))?;
            Installation::get()?.give(&program.path(name))?;
        }
        super::write_program(&program.path("program"), SCRIPT)?;
        program.write("keys/credentials", "good", 0o600)?;
        program.make_key("db-kek")?;
        Ok(program)
    }

    /// A file or directory of this program.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Options of a provider of kind `command`.
    #[must_use]
    pub fn options(&self) -> Value {
        let program = json!([self.path("program"), self.path("keys")]);
        json!({"wrap": program, "unwrap": program})
    }

    /// Makes a key, in place of one of the same name.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn make_key(&self, name: &str) -> Result<()> {
        let random = tempfile::Builder::new().rand_bytes(40).tempfile()?;
        self.write(&format!("keys/{name}"), &random.path().display().to_string(), 0o600)
    }

    /// Writes a file of the server user.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str, mode: u32) -> Result<()> {
        super::write_file(&self.path(name), content, mode).map(drop)
    }
}
