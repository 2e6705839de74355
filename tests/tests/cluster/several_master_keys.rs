//! Database keys that several master keys wrap: any of them unlocks.

use std::thread;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use crate::revalidate::{STATE, put_back, replace, strict};

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 1000) i";
const SUM: &str = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM t";

/// The master keys of the cluster's newest key, in their order.
fn master_keys(cluster: &Cluster) -> Result<String> {
    cluster.text(
        "SELECT string_agg(provider || '/' || master_key || ' ' || master_key_version, ', '
                           ORDER BY preference)
           FROM pagevault.database_keys
          WHERE scope = 'cluster'
            AND version = (SELECT max(version) FROM pagevault.database_keys)",
    )
}

/// A cluster whose key three files wrap, in this order.
fn with_three(settings: &Settings) -> Result<(Cluster, [KeyFile; 3])> {
    let (cluster, first) = Cluster::with_keys(settings)?;
    cluster.sql(TABLE)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    let add = |name: &str| -> Result<KeyFile> {
        let file = cluster.key_file(name, "spare")?;
        cluster.sql(&file.add_provider(name))?;
        cluster.sql(&format!("SELECT pagevault.add_cluster_master_key('{name}', 'spare')"))?;
        Ok(file)
    };
    let (second, third) = (add("second")?, add("third")?);
    ensure!(master_keys(&cluster)? == "local/main 1, second/spare 1, third/spare 1");
    Ok((cluster, [first, second, third]))
}

/// Takes all files away but those whose bit is set.
fn leave(files: &[KeyFile; 3], left: u32) -> Result<()> {
    files
        .iter()
        .enumerate()
        .filter(|(at, _)| left >> at & 1 == 0)
        .try_for_each(|(_, f)| f.take_away())
}

fn bring_back(files: &[KeyFile; 3], left: u32) -> Result<()> {
    files
        .iter()
        .enumerate()
        .filter(|(at, _)| left >> at & 1 == 0)
        .try_for_each(|(_, f)| f.bring_back())
}

/// After a clean shutdown and after a crash, whichever of them answer.
#[test]
fn any_of_them_unlocks() -> Result<()> {
    let settings = Settings::default().conf("pagevault.unlock_timeout = 0");
    let (mut cluster, files) = with_three(&settings)?;
    cluster.allow_log("could not unwrap");
    cluster.allow_log("cannot start without keys");
    let sum = cluster.text(SUM)?;
    for left in 1..8 {
        for kills in [false, true] {
            cluster.sql("UPDATE t SET name = name")?;
            if kills {
                cluster.kill()?
            } else {
                cluster.stop(StopMode::Fast)?
            }
            leave(&files, left)?;
            cluster.start_server().with_context(|| format!("left: {left:b}, killed: {kills}"))?;
            ensure!(cluster.text(STATE)? == "unlocked" && cluster.text(SUM)? == sum);
            bring_back(&files, left)?;
        }
    }
    // None of them.
    cluster.stop(StopMode::Fast)?;
    leave(&files, 0)?;
    cluster.start_server()?;
    ensure!(cluster.text(STATE)? == "locked");
    let error = cluster.error("SELECT pagevault.unlock()")?;
    ensure!(error.text().contains("could not unwrap"), "{error}");
    files[2].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(cluster.text(STATE)? == "unlocked" && cluster.text(SUM)? == sum);
    // Crash recovery needs the key.
    cluster.kill()?;
    files[2].take_away()?;
    ensure!(cluster.start_server().is_err(), "it has started without keys");
    files[1].bring_back()?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum);
    Ok(())
}

/// A standby that reaches another provider than its primary.
#[test]
fn a_standby_unlocks_by_another_master_key() -> Result<()> {
    let (cluster, files) = with_three(&Settings::default())?;
    let standby = standby_of(&cluster, &["pagevault.unlock_timeout = 0"])?;
    // The wrappings are in WAL, in one record for each version.
    for rotation in ["rotate_database_key", "rotate_cluster_master_key"] {
        cluster.sql(&format!("SELECT pagevault.{rotation}()"))?;
        wait_for(&standby, &cluster)?;
        ensure!(master_keys(&standby)? == master_keys(&cluster)?);
        standby.stop(StopMode::Fast)?;
        leave(&files, 0b100)?;
        standby.start_server()?;
        ensure!(standby.text(STATE)? == "unlocked");
        bring_back(&files, 0b100)?;
        wait_for(&standby, &cluster)?;
        ensure!(standby.text(SUM)? == cluster.text(SUM)?);
    }
    Ok(())
}

#[test]
fn all_are_rotated_in_one_call() -> Result<()> {
    let (cluster, files) = with_three(&Settings::default())?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(master_keys(&cluster)? == "local/main 2, second/spare 2, third/spare 2");
    // A new database key is wrapped by all of them.
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    ensure!(master_keys(&cluster)? == "local/main 2, second/spare 2, third/spare 2");
    let versions = "SELECT count(*), count(DISTINCT version) FROM pagevault.database_keys";
    let of_each = "SELECT string_agg(DISTINCT n::text, ' ') FROM
        (SELECT count(*) AS n FROM pagevault.database_keys GROUP BY version) versions";
    ensure!(cluster.text(of_each)? == "3", "{:?}", column(&mut cluster.client()?, versions));
    // If one of them does not answer, nothing is changed.
    files[1].take_away()?;
    for call in ["rotate_cluster_master_key()", "rotate_database_key()"] {
        let error = cluster.error(&format!("SELECT pagevault.{call}"))?;
        ensure!(error.text().contains("second"), "{error}");
        ensure!(master_keys(&cluster)? == "local/main 2, second/spare 2, third/spare 2");
    }
    cluster.sql("SELECT pagevault.drop_cluster_master_key('second', 'spare')")?;
    cluster.sql("SELECT pagevault.drop_provider('second')")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    // `local` had a version 3 already.
    ensure!(master_keys(&cluster)? == "local/main 3, third/spare 3", "{}", master_keys(&cluster)?);
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    Ok(())
}

#[test]
fn master_keys_are_added_replaced_and_dropped() -> Result<()> {
    let (cluster, files) = with_three(&Settings::default())?;
    let error = |call: &str| cluster.error(&format!("SELECT pagevault.{call}"));
    let code = |call: &str| -> Result<String> { Ok(error(call)?.sqlstate) };
    ensure!(code("add_cluster_master_key('second', 'spare')")? == "42710");
    ensure!(code("add_cluster_master_key('none', 'spare')")? == "42704");
    ensure!(code("add_cluster_master_key('second', 'none')")? != "00000");
    ensure!(code("drop_cluster_master_key('second', 'none')")? == "42704");
    ensure!(code("drop_database_master_key('second', 'spare')")? == "55000");
    ensure!(code("add_database_master_key('second', 'spare')")? == "55000");
    ensure!(code("drop_provider('third')")? == "2BP01");
    // One that wraps already comes first; another one takes the place of the first.
    cluster.sql("SELECT pagevault.set_cluster_master_key('third', 'spare')")?;
    ensure!(master_keys(&cluster)? == "third/spare 1, local/main 1, second/spare 1");
    files[0].add_key("more")?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'more')")?;
    ensure!(master_keys(&cluster)? == "local/more 1, local/main 1, second/spare 1");
    // What is left must unlock.
    files[0].take_away()?;
    let refused = error("drop_cluster_master_key('second', 'spare')")?;
    ensure!(refused.text().contains("local"), "{refused}");
    cluster.sql("SELECT pagevault.drop_cluster_master_key('local', 'more')")?;
    cluster.sql("SELECT pagevault.drop_cluster_master_key('local', 'main')")?;
    ensure!(master_keys(&cluster)? == "second/spare 1");
    ensure!(code("drop_cluster_master_key('second', 'spare')")? == "2BP01");
    files[0].bring_back()?;
    // There are no more than eight.
    for number in 1..8 {
        files[0].add_key(&format!("key{number}"))?;
        cluster.sql(&format!("SELECT pagevault.add_cluster_master_key('local', 'key{number}')"))?;
    }
    ensure!(code("add_cluster_master_key('local', 'main')")? == "54000");
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    // A database with its own.
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    cluster.sql("SELECT pagevault.add_database_master_key('third', 'spare')")?;
    files[0].take_away()?;
    files[1].take_away()?;
    cluster.restart()?;
    let state =
        "SELECT string_agg(DISTINCT scope || ' ' || state, ', ') FROM pagevault.database_keys";
    ensure!(
        cluster.text(state)? == "cluster locked, database unlocked",
        "{}",
        cluster.text(state)?
    );
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    let mut plain = cluster.client()?;
    plain.batch_execute("CREATE ROLE nobody; SET ROLE nobody")?;
    for call in ["add_cluster", "add_database", "drop_cluster", "drop_database"] {
        let error = expect_error(
            &mut plain,
            &format!("SELECT pagevault.{call}_master_key('third', 'spare')"),
        )?;
        ensure!(error.sqlstate == "42501", "{error}");
    }
    Ok(())
}

/// The server is killed before and after each change is written.
#[test]
fn a_crash_leaves_the_old_master_keys_or_the_new_ones() -> Result<()> {
    let (cluster, _files) = with_three(&Settings::default())?;
    let sum = cluster.text(SUM)?;
    let calls = [
        "drop_cluster_master_key('second', 'spare')",
        "add_cluster_master_key('second', 'spare')",
        "set_cluster_master_key('third', 'spare')",
        "rotate_cluster_master_key()",
    ];
    for call in calls {
        for point in ["keys.in_file", "keys.in_wal"] {
            let before = master_keys(&cluster)?;
            cluster.stop_at(point)?;
            let mut client = cluster.client()?;
            let session =
                thread::spawn(move || client.batch_execute(&format!("SELECT pagevault.{call}")));
            cluster.stopped_at(point)?;
            cluster.kill()?;
            cluster.resume();
            ensure!(session.join().is_ok_and(|ended| ended.is_err()), "{call}: it ended");
            cluster.start_server()?;
            ensure!(master_keys(&cluster)? == before, "{call}: {}", master_keys(&cluster)?);
            ensure!(cluster.text(SUM)? == sum);
        }
        cluster.sql(&format!("SELECT pagevault.{call}"))?;
        cluster.kill()?;
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == sum);
    }
    Ok(())
}

/// A refused master key locks nothing as long as another one unlocks, or might.
#[test]
fn a_key_is_revoked_when_all_its_master_keys_are() -> Result<()> {
    let (mut cluster, files) = with_three(&strict())?;
    cluster.allow_log("was revoked");
    cluster.sql("SELECT pagevault.drop_cluster_master_key('third', 'spare')")?;
    let left = "SELECT one_master_key_left FROM pagevault.status";
    cluster.eventually(left, "{}")?;
    replace(&cluster, &files[0], "another")?;
    cluster.eventually_logs("Another master key unlocks it")?;
    cluster.eventually(left, "{cluster}")?;
    ensure!(cluster.text(STATE)? == "unlocked");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    files[1].take_away()?;
    cluster.eventually("SELECT unreachable_providers FROM pagevault.status", "{second}")?;
    ensure!(cluster.text(STATE)? == "unlocked", "one is refused, the other cannot be asked");
    files[1].bring_back()?;
    replace(&cluster, &files[1], "another")?;
    cluster.eventually(STATE, "locked")?;
    cluster.error("SELECT count(*) FROM t")?;
    put_back(&files[1])?;
    cluster.eventually(STATE, "unlocked")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    put_back(&files[0])?;
    cluster.eventually(left, "{}")?;
    Ok(())
}

/// Programs that read the keystore without a server ask them all.
#[test]
fn programs_unlock_by_any_of_them() -> Result<()> {
    let (cluster, files) = with_three(&Settings::default())?;
    cluster.stop(StopMode::Fast)?;
    for left in [0b001, 0b010, 0b100, 0b110] {
        leave(&files, left)?;
        cluster.expect_verified(&cluster.data_directory(), 0, &[])?;
        bring_back(&files, left)?;
    }
    cluster.start_server()
}

/// The hint for a provider of an additional master key names what helps.
#[test]
fn the_provider_of_another_master_key_is_dropped() -> Result<()> {
    let (cluster, _files) = with_three(&Settings::default())?;
    let error = cluster.error("SELECT pagevault.drop_provider('third')")?;
    ensure!(error.hint.contains("pagevault.drop_cluster_master_key()"), "{error}");
    cluster.sql("SELECT pagevault.drop_cluster_master_key('third', 'spare')")?;
    cluster.sql("SELECT pagevault.drop_provider('third')")?;
    cluster.finish()
}

/// The member of `pagevault_admin` who names a path may be another person than who creates a file.
#[test]
fn a_hint_shows_no_path_that_a_shell_would_take_for_more() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "SELECT pagevault.add_provider('odd', 'file', '{\"path\": \"/nowhere/$(touch x)/keys\"}')",
    )?;
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('odd', 'main')")?;
    ensure!(error.hint.contains("use pagevault-keyring file create."), "{error}");
    ensure!(!error.hint.contains("touch"), "{error}");
    cluster.finish()
}
