//! Files of an encrypted table, its indexes and its TOAST table contain no plaintext; a plaintext
//! table next to it is unchanged.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, DataFile, Settings};

use crate::{assert_plain, assert_sealed};

/// Occurs in every row: in the table, in the index, and in the TOAST table.
const CANARY: &str = "kanarienvogel";

fn fill(table: &str) -> String {
    format!(
        "CREATE TABLE {table} (id int PRIMARY KEY, name text, wide text);
         ALTER TABLE {table} ALTER wide SET STORAGE EXTERNAL;
         CREATE INDEX {table}_name ON {table} (name);
         INSERT INTO {table}
             SELECT i, '{CANARY}-' || i, repeat('{CANARY}', 700)
             FROM generate_series(1, 500) i;
         UPDATE {table} SET name = name || 'x' WHERE id % 10 = 0;
         VACUUM {table};
         CHECKPOINT;"
    )
}

fn leaks(files: &[DataFile]) -> Result<Vec<String>> {
    let mut leaking = Vec::new();
    for file in files {
        if file.contains_text(CANARY)? {
            leaking.push(file.path.display().to_string());
        }
    }
    Ok(leaking)
}

#[test]
fn files_of_an_encrypted_table_hold_no_plaintext() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE warm ()")?;
    let mut client = cluster.client()?;
    pagevault_tests::cluster::run_sql(&mut client, "SET pagevault.default_encryption = on")?;
    for statement in fill("secret").split_inclusive(';') {
        pagevault_tests::cluster::run_sql(&mut client, statement)?;
    }
    for statement in fill("open").split_inclusive(';') {
        cluster.sql(statement)?;
    }

    let secret = cluster.family_files("secret")?;
    assert_sealed(&secret)?;
    ensure!(leaks(&secret)?.is_empty(), "plaintext in {:?}", leaks(&secret)?);
    for member in ["secret", "secret_pkey", "secret_name"] {
        assert_sealed(&cluster.files(member)?)?;
    }

    let open = cluster.family_files("open")?;
    assert_plain(&open)?;
    // In the plaintext table, its index on name and its TOAST table the scan finds the values.
    ensure!(leaks(&open)?.len() >= 3, "the scan finds too little: {:?}", leaks(&open)?);

    let sums = "SELECT count(*) || ' ' || sum(length(wide)) || ' ' || max(name) FROM ";
    let expected = cluster.text(&format!("{sums} open"))?;
    ensure!(cluster.text(&format!("{sums} secret"))? == expected, "the tables differ");
    cluster.restart()?;
    ensure!(cluster.text(&format!("{sums} secret"))? == expected, "the encrypted table differs");
    ensure!(cluster.text(&format!("{sums} open"))? == expected, "the plain table differs");
    cluster.finish()
}

#[test]
fn a_table_with_rows_is_sealed_by_encrypt() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    for statement in fill("secret").split_inclusive(';') {
        cluster.sql(statement)?;
    }
    assert_plain(&cluster.family_files("secret")?)?;
    let before = cluster.text("SELECT md5(string_agg(s::text, '' ORDER BY id)) FROM secret s")?;

    cluster.sql("SELECT pagevault.encrypt('secret')")?;
    cluster.sql("CHECKPOINT")?;
    let files = cluster.family_files("secret")?;
    assert_sealed(&files)?;
    ensure!(leaks(&files)?.is_empty(), "plaintext in {:?}", leaks(&files)?);
    ensure!(cluster.text("SELECT pagevault.is_encrypted('secret')")? == "t", "is_encrypted");
    let after = cluster.text("SELECT md5(string_agg(s::text, '' ORDER BY id)) FROM secret s")?;
    ensure!(after == before, "rows changed");
    cluster.finish()
}

#[test]
fn a_security_label_encrypts_too() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE labelled (id int, name text)")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE labelled IS 'encrypted aes-128-xts'")?;
    cluster.sql(&format!(
        "INSERT INTO labelled SELECT i, '{CANARY}' FROM generate_series(1, 1000) i"
    ))?;
    cluster.sql("CHECKPOINT")?;
    let files = cluster.files("labelled")?;
    assert_sealed(&files)?;
    ensure!(leaks(&files)?.is_empty(), "plaintext in {:?}", leaks(&files)?);
    ensure!(
        cluster.text("SELECT count(*) FROM labelled WHERE name = 'kanarienvogel'")? == "1000",
        "rows are missing"
    );
    let cipher = cluster.text(
        "SELECT cipher FROM pagevault.data_keys
         WHERE relation = 'labelled'::regclass AND is_current",
    )?;
    ensure!(cipher == "aes-128-xts", "the cipher is {cipher:?}");
    cluster.finish()
}
