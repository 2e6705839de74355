//! Writing keys down: the steps of `keys/store/persist.rs`, on the keystore's own log and
//! directory.

use pagevault_keystore::log::{self, Log, LogError};
use pagevault_keystore::state::State;
use pagevault_keystore::{DataKeyVersion, Record, batch, compaction, wrappings};

use super::disk::Mounted;
use super::order::Order;
use super::server::{Memory, Server, Stop, Words};
use super::wal::{KeyChange, SCOPE, address};

/// The identity of the one keystore.
const KEYSTORE: [u8; 16] = [9; 16];

impl Server {
    /// Runs `f` with the key log, which is made if need be. Stops the server on an error.
    fn with_log<R>(
        &mut self,
        f: impl FnOnce(&mut Log<'_, Mounted>) -> Result<R, LogError>,
    ) -> Option<R> {
        let memory = self.memory.as_mut()?;
        let position = memory.position;
        let result = self.files.with(|storage| {
            let mut log = match position {
                Some(position) => Log::resume(storage, position),
                None => Log::create(storage, KEYSTORE, SCOPE, &[])?,
            };
            let result = f(&mut log)?;
            Ok::<_, LogError>((result, log.position()))
        });
        match result {
            Ok((result, position)) => {
                memory.position = Some(position);
                Some(result)
            }
            Err(_) => {
                self.stop(Stop::KeyFile);
                None
            }
        }
    }

    /// Adds records to the end of the key log, where they count for nothing yet. `index`: where WAL
    /// ends, or the record under replay stands.
    pub fn stage(&mut self, records: &[Record], index: usize) {
        self.with_log(|log| {
            let batch = batch::encode(records).map_err(LogError::Record)?;
            log.stage_batch(&batch, address(index))
        });
    }

    /// Adds records that count at once.
    pub fn append_counting(&mut self, records: &[Record]) {
        self.with_log(|log| log.append(records));
    }

    /// Makes the key log durable as it is.
    pub fn sync_log(&mut self, fsync: bool, order: Order) {
        if fsync && order != Order::MarkBeforeSync {
            self.with_log(|log| log.sync());
        }
    }

    /// Adds the mark up to where the log ends now, or ended at `synced`. It is not durable yet.
    pub fn mark_settled(&mut self, synced: Option<log::Position>) {
        self.with_log(|log| log.append_settled(&synced.unwrap_or(log.position())));
    }

    /// Makes the mark durable.
    pub fn sync_mark(&mut self, fsync: bool) {
        self.sync_log(fsync, Order::Right);
    }

    /// Settles all that is staged, at once: `settle_now`.
    pub fn settle_now(&mut self, fsync: bool, order: Order) {
        let Some(Memory { position: Some(_), logged, .. }) = self.memory else { return };
        self.flush(logged, order);
        self.sync_log(fsync, order);
        self.mark_settled(None);
        self.sync_mark(fsync);
    }

    /// Puts records into the directory, from where writers of pages take keys.
    pub fn take_in(&mut self, records: &[Record]) {
        if let Some(memory) = &mut self.memory {
            memory.directory.apply(records);
        }
    }

    /// What the key log says now, batch by batch; a mark is an empty one.
    pub fn batches(&self) -> Option<Vec<Vec<Record>>> {
        log::batches(self.log_bytes()?, SCOPE).ok()
    }

    /// Writes the key log anew without what was destroyed.
    pub fn compact(&mut self, order: Order) {
        let Some(batches) = self.batches() else { return };
        let Ok(state) = State::from_records(batches.concat()) else {
            return self.stop(Stop::KeyFile);
        };
        let folded = state.records(SCOPE);
        let kept = wrappings::with_older(&folded, batches.iter().flatten());
        let batches = compaction::in_place(&kept, &batches);
        let logged = self.memory.as_ref().map_or(0, |memory| memory.logged);
        self.flush(logged, order);
        self.with_log(|log| log.compact_to(&batches));
    }

    /// Wrong: removes keys and leaves no tombstone.
    pub fn remove_keys(&mut self, through: DataKeyVersion) {
        let is_of_one = |record: &Record| match record {
            Record::DataKey { version, .. } | Record::Current { version, .. } => {
                *version <= through
            }
            Record::Rewriting { phase, .. } => phase.version <= Some(through),
            _ => false,
        };
        let mut left = self.batches().unwrap_or_default().concat();
        left.retain(|record| !is_of_one(record));
        self.with_log(|log| log.compact(&left));
        if let Some(memory) = &mut self.memory {
            memory.directory = Words::empty();
            memory.directory.apply(&left);
        }
    }

    /// Whether the key log holds a key that [`KeyChange::Destroyed`] has destroyed.
    pub fn log_holds_key_through(&self, through: Option<DataKeyVersion>) -> bool {
        let is_one = |record: &Record| match record {
            Record::DataKey { version, .. } => Some(*version) <= through,
            _ => false,
        };
        self.batches().is_some_and(|batches| batches.iter().flatten().any(is_one))
    }

    /// What the tombstone of all present keys says; `None` if there are none.
    pub fn tombstone(&self) -> Option<KeyChange> {
        let through = self.known().keys.last()?.version;
        Some(KeyChange::Destroyed { through, lsn: address(self.wal.len()) })
    }
}
