//! A keystore that is older than the pages under interim keys on disk.

use std::path::Path;

use super::*;

/// Replaces the keystore by another one, and moves it to `aside`.
fn swap(cluster: &Cluster, with: &Path, aside: &Path) -> Result<()> {
    let keystore = cluster.data_directory().join("pagevault");
    fs::rename(&keystore, aside)?;
    Ok(fs::rename(with, &keystore)?)
}

/// It does not know that the relation came into a group. Such pages are not taken for those of a
/// group that has ended, though something was destroyed once.
#[test]
fn a_keystore_from_before_is_refused() -> Result<()> {
    const SUM: &str = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM joined";
    let settings = Settings::default().conf("shared_buffers = 1MB\nautovacuum = off");
    let (mut cluster, keys) = with_groups(&settings)?;
    for text in ["key group", "WAL has not brought", "startup process", "shutting down"] {
        cluster.allow_log(text);
    }
    tables(&cluster)?;
    cluster.sql(
        "CREATE TABLE joined (id int, name text) WITH (fillfactor = 40);
         INSERT INTO joined SELECT i, repeat('x', 200) FROM generate_series(1, 1000) i;
         CREATE TABLE gone AS SELECT 1 AS id; SELECT pagevault.encrypt('gone')",
    )?;
    cluster.sql("SELECT * FROM pagevault.shred('gone', 'public.gone')")?;
    cluster.sql("CHECKPOINT")?;
    let [older, newer] = ["older", "newer"].map(|name| cluster.directory().join(name));
    crate::redo::copy(&cluster.data_directory().join("pagevault"), &older)?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE joined IS 'encrypted key_group=acme'")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('joined'::regclass, '60s')")? == "t");
    cluster.sql("CHECKPOINT")?;
    cluster.sql("UPDATE joined SET name = 'MARKER-' || id")?;
    cluster.sql("CREATE TABLE much AS SELECT repeat('x', 500) FROM generate_series(1, 6000)")?;
    let sum = cluster.text(SUM)?;
    let files = cluster.files("joined")?;
    keys[1].take_away()?;
    cluster.kill()?;
    // Before the checkpoint at the end of recovery.
    kill_in_start(&cluster, "interim.redone")?;
    let interim = |file: &DataFile| anyhow::Ok(file.states()?.iter().any(is_interim));
    ensure!(interim(&files[0])?, "nothing is under an interim key");
    swap(&cluster, &older, &newer)?;
    let Err(error) = cluster.start_server() else { anyhow::bail!("the server starts") };
    let error = error.to_string();
    ensure!(error.contains("WAL has not brought the data key"), "{error}");
    for file in &files {
        ensure!(!file.contains_text("MARKER")?, "plaintext in {}", file.path.display());
    }
    swap(&cluster, &newer, &older)?;
    keys[1].bring_back()?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "contents differ");
    cluster.finish()
}
