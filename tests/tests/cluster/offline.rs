//! `pagevault-keyring inspect` and `verify`: examining data directories without a server.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::wal::{PAGE, Segment, WalPage};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use crate::wal::{insert, sealing, switch};

/// A cluster with sealed and plaintext pages of several versions, and with both kinds of WAL.
fn mixed() -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) =
        sealing(&Settings::default().wal_segment_size(1).conf("wal_keep_size = 1GB"))?;
    cluster.sql(
        "CREATE TABLE sealed AS SELECT i AS id, repeat('x', 100) AS name FROM generate_series(1, 20000) i;
         CREATE INDEX ON sealed (id);
         CREATE TABLE gone AS SELECT * FROM sealed LIMIT 100",
    )?;
    cluster.sql("SELECT pagevault.encrypt('sealed'); SELECT pagevault.encrypt('gone')")?;
    cluster.sql("SELECT pagevault.rotate_data_key('sealed')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('sealed'::regclass, '1min')")?;
    cluster.sql("DELETE FROM sealed WHERE id % 9 = 0; SELECT pagevault.rotate_database_key()")?;
    cluster.sql("VACUUM sealed")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    switch(&cluster, false)?;
    insert(&cluster, "drossel", 1000)?;
    switch(&cluster, true)?;
    // Records that are longer than a page, and longer than a segment.
    cluster.sql("SELECT pg_logical_emit_message(true, 'x', repeat('y', n)) FROM (VALUES (20000), (3000000)) v(n)")?;
    insert(&cluster, "fink", 1000)?;
    Ok((cluster, keys))
}

/// The name of a segment that one record fills. Bytes between records, or after the last record of
/// a segment, have no checksum.
fn filled_segment(cluster: &Cluster) -> Result<String> {
    cluster.text(
        "SELECT pg_walfile_name(
             pg_logical_emit_message(true, 'x', repeat('y', 3000000)) - 1500000)",
    )
}

/// Changes a byte of a file.
fn flip(path: &Path, at: u64) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
}

#[test]
fn verify_opens_everything_and_finds_each_damage() -> Result<()> {
    let (cluster, keys) = mixed()?;
    let data = cluster.data_directory();
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(1) && response.contains("a server is running"), "{response}");
    let earlier = filled_segment(&cluster)?;
    // WAL whose end is in the middle of a segment.
    insert(&cluster, "meise", 100)?;
    cluster.without_witness("its WAL is damaged");
    cluster.kill()?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(0) && response.contains("No damage found."), "{response}");
    cluster.start_server()?;
    let table = cluster.files("sealed")?.remove(0).path;
    let last = filled_segment(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(0) && response.contains("No damage found."), "{response}");
    let number = |line: &str, after: &str| -> Option<u64> {
        let line = response.lines().find(|found| found.starts_with(line))?;
        let words: Vec<_> = line.split_whitespace().collect();
        let at = words.iter().position(|word| word.trim_end_matches(',') == after)?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    ensure!(number("WAL", "records").is_some_and(|records| records > 5000), "{response}");
    ensure!(number("relations", "pages").is_some_and(|pages| pages > 300), "{response}");

    keys.take_away()?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(1) && response.contains("provider \"local\""), "{response}");
    keys.bring_back()?;

    flip(&table, 3 * 8192 + 5000)?;
    // Damage that looks like the end of WAL, and damage that does not.
    for name in [earlier, last] {
        let segments = Segment::all(&data.join("pg_wal"))?;
        let segment = segments.into_iter().find(|segment| segment.path.ends_with(&name));
        let segment = segment.with_context(|| format!("no segment {name}"))?;
        ensure!(matches!(segment.pages()?[20], WalPage::Sealed(_)), "{name} is not sealed");
        flip(&segment.path, 20 * PAGE as u64 + 4000)?;
    }
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(2) && response.contains("Damage found: 3."), "{response}");
    let name = table.strip_prefix(&data)?.display().to_string();
    ensure!(response.contains(&format!("{name} block 3: the checksum")), "{response}");
    ensure!(response.matches("the record's checksum is wrong").count() == 2, "{response}");
    ensure!(!response.contains("lost power"), "{response}"); // it was shut down
    flip(&table, 3 * 8192 + 5000)?;
    cluster.finish()
}

#[test]
fn inspect_needs_no_keys() -> Result<()> {
    let (cluster, keys) = mixed()?;
    cluster.sql("CHECKPOINT")?;
    keys.take_away()?;
    let table = cluster.files("sealed")?.remove(0).path;
    let plain = cluster.files("t")?.remove(0).path;
    let inspect = |path: &Path| run(cluster.program("pagevault-keyring").arg("inspect").arg(path));
    let response = inspect(&cluster.data_directory())?;
    ensure!(response.contains("key file of the cluster, format 1, keystore"), "{response}");
    ensure!(
        response.contains("provider local kind file")
            && response.contains("version 2 aes-256-xts-auth"),
        "{response}"
    );
    let response = inspect(&table)?;
    ensure!(
        response.contains("encrypted, data key version 2") && !response.contains("plaintext"),
        "{response}"
    );
    ensure!(inspect(&plain)?.contains("plaintext"));
    let mut all = String::new();
    for segment in Segment::all(&cluster.data_directory().join("pg_wal"))? {
        all += &inspect(&segment.path)?;
    }
    for state in [
        "plaintext",
        "encrypted, WAL key version 1",
        "encrypted, WAL key version 2",
        "encrypted, WAL key version 3",
    ] {
        ensure!(all.contains(state), "no page is {state}: {all}");
    }
    keys.bring_back()?;
    cluster.finish()
}

/// The path of a fork of a relation.
fn fork(cluster: &Cluster, relation: &str, fork: &str) -> Result<PathBuf> {
    let path = cluster.text(&format!("SELECT pg_relation_filepath('{relation}')"))?;
    Ok(cluster.data_directory().join(path + fork))
}

#[test]
fn verify_looks_at_every_kind_of_file() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().conf("allow_in_place_tablespaces = on"))?;
    cluster.sql("CREATE TABLESPACE place LOCATION ''")?;
    cluster.sql(
        "CREATE TABLE sealed AS SELECT i AS id, repeat('x', 100) AS name FROM generate_series(1, 20000) i;
         CREATE TABLE elsewhere TABLESPACE place AS SELECT * FROM sealed;
         CREATE UNLOGGED TABLE fleeting AS SELECT * FROM sealed LIMIT 100;
         CREATE INDEX fleeting_index ON fleeting (id)",
    )?;
    for table in ["sealed", "elsewhere", "fleeting"] {
        cluster.sql(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    cluster.sql("SELECT pagevault.rotate_data_key('elsewhere')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('elsewhere'::regclass, '1min')")?;
    cluster.sql("DELETE FROM sealed WHERE id % 9 = 0")?;
    cluster.sql("VACUUM ANALYZE sealed")?;
    let data = cluster.data_directory();
    let sealed = fork(&cluster, "sealed", "")?;
    let elsewhere = fork(&cluster, "elsewhere", "")?;
    let fleeting = fork(&cluster, "fleeting", "")?;
    let damage = [
        (elsewhere.clone(), 2),
        (fork(&cluster, "sealed", "_fsm")?, 1),
        (fork(&cluster, "sealed", "_vm")?, 0),
        (fork(&cluster, "fleeting_index", "_init")?, 0),
        (fork(&cluster, "pg_statistic", "")?, 0),
        (fork(&cluster, "pg_class", "")?, 0),
        (fork(&cluster, "pg_database", "")?, 0),
    ];
    cluster.stop(StopMode::Fast)?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(0) && !response.contains("skipped"), "{response}");

    let show = |path: &Path| path.strip_prefix(&data).unwrap_or(path).display().to_string();
    let flip_all = || damage.iter().try_for_each(|(path, block)| flip(path, block * 8192 + 5000));
    flip_all()?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(2) && response.contains("\nDamage found: 5."), "{response}");
    ensure!(!response.contains("not shut down cleanly"), "{response}");
    ensure!(response.contains("\nmaps         2 damaged pages"), "{response}");
    let is_map = |path: &Path| {
        let name = path.to_string_lossy();
        name.ends_with("_fsm") || name.ends_with("_vm")
    };
    for (path, block) in damage.iter().filter(|(path, _)| !is_map(path)) {
        let place = format!("{} block {block}: the checksum", show(path));
        ensure!(response.contains(&place), "{place}: {response}");
    }
    flip_all()?;

    // Files that end within a block, belong to another relation, or lack the previous segment.
    let whole = std::fs::read(&sealed)?;
    std::fs::write(&sealed, &whole[..whole.len() - 100])?;
    let (response, code) = cluster.verify_offline(&data)?;
    let place = format!("partial      {} block {}:", show(&sealed), whole.len() / 8192 - 1);
    ensure!(code == Some(0) && response.contains(&place), "{response}");
    std::fs::copy(&elsewhere, &sealed)?;
    let (response, _) = cluster.verify_offline(&data)?;
    let place = format!("{} block 0: the keystore has no data key of version 2", show(&sealed));
    ensure!(response.contains(&place), "{response}");
    std::fs::write(&sealed, &whole)?;
    let beyond = PathBuf::from(format!("{}.1", sealed.display()));
    std::fs::write(&beyond, "")?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(0), "{response}");
    std::fs::write(&beyond, vec![0; 8192])?;
    let (response, code) = cluster.verify_offline(&data)?;
    let place = format!("{}: the segment before it is not full", show(&beyond));
    ensure!(code == Some(2) && response.contains(&place), "{response}");
    std::fs::remove_file(&beyond)?;

    // After a crash, unlogged relations may contain anything, and recovery may repair other damage.
    cluster.start_server()?;
    cluster.sql("INSERT INTO fleeting SELECT * FROM sealed LIMIT 10; CHECKPOINT")?;
    cluster.kill()?;
    flip(&fleeting, 5000)?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(0) && response.contains("files of unlogged relations"), "{response}");
    flip(&sealed, 5000)?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(2) && response.contains("was not shut down cleanly"), "{response}");
    flip(&sealed, 5000)?;
    cluster.finish()
}

/// Files of a transaction that a crash interrupted belong to no relation. Their pages may be torn,
/// or sealed under a key that was never flushed.
#[test]
fn verify_reports_files_without_relation() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().conf("max_prepared_transactions = 2"))?;
    cluster.sql("SELECT pagevault.encrypt_database()")?;
    let make = |name: &str| {
        format!(
            "CREATE TABLE {name} AS SELECT repeat('x', 100) AS name FROM generate_series(1, 5000) i"
        )
    };
    let made = |client: &mut postgres::Client, name: &str| -> Result<PathBuf> {
        run_sql(client, &make(name))?;
        let path = text(client, &format!("SELECT pg_relation_filepath('{name}')"))?;
        Ok(cluster.data_directory().join(path))
    };
    let kept = made(&mut cluster.client()?, "kept")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN; SAVEPOINT one")?;
    let lost = made(&mut client, "lost")?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    ensure!(lost.exists(), "recovery removes such files");
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN")?;
    let prepared = made(&mut client, "prepared")?;
    run_sql(&mut client, "PREPARE TRANSACTION 'it'")?;
    let data = cluster.data_directory();
    let show = |path: &Path| path.strip_prefix(&data).unwrap_or(path).display().to_string();
    // A version without a key.
    let reseal = |path: &Path| -> Result<()> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(file.write_all_at(&(77_u16 << 3).to_le_bytes(), 8192 + 10)?)
    };

    // A prepared transaction may still commit.
    cluster.stop(StopMode::Fast)?;
    flip(&prepared, 5000)?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(2) && !response.contains("left over"), "{response}");
    flip(&prepared, 5000)?;
    flip(&lost, 2 * 8192 + 5000)?;
    cluster.start_server()?;
    cluster.sql("COMMIT PREPARED 'it'")?;

    // Before recovery, it depends on what WAL has.
    cluster.kill()?;
    let (response, code) = cluster.verify_offline(&data)?;
    let place = match code {
        Some(0) => format!("left over    {}", show(&lost)),
        _ => format!("{} block 2", show(&lost)),
    };
    ensure!(matches!(code, Some(0 | 2)) && response.contains(&place), "{response}");
    cluster.start_server()?;

    cluster.stop(StopMode::Fast)?;
    reseal(&lost)?;
    let (response, code) = cluster.verify_offline(&data)?;
    let line = format!("left over    {}: belongs to no relation", show(&lost));
    ensure!(code == Some(0) && response.contains(&line), "{response}");
    ensure!(response.contains("No damage found."), "{response}");
    for file in [&kept, &prepared] {
        flip(file, 5000)?;
        let (response, code) = cluster.verify_offline(&data)?;
        ensure!(code == Some(2) && response.contains(&line), "{response}");
        ensure!(response.contains(&format!("{} block 0: the checksum", show(file))), "{response}");
        flip(file, 5000)?;
    }
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM kept")? == "5000");
    cluster.finish()
}
