//! What may happen, and when.

use super::disk::Unsynced;
use super::interim::{Seal, Start};
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
        /// Whether the key provider answers then.
        start: Start,
    },
    /// The key provider answers a server that has started without it.
    Unlock(Site),
    /// The replica is started again, after a locked key has stopped it.
    StartAgain,
    /// A worker of the primary looks at the marks of files that may have interim pages.
    LookForInterim,
    /// A job of the primary begins to make a key for such a file.
    Rekey,
    /// The job rewrites the page.
    RewritePage,
    /// The backup program lists the keystore.
    ListKeys,
    /// It copies it.
    CopyKeys,
    /// It copies the file.
    CopyPages,
    /// It copies the marks of files that may have interim pages.
    CopyMarks,
    /// The backup ends.
    EndBackup,
    /// The backup is restored as a replica.
    Restore {
        /// The key provider does not answer.
        locked: bool,
    },
    /// The replica replays the next record.
    Replay,
    /// The replica makes a restart point.
    RestartPoint,
    /// The replica crashes, and is started.
    CrashReplica {
        /// What becomes of key files.
        unsynced: Unsynced,
        /// The key provider does not answer.
        locked: bool,
    },
    /// The replica, wherever it is, becomes the primary.
    Promote,
    /// The former primary becomes a replica of the present one.
    Rewind {
        /// The key provider does not answer.
        locked: bool,
    },
}

fn is_dirty(server: &Server) -> bool {
    let buffer = server.memory.as_ref().map(|memory| memory.buffer);
    matches!(buffer, Some(Buffer::Page { dirty: true, .. }))
}

/// Whether the page without LSN would be written under another key than it is.
fn map_would_change(server: &Server) -> bool {
    let known = server.known();
    let key = known.current.and_then(|version| known.key(version));
    let seal = key.map(|key| Seal { key, interim: server.is_locked() });
    seal.is_some() && seal != server.map
}

impl Bounds {
    pub(super) fn actions_of_primary(&self, world: &World, actions: &mut Vec<Action>) {
        let primary = &world.primary;
        let exists = primary.file_is_used(self);
        let is_used = exists && !primary.is_locked();
        self.actions_of_interim(world, is_used, actions);
        if primary.keystore_is_free() {
            if world.left(Count::Keys) && !primary.is_locked() {
                actions.push(Action::MakeKey);
            }
            if world.left(Count::Decryptions) && is_used && primary.known().current.is_some() {
                actions.push(Action::Decrypt);
            }
            if world.left(Count::Proofs) && is_used && primary.proof(self.order).is_some() {
                actions.push(Action::Prove);
            }
            if world.left(Count::Destructions) && exists && primary.tombstone().is_some() {
                actions.push(Action::DestroyKeys);
            }
        } else {
            actions.push(Action::StepKeys);
        }
        let can_read = primary.page.is_none() || primary.visible_row(self.order).is_some();
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
                for unsynced in self.powercuts(primary) {
                    actions.push(Action::Crash { wal, unsynced, start: Start::Open });
                    if world.may_be_locked() {
                        for start in [Start::Locked, Start::LockedAndKilled] {
                            actions.push(Action::Crash { wal, unsynced, start });
                        }
                    }
                }
            }
        }
    }

    /// What a crash may make of key files.
    fn powercuts(&self, server: &Server) -> impl Iterator<Item = Unsynced> + use<> {
        let is_any = self.fsync && server.has_unsynced();
        let lost = [Unsynced::Lost, Unsynced::Torn, Unsynced::Hole];
        [Unsynced::Kept].into_iter().chain(lost.into_iter().filter(move |_| is_any))
    }

    fn actions_of_interim(&self, world: &World, is_used: bool, actions: &mut Vec<Action>) {
        let primary = &world.primary;
        if primary.is_locked() {
            actions.push(Action::Unlock(Site::Primary));
        }
        if !primary.keystore_is_free() {
            return;
        }
        if primary.may_look_for_interim() {
            actions.push(Action::LookForInterim);
        }
        let may_rekey = world.left(Count::Rekeys);
        if is_used && may_rekey && primary.is_to_rekey() {
            actions.push(Action::Rekey);
        }
        let is_former = primary.page.and_then(|page| page.key()).map(|key| key.version)
            != primary.known().current;
        if is_used && (is_former || !may_rekey) && primary.may_rewrite_interim_page() {
            actions.push(Action::RewritePage);
        }
    }

    pub(super) fn actions_of_backup(&self, world: &World, actions: &mut Vec<Action>) {
        let Some(backup) = &world.backup else { return };
        if backup.end.is_some() {
            if world.replica.is_none() && world.former.is_none() {
                actions.push(Action::Restore { locked: false });
                if world.may_be_locked() {
                    actions.push(Action::Restore { locked: true });
                }
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
        if backup.marks.is_none() {
            actions.push(Action::CopyMarks);
        }
        if backup.keys.is_some() && backup.pages.is_some() && backup.marks.is_some() {
            actions.push(Action::EndBackup);
        }
    }

    pub(super) fn actions_of_replica(&self, world: &World, actions: &mut Vec<Action>) {
        let Some(replica) = &world.replica else {
            let source = &world.primary;
            let is_idle = source.keystore_is_free() && source.checkpointer().redo().is_none();
            if world.left(Count::Rewinds) && world.former.is_some() && is_idle {
                actions.push(Action::Rewind { locked: false });
                if world.may_be_locked() {
                    actions.push(Action::Rewind { locked: true });
                }
            }
            return;
        };
        if replica.may_start_again() {
            actions.push(Action::StartAgain);
        }
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
        if replica.is_locked() {
            actions.push(Action::Unlock(Site::Replica));
        }
        if world.left(Count::RestartPoints) && recovery.checkpoint.is_some() {
            actions.push(Action::RestartPoint);
        }
        if world.left(Count::ReplicaCrashes) {
            for unsynced in self.powercuts(replica) {
                actions.push(Action::CrashReplica { unsynced, locked: false });
                if world.may_be_locked() {
                    actions.push(Action::CrashReplica { unsynced, locked: true });
                }
            }
        }
        if world.left(Count::Promotions) && recovery.consistent {
            actions.push(Action::Promote);
        }
    }
}
