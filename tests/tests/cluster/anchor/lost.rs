//! A store that says that there is no note, although there was one: its file system is not mounted,
//! somebody has removed the note, or the store is another one.

use super::*;

const LOST: &str = "anchor has lost its note";
const UNCOMPARED: &str = "server starts without comparing its data directory with its anchor";

impl Anchor {
    /// Leaves the mount point empty.
    fn unmount(&self, cluster: &Cluster) -> Result<()> {
        fs::rename(&self.mount, self.mount.with_extension("away"))?;
        make_directory(cluster, &self.mount)
    }

    /// Brings back what was there before.
    fn mount(&self) -> Result<()> {
        fs::remove_dir_all(&self.mount)?;
        Ok(fs::rename(self.mount.with_extension("away"), &self.mount)?)
    }

    /// The server warns, and writes no note where there is none.
    fn stays_without_a_note(&self, cluster: &Cluster) -> Result<()> {
        let warnings = || cluster.log().matches(&format!("WARNING:  {LOST}")).count();
        let before = warnings();
        cluster.sql("CHECKPOINT")?;
        // Until somebody acts.
        cluster.eventually_that("the server warns twice", || {
            ensure!(warnings() >= before + 2, "{} warnings", warnings());
            Ok(())
        })?;
        ensure!(!self.note.exists(), "there is a note");
        Ok(())
    }
}

fn mark(cluster: &Cluster) -> PathBuf {
    cluster.data_directory().join("pagevault/anchor.noted")
}

fn without_comparing(cluster: &Cluster) -> Result<()> {
    cluster.start_server()?;
    let log = cluster.log();
    ensure!(log.contains(&format!("WARNING:  {UNCOMPARED}: {LOST}")), "no warning: {log}");
    ensure!(log.contains("\"outcome\":\"lost_note\""), "no audit line: {log}");
    Ok(())
}

/// The older directory does not get ahead of the note while its file system is not mounted.
#[test]
fn an_older_directory_is_not_a_new_cluster() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor");
    cluster.without_witness("WAL of an older directory is another");
    cluster.stop(StopMode::Fast)?;
    let kept = keep(&cluster)?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    let noted = fs::read(&anchor.note)?;
    put_back(&cluster, &kept)?;

    anchor.unmount(&cluster)?;
    without_comparing(&cluster)?;
    for _ in 0..3 {
        cluster.sql("INSERT INTO t VALUES (2); CHECKPOINT; SELECT pg_switch_wal()")?;
    }
    anchor.stays_without_a_note(&cluster)?;
    // Over further starts, after a crash, too.
    cluster.crash()?;
    cluster.restart()?;
    anchor.stays_without_a_note(&cluster)?;
    anchor.mount()?;
    cluster.eventually_logs(&format!("WARNING:  {OLDER}"))?;
    ensure!(fs::read(&anchor.note)? == noted, "the note was written over");
    cluster.stop(StopMode::Fast)?;
    ensure_refused(&cluster, &anchor, OLDER)?;
    anchor.accept(&cluster, "it was me")?;
    cluster.start_server()?;
    anchor.checkpoint(&cluster)?;
    cluster.finish()
}

/// Who is asked to wait for the store waits for its file system.
#[test]
fn a_start_waits_for_the_note() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings().conf("pagevault.anchor_wait = 1h"))?;
    cluster.allow_log("server start waits for its anchor");
    cluster.stop(StopMode::Fast)?;
    anchor.unmount(&cluster)?;
    std::thread::scope(|scope| {
        let start = scope.spawn(|| cluster.start_server());
        let waits = format!("WARNING:  server start waits for its anchor: {LOST}");
        cluster.eventually_logs(&waits)?;
        anchor.mount()?;
        start.join().map_err(|_| anyhow::anyhow!("the start panicked"))?
    })?;
    ensure!(!cluster.log().contains("without comparing"), "it has not compared");
    anchor.checkpoint(&cluster)?;
    cluster.finish()
}

/// The note is gone for good; a person says so.
#[test]
fn a_lost_note_is_replaced_by_a_command_only() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor");
    fs::remove_file(&anchor.note)?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    anchor.stays_without_a_note(&cluster)?;
    let accept = format!(
        "run: pagevault-keyring accept-restore \"{}\" --anchor \"{}\" --reason",
        cluster.data_directory().display(),
        anchor.shown()
    );
    ensure!(cluster.log().contains(&accept), "no hint");
    cluster.stop(StopMode::Fast)?;
    without_comparing(&cluster)?;
    // While the server runs.
    let printed = anchor.accept(&cluster, "the volume is lost")?;
    ensure!(printed.contains("Before: no note"), "{printed}");
    cluster.sql("INSERT INTO t VALUES (2)")?;
    anchor.checkpoint(&cluster)?;
    let note = anchor.read(&cluster)?.context("no note")?;
    ensure!(note.get("accepted").is_none(), "the server does not go on: {note}");
    // And while it does not.
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(&anchor.note)?;
    anchor.accept(&cluster, "once more")?;
    let before = cluster.log().matches(LOST).count();
    cluster.start_server()?;
    anchor.checkpoint(&cluster)?;
    ensure!(cluster.log().matches(LOST).count() == before, "a warning without a reason");
    cluster.finish()
}

/// Another store has no note. It gets one before the server uses it.
#[test]
fn another_store_is_accepted_before_it_is_used() -> Result<()> {
    let (mut cluster, keys, anchor) = anchored(&settings())?;
    let second = Anchor::named("second", &cluster, &keys)?;
    second.accept(&cluster, "the anchor moves")?;
    // The server goes on with the former one until it is told.
    cluster.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&cluster)?;
    cluster.set(&[("pagevault.anchor", &second.shown())])?;
    cluster.sql("INSERT INTO t VALUES (2)")?;
    second.checkpoint(&cluster)?;
    cluster.restart()?;
    second.checkpoint(&cluster)?;

    // It can be accepted later, but the server warns until then.
    let third = Anchor::named("third", &cluster, &keys)?;
    cluster.allow_log("anchor");
    cluster.set(&[("pagevault.anchor", &third.shown())])?;
    third.stays_without_a_note(&cluster)?;
    third.accept(&cluster, "the anchor moves again")?;
    third.checkpoint(&cluster)?;
    cluster.restart()?;
    cluster.finish()
}

/// As after a crash between the first note and the mark.
#[test]
fn a_mark_that_is_missing_is_made_up_for() -> Result<()> {
    let (cluster, _keys, anchor) = anchored(&settings())?;
    for start in [false, true] {
        fs::remove_file(mark(&cluster))?;
        if start {
            cluster.restart()?;
        } else {
            cluster.sql("INSERT INTO t VALUES (1)")?;
            anchor.checkpoint(&cluster)?;
        }
        cluster.eventually_that("there is a mark", || {
            ensure!(fs::read_to_string(mark(&cluster))? == "pagevault noted 1\n");
            Ok(())
        })?;
    }
    cluster.finish()
}

/// Its notes are those of the primary, and so is the mark.
#[test]
fn a_promoted_standby_writes_no_first_note() -> Result<()> {
    let (primary, _keys, anchor) = anchored(&settings())?;
    let mut standby = Standby::default().start(&primary)?;
    standby.allow_log("anchor");
    wait_for(&standby, &primary)?;
    anchor.unmount(&primary)?;
    primary.stop(StopMode::Fast)?;
    standby.promote()?;
    anchor.stays_without_a_note(&standby)?;
    anchor.mount()?;
    anchor.checkpoint(&standby)?;
    standby.restart()?;
    standby.without_witness("a standby was promoted");
    standby.finish()?;
    primary.finish()
}
