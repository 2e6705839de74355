//! The anchor: an older data directory is not started unnoticed, and nothing else is in the way of
//! a start.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::standby::{Standby, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};
use serde_json::{Value, json};

mod later;
mod lost;

/// A note in a file, wrapped by the master key of a key file.
struct Anchor {
    described: PathBuf,
    /// As if another file system were mounted there; it has nothing but the note.
    mount: PathBuf,
    note: PathBuf,
}

impl Anchor {
    /// In a directory of its own, beside the data directory.
    fn new(cluster: &Cluster, keys: &KeyFile) -> Result<Anchor> {
        Anchor::named("anchor", cluster, keys)
    }

    fn named(name: &str, cluster: &Cluster, keys: &KeyFile) -> Result<Anchor> {
        let directory = cluster.directory().join(name);
        make_directory(cluster, &directory)?;
        let (described, mount) = (directory.join("anchor.json"), directory.join("mount"));
        let note = mount.join("note");
        make_directory(cluster, &mount)?;
        let provider = json!({"kind": "file", "options": {"path": keys.path()}});
        let options = json!({"path": note, "provider": provider, "key": "main"});
        let text = json!({"store": "file", "options": options}).to_string();
        fs::write(&described, text)?;
        cluster.installation().give(&described)?;
        Ok(Anchor { described, mount, note })
    }

    fn shown(&self) -> String {
        self.described.display().to_string()
    }

    /// The note, if there is one.
    fn read(&self, cluster: &Cluster) -> Result<Option<Value>> {
        let mut helper = Provider::new("anchor", json!({"file": self.described}));
        helper.data_directory = cluster.data_directory();
        let outcome = helper.ask("", "", json!("read_note"))?;
        let stored = outcome.get("note").with_context(|| format!("{outcome}"))?;
        let note = stored["stored"]["note"].as_str();
        note.map(|note| serde_json::from_str(note).context("a note")).transpose()
    }

    /// Makes a checkpoint, and waits until it is noted.
    fn checkpoint(&self, cluster: &Cluster) -> Result<()> {
        cluster.sql("CHECKPOINT")?;
        self.is_noted(cluster)
    }

    /// Waits until the last checkpoint is noted.
    fn is_noted(&self, cluster: &Cluster) -> Result<()> {
        let last = cluster
            .text("SELECT timeline_id || ' ' || checkpoint_lsn FROM pg_control_checkpoint()")?;
        cluster.eventually_that("the last checkpoint is noted", || {
            let note = self.read(cluster)?.context("there is no note")?;
            let noted =
                format!("{} {}", note["timeline"], note["checkpoint"].as_str().unwrap_or(""));
            ensure!(noted == last, "{note}, not {last}");
            Ok(())
        })
    }

    fn accept(&self, cluster: &Cluster, reason: &str) -> Result<String> {
        let mut program = cluster.program("pagevault-keyring");
        program.arg("accept-restore").arg(cluster.data_directory()).arg("--anchor");
        run(program.arg(&self.described).args(["--reason", reason]))
    }
}

fn make_directory(cluster: &Cluster, path: &Path) -> Result<()> {
    fs::create_dir(path)?;
    cluster.installation().give(path)
}

fn settings() -> Settings {
    Settings::default()
        .conf("checkpoint_timeout = 1h")
        .conf("pagevault.anchor_interval = 1s")
        .conf("wal_keep_size = 1GB")
}

fn anchored(settings: &Settings) -> Result<(Cluster, KeyFile, Anchor)> {
    let (cluster, keys) = Cluster::with_keys(settings)?;
    let anchor = Anchor::new(&cluster, &keys)?;
    cluster.set(&[("pagevault.anchor", &anchor.shown())])?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE t (id int)")?;
    anchor.checkpoint(&cluster)?;
    Ok((cluster, keys, anchor))
}

/// A copy of a data directory.
fn copy(from: &Path, to: &Path) -> Result<()> {
    run(std::process::Command::new("cp").arg("-a").arg(from).arg(to)).map(drop)
}

/// The stopped server's data directory as it is now, beside it.
fn keep(cluster: &Cluster) -> Result<PathBuf> {
    let kept = cluster.directory().join("kept");
    copy(&cluster.data_directory(), &kept)?;
    Ok(kept)
}

/// Puts a kept data directory in the place of the present one.
fn put_back(cluster: &Cluster, kept: &Path) -> Result<()> {
    fs::remove_dir_all(cluster.data_directory())?;
    Ok(fs::rename(kept, cluster.data_directory())?)
}

/// What the server says when it refuses to start.
fn refusal(cluster: &Cluster) -> Result<String> {
    match cluster.start_server() {
        Ok(()) => anyhow::bail!("the server starts"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

fn ensure_refused(cluster: &Cluster, anchor: &Anchor, why: &str) -> Result<()> {
    let said = refusal(cluster)?;
    let hint = format!(
        "pagevault-keyring accept-restore \"{}\" --anchor \"{}\" --reason",
        cluster.data_directory().display(),
        anchor.shown()
    );
    for part in [&format!("FATAL:  {why}"), "DETAIL:  The data directory contains WAL up to", &hint]
    {
        ensure!(said.contains(part), "{part}: {said}");
    }
    Ok(())
}

const OLDER: &str = "data directory is older than its anchor";
const ELSEWHERE: &str = "data directory is not on the timeline of its anchor";

#[test]
fn an_older_directory_is_refused_until_somebody_says_why() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings().conf("log_error_verbosity = verbose"))?;
    cluster.allow_log(OLDER);
    cluster.stop(StopMode::Fast)?;
    let kept = keep(&cluster)?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    put_back(&cluster, &kept)?;
    let said = refusal(&cluster)?;
    ensure!(said.contains(&format!("FATAL:  55000: {OLDER}")), "{said}");
    ensure_refused_again(&cluster, &anchor)?;

    // The reason is required, and one line.
    for reason in ["", " ", "a\nb"] {
        ensure!(anchor.accept(&cluster, reason).is_err(), "accepted for {reason:?}");
    }
    let before = anchor.read(&cluster)?.context("no note")?;
    let printed = anchor.accept(&cluster, "restored for ticket 4711")?;
    let after = anchor.read(&cluster)?.context("no note")?;
    ensure!(after["accepted"] == "restored for ticket 4711", "{after}");
    ensure!(
        after["generation"].as_u64() == before["generation"].as_u64().map(|before| before + 1),
        "{before} {after}"
    );
    ensure!(printed.contains(before["checkpoint"].as_str().context("no LSN")?), "{printed}");
    let trail = fs::read_to_string(cluster.data_directory().join("pagevault/audit.tools"))?;
    for outcome in ["attempted", "ok"] {
        let line = trail.lines().find(|line| line.contains(&format!("\"outcome\":\"{outcome}\"")));
        let line = line.with_context(|| format!("{outcome}: {trail}"))?;
        ensure!(line.contains("\"action\":\"accept_restore\""), "{line}");
        ensure!(line.contains("restored for ticket 4711"), "{line}");
    }
    cluster.start_server()?;
    // Nobody can have added or changed these lines.
    let mut verify = cluster.program("pagevault-keyring");
    verify.args(["audit", "verify"]).arg(cluster.directory().join("log"));
    let verified = run(verify.arg("-D").arg(cluster.data_directory()));
    // The server's own lines since the directory was kept are of another run of it.
    let verified = verified.unwrap_or_else(|error| format!("{error:#}"));
    let own = "own audit trail: 1 with a MAC, 1 confirmed without a MAC";
    ensure!(verified.contains(own), "{verified}");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "0");
    ensure!(
        cluster.log().contains("\"action\":\"anchor_check\",\"by\":\"start\""),
        "no audit line"
    );
    // From now on the notes are the server's again.
    anchor.checkpoint(&cluster)?;
    ensure!(anchor.read(&cluster)?.context("no note")?.get("accepted").is_none());
    cluster.restart()?;
    cluster.finish()
}

fn ensure_refused_again(cluster: &Cluster, anchor: &Anchor) -> Result<()> {
    let path = cluster.data_directory().join("postgresql.conf");
    let text = fs::read_to_string(&path)?;
    fs::write(&path, text.replace("log_error_verbosity = verbose", ""))?;
    ensure_refused(cluster, anchor, OLDER)
}

#[test]
fn crashes_are_not_in_the_way() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor cannot be used");
    cluster.without_witness("a restore from the first WAL would be older than the anchor");
    for round in 0..3 {
        cluster.sql(&format!("INSERT INTO t VALUES ({round})"))?;
        anchor.checkpoint(&cluster)?;
        // At once after the note, and after more WAL.
        if round > 0 {
            cluster.sql("INSERT INTO t VALUES (10)")?;
        }
        cluster.crash()?;
        anchor.is_noted(&cluster)?;
    }
    // The store is not asked after the crash of a process.
    let comparisons = || cluster.log().matches("\"by\":\"start\"").count();
    let before = comparisons();
    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    let pid: i32 = cluster
        .text("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")?
        .parse()?;
    cluster.crash_process(rustix::process::Pid::from_raw(pid).context("no process")?)?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "5");
    ensure!(comparisons() == before, "the server asked its anchor after the crash of a process");
    fs::rename(&away, &anchor.described)?;
    cluster.sql("INSERT INTO t VALUES (11)")?;
    anchor.checkpoint(&cluster)?;
    cluster.finish()
}

/// Recovery to a point in time begins with a backup, which is older than the anchor.
#[test]
fn a_recovery_to_a_point_in_time_is_accepted_by_one_command() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["--wal-method=stream"])?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    let time = cluster.text("SELECT clock_timestamp()")?;
    cluster.sql("SELECT pg_sleep(0.01); INSERT INTO t VALUES (2)")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    anchor.checkpoint(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    let mut restored = Cluster::from_files(|target| copy(&backup, target))?;
    let signal = restored.data_directory().join("recovery.signal");
    fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/pg_wal/%f %p'\nrecovery_target_time = '{time}'\n\
         recovery_target_action = 'promote'",
        cluster.data_directory().display()
    ))?;
    restored.allow_log(OLDER);
    ensure_refused(&restored, &anchor, OLDER)?;
    // PostgreSQL would understand this label.
    let label = restored.data_directory().join("backup_label");
    let text = fs::read_to_string(&label)?;
    fs::write(&label, text.replace("CHECKPOINT LOCATION", "CHECKPOINT  LOCATION"))?;
    ensure!(refusal(&restored)?.contains("backup_label is not as a server writes it"));
    restored.allow_log("backup_label is not as a server writes it");
    fs::write(&label, text)?;
    anchor.accept(&restored, "the second row was a mistake")?;
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    ensure!(restored.text("SELECT count(*) FROM t")? == "1");
    anchor.is_noted(&restored)?;
    ensure!(anchor.read(&restored)?.context("no note")?["timeline"] == 2);
    restored.restart()?;
    restored.crash()?;
    anchor.checkpoint(&restored)?;

    // The former primary has a row that is not in the history of the cluster any more.
    ensure_refused(&cluster, &anchor, ELSEWHERE)?;
    cluster.allow_log(ELSEWHERE);
    restored.without_witness("it is a restored backup");
    restored.finish()?;
    cluster.finish()
}

/// A server that stands at a point in time is accepted, and promoted there.
#[test]
fn what_is_accepted_at_a_point_in_time_can_be_promoted_there() -> Result<()> {
    let (cluster, _keys, anchor) = anchored(&settings())?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["--wal-method=stream"])?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    cluster.sql("SELECT pg_create_restore_point('here'); INSERT INTO t VALUES (2)")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    anchor.checkpoint(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    let restored = Cluster::from_files(|target| copy(&backup, target))?;
    let signal = restored.data_directory().join("recovery.signal");
    fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/pg_wal/%f %p'\nrecovery_target_name = 'here'",
        cluster.data_directory().display()
    ))?;
    restored.without_witness("it is a restored backup");
    anchor.accept(&restored, "to look at it")?;
    restored.start_server()?;
    restored.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    ensure!(restored.text("SELECT count(*) FROM t")? == "1");
    restored.stop(StopMode::Fast)?;
    anchor.accept(&restored, "the second row was a mistake")?;
    restored.start_server()?;
    restored.eventually("SELECT pg_get_wal_replay_pause_state()", "paused")?;
    restored.sql("SELECT pg_wal_replay_resume()")?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    anchor.checkpoint(&restored)?;
    restored.restart()?;
    anchor.checkpoint(&restored)?;
    restored.finish()
}

#[test]
fn a_standby_that_has_everything_needs_no_command() -> Result<()> {
    let (primary, _keys, anchor) = anchored(&settings())?;
    let standby = Standby::default().start(&primary)?;
    primary.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&primary)?;
    wait_for(&standby, &primary)?;
    // A standby is behind the notes of its primary, and starts.
    standby.restart()?;
    wait_for(&standby, &primary)?;
    primary.stop(StopMode::Fast)?;
    standby.promote()?;
    // Also before the first checkpoint of the new timeline.
    standby.crash()?;
    anchor.checkpoint(&standby)?;
    let note = anchor.read(&standby)?.context("no note")?;
    ensure!(note["timeline"] == 2 && note.get("accepted").is_none(), "{note}");
    standby.restart()?;
    standby.without_witness("a standby was promoted");
    standby.finish()?;
    primary.finish()
}

#[test]
fn a_failover_that_lost_wal_is_reported_and_accepted_while_the_server_runs() -> Result<()> {
    let (primary, _keys, anchor) = anchored(&settings())?;
    let mut standby = Standby::default().start(&primary)?;
    standby.allow_log(ELSEWHERE);
    standby.allow_log("could not receive");
    wait_for(&standby, &primary)?;
    standby.stop(StopMode::Fast)?;
    primary.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&primary)?;
    primary.stop(StopMode::Fast)?;
    standby.start_server()?;
    // It is the primary's note, so nothing can be said yet, nor accepted.
    let refused = anchor.accept(&standby, "too early").err().context("a standby was accepted")?;
    ensure!(format!("{refused:#}").contains("that of a standby"), "{refused:#}");
    standby.promote()?;
    let warning = format!("WARNING:  {ELSEWHERE}");
    standby.eventually_logs(&warning)?;
    ensure!(standby.text("SELECT count(*) FROM t")? == "0", "the server is not usable");
    standby.stop(StopMode::Fast)?;
    ensure_refused(&standby, &anchor, ELSEWHERE)?;
    anchor.accept(&standby, "failover")?;
    standby.start_server()?;
    anchor.checkpoint(&standby)?;
    standby.without_witness("a standby was promoted");
    standby.finish()?;
    primary.finish()
}

/// An outage is no refusal; the comparison is made up for, and does not forget how old the data
/// directory was.
#[test]
fn without_its_store_a_server_starts_and_compares_later() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor");
    cluster.stop(StopMode::Fast)?;
    let kept = keep(&cluster)?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&cluster)?;
    let noted = anchor.read(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    put_back(&cluster, &kept)?;
    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    cluster.start_server()?;
    let log = cluster.log();
    ensure!(log.contains("WARNING:  server starts without comparing its data directory"), "{log}");
    ensure!(log.contains("\"outcome\":\"outage\""), "no audit line: {log}");
    // It gets ahead of the note, which the start would have refused.
    for _ in 0..3 {
        cluster.sql("INSERT INTO t VALUES (2); CHECKPOINT; SELECT pg_switch_wal()")?;
    }
    cluster.sql("CHECKPOINT")?;
    fs::rename(&away, &anchor.described)?;
    cluster.eventually_logs(&format!("WARNING:  {OLDER}"))?;
    ensure!(cluster.log().contains("The next start will be refused"), "no warning");
    ensure!(anchor.read(&cluster)? == noted, "the note was written over");
    cluster.stop(StopMode::Fast)?;
    ensure_refused(&cluster, &anchor, OLDER)?;
    fs::rename(&anchor.described, &away)?;
    cluster.start_server()?;
    fs::rename(&away, &anchor.described)?;
    cluster.sql("CHECKPOINT")?;
    // A person may accept it while the server runs.
    anchor.accept(&cluster, "it was me")?;
    anchor.checkpoint(&cluster)?;
    cluster.restart()?;
    cluster.finish()
}

#[test]
fn a_start_waits_for_its_store_if_it_is_told_to() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings().conf("pagevault.anchor_wait = 1h"))?;
    cluster.allow_log("server start waits for its anchor");
    cluster.stop(StopMode::Fast)?;
    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    std::thread::scope(|scope| {
        let start = scope.spawn(|| cluster.start_server());
        cluster.eventually_logs("WARNING:  server start waits for its anchor")?;
        ensure!(cluster.client().is_err(), "a session is admitted");
        fs::rename(&away, &anchor.described)?;
        start.join().map_err(|_| anyhow::anyhow!("the start panicked"))?
    })?;
    let log = cluster.log();
    ensure!(!log.contains("without comparing"), "{log}");
    anchor.checkpoint(&cluster)?;
    cluster.finish()
}

#[test]
fn garbage_is_an_outage_and_is_not_written_over() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor");
    cluster.stop(StopMode::Fast)?;
    fs::write(&anchor.note, "garbage")?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO t VALUES (1); CHECKPOINT")?;
    cluster.eventually_logs("WARNING:  anchor cannot be used")?;
    ensure!(fs::read(&anchor.note)? == b"garbage", "it was written over");
    cluster.finish()
}

/// A copy of a stopped data directory is neither older nor newer. Whichever notes second finds that
/// it is not alone.
#[test]
fn two_primaries_are_reported() -> Result<()> {
    let (one, _keys, anchor) = anchored(&settings())?;
    one.stop(StopMode::Fast)?;
    let mut two = Cluster::from_files(|target| copy(&one.data_directory(), target))?;
    two.allow_log("another server writes notes");
    one.start_server()?;
    anchor.is_noted(&one)?;
    two.start_server()?;
    one.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&one)?;
    let noted = anchor.read(&one)?;
    two.sql("INSERT INTO t SELECT generate_series(1, 10000); CHECKPOINT")?;
    two.eventually_logs("WARNING:  another server writes notes to the anchor of this one")?;
    two.eventually_logs("\"outcome\":\"another_server\"")?;
    ensure!(anchor.read(&one)? == noted, "the note was written over");
    ensure!(two.text("SELECT count(*) FROM t")? == "10000", "the server is not usable");
    // The other one goes on undisturbed.
    one.sql("INSERT INTO t VALUES (2)")?;
    anchor.checkpoint(&one)?;
    two.without_witness("it is a copy");
    two.finish()?;
    one.finish()
}
