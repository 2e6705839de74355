//! Ciphers that authenticate pages: what is changed or moved on disk is refused, and what the
//! server itself wrote never is. Without data checksums, so that nothing but the tag can notice.

mod past_buffers;
mod redo;

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::DataFile;
use pagevault_tests::errors::SqlError;
use pagevault_tests::installation::run;
use pagevault_tests::process::processes_in;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};
use rustix::process::{Pid, Signal, kill_process};

const CIPHERS: [&str; 2] = ["aes-256-xts-auth", "aes-256-xts-hmac"];

const TABLES: [&str; 4] = [
    "CREATE TABLE t AS SELECT i AS id, 'row ' || i AS name FROM generate_series(1, 5000) i",
    "CREATE TABLE other AS SELECT i AS id, 'row ' || i AS name FROM generate_series(1, 5000) i",
    "CREATE INDEX t_id ON t (id)",
    "VACUUM t",
];

const SUM: &str = "SELECT count(*) || ' ' || sum(id) FROM t";
const EXPECTED: &str = "5000 12502500";

fn settings() -> Settings {
    Settings::default().without_checksums().conf("full_page_writes = on")
}

fn cluster(cipher: &str) -> Result<(Cluster, KeyFile)> {
    let settings = settings()
        .conf("wal_log_hints = on")
        .conf("pagevault.default_encryption = on")
        .conf(&format!("pagevault.cipher = '{cipher}'"));
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    TABLES.iter().try_for_each(|statement| cluster.sql(statement))?;
    let used = "SELECT string_agg(DISTINCT cipher, ' ') FROM pagevault.relations
        WHERE relation IN ('t'::regclass, 't_id'::regclass)";
    ensure!(cluster.text(used)? == cipher);
    ensure!(all_authenticated(&cluster)?, "born with tags");
    Ok((cluster, keys))
}

/// Whether the table and its index must have tags in all pages.
fn all_authenticated(cluster: &Cluster) -> Result<bool> {
    let all = "SELECT bool_and(authenticated) FROM pagevault.relations
        WHERE relation IN ('t'::regclass, 't_id'::regclass)";
    Ok(cluster.text(all)? == "t")
}

fn main_fork(cluster: &Cluster, relation: &str) -> Result<DataFile> {
    cluster.files(relation)?.into_iter().next().context("a file")
}

/// Restarts the server, and makes a change on disk in between.
fn while_down(cluster: &Cluster, change: impl FnOnce() -> Result<()>) -> Result<()> {
    cluster.stop(StopMode::Fast)?;
    change()?;
    cluster.start_server()
}

fn ensure_refused(error: &SqlError, what: &str) -> Result<()> {
    let says = error.message.ends_with("is not as it was encrypted");
    ensure!(error.sqlstate == "XX001" && says, "{what}: {error}");
    Ok(())
}

#[test]
fn changed_and_moved_pages_are_refused() -> Result<()> {
    for cipher in CIPHERS {
        let (cluster, _keys) = cluster(cipher)?;
        let (t, other) = (main_fork(&cluster, "t")?, main_fork(&cluster, "other")?);
        cluster.stop(StopMode::Fast)?;
        let first = t.read_page(0)?;
        let changed = |at: usize| {
            let mut page = first.clone();
            page[at] ^= 1;
            page
        };
        for (what, page) in [
            ("a bit of a row", changed(8000)),
            ("a bit of the LSN", changed(3)),
            ("pd_lower", changed(12)),
            ("another block", t.read_page(1)?),
            ("another file", other.read_page(0)?),
        ] {
            t.write_page(0, &page)?;
            cluster.start_server()?;
            ensure_refused(&cluster.error(SUM)?, what)?;
            for setting in ["ignore_checksum_failure", "zero_damaged_pages"] {
                ensure_refused(&cluster.error(&format!("SET {setting} = on; {SUM}"))?, what)?;
            }
            ensure!(cluster.text("SELECT count(*) > 0 FROM t WHERE ctid >= '(1,0)'")? == "t");
            cluster.stop(StopMode::Fast)?;
            ensure!(t.read_page(0)? == page, "{what}: the server has changed the page");
            let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
            let says = text.contains("block 0: the page is not as it was sealed");
            ensure!(code == Some(2) && says, "{what}: {text}");
        }
        t.write_page(0, &first)?;
        let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
        ensure!(code == Some(0) && text.contains("by tags of 128 bits"), "{text}");
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == EXPECTED);
        cluster.finish()?;
    }
    Ok(())
}

/// A map that was changed is read as an empty one, as PostgreSQL reads a damaged one. Then no row
/// is missed: a forged bit "all visible" would hide rows from index-only scans.
#[test]
fn changed_maps_are_empty() -> Result<()> {
    let (cluster, _keys) = cluster(CIPHERS[0])?;
    let maps: Vec<DataFile> = cluster.files("t")?.into_iter().skip(1).collect();
    ensure!(maps.len() == 2, "{maps:?}");
    while_down(&cluster, || {
        maps.iter().try_for_each(|map| {
            let mut page = map.read_page(0)?;
            page[5000] ^= 1;
            map.write_page(0, &page)
        })
    })?;
    cluster.sql("SET enable_seqscan = off; SELECT count(id) FROM t WHERE id > 0")?;
    ensure!(cluster.text(SUM)? == EXPECTED);
    cluster.sql("INSERT INTO t VALUES (5001, 'new'); DELETE FROM t WHERE id = 5001")?;
    cluster.sql("VACUUM t")?;
    let refused = "SELECT decrypt_failures > 0 FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(cluster.text(refused)? == "t", "not counted");
    cluster.finish()
}

/// A page that a crash tears is refused, so WAL must have an image of each.
#[test]
fn torn_pages_must_be_restored() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&settings())?;
    let create = "CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 5000) i";
    let label =
        |cipher: &str| format!("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted {cipher}'");
    cluster.sql(create)?;
    let message = "cannot encrypt with aes-256-xts-auth: torn pages would not be restored";
    let refused = |cluster: &Cluster| -> Result<()> {
        let error = cluster.error(&label(CIPHERS[0]))?;
        ensure!(error.sqlstate == "55000" && error.message == message, "{error}");
        Ok(())
    };
    refused(&cluster)?;
    cluster.append_conf("wal_log_hints = on\nfull_page_writes = off")?;
    while_down(&cluster, || Ok(()))?;
    refused(&cluster)?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "f");

    let warning = "authenticated pages that a crash tears would be lost";
    cluster.set(&[("full_page_writes", "on")])?;
    while_down(&cluster, || Ok(()))?;
    cluster.sql(&label(CIPHERS[0]))?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "t");
    while_down(&cluster, || Ok(()))?;
    ensure!(!cluster.log().contains(warning));
    cluster.allow_log(warning);
    cluster.set(&[("full_page_writes", "off")])?;
    while_down(&cluster, || Ok(()))?;
    ensure!(cluster.log().contains(warning), "no warning at the start");
    ensure!(cluster.text(SUM)? == EXPECTED);
    cluster.finish()
}

const LABEL: &str = "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-256-xts-auth'";

/// The process of this kind, by its title.
pub(crate) fn pid_of(cluster: &Cluster, kind: &str) -> Result<Pid> {
    let is_it = |pid: &Pid| {
        let title = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        title.is_ok_and(|title| title.contains(kind))
    };
    processes_in(&cluster.data_directory()).into_iter().find(is_it).context("a process")
}

/// Requires that `t`, which has pages, is not encrypted before the next checkpoint, but then.
fn needs_a_checkpoint(cluster: &Cluster, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
    let error = cluster.error(LABEL)?;
    ensure!(error.sqlstate == "55000" && error.hint.contains("CHECKPOINT"), "{error}");
    meanwhile()?;
    cluster.eventually_that("images from a checkpoint on", || {
        cluster.sql("CHECKPOINT")?;
        cluster.sql(LABEL)
    })?;
    ensure!(cluster.text(SUM)? == EXPECTED);
    Ok(())
}

/// No process has to run to notice that full_page_writes was off.
#[test]
fn images_that_were_off_for_a_moment_are_noticed() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLES[0])?;
    let worker = pid_of(&cluster, "pagevault revalidate")?;
    kill_process(worker, Signal::STOP)?;
    cluster.set(&[("full_page_writes", "off")])?;
    cluster.set(&[("full_page_writes", "on")])?;
    needs_a_checkpoint(&cluster, || Ok(kill_process(worker, Signal::CONT)?))?;
    cluster.finish()
}

/// The checkpointer has never read the setting: a checkpoint ends the doubt.
#[test]
fn images_that_were_never_off_are_known_after_a_checkpoint() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLES[0])?;
    let checkpointer = pid_of(&cluster, "checkpointer")?;
    kill_process(checkpointer, Signal::STOP)?;
    cluster.append_conf("full_page_writes = off")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.eventually_that("the setting off", || {
        ensure!(cluster.text("SHOW full_page_writes")? == "off");
        Ok(())
    })?;
    cluster.append_conf("full_page_writes = on")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.eventually_that("the setting on", || {
        ensure!(cluster.text("SHOW full_page_writes")? == "on");
        Ok(())
    })?;
    needs_a_checkpoint(&cluster, || Ok(kill_process(checkpointer, Signal::CONT)?))?;
    cluster.finish()
}

/// A standby that has read its configuration again can encrypt after the first checkpoint as a
/// primary.
#[test]
fn a_promoted_standby_that_has_reloaded_needs_one_checkpoint() -> Result<()> {
    // Only what is in the file is assigned again.
    let settings = Settings::default().conf("full_page_writes = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(TABLES[0])?;
    let standby = standby_of(&cluster, &[])?;
    standby.append_conf("work_mem = 5MB")?;
    standby.sql("SELECT pg_reload_conf()")?;
    standby.eventually("SHOW work_mem", "5MB")?;
    // The checkpointer has been told, and reads its configuration before it does anything else.
    standby.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    standby.promote()?;
    standby.sql("CHECKPOINT")?;
    standby.sql(LABEL)?;
    ensure!(standby.text(SUM)? == EXPECTED);
    standby.finish()?;
    cluster.finish()
}

/// A job that comes before that checkpoint waits for it.
#[test]
fn a_job_waits_for_the_checkpoint() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("a crash tears would be lost");
    cluster.sql(TABLES[0])?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql(LABEL)?;
    cluster.set(&[("full_page_writes", "off")])?;
    cluster.set(&[("full_page_writes", "on")])?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.eventually_logs("rekey job 1 waits: cannot encrypt with aes-256-xts-auth yet")?;
    cluster.eventually_that("a checkpoint helps", || {
        cluster.sql("CHECKPOINT")?;
        let done = "SELECT state = 'done' FROM pagevault.rekey_jobs WHERE job = 1";
        ensure!(cluster.text(done)? == "t");
        Ok(())
    })?;
    ensure!(!cluster.log().contains("has failed"), "the job failed");
    ensure!(cluster.text(SUM)? == EXPECTED);
    cluster.finish()
}

/// From format 1 to format 2 and back, by jobs, with rows that change and a crash in between.
#[test]
fn relations_change_between_formats() -> Result<()> {
    let settings = settings().conf("wal_log_hints = on").conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE EXTENSION IF NOT EXISTS pagevault")?;
    TABLES.iter().try_for_each(|statement| cluster.sql(statement))?;
    let mut sum = 12_502_500;
    for cipher in ["aes-256-xts", "aes-256-xts-auth", "aes-256-xts-hmac", "aes-128-xts"] {
        cluster.sql(&format!("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted {cipher}'"))?;
        cluster.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 0")?;
        sum = cluster.text("SELECT sum(id) FROM t")?.parse::<i64>()?.max(sum);
        cluster.crash()?;
        cluster.sql("SELECT pagevault.wait_for_rekey('t')")?;
        let states = "SELECT string_agg(DISTINCT cipher, ' ') FROM pagevault.relations
            WHERE relation IN ('t'::regclass, 't_id'::regclass)";
        ensure!(cluster.text(states)? == cipher, "{cipher}");
        ensure!(cluster.text("SELECT sum(id) FROM t")? == sum.to_string(), "{cipher}");
        while_down(&cluster, || {
            let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
            ensure!(code == Some(0), "{cipher}: {text}");
            let has_tags = cipher.starts_with("aes-256-xts-");
            ensure!(text.contains("by tags of 128 bits") == has_tags, "{cipher}: {text}");
            Ok(())
        })?;
        ensure!(cluster.text("SELECT sum(id) FROM t")? == sum.to_string(), "{cipher}");
        // Pages under the former key would be accepted, and only that of the third step has tags.
        ensure!(all_authenticated(&cluster)? == (cipher == "aes-256-xts-hmac"), "{cipher}");
        cluster.sql("VACUUM FULL t")?;
        ensure!(all_authenticated(&cluster)? == cipher.starts_with("aes-256-xts-"), "{cipher}");
    }
    cluster.finish()
}

/// `auto` authenticates pages where torn ones are restored, and says in the log where not.
#[test]
fn auto_authenticates_where_it_can() -> Result<()> {
    let line = "pagevault: new data keys do not authenticate pages";
    let settings = settings().conf("pagevault.default_encryption = on").conf("wal_log_hints = on");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    let ensure_cipher = |cluster: &Cluster, relation: &str, expected: &str| -> Result<()> {
        let cipher = cluster.text(&format!(
            "SELECT cipher FROM pagevault.relations WHERE relation = '{relation}'::regclass"
        ))?;
        ensure!(cipher == expected, "{relation}: {cipher}");
        Ok(())
    };
    cluster.eventually_logs(line)?;
    cluster.sql("CREATE TABLE t AS SELECT generate_series(1, 5000) AS id")?;
    ensure_cipher(&cluster, "t", "aes-256-xts")?;

    while_down(&cluster, || {
        run(cluster.program("pg_checksums").arg("--enable").arg(cluster.data_directory())).map(drop)
    })?;
    cluster.sql("CREATE TABLE other AS TABLE t; CREATE INDEX other_id ON other (id)")?;
    ensure_cipher(&cluster, "other", CIPHERS[0])?;
    ensure_cipher(&cluster, "other_id", CIPHERS[0])?;
    let label =
        format!("SECURITY LABEL FOR pagevault ON TABLE named IS 'encrypted {}'", CIPHERS[0]);
    cluster.sql(&format!("CREATE TABLE named (id int); {label}"))?;
    cluster.sql("TRUNCATE t")?;
    // It replaces a file, whose cipher it keeps.
    ensure_cipher(&cluster, "t", "aes-256-xts")?;

    // What cannot be used any more is not handed on, except where a label or the setting names it.
    cluster.allow_log("authenticated pages that a crash tears would be lost");
    cluster.set(&[("full_page_writes", "off")])?;
    while_down(&cluster, || Ok(()))?;
    cluster.eventually_that("a second line", || {
        ensure!(cluster.log().matches(line).count() > 1);
        Ok(())
    })?;
    ensure!(cluster.text(&SUM.replace("FROM t", "FROM other"))? == EXPECTED);
    cluster.sql("CREATE INDEX other_too ON other (id); REINDEX INDEX other_id")?;
    cluster.sql("VACUUM FULL other")?;
    for relation in ["other", "other_id", "other_too"] {
        ensure_cipher(&cluster, relation, "aes-256-xts")?;
    }
    let error = cluster.error("TRUNCATE named")?;
    ensure!(error.sqlstate == "55000", "{error}");
    let error = cluster
        .error("SET pagevault.cipher = 'aes-256-xts-auth'; CREATE TABLE asked AS TABLE other")?;
    ensure!(error.sqlstate == "55000", "{error}");

    // New files may have it at once, files with pages not before WAL has an image of each change.
    cluster.set(&[("full_page_writes", "on")])?;
    cluster.sql("TRUNCATE named")?;
    ensure_cipher(&cluster, "named", CIPHERS[0])?;
    let label = label.replace("named", "other");
    let error = cluster.error(&label)?;
    ensure!(error.sqlstate == "55000" && error.hint.contains("CHECKPOINT"), "{error}");
    cluster.eventually_that("images from a checkpoint on", || {
        cluster.sql("CHECKPOINT")?;
        cluster.sql(&label)
    })?;
    cluster.sql("SELECT pagevault.wait_for_rekey('other')")?;
    ensure_cipher(&cluster, "other", CIPHERS[0])?;
    cluster.finish()
}

/// When a file is created, nobody knows for which of the relations that the transaction has locked.
/// Who may only TRUNCATE a table must not give it the cipher of their own ones.
#[test]
fn the_strongest_cipher_of_locked_relations() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(
        "CREATE TABLE strong (id int);
         SECURITY LABEL FOR pagevault ON TABLE strong IS 'encrypted aes-256-xts-auth';
         CREATE INDEX ON strong (id);
         CREATE ROLE u; GRANT CREATE ON SCHEMA public TO u; GRANT TRUNCATE ON strong TO u",
    )?;
    let (mut tables, mut locks) = (String::new(), String::new());
    for i in 0..40 {
        tables += &format!(
            "CREATE TABLE weak{i} (); SECURITY LABEL FOR pagevault ON TABLE weak{i} IS 'encrypted aes-128-xts';"
        );
        locks += &format!("LOCK TABLE weak{i} IN ACCESS EXCLUSIVE MODE;");
    }
    cluster.sql(&format!("SET ROLE u; {tables}"))?;
    cluster.sql(&format!("SET ROLE u; BEGIN; {locks} TRUNCATE strong; COMMIT"))?;
    cluster.sql("TRUNCATE weak0, strong")?;
    let ciphers = "SELECT string_agg(DISTINCT cipher, ' ') FROM pagevault.relations
        WHERE relation::text LIKE 'strong%'";
    ensure!(cluster.text(ciphers)? == CIPHERS[0], "{}", cluster.text(ciphers)?);
    cluster.finish()
}
