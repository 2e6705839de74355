//! Stores of notes: the KV engine of a real Vault or OpenBao, programs, files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use base64::Engine;
use pagevault_tests::Installation;
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::key_servers::{Server, write_file};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, needs, run| Test { name, needs, run };
    vec![
        test("anchor::vault_keeps_notes", &[Server::Vault], vault_keeps_notes),
        test("anchor::vault_says_what_is_wrong", &[Server::Vault], vault_says_what_is_wrong),
        test("anchor::only_vault_says_that_there_is_no_note", &[], only_vault_says_no_note),
        test("anchor::programs_keep_notes", &[], programs_keep_notes),
        test("anchor::files_keep_notes", &[], files_keep_notes),
        test("anchor::others_cannot_describe_the_store", &[], others_cannot_describe_it),
    ]
}

/// A store that a file describes.
struct Store {
    directory: TempDir,
    helper: Provider,
}

impl Store {
    fn new(kind: &str, options: &Value) -> Result<Store> {
        let directory = tempfile::Builder::new().prefix("pagevault-anchor-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let described = directory.path().join("anchor.json");
        let mut store =
            Store { helper: Provider::new("anchor", json!({"file": described})), directory };
        store.describe(kind, options)?;
        // Nothing may be in it, so it must exist.
        let data = store.path("data");
        fs::create_dir(&data)?;
        Installation::get()?.give(&data)?;
        store.helper.data_directory = data;
        store.helper.deadline_ms = 5000;
        Ok(store)
    }

    fn describe(&self, kind: &str, options: &Value) -> Result<PathBuf> {
        let text = json!({"store": kind, "options": options}).to_string();
        write_file(&self.path("anchor.json"), &text, 0o600)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn read(&self) -> Result<Value> {
        let outcome = self.helper.ask("", "", json!("read_note"))?;
        outcome["note"].get("stored").cloned().with_context(|| format!("{outcome}"))
    }

    /// The version of the written note; `None` if the store has another than the one to be
    /// replaced.
    fn write(&self, note: &str, replaces: Option<u64>) -> Result<Option<u64>> {
        let outcome = self.helper.ask("", "", write(note, replaces))?;
        if outcome == "overtaken" {
            return Ok(None);
        }
        outcome["noted"]["version"].as_u64().map(Some).with_context(|| format!("{outcome}"))
    }

    /// Both operations fail with this class.
    fn fails(&self, class: &str) -> Result<Value> {
        self.helper.refused("", "", write("{}", None), class)?;
        self.helper.refused("", "", json!("read_note"), class)
    }

    /// The first notes, and some that come too late.
    fn keeps_notes(&self, note: impl Fn(u64) -> String) -> Result<()> {
        ensure!(self.read()? == Value::Null, "there is a note");
        ensure!(self.write(&note(1), Some(1))?.is_none(), "a note was replaced that is not there");
        ensure!(self.write(&note(1), None)? == Some(1));
        ensure!(self.read()? == json!({"note": note(1), "version": 1}));
        ensure!(self.write(&note(2), None)?.is_none(), "written over the first note");
        ensure!(self.write(&note(2), Some(1))? == Some(2));
        ensure!(self.write(&note(9), Some(1))?.is_none(), "written over the second note");
        ensure!(self.read()? == json!({"note": note(2), "version": 2}));
        Ok(())
    }
}

fn write(note: &str, replaces: Option<u64>) -> Value {
    json!({"write_note": {"note": note, "replaces": replaces}})
}

fn note(generation: u64) -> String {
    json!({"version": 1, "keystore": "0".repeat(32), "system": "1", "timeline": 1,
        "checkpoint": "0/1", "generation": generation, "time": "now"})
    .to_string()
}

const POLICY: &str = "path \"secret/data/pagevault/app\" {\n  capabilities = [\"create\", \"read\", \"update\"]\n}\n";

/// A Vault with the KV engine, and a store in it that a token of the policy uses.
fn vault() -> Result<(Vault, Store)> {
    let vault = Vault::start()?;
    vault.cli(&["secrets", "enable", "-path=secret", "kv-v2"])?;
    vault.write_policy("anchor", POLICY)?;
    let token = vault.cli(&["token", "create", "-policy=anchor", "-field=token"])?;
    let mut options = vault.token("anchor-token", &token)?;
    options["path"] = "pagevault/app".into();
    let store = Store::new("vault", &options)?;
    // The engine is upgraded in the background after it was enabled.
    let mut tries = 0;
    while let Err(error) = store.read() {
        ensure!(tries < 100, "{error:#}");
        tries += 1;
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    Ok((vault, store))
}

fn vault_keeps_notes() -> Result<()> {
    let (vault, store) = vault()?;
    store.keeps_notes(note)?;
    // A note that somebody has removed with its history is gone; one that was only deleted is not.
    vault.cli(&["kv", "delete", "-mount=secret", "pagevault/app"])?;
    store.helper.refused("", "", json!("read_note"), "unreachable")?;
    vault.cli(&["kv", "metadata", "delete", "-mount=secret", "pagevault/app"])?;
    ensure!(store.read()? == Value::Null);
    ensure!(store.write(&note(3), None)? == Some(1));
    // A secret that is no note is one for the server to refuse.
    vault.cli(&["kv", "put", "-mount=secret", "pagevault/app", "other=text"])?;
    ensure!(store.read()? == json!({"note": "", "version": 2}));
    Ok(())
}

fn vault_says_what_is_wrong() -> Result<()> {
    let (mut vault, store) = vault()?;
    let (address, ca_file) = (vault.address(), vault.path("ca.pem"));
    let token = vault.path("anchor-token");
    let options = |path: &str, mount: &str| {
        json!({"address": address, "ca_file": ca_file, "auth": {"token_file": token},
            "path": path, "mount": mount})
    };
    store.describe("vault", &options("pagevault/other", "secret"))?;
    let failure = store.fails("denied")?;
    ensure!(
        failure["hint"].as_str().is_some_and(|hint| hint.contains("secret/data/pagevault/other")),
        "{failure}"
    );
    // A mount that does not exist is not a note that does not exist, whatever the token may do.
    let root = vault.environment().into_iter().find(|(name, _)| name == "VAULT_TOKEN");
    vault.write("anchor-token", &root.context("no token")?.1, 0o600)?;
    store.describe("vault", &options("pagevault/app", "nowhere"))?;
    store.fails("key_missing")?;
    vault.write("anchor-token", "unknown", 0o600)?;
    store.describe("vault", &options("pagevault/app", "secret"))?;
    store.fails("unauthenticated")?;
    vault.seal()?;
    store.fails("sealed")?;
    vault.stop();
    let failure = store.fails("unreachable")?;
    ensure!(failure["retry"] == true, "{failure}");
    Ok(())
}

/// A server in between that finds nothing is an outage. If it counted, an older data directory
/// would start.
fn only_vault_says_no_note() -> Result<()> {
    let json = "application/json";
    for (kind, body) in [
        (json, "{\"errors\":[]}"),
        (json, "{\"data\":null}"),
        (json, "{\"request_id\":\"\",\"data\":{\"data\":null,\"metadata\":null}}"),
        ("text/html", "<html>not found</html>"),
    ] {
        for status in [200, 404] {
            let server = Canned::answer(status, kind, body.to_owned())?;
            let options = json!({"address": server.endpoint, "insecure_loopback_http": true,
                "path": "pagevault/app", "auth": {"token_file": "/nowhere"}});
            let mut store = Store::new("vault", &options)?;
            store.helper.deadline_ms = 500;
            let token = write_file(&store.path("token"), "a-token", 0o600)?;
            let mut options = options.clone();
            options["auth"] = json!({"token_file": token});
            store.describe("vault", &options)?;
            let outcome = store.helper.ask("", "", json!("read_note"))?;
            ensure!(outcome.get("failed").is_some(), "{status} {body}: {outcome}");
        }
    }
    Ok(())
}

/// As in docs/anchor.md.
const PROGRAM: &str = r#"#!/bin/sh
set -eu
cd "$(dirname "$0")"
replaces=0 note=
while IFS=' ' read -r name value; do
    case $name in
        operation) operation=$value ;;
        replaces) replaces=$value ;;
        note) note=$value ;;
    esac
done
version=0
[ ! -e version ] || version=$(cat version)
case $operation in
    read)
        [ "$version" = 0 ] || printf 'version %s\nnote %s\n' "$version" "$(cat note)" ;;
    write)
        [ "$version" = "$replaces" ] || exit 18
        printf '%s\n' "$note" > note
        echo $((version + 1)) > version
        printf 'version %s\n' $((version + 1)) ;;
esac
"#;

fn programs_keep_notes() -> Result<()> {
    let store = Store::new("command", &json!({}))?;
    let programs = store.path("programs");
    fs::create_dir(&programs)?;
    Installation::get()?.give(&programs)?;
    let program = write_file(&programs.join("anchor"), PROGRAM, 0o755)?;
    let options = |program: &Path| json!({"read": [program], "write": [program]});
    store.describe("command", &options(&program))?;
    store.keeps_notes(note)?;

    let with = |script: &str| -> Result<()> {
        let program =
            write_file(&programs.join("other"), &format!("#!/bin/sh\n{script}\n"), 0o755)?;
        store.describe("command", &options(&program)).map(drop)
    };
    for (status, class) in [(12, "denied"), (10, "unreachable"), (1, "unreachable"), (15, "sealed")]
    {
        with(&format!("echo because >&2; exit {status}"))?;
        let failure = store.fails(class)?;
        ensure!(failure["retry"] == (status == 10), "{failure}");
        ensure!(failure["detail"].as_str().is_some_and(|text| text.contains("because")));
        ensure!(!failure["hint"].as_str().is_some_and(|text| text.contains("--provider-kind")));
    }
    for answer in ["garbage", "version 1", "version 0\\nnote x", "version 1\\nnote x\\nmore"] {
        with(&format!("printf '{answer}\\n'"))?;
        store.helper.refused("", "", json!("read_note"), "unreachable")?;
    }
    with("exec sleep 60")?;
    let mut impatient = store.helper.clone();
    impatient.deadline_ms = 1000;
    impatient.refused("", "", json!("read_note"), "deadline")?;
    // The rules for programs that get keys.
    let inside = write_file(&store.path("data/anchor"), PROGRAM, 0o755)?;
    store.describe("command", &options(&inside))?;
    store.fails("insecure")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o777))?;
    store.describe("command", &options(&program))?;
    store.fails("insecure")?;
    Ok(())
}

fn files_keep_notes() -> Result<()> {
    let store = Store::new("file", &json!({}))?;
    let keys = store.path("keys");
    for name in ["main", "other"] {
        pagevault_tests::installation::run(
            Installation::get()?
                .command("pagevault-keyring")
                .args(["file", "create"])
                .arg(&keys)
                .args(["--key", name]),
        )?;
    }
    let provider = json!({"kind": "file", "options": {"path": keys}});
    let options = |key: &str, path: &Path| json!({"path": path, "provider": provider, "key": key});
    let place = store.path("note");
    store.describe("file", &options("main", &place))?;
    store.keeps_notes(note)?;

    // Nobody without the master key makes a note, or changes one.
    let written = fs::read(&place)?;
    for position in [0, 1, written.len() / 2, written.len() - 1] {
        let mut changed = written.clone();
        changed[position] ^= 1;
        fs::write(&place, &changed)?;
        let outcome = store.helper.ask("", "", json!("read_note"))?;
        ensure!(outcome.get("failed").is_some(), "byte {position}: {outcome}");
    }
    fs::write(&place, note(3))?;
    store.fails("wrong_ciphertext")?;
    // What the key has wrapped for another purpose is no note.
    let keyring = Provider {
        kind: "file".into(),
        options: provider["options"].clone(),
        ..store.helper.clone()
    };
    let (wrapped, _) =
        keyring.wrap("main", "pagevault/1/00112233445566778899aabbccddeeff/0", "AAAA")?;
    let wrapped = wrapped.as_str().context("nothing was wrapped")?;
    fs::write(&place, base64::engine::general_purpose::STANDARD.decode(wrapped)?)?;
    store.fails("wrong_ciphertext")?;
    fs::write(&place, &written)?;
    ensure!(store.write(&note(3), Some(2))? == Some(3));
    store.describe("file", &options("other", &place))?;
    store.fails("wrong_ciphertext")?;
    // Beside the data it would be put back with the data.
    store.describe("file", &options("main", &store.path("data/note")))?;
    store.fails("insecure")?;
    Ok(())
}

fn others_cannot_describe_it() -> Result<()> {
    let store = Store::new("file", &json!({}))?;
    let described = store.path("anchor.json");
    for (kind, options) in
        [("nothing", json!({})), ("vault", json!({"adress": "x"})), ("vault", json!({}))]
    {
        store.describe(kind, &options)?;
        let outcome = store.helper.ask("", "", json!("read_note"))?;
        ensure!(outcome["failed"]["class"] == "bad_options", "{outcome}");
        ensure!(outcome["failed"]["hint"].is_string(), "{outcome}");
    }
    write_file(&described, "{\"store\": \"S3CRET", 0o600)?;
    let failure = store.fails("bad_options")?;
    ensure!(!failure.to_string().contains("S3CRET"), "{failure}");
    write_file(&described, "{}", 0o666)?;
    store.fails("insecure")?;
    let inside = write_file(&store.path("data/anchor.json"), "{}", 0o600)?;
    let helper = Provider { options: json!({"file": inside}), ..store.helper.clone() };
    helper.refused("", "", json!("read_note"), "insecure")?;
    fs::remove_file(&described)?;
    store.fails("unreachable")?;
    // A store is not a provider.
    let wrap = json!({"wrap": {"plaintext": "AAAA"}});
    write_file(
        &described,
        &json!({"store": "command", "options": {"read": ["/bin/true"],
        "write": ["/bin/true"]}})
        .to_string(),
        0o600,
    )?;
    let outcome = store.helper.ask("", "", wrap)?;
    ensure!(outcome["failed"]["class"] == "bad_request", "{outcome}");
    Ok(())
}
