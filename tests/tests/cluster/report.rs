//! `pagevault-keyring report`: the page and the document say what a real server contains, and no
//! name in it is markup.

use std::fs;
use std::io::Cursor;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use minisign::{KeyPair, SignatureBox};
use pagevault_tests::{Cluster, Settings};
use serde_json::Value;

use crate::doctor::keyring;

/// A file next to the data directory.
fn path(cluster: &Cluster, name: &str) -> PathBuf {
    cluster.directory().join(name)
}

/// Makes a report with these options; returns document and page.
fn report(cluster: &Cluster, options: &[&str]) -> Result<(Value, String)> {
    let (json, html) = (path(cluster, "r.json"), path(cluster, "r.html"));
    let (json_text, html_text) = (json.display().to_string(), html.display().to_string());
    let mut arguments = vec!["report", "--json", &json_text, "--output", &html_text];
    arguments.extend(options);
    let (code, output, errors) = keyring(cluster, "postgres", &arguments)?;
    ensure!(code == 0, "{code}: {output}{errors}");
    ensure!(output == format!("Wrote {json_text}\nWrote {html_text}\n"), "{output}");
    for file in [&json, &html] {
        let mode = fs::metadata(file)?.permissions().mode() & 0o777;
        ensure!(mode == 0o600, "mode {mode:o}");
    }
    let page = fs::read_to_string(&html)?;
    for active in ["<script", "<img", "<b>evil", "http://", "https://", " onload=", "@import"] {
        ensure!(!page.contains(active), "the page contains {active:?}");
    }
    Ok((serde_json::from_str(&fs::read_to_string(&json)?)?, page))
}

/// Where the library is in a folder of its own, as in images of extensions.
#[test]
fn a_report_names_the_files_that_the_server_finds() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let (of_server, _) = report(&cluster, &[])?;
    for folder in ["image", "image/lib", "image/bin"] {
        fs::create_dir(path(&cluster, folder))?;
        cluster.installation().give(&path(&cluster, folder))?;
    }
    // The same file: a session may load it.
    let library = cluster.installation().library_directory().join("pagevault.so");
    symlink(library, path(&cluster, "image/lib/pagevault.so"))?;
    let folders = format!("/nonexistent:{}", path(&cluster, "image/lib").display());
    cluster.set(&[("dynamic_library_path", &folders)])?;
    let (of_image, _) = report(&cluster, &[])?;
    ensure!(of_image["installed"] == of_server["installed"], "{of_image}");
    fs::write(path(&cluster, "image/bin/pagevault-keyring"), "another")?;
    let (with_helper, _) = report(&cluster, &[])?;
    let sum = |of: &str| of_image["installed"][of] == with_helper["installed"][of];
    ensure!(sum("library") && !sum("helper"), "{with_helper}");
    cluster.finish()
}

#[test]
fn a_report_says_what_is_encrypted_and_what_has_changed() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE DATABASE \"<b>evil\"")?;
    cluster.sql("CREATE DATABASE other")?;
    cluster.sql(
        "CREATE TABLE a AS SELECT generate_series(1, 5000) AS id; SELECT pagevault.encrypt('a');
         CREATE TABLE b AS SELECT generate_series(1, 5000) AS id;
         CREATE TABLE c AS SELECT 1 AS id; SECURITY LABEL FOR pagevault ON TABLE c IS 'plaintext'",
    )?;
    cluster.client_to("<b>evil")?.batch_execute(
        "CREATE EXTENSION pagevault; CREATE TABLE \"<script>alert(1)</script>&'\" AS SELECT 1 AS id;
         SELECT pagevault.encrypt('\"<script>alert(1)</script>&''\"')",
    )?;
    cluster.sql("CHECKPOINT")?;
    let (first, page) = report(&cluster, &["--check-files"])?;
    let expected = [
        "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&#39;",
        "its label says plaintext",
        "no label or setting requires encryption",
        "aes-256-xts-auth",
        "it has no extension pagevault",
        "made without the audit trail",
        "All files of database &quot;postgres&quot; were read",
        "WAL is written in plaintext",
    ];
    for text in expected {
        ensure!(page.contains(text), "{text}");
    }
    ensure!(page.matches("<svg").count() == 2, "plots");
    let checksum = first["installed"]["library"].as_str().context("a checksum")?;
    ensure!(checksum.len() == 64 && page.contains(checksum), "{checksum}");
    ensure!(first["program"]["sha256"] == first["installed"]["helper"], "the same program");
    let document = first.to_string();
    ensure!(!document.contains(&keys.path().display().to_string()), "options of providers");

    fs::rename(path(&cluster, "r.json"), path(&cluster, "old.json"))?;
    let old = path(&cluster, "old.json").display().to_string();
    let (_, page) = report(&cluster, &["--compare", &old])?;
    ensure!(page.contains("Nothing has changed but sizes and ages."), "{page}");
    cluster.sql(
        "SELECT pagevault.encrypt('b'); DROP TABLE c; SELECT pagevault.rotate_database_key()",
    )?;
    let (_, page) = report(&cluster, &["--compare", &old])?;
    for text in [
        "<td>postgres: public.b</td><td>encrypted: false \u{2192} true</td>",
        "<td>postgres: public.c</td><td>gone</td>",
        "<td>cluster local main, version 2</td><td>new</td>",
    ] {
        ensure!(page.contains(text), "{text}");
    }

    let page_path = path(&cluster, "r.html").display().to_string();
    let (code, _, errors) =
        keyring(&cluster, "postgres", &["report", "--output", "/nowhere/r.html"])?;
    ensure!(code == 1 && errors.contains("could not write"), "{errors}");
    let arguments = ["report", "--output", &page_path, "--compare", &page_path];
    let (code, _, errors) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 1 && errors.contains("is not a report of this version"), "{errors}");
    let (code, _, errors) = keyring(&cluster, "postgres", &["report"])?;
    ensure!(code == 1 && errors.contains("there is nothing to write"), "{errors}");
    cluster.finish()
}

#[test]
fn a_report_says_who_did_what_and_whether_that_is_proven() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE a (id int); SELECT pagevault.encrypt('a')")?;
    let log = path(&cluster, "log").display().to_string();
    let data = cluster.data_directory().display().to_string();
    let (document, page) = report(&cluster, &["--audit", &log, "-D", &data])?;
    ensure!(page.contains("The trail was verified: no line is missing"), "{page}");
    let newest = document["audit"]["newest"].as_array().context("lines")?;
    let encrypt = |line: &Value| line["action"] == "encrypt" && line["role"] == "postgres";
    ensure!(newest.iter().any(encrypt), "{newest:?}");
    let (_, page) = report(&cluster, &["--audit", &log])?;
    ensure!(page.contains("Whether the server wrote them was not verified"), "{page}");

    // Names that look like lines, within lines that the server has written. They prove themselves.
    cluster.sql(
        "CREATE ROLE mallory; GRANT CREATE ON SCHEMA public TO mallory; SET ROLE mallory;
         CREATE TABLE \"pagevault audit: {\"\"role\"\":\"\"dba1\"\",\"\"action\"\":\"\"shred\"\"}\" (i int);
         SECURITY LABEL FOR pagevault
             ON TABLE \"pagevault audit: {\"\"role\"\":\"\"dba1\"\",\"\"action\"\":\"\"shred\"\"}\" IS 'encrypted'",
    )?;
    let (document, page) = report(&cluster, &["--audit", &log, "-D", &data])?;
    ensure!(page.contains("The trail was verified: no line is missing"), "{page}");
    let newest = document["audit"]["newest"].as_array().context("lines")?;
    let is_forged = |line: &Value| line["role"] == "dba1";
    ensure!(!newest.iter().any(is_forged), "{newest:?}");
    ensure!(newest.iter().any(|line| line["current_role"] == "mallory"), "{newest:?}");
    let numbers: Vec<_> = newest.iter().map(|line| line["seq"].as_u64()).collect();
    ensure!(numbers.is_sorted(), "{numbers:?}");

    // A line that a role without rights has made up.
    cluster.sql(
        "DO $$ BEGIN RAISE LOG '%', 'pagevault audit: {\"run\":\"00\",\"seq\":1,\"action\":\"decrypt\",\"role\":\"victim\"}'; END $$",
    )?;
    let (document, page) = report(&cluster, &["--audit", &log, "-D", &data])?;
    ensure!(page.contains("Lines are missing, changed or forged."), "{page}");
    ensure!(!document["audit"]["newest"].to_string().contains("victim"), "{page}");
    cluster.finish()
}

/// What is signed is verified with the public key; not what was changed, or has another name.
#[test]
fn a_report_is_signed() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let secret = path(&cluster, "auditor.key");
    let pair = KeyPair::generate_unencrypted_keypair()?;
    // As `minisign -G -W` makes it.
    let mut bytes = pair.sk.to_bytes();
    bytes[2..4].fill(0);
    fs::write(&secret, format!("untrusted comment: a key\n{}\n", STANDARD.encode(&bytes)))?;
    let (json, html) = (path(&cluster, "r.json"), path(&cluster, "r.html"));
    let (json_text, html_text) = (json.display().to_string(), html.display().to_string());
    cluster.installation().give(&secret)?;
    let key = secret.display().to_string();
    let make = |key: &str| {
        let files = ["report", "--json", &json_text, "--output", &html_text, "--sign-key", key];
        keyring(&cluster, "postgres", &files)
    };
    for (mode, expected) in [(0o644, 1), (0o600, 0)] {
        fs::set_permissions(&secret, fs::Permissions::from_mode(mode))?;
        let (code, output, errors) = make(&key)?;
        ensure!(code == expected, "{mode:o}: {code}: {output}{errors}");
    }
    let (_, output, _) = make(&key)?;
    for file in [&json, &html] {
        let signature = format!("{}.minisig", file.display());
        ensure!(output.contains(&format!("Wrote {signature}\n")), "{output}");
        let signature = SignatureBox::from_string(&fs::read_to_string(&signature)?)?;
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let comment = signature.trusted_comment()?;
        ensure!(comment.starts_with(&format!("file:{name}\tmade:20")), "{comment}");
        let verify = |content: &[u8]| {
            let content = Cursor::new(content);
            minisign::verify(&pair.pk, &signature, content, true, false, false).is_ok()
        };
        let mut content = fs::read(file)?;
        ensure!(verify(&content), "the signature of {name} is wrong");
        content.push(b' ');
        ensure!(!verify(&content), "another {name} has the same signature");
    }
    fs::remove_file(&json)?;
    bytes[70] ^= 1;
    fs::write(&secret, format!("untrusted comment: a key\n{}\n", STANDARD.encode(&bytes)))?;
    let (code, _, errors) = make(&key)?;
    ensure!(code != 0 && errors.contains("could not sign"), "{code}: {errors}");
    let locked = KeyPair::generate_encrypted_keypair(Some("secret".to_owned()))?;
    fs::write(&secret, locked.sk.to_box(None)?.into_string())?;
    let (code, _, errors) = make(&key)?;
    ensure!(code != 0 && errors.contains("must have no password"), "{code}: {errors}");
    ensure!(!json.exists(), "a report was written without a signature");
    fs::write(&secret, "no key")?;
    let (code, _, errors) = make(&key)?;
    ensure!(code != 0 && errors.contains("could not use the key"), "{code}: {errors}");
    cluster.finish()
}
