//! A program for the provider `command`: keys in files, used by OpenSSL.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Installation;

/// Wraps with AES-256-CTR, which authenticates nothing: pagevault does. The argument is the
/// directory of the keys: NAME is a key's first version, NAME.2 its second. If there is NAME.off,
/// the key is disabled. Each line of the file "instead" is what one run does instead: an exit
/// status, or sleep.
const SCRIPT: &str = r#"#!/bin/sh
set -u
version=1
while read -r name value; do
    case $name in
        operation) operation=$value ;;
        key) key=$value ;;
        key_version) version=$value ;;
        plaintext | wrapped) data=$value ;;
    esac
done
[ -e "$1" ] || { echo "the key server is down" >&2; exit 10; }
echo "$operation" >>"${1%/*}/log"
if [ -s "$1/instead" ]; then
    read -r status <"$1/instead"
    sed -i 1d "$1/instead"
    [ "$status" = sleep ] && exec sleep 1000
    exit "$status"
fi
[ -e "$1/$key" ] || { echo "no key $key" >&2; exit 13; }
[ -e "$1/$key.off" ] && exit 14
[ -r "$1/credentials" ] || { echo "cannot log in" >&2; exit 11; }
newest=1
while [ -e "$1/$key.$((newest + 1))" ]; do newest=$((newest + 1)); done
file() { if [ "$1" = 1 ]; then echo "$key"; else echo "$key.$1"; fi; }
crypt() { openssl enc -aes-256-ctr -pbkdf2 -iter 1 -a -A -pass "file:$1" "$2" 2>/dev/null; }
case $operation in
    wrap)
        echo "key_version $newest"
        echo "wrapped $(printf %s "$data" | crypt "$1/$(file "$newest")" -e)"
        ;;
    unwrap)
        [ -e "$1/$(file "$version")" ] || exit 13
        plaintext=$(printf %s "$data" | crypt "$1/$(file "$version")" -d | tr -d '\0')
        # 32 bytes in base64.
        printf %s "$plaintext" | LC_ALL=C grep -Eqx '[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=' || exit 17
        echo "plaintext $plaintext"
        ;;
    rotate)
        head -c 40 /dev/urandom | base64 >"$1/$key.$((newest + 1))"
        echo "key_version $((newest + 1))"
        ;;
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

    /// The same, with new versions of keys.
    #[must_use]
    pub fn options_with_rotation(&self) -> Value {
        let mut options = self.options();
        options["rotate"] = options["wrap"].clone();
        options
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
