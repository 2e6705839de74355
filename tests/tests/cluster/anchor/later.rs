//! What is compared later than at the start.

use super::*;

/// There is nothing to compare with when the store is back, and the next note is the server's own.
#[test]
fn a_store_without_a_note_ends_what_was_not_compared() -> Result<()> {
    let (mut cluster, _keys, anchor) = anchored(&settings())?;
    cluster.allow_log("anchor");
    cluster.stop(StopMode::Fast)?;
    let away = anchor.described.with_extension("away");
    fs::rename(&anchor.described, &away)?;
    cluster.start_server()?;
    fs::remove_file(&anchor.note)?;
    cluster.sql("INSERT INTO t VALUES (1)")?;
    cluster.sql("CHECKPOINT")?;
    fs::rename(&away, &anchor.described)?;
    anchor.is_noted(&cluster)?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1", "the server is not usable");
    cluster.finish()
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
    let accepted = anchor.read(&one)?;
    one.sql("INSERT INTO t VALUES (2)")?;
    one.sql("CHECKPOINT")?;
    one.eventually_logs("WARNING:  another server writes notes to the anchor of this one")?;
    ensure!(anchor.read(&one)? == accepted, "the note was written over");
    two.start_server()?;
    anchor.checkpoint(&two)?;
    two.without_witness("it is a copy");
    two.finish()?;
    one.finish()
}
