//! The order of steps that pagevault keeps, and orders that are wrong.

/// In which order, or with which steps, changes of keys are made. All but the first are faults:
/// some pagevault once had, others it might have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// As pagevault does it.
    Right,
    /// The record counts in the key file before it is in WAL.
    FileBeforeWal,
    /// The key is in use before it is in WAL.
    UsedBeforeWal,
    /// A page reaches the disk before the WAL that it depends on.
    PageBeforeWal,
    /// The key of a file with pages is used before it is durable.
    NextKeyNotDurable,
    /// A start believes all that is readable in a key file.
    UnsettledBelieved,
    /// Checkpoints move the redo pointer and settle nothing.
    CheckpointSettlesNothing,
    /// The mark is written, and the batches before it are not synced.
    MarkBeforeSync,
    /// The mark is written, and WAL is not flushed up to the batches before it.
    MarkBeforeWal,
    /// The checkpointer is asked to settle when the record is in use, not before it is staged.
    SyncRequestedLast,
    /// Checkpoints do not wait for who stages a record.
    CheckpointPassesStaged,
    /// The tombstone is in the key file, and not in WAL.
    TombstoneNotInWal,
    /// Destroying is reported before the tombstone is durable.
    TombstoneNotDurable,
    /// Keys are removed from the key file, and no tombstone takes their place.
    NoTombstone,
    /// Redo settles a record without moving the minimum recovery point.
    RedoMovesNoMinimum,
    /// Redo writes the key file, and does not move the minimum recovery point for keys of files in
    /// use.
    RedoSettlesLater,
    /// Redo takes a page whose key it does not know for damaged.
    NoPlaceholders,
    /// Restart points move the redo pointer and settle nothing.
    RestartPointSettlesNothing,
    /// After `pg_rewind` the target keeps its own keystore.
    RewindKeepsKeystore,
    /// A job that finds no page in plaintext on the primary's disk says so of all servers.
    ProofByDiskOnly,
    /// A page is written under an interim key, and its file's mark is not durable.
    InterimMarkNotDurable,
    /// The mark is removed when WAL has an image of each page, not when they are on disk.
    UnmarkedWhenLogged,
    /// At consistency, pages of a locked group are dropped from shared buffers and not written.
    LockedPagesDropped,
    /// Pages of a locked group are written as those whose keys were destroyed.
    LockedAsDestroyed,
    /// Pages of a locked group are written in plaintext.
    LockedInPlaintext,
    /// An interim page is opened under the interim key of the data key that the file has now.
    InterimOfCurrentKey,
    /// Destroying keys leaves pages under interim keys on disk.
    InterimPagesOutliveKeys,
    /// After `pg_rewind`, or from a base backup, a server believes the marks that were copied.
    CopyBelievesMarks,
}

impl Order {
    /// All wrong orders.
    pub const FAULTS: [Self; 27] = [
        Self::FileBeforeWal,
        Self::UsedBeforeWal,
        Self::PageBeforeWal,
        Self::NextKeyNotDurable,
        Self::UnsettledBelieved,
        Self::CheckpointSettlesNothing,
        Self::MarkBeforeSync,
        Self::MarkBeforeWal,
        Self::SyncRequestedLast,
        Self::CheckpointPassesStaged,
        Self::TombstoneNotInWal,
        Self::TombstoneNotDurable,
        Self::NoTombstone,
        Self::RedoMovesNoMinimum,
        Self::RedoSettlesLater,
        Self::NoPlaceholders,
        Self::RestartPointSettlesNothing,
        Self::RewindKeepsKeystore,
        Self::ProofByDiskOnly,
        Self::InterimMarkNotDurable,
        Self::UnmarkedWhenLogged,
        Self::LockedPagesDropped,
        Self::LockedAsDestroyed,
        Self::LockedInPlaintext,
        Self::InterimOfCurrentKey,
        Self::InterimPagesOutliveKeys,
        Self::CopyBelievesMarks,
    ];
}
