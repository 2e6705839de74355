//! What may happen, and when.

use super::disk::Unsynced;
use super::server::{Buffer, Checkpointer, Server};
use super::{Bounds, Count, World};

/// Which of two servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Site {
    /// The primary.
    Primary,
    /// The replica.
    Replica,
}

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A process of the primary begins to make a key for the file.
    MakeKey,
    /// A process of the primary begins to decrypt the file.
    Decrypt,
    /// A rekey job of the primary begins to record that no page is in plaintext or under a former
    /// key.
    Prove,
    /// A process of the primary begins to destroy all keys of the file.
    DestroyKeys,
    /// It takes its next step.
    StepKeys,
    /// The primary's checkpointer begins, or takes its next step.
    StepCheckpoint,
    /// The same, and its end begins a base backup.
    StepCheckpointOfBackup,
    /// A transaction changes the page.
    ChangeRow,
    /// WAL is flushed, and with it a commit acknowledged.
    FlushWal,
    /// The page is written and evicted.
    WritePage(Site),
    /// The page without LSN is written.
    WriteMap(Site),
    /// The primary crashes with so much WAL on disk, and is started.
    Crash {
        /// Records that are left.
        wal: usize,
        /// What becomes of key files.
        unsynced: Unsynced,
    },
    /// The backup program lists the keystore.
    ListKeys,
    /// It copies it.
    CopyKeys,
    /// It copies the file.
    CopyPages,
    /// The backup ends.
    EndBackup,
    /// The backup is restored as a replica.
    Restore,
    /// The replica replays the next record.
    Replay,
    /// The replica makes a restart point.
    RestartPoint,
    /// The replica crashes, and is started.
    CrashReplica(Unsynced),
    /// The replica, wherever it is, becomes the primary.
    Promote,
    /// The former primary becomes a replica of the present one.
    Rewind,
}

fn is_dirty(server: &Server) -> bool {
    let buffer = server.memory.as_ref().map(|memory| memory.buffer);
    matches!(buffer, Some(Buffer::Page { dirty: true, .. }))
}

/// Whether the page without LSN would be written under another key than it is.
fn map_would_change(server: &Server) -> bool {
    let known = server.known();
    let key = known.current.and_then(|version| known.key(version));
    key.is_some() && key != server.map
}

impl Bounds {
    pub(super) fn actions_of_primary(&self, world: &World, actions: &mut Vec<Action>) {
        let primary = &world.primary;
        let is_used = primary.file_is_used(self);
        if primary.is_unlocked() {
            if world.left(Count::Keys) {
                actions.push(Action::MakeKey);
            }
            if world.left(Count::Decryptions) && is_used && primary.known().current.is_some() {
                actions.push(Action::Decrypt);
            }
            if world.left(Count::Proofs) && is_used && primary.proof(self.order).is_some() {
                actions.push(Action::Prove);
            }
            if world.left(Count::Destructions) && is_used && primary.tombstone().is_some() {
                actions.push(Action::DestroyKeys);
            }
        } else {
            actions.push(Action::StepKeys);
        }
        let can_read = primary.page.is_none() || primary.visible_row().is_some();
        if world.left(Count::Rows) && is_used && can_read {
            actions.push(Action::ChangeRow);
        }
        let begins = primary.checkpointer().redo().is_none();
        if (world.left(Count::Checkpoints) || !begins) && primary.may_step_checkpoint(self.order) {
            actions.push(Action::StepCheckpoint);
            let ends = matches!(primary.checkpointer(), Checkpointer::Settled(..));
            if ends && world.left(Count::Backups) && world.backup.is_none() {
                actions.push(Action::StepCheckpointOfBackup);
            }
        }
        if primary.flushed < primary.wal.len() {
            actions.push(Action::FlushWal);
        }
        if is_dirty(primary) {
            actions.push(Action::WritePage(Site::Primary));
        }
        if is_used && map_would_change(primary) {
            actions.push(Action::WriteMap(Site::Primary));
        }
        if world.left(Count::Crashes) {
            for wal in primary.flushed..=primary.wal.len() {
                actions.push(Action::Crash { wal, unsynced: Unsynced::Kept });
                if self.fsync && primary.files.has_unsynced() {
                    for unsynced in [Unsynced::Lost, Unsynced::Torn, Unsynced::Hole] {
                        actions.push(Action::Crash { wal, unsynced });
                    }
                }
            }
        }
    }

    pub(super) fn actions_of_backup(&self, world: &World, actions: &mut Vec<Action>) {
        let Some(backup) = &world.backup else { return };
        if backup.end.is_some() {
            if world.replica.is_none() && world.former.is_none() {
                actions.push(Action::Restore);
            }
            return;
        }
        match (backup.listed, &backup.keys) {
            (None, _) => actions.push(Action::ListKeys),
            (Some(_), None) => actions.push(Action::CopyKeys),
            (Some(_), Some(_)) => {}
        }
        if backup.pages.is_none() {
            actions.push(Action::CopyPages);
        }
        if backup.keys.is_some() && backup.pages.is_some() {
            actions.push(Action::EndBackup);
        }
    }

    pub(super) fn actions_of_replica(&self, world: &World, actions: &mut Vec<Action>) {
        let Some(replica) = &world.replica else {
            let source = &world.primary;
            let is_idle = source.is_unlocked() && source.checkpointer().redo().is_none();
            if world.left(Count::Rewinds) && world.former.is_some() && is_idle {
                actions.push(Action::Rewind);
            }
            return;
        };
        let Some(recovery) = replica.recovery() else { return };
        if recovery.replayed < world.primary.flushed {
            actions.push(Action::Replay);
        }
        if is_dirty(replica) {
            actions.push(Action::WritePage(Site::Replica));
        }
        if map_would_change(replica) {
            actions.push(Action::WriteMap(Site::Replica));
        }
        if world.left(Count::RestartPoints) && recovery.checkpoint.is_some() {
            actions.push(Action::RestartPoint);
        }
        if world.left(Count::ReplicaCrashes) {
            actions.push(Action::CrashReplica(Unsynced::Kept));
            if self.fsync && replica.files.has_unsynced() {
                for unsynced in [Unsynced::Lost, Unsynced::Torn, Unsynced::Hole] {
                    actions.push(Action::CrashReplica(unsynced));
                }
            }
        }
        if world.left(Count::Promotions) && recovery.consistent {
            actions.push(Action::Promote);
        }
    }
}
