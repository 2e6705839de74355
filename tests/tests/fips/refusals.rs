//! What the module does not have: no key is made for it, and data under it is refused as soon as
//! the module is required.

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::{REQUIRED, ordinary, validated};

const CIPHER: &str = "SELECT cipher FROM pagevault.relations WHERE relation = 't'::regclass";

const LEFT: &str =
    "SELECT count(*) FROM pagevault.relations WHERE cipher IN ('aes-128-xts', 'aes-256-xts-auth')";

#[test]
fn no_key_is_made_for_a_cipher_that_the_module_does_not_have() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().on(validated()?))?;
    cluster.sql("CREATE TABLE t (i int); INSERT INTO t VALUES (1)")?;
    for cipher in ["aes-128-xts", "aes-256-xts-auth"] {
        for statement in [
            format!("SELECT pagevault.encrypt('t', '{cipher}')"),
            format!("SET pagevault.cipher = '{cipher}'; SELECT pagevault.encrypt('t')"),
        ] {
            let error = cluster.error(&statement)?;
            ensure!(error.sqlstate == "0A000", "{error}");
            ensure!(
                error.message
                    == format!(
                        "cannot encrypt with {cipher}: the validated cryptographic module does not have it"
                    ),
                "{error}"
            );
            ensure!(
                error.detail
                    == "This build of pagevault makes keys for aes-256-xts and aes-256-xts-hmac only.",
                "{error}"
            );
            ensure!(error.hint.starts_with("Choose one of these (pagevault.cipher, or the label)"));
        }
    }
    ensure!(cluster.text(CIPHER)?.is_empty(), "it is encrypted");
    cluster.finish()
}

/// `auto` authenticates pages, by the algorithm that is approved.
#[test]
fn auto_means_hmac() -> Result<()> {
    let settings = Settings::default().on(validated()?).conf(REQUIRED);
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE t (i int); SELECT pagevault.encrypt('t')")?;
    ensure!(cluster.text(CIPHER)? == "aes-256-xts-hmac", "{}", cluster.text(CIPHER)?);
    cluster.finish()
}

/// An ordinary server has made keys for other ciphers. With the module they can be read and
/// replaced, unless it is required.
#[test]
fn data_under_other_ciphers_is_refused_when_the_module_is_required() -> Result<()> {
    let settings = Settings::default().on(ordinary()?);
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE TABLE t (i int); INSERT INTO t SELECT generate_series(1, 1000);
         CREATE TABLE other (LIKE t); INSERT INTO other SELECT * FROM t;
         SELECT pagevault.encrypt('t', 'aes-128-xts');
         SELECT pagevault.encrypt('other')",
    )?;
    cluster.stop(StopMode::Fast)?;
    cluster.run_by(validated()?);

    cluster.allow_log("there are relations that pagevault.require_fips refuses");
    cluster.start_server_with(&["-c", REQUIRED])?;
    // The statistics, which are read first, are under the default cipher.
    for table in ["t", "other"] {
        for statement in
            [format!("SELECT count(*) FROM {table}"), format!("INSERT INTO {table} VALUES (1)")]
        {
            let error = cluster.error(&statement)?;
            ensure!(error.sqlstate == "55000", "{error}");
            let refused = ["aes-128-xts", "aes-256-xts-auth"].map(|cipher| {
                format!("is encrypted with {cipher}, which pagevault.require_fips refuses")
            });
            ensure!(refused.iter().any(|text| error.message.ends_with(text)), "{error}");
            let detail = "The validated cryptographic module does not have this cipher.";
            ensure!(error.detail.starts_with(detail), "{error}");
            let hint = "Start the server without pagevault.require_fips, encrypt the data with";
            ensure!(error.hint.starts_with(hint), "{error}");
        }
    }
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;

    // As the hint says.
    cluster.start_server()?;
    for table in ["t", "other"] {
        ensure!(cluster.text(&format!("SELECT count(*) FROM {table}"))? == "1000", "{table}");
    }
    cluster.sql("SELECT pagevault.encrypt('t', 'aes-256-xts-hmac')")?;
    // Statistics, too: without them there are no plans.
    cluster.sql("SELECT * FROM pagevault.rotate_all_data_keys()")?;
    cluster.eventually(LEFT, "0")?;
    ensure!(cluster.text(CIPHER)? == "aes-256-xts-hmac", "{}", cluster.text(CIPHER)?);
    cluster.stop(StopMode::Fast)?;
    cluster.start_server_with(&["-c", REQUIRED])?;
    for table in ["t", "other"] {
        ensure!(cluster.text(&format!("SELECT count(*) FROM {table}"))? == "1000", "{table}");
    }
    cluster.end().context("the end")?;
    cluster.keep_quiet();
    Ok(())
}

/// A file that has such a key already does not stop TRUNCATE: nobody names the cipher.
#[test]
fn a_new_file_does_not_inherit_such_a_cipher() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default().on(ordinary()?))?;
    cluster.sql(
        "CREATE TABLE t (i int); INSERT INTO t VALUES (1);
         SET pagevault.cipher = 'aes-128-xts'; SELECT pagevault.encrypt('t')",
    )?;
    ensure!(cluster.text(CIPHER)? == "aes-128-xts", "{}", cluster.text(CIPHER)?);
    cluster.stop(StopMode::Fast)?;
    cluster.run_by(validated()?);
    cluster.start_server()?;
    cluster.sql("TRUNCATE t")?;
    ensure!(cluster.text(CIPHER)? == "aes-256-xts-hmac", "{}", cluster.text(CIPHER)?);
    cluster.end()?;
    cluster.keep_quiet();
    Ok(())
}
