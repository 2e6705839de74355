//! What a schedule is made of.

use serde::{Deserialize, Serialize};

use super::database::Label;
use super::statement::Statement;

/// Processes that are killed one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Process {
    Backend,
    Bgwriter,
    Checkpointer,
    Postmaster,
    RekeyWorker,
    Walwriter,
}

/// What is ordered of all unfinished jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    Pause,
    /// Of those that are paused.
    Resume,
    Cancel,
}

/// Up to where a backup is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Target {
    /// No farther than it must.
    Itself,
    /// The last restore point after it.
    Mark,
    /// It follows the primary.
    Present,
}

/// How a cluster is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) wal_encryption: bool,
    pub(super) checksums: bool,
    /// `wal_level = minimal`: new relations skip WAL, and there are no standbys or backups.
    #[serde(default)]
    pub(super) minimal_wal: bool,
    /// `wal_level = logical`.
    #[serde(default)]
    pub(super) logical_wal: bool,
    /// Keys that nothing needs are forgotten at once.
    #[serde(default)]
    pub(super) forgets: bool,
    /// Labels on tables name key groups, by the numbers of the tables.
    #[serde(default)]
    pub(super) key_groups: bool,
    /// There is another tablespace, `space`.
    pub(super) tablespace: bool,
    /// It has a label: encrypted.
    #[serde(default)]
    pub(super) labelled_tablespace: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Operation {
    /// A statement in a session, in its transaction if it has one.
    Run {
        session: u8,
        statement: Statement,
    },
    Begin {
        session: u8,
    },
    Savepoint {
        session: u8,
    },
    RollbackTo {
        session: u8,
    },
    Commit {
        session: u8,
    },
    Rollback {
        session: u8,
    },
    Prepare {
        session: u8,
    },
    FinishPrepared {
        commit: bool,
    },
    /// The session goes over to another database.
    Connect {
        session: u8,
        database: u8,
    },

    Default {
        on: bool,
    },
    /// A label on a database covers its catalogs too.
    DatabaseLabel {
        database: u8,
        on: bool,
    },
    SchemaLabel {
        database: u8,
        schema: u8,
        label: Option<Label>,
    },
    /// Whether even small relations are left to jobs.
    Jobs {
        always: bool,
    },
    /// Whether jobs crawl.
    Crawl {
        on: bool,
    },
    Order {
        order: Order,
    },
    WaitForJobs,
    /// New data keys for all that is encrypted.
    RotateAllDataKeys {
        database: u8,
    },
    /// A label on the database, and everything in it is encrypted.
    EncryptDatabase {
        database: u8,
    },
    /// A label that would decrypt a table, while encryption is enforced.
    Forbidden {
        database: u8,
        table: u8,
    },
    RotateClusterMasterKey,
    MoveClusterMasterKey,
    OwnMasterKey {
        database: u8,
    },
    RotateDatabaseMasterKey {
        database: u8,
    },
    RotateDatabaseKey {
        database: u8,
    },
    RotateKeyGroupMasterKey {
        group: u8,
    },
    RotateKeyGroupKey {
        group: u8,
    },
    RotateWalKey,
    WalEncryption {
        on: bool,
    },
    ShredFormerFiles {
        database: u8,
    },

    Checkpoint,
    Restart,
    StopImmediately,
    Crash,
    Kill {
        process: Process,
    },
    /// SIGKILL when a statement or an operation with keys, or a worker for it, has come to a fault
    /// point: to the process there, or to all.
    CrashAt {
        point: String,
        only_there: bool,
        operation: Box<Operation>,
    },
    /// Statements of as many sessions at the same time; after so many milliseconds everything is
    /// killed, unless that is none.
    Together {
        statements: Vec<Statement>,
        kill_after: Option<u16>,
    },
    /// SIGKILL to everything, and once more when recovery has come to a fault point.
    CrashInRecovery {
        point: String,
    },

    /// SIGKILL to everything, and recovery while the provider of all key groups is out of reach;
    /// once more, perhaps.
    CrashWithoutGroups {
        again: bool,
    },

    /// The provider is out of reach.
    KeysAway,
    KeysBack,

    MakeStandby,
    CrashStandby,
    /// The standby takes over from a primary that has crashed, or was stopped. The old one follows
    /// it, after `pg_rewind` if it had gone on by itself.
    Promote {
        crash: bool,
        rewind: bool,
    },
    /// Between the copy of the keystore and that of the rest the statements are run.
    BackUp {
        meanwhile: Vec<Statement>,
    },
    /// A restore point.
    Mark,
    Restore {
        backup: u8,
        to: Target,
    },

    /// Changes in the database `postgres` are decoded from now on.
    MakeSlot,
    /// Logical decoding of all changes since the last time.
    Decode,

    CreateDatabase {
        database: u8,
        template: u8,
        by_files: bool,
    },
    /// By `pg_dump` and `psql`, into a new database.
    Dump {
        database: u8,
        of: u8,
    },
    MoveDatabase {
        database: u8,
        to_other: bool,
    },
    DropDatabase {
        database: u8,
    },
    ShredSchema {
        database: u8,
        schema: u8,
    },
    /// And drops it: nothing can be done with it any more.
    ShredDatabase {
        database: u8,
    },
    DropExtension {
        database: u8,
    },

    /// Something of which the model does not hear. Never drawn.
    Unforeseen {
        sql: String,
    },
    /// Everything is looked at; at the end of a schedule too.
    Judge,
}

impl Operation {
    /// Whether it may destroy keys of the database `postgres`.
    pub(super) fn shreds(&self) -> bool {
        match self {
            Operation::ShredSchema { .. } | Operation::ShredFormerFiles { .. } => true,
            Operation::Run { statement, .. } => matches!(statement, Statement::Shred { .. }),
            Operation::CrashAt { operation, .. } => operation.shreds(),
            _ => false,
        }
    }
}
