//! What is compared later than at the start.

use rustix::process::Signal;

use super::*;
use crate::shutdown::starts_and_ends;

/// A new cluster has nothing to compare with when the store is back, and the next note is its own.
#[test]
fn a_store_without_a_note_ends_what_was_not_compared() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&settings())?;
    let anchor = Anchor::new(&cluster, &keys)?;
    cluster.allow_log("anchor");
    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    cluster.set(&[("pagevault.anchor", &anchor.shown())])?;
    cluster.restart()?;
    ensure!(cluster.log().contains("server starts without comparing"), "it has compared");
    fs::rename(&away, &anchor.described)?;
    cluster.sql("CREATE TABLE t (id int)")?;
    anchor.checkpoint(&cluster)?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "0", "the server is not usable");
    cluster.finish()
}

/// A server goes on, and reports the note that is there instead of writing its own.
fn does_not_write_over(server: &Cluster, anchor: &Anchor) -> Result<()> {
    let note = anchor.read(server)?;
    server.sql("INSERT INTO t VALUES (2)")?;
    server.sql("CHECKPOINT")?;
    server.eventually_logs("WARNING:  another server writes notes to the anchor of this one")?;
    ensure!(anchor.read(server)? == note, "the note was written over");
    Ok(())
}

/// It is believed to be down, and a restored data directory is accepted.
#[test]
fn a_former_primary_does_not_write_over_what_was_accepted() -> Result<()> {
    let (mut one, _keys, anchor) = anchored(&settings())?;
    one.allow_log("another server writes notes");
    one.stop(StopMode::Fast)?;
    let two = Cluster::from_files(|target| copy(&one.data_directory(), target))?;
    one.start_server()?;
    one.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&one)?;
    anchor.accept(&two, "restored")?;
    does_not_write_over(&one, &anchor)?;
    two.start_server()?;
    anchor.checkpoint(&two)?;
    two.without_witness("it is a copy");
    two.finish()?;
    one.finish()
}

/// A base backup that was made after the last note can contain more than the former primary has
/// noted. So the place in a note does not tell which of the two was accepted.
#[test]
fn a_former_primary_does_not_take_over_a_later_note_for_another_directory() -> Result<()> {
    let (mut one, _keys, anchor) = anchored(&settings())?;
    one.allow_log("another server writes notes");
    one.allow_log(OLDER);
    let backup = one.directory().join("backup");
    one.base_backup_with(&backup, &["--wal-method=stream"])?;
    let two = Cluster::from_files(|target| copy(&backup, target))?;
    anchor.is_noted(&one)?;
    anchor.accept(&two, "restored")?;
    // The manifest of the backup does not have what the command has written there.
    let verified =
        two.program("pagevault-keyring").arg("verify").arg(two.data_directory()).output()?;
    let said = String::from_utf8_lossy(&verified.stdout);
    ensure!(said.contains("compared with") && !said.contains("accepted"), "{said}");
    does_not_write_over(&one, &anchor)?;
    two.start_server()?;
    anchor.checkpoint(&two)?;
    // A restored server may be accepted again, and while it runs.
    for reason in ["once more", "and again"] {
        anchor.accept(&two, reason)?;
        two.sql("INSERT INTO t VALUES (3)")?;
        anchor.checkpoint(&two)?;
    }
    two.without_witness("it is a restored backup");
    two.finish()?;
    one.finish()
}

/// The store was put back, so that the note that was made there has the number of a later one.
#[test]
fn a_former_primary_does_not_take_over_a_note_with_the_number_of_its_own() -> Result<()> {
    let (mut one, _keys, anchor) = anchored(&settings())?;
    one.allow_log("another server writes notes");
    one.stop(StopMode::Fast)?;
    let two = Cluster::from_files(|target| copy(&one.data_directory(), target))?;
    one.start_server()?;
    anchor.is_noted(&one)?;
    let kept = fs::read(&anchor.note)?;
    one.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&one)?;
    ensure!(fs::read(&anchor.note)? != kept, "there is no later note");
    fs::write(&anchor.note, &kept)?;
    anchor.accept(&two, "restored")?;
    does_not_write_over(&one, &anchor)?;
    two.start_server()?;
    two.without_witness("it is a copy");
    two.finish()?;
    one.finish()
}

/// What was accepted is another state of the data directory.
#[test]
fn an_older_directory_does_not_overtake_a_note_that_was_accepted() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor");
    cluster.stop(StopMode::Fast)?;
    let kept = keep(&cluster)?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    anchor.checkpoint(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    anchor.accept(&cluster, "a recovery to a point in time")?;
    put_back(&cluster, &kept)?;
    ensure_refused(&cluster, &anchor, OLDER)?;

    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    cluster.start_server()?;
    cluster.sql("CREATE TABLE more AS SELECT generate_series(1, 100000) AS id")?;
    cluster.sql("CHECKPOINT")?;
    let accepted = fs::read(&anchor.note)?;
    fs::rename(&away, &anchor.described)?;
    cluster.eventually_logs(&format!("WARNING:  {OLDER}"))?;
    ensure!(fs::read(&anchor.note)? == accepted, "the note was written over");
    cluster.stop(StopMode::Fast)?;
    ensure_refused(&cluster, &anchor, OLDER)?;
    anchor.accept(&cluster, "this one")?;
    cluster.start_server()?;
    anchor.checkpoint(&cluster)?;
    cluster.restart()?;
    cluster.finish()
}

/// `pagevault.anchor_wait` does not hold up the end of a start. The next one compares.
#[test]
fn a_start_that_waits_for_the_note_ends_when_it_is_told_to() -> Result<()> {
    let settings = settings().conf("pagevault.anchor_wait = 1h");
    let (mut cluster, _keys, anchor) = anchored(&settings)?;
    cluster.allow_log("anchor");
    let older = cluster.directory().join("older");
    cluster.stop(StopMode::Fast)?;
    copy(&cluster.data_directory(), &older)?;
    cluster.start_server()?;
    anchor.checkpoint(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir_all(cluster.data_directory())?;
    fs::rename(&older, cluster.data_directory())?;
    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        let before = cluster.log().len();
        starts_and_ends(&cluster, &[], signal, || {
            let waits = cluster.log()[before..].contains("server start waits for its anchor");
            ensure!(waits, "it does not wait");
            Ok(())
        })?;
    }
    fs::rename(&away, &anchor.described)?;
    ensure!(cluster.start_server().is_err(), "an older directory is started");
    cluster.finish()
}
