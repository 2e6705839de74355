//! What an action does.

use super::actions::{Action, Site};
use super::disk::Unsynced;
use super::interim::{Marks, Start};
use super::order::Order;
use super::server::Server;
use super::wal::{self, KeyChange, WalRecord};
use super::{Backup, Bounds, Count, World};

impl Bounds {
    pub(super) fn act(&self, world: &mut World, action: Action) {
        match action {
            Action::MakeKey => {
                world.count(Count::Keys);
                world.keys_made += 1;
                let change = world.primary.new_key(world.keys_made, self);
                world.primary.begin_keys(change, self.order);
            }
            Action::Decrypt => {
                world.count(Count::Decryptions);
                if let Some(after) = world.primary.known().current {
                    world.primary.begin_keys(KeyChange::Decrypted { after }, self.order);
                }
            }
            Action::Prove => {
                world.count(Count::Proofs);
                if let Some(change) = world.primary.proof(self.order) {
                    world.primary.begin_keys(change, self.order);
                }
            }
            Action::DestroyKeys => {
                world.count(Count::Destructions);
                if let Some(change) = world.primary.tombstone() {
                    world.primary.begin_keys(change, self.order);
                }
            }
            Action::StepKeys => self.step_keys(world),
            Action::StepCheckpoint | Action::StepCheckpointOfBackup => {
                if world.primary.checkpointer().redo().is_none() {
                    world.count(Count::Checkpoints);
                }
                let may_crash = world.left(Count::Crashes);
                let ended = world.primary.step_checkpoint(may_crash, self);
                if ended && action == Action::StepCheckpointOfBackup {
                    world.count(Count::Backups);
                    let redo = world.primary.redo;
                    let listed = (!self.lists).then_some(usize::MAX);
                    let marks = (self.outages == 0).then(Marks::default);
                    let (keys, pages, end) = (None, None, None);
                    world.backup = Some(Backup { redo, listed, keys, pages, marks, end });
                }
            }
            Action::ChangeRow => {
                world.count(Count::Rows);
                world.rows_made += 1;
                world.primary.change_row(world.rows_made);
            }
            Action::FlushWal => world.primary.flush(world.primary.wal.len(), self.order),
            Action::WritePage(Site::Primary) => world.primary.write_page(self.order),
            Action::WriteMap(Site::Primary) => world.primary.write_map(self.order),
            Action::WritePage(Site::Replica) => {
                if let Some(replica) = &mut world.replica {
                    replica.write_page(self.order);
                }
            }
            Action::WriteMap(Site::Replica) => {
                if let Some(replica) = &mut world.replica {
                    replica.write_map(self.order);
                }
            }
            Action::Crash { wal, unsynced, start } => self.crash(world, wal, unsynced, start),
            Action::Unlock(Site::Primary) => world.primary.unlock(),
            Action::Unlock(Site::Replica) => {
                if let Some(replica) = &mut world.replica {
                    replica.unlock();
                }
            }
            Action::StartAgain => {
                if let Some(replica) = &mut world.replica {
                    replica.start_again(self);
                }
            }
            Action::LookForInterim => world.primary.look_for_interim(self),
            Action::Rekey => {
                world.count(Count::Rekeys);
                world.keys_made += 1;
                let change = world.primary.new_key(world.keys_made, self);
                world.primary.begin_keys(change, self.order);
            }
            Action::RewritePage => world.primary.rewrite_page(self.order),
            Action::ListKeys
            | Action::CopyKeys
            | Action::CopyPages
            | Action::CopyMarks
            | Action::EndBackup
            | Action::Restore { .. } => self.step_backup(world, action),
            Action::Replay
            | Action::RestartPoint
            | Action::CrashReplica { .. }
            | Action::Promote
            | Action::Rewind { .. } => self.step_replica(world, action),
        }
    }

    fn step_keys(&self, world: &mut World) {
        let change = world.primary.change_under_way();
        if !world.primary.step_keys(world.left(Count::Crashes), self) {
            return;
        }
        if let Some(KeyChange::Destroyed { through, .. }) = change {
            world.reported = Some((through, world.primary.wal.len()));
        }
    }

    fn crash(&self, world: &mut World, wal: usize, unsynced: Unsynced, start: Start) {
        world.count(Count::Crashes);
        if start.is_locked() {
            world.count(Count::Outages);
        }
        if world.backup.as_ref().is_some_and(|backup| backup.end.is_none()) {
            world.backup = None;
        }
        let primary = &mut world.primary;
        primary.wal.truncate(wal);
        primary.crash(unsynced);
        primary.recover(start, self);
    }

    fn step_backup(&self, world: &mut World, action: Action) {
        let primary = &mut world.primary;
        let Some(backup) = &mut world.backup else { return };
        match action {
            Action::ListKeys => backup.listed = Some(primary.log_bytes().map_or(0, <[u8]>::len)),
            Action::CopyKeys => {
                let listed = backup.listed.unwrap_or(0);
                backup.keys = Some(primary.files.copy(listed));
            }
            Action::CopyPages => backup.pages = Some((primary.page, primary.map)),
            Action::CopyMarks => backup.marks = Some(primary.marks),
            Action::EndBackup => {
                let end = primary.wal.len();
                backup.end = Some(end);
                primary.flush(end, self.order);
            }
            Action::Restore { locked } => {
                if locked {
                    world.left[Count::Outages as usize] -= 1;
                }
                let Some((page, map)) = backup.pages else { return };
                let mut replica = Server {
                    redo: backup.redo,
                    minimum: backup.end.unwrap_or(0),
                    files: backup.keys.clone().unwrap_or_default(),
                    page,
                    map,
                    marks: backup.marks.unwrap_or_default(),
                    ..Server::default()
                };
                replica.open_keystore(self.order, locked);
                if self.outages > 0 {
                    replica.note_copied(self.order);
                }
                replica.check_consistency(self);
                world.replica = Some(replica);
                world.backup = None;
                if self.rewinds == 0 {
                    // All that the replica will see of it.
                    let wal = primary.wal[..primary.flushed].to_vec();
                    *primary = Server { flushed: wal.len(), wal, ..Server::default() };
                }
            }
            _ => {}
        }
    }

    fn step_replica(&self, world: &mut World, action: Action) {
        if let Action::Rewind { locked } = action {
            return self.rewind(world, locked);
        }
        let Some(replica) = &mut world.replica else { return };
        match action {
            Action::Replay => {
                let Some(recovery) = replica.recovery() else { return };
                let record: WalRecord = world.primary.wal[recovery.replayed];
                replica.replay(record, recovery.replayed, self);
                replica.check_consistency(self);
            }
            Action::RestartPoint => {
                world.left[Count::RestartPoints as usize] -= 1;
                replica.restart_point(self);
            }
            Action::CrashReplica { unsynced, locked } => {
                world.left[Count::ReplicaCrashes as usize] -= 1;
                if locked {
                    world.left[Count::Outages as usize] -= 1;
                }
                replica.crash(unsynced);
                replica.open_keystore(self.order, locked);
                replica.check_consistency(self);
            }
            _ => self.promote(world),
        }
    }

    fn promote(&self, world: &mut World) {
        let Some(mut replica) = world.replica.take() else { return };
        world.count(Count::Promotions);
        let fork = replica.recovery().map_or(0, |recovery| recovery.replayed);
        replica.wal = world.primary.wal[..fork].to_vec();
        replica.flushed = fork;
        replica.drop_locked_pages(self.order);
        replica.after_redo(self.order);
        replica.begin_service();
        world.reported = world.reported.filter(|(_, end)| *end <= fork);
        world.backup = None;
        let mut former = std::mem::replace(&mut world.primary, replica);
        former.memory = None;
        world.former = Some((former, fork));
    }

    /// `pg_rewind` of a former primary that was shut down: its files become those of the source,
    /// where either has changed them since WAL has parted.
    fn rewind(&self, world: &mut World, locked: bool) {
        world.count(Count::Rewinds);
        if locked {
            world.count(Count::Outages);
        }
        let Some((former, fork)) = world.former.take() else { return };
        let source = &mut world.primary;
        // `pg_rewind` wants one since the promotion: pages from before may be in memory only.
        while source.memory.is_some() && !source.step_checkpoint(false, self) {}
        let is_change = |record: &WalRecord| !matches!(record, WalRecord::Checkpoint { .. });
        let parted = former.wal.get(fork..).unwrap_or_default();
        world.left_behind_key = wal::keys_made(parted).next().is_some();
        let has_changed = parted.iter().any(is_change);
        let redo = source.wal[..fork].iter().rev().find_map(|record| match record {
            WalRecord::Checkpoint { redo } => Some(*redo),
            _ => None,
        });
        let keeps = self.order == Order::RewindKeepsKeystore;
        let mut replica = Server {
            redo: redo.unwrap_or(0),
            minimum: source.flushed,
            files: if keeps { former.files } else { source.files.copy(usize::MAX) },
            page: if has_changed { source.page } else { former.page },
            map: source.map,
            marks: source.marks,
            ..Server::default()
        };
        replica.open_keystore(self.order, locked);
        // Else the file is in no key group.
        if self.outages > 0 {
            replica.note_copied(self.order);
        }
        replica.check_consistency(self);
        world.replica = Some(replica);
    }
}
