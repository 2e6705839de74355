//! The life of data keys, as a state machine: a primary, a base backup of it, and a replica that is
//! made from the backup, which may follow, stop anywhere, be promoted, and be followed by the
//! former primary after `pg_rewind`.
//!
//! Everything that may happen is an [`Action`]; each takes effect at once, and any may come next, a
//! crash among them. Key files are bytes, read and written by `pagevault_keystore`'s own log, and
//! keys are in its own directory. What is modelled is what surrounds them: WAL, checkpoints, pages,
//! and the steps of the extension. The [`invariants`] are checked in every state that can be
//! reached within [`Bounds`].

pub mod actions;
pub mod disk;
pub mod interim;
pub mod invariants;
mod keystore;
pub mod order;
mod primary;
mod recovery;
pub mod server;
mod steps;
pub mod wal;

use pagevault_keystore::DataKeyVersion;
use stateright::{Model, Property};

use self::actions::Action;
use self::disk::Files;
use self::interim::{Marks, Seal};
use self::order::Order;
use self::server::{Page, Server};

/// How much may happen, and in which order the steps are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The order of steps.
    pub order: Order,
    /// The file exists at first, in plaintext; else a key is made for it before it is created.
    pub in_use: bool,
    /// The setting of that name. Without it processes are killed, and the power stays.
    pub fsync: bool,
    /// Keys that are made.
    pub keys: u8,
    /// How often the file is decrypted in use.
    pub decryptions: u8,
    /// How often a job proves that no page is in plaintext, or under a former key.
    pub proofs: u8,
    /// How often all keys of the file are destroyed.
    pub destructions: u8,
    /// Changes of the page.
    pub rows: u8,
    /// Checkpoints.
    pub checkpoints: u8,
    /// Crashes of the primary.
    pub crashes: u8,
    /// Base backups.
    pub backups: u8,
    /// The backup program lists the keystore first, and later copies no more than it has listed.
    pub lists: bool,
    /// Crashes of the replica.
    pub replica_crashes: u8,
    /// Restart points of the replica.
    pub restart_points: u8,
    /// Promotions of the replica.
    pub promotions: u8,
    /// Former primaries that `pg_rewind` makes replicas.
    pub rewinds: u8,
    /// Crashes, restores and rewinds after which the key provider of the file's group does not
    /// answer at first. As often a job of the server itself gives the file another key.
    pub outages: u8,
}

impl Bounds {
    /// Nothing happens.
    pub const NONE: Self = Self {
        order: Order::Right,
        in_use: true,
        fsync: true,
        keys: 0,
        decryptions: 0,
        proofs: 0,
        destructions: 0,
        rows: 0,
        checkpoints: 0,
        crashes: 0,
        backups: 0,
        lists: false,
        replica_crashes: 0,
        restart_points: 0,
        promotions: 0,
        rewinds: 0,
        outages: 0,
    };

    /// The same, in another order of steps.
    pub fn in_order(self, order: Order) -> Self {
        Self { order, ..self }
    }
}

/// A base backup.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Backup {
    redo: usize,
    /// The length that the key log had when the backup program listed it.
    listed: Option<usize>,
    keys: Option<Files>,
    pages: Option<(Option<Page>, Option<Seal>)>,
    marks: Option<Marks>,
    end: Option<usize>,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    /// The server that takes changes.
    pub primary: Server,
    /// A replica, or a restored server, in recovery from the primary's WAL.
    pub replica: Option<Server>,
    /// The primary before the promotion, and where its WAL and that of the present one part.
    pub former: Option<(Server, usize)>,
    /// The base backup, under way or complete.
    pub backup: Option<Backup>,
    /// A destruction that was reported: the last version, and where WAL ended then.
    pub reported: Option<(DataKeyVersion, usize)>,
    /// The WAL that `pg_rewind` took from the former primary held a key.
    left_behind_key: bool,
    /// What may still happen; counted down.
    left: [u8; COUNTERS],
    keys_made: u8,
    rows_made: u8,
}

const COUNTERS: usize = 14;

/// What is counted.
#[derive(Debug, Clone, Copy)]
enum Count {
    Keys,
    Decryptions,
    Proofs,
    Destructions,
    Rows,
    Checkpoints,
    Crashes,
    Backups,
    ReplicaCrashes,
    RestartPoints,
    Promotions,
    Rewinds,
    Outages,
    /// Keys that jobs make for files with pages under interim keys.
    Rekeys,
}

impl World {
    fn left(&self, what: Count) -> bool {
        self.left[what as usize] > 0
    }

    /// A server that starts now may have a key that is locked.
    fn may_be_locked(&self) -> bool {
        self.left(Count::Outages) && self.keys_made > 0
    }

    /// A former primary has become a replica, and WAL that only it had held a key.
    fn follows_after_rewind(&self) -> bool {
        self.left_behind_key && self.replica.as_ref().is_some_and(|replica| replica.serves())
    }

    /// A job of the server itself has given the file another key, and no page was left behind.
    fn is_rekeyed(&self, bounds: &Bounds) -> bool {
        let key = self.primary.page.and_then(|page| page.key());
        let is_current = key.map(|key| key.version) == self.primary.known().current;
        let is_rekeyed = self.left[Count::Rekeys as usize] < bounds.outages;
        is_rekeyed && is_current && !self.primary.marks.file && !self.primary.has_interim_pages()
    }

    fn count(&mut self, what: Count) {
        self.left[what as usize] -= 1;
    }
}

impl Model for Bounds {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let left = [
            self.keys,
            self.decryptions,
            self.proofs,
            self.destructions,
            self.rows,
            self.checkpoints,
            self.crashes,
            self.backups,
            self.replica_crashes,
            self.restart_points,
            self.promotions,
            self.rewinds,
            self.outages,
            self.outages,
        ];
        vec![World {
            primary: Server::new(self),
            replica: None,
            former: None,
            backup: None,
            reported: None,
            left_behind_key: false,
            left,
            keys_made: 0,
            rows_made: 0,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        // A replica sees nothing of the primary but its WAL, and the primary nothing of the
        // replica: what the primary does after the replica is made can come before as well.
        if world.replica.is_none() && world.primary.is_open() {
            self.actions_of_primary(world, actions);
            self.actions_of_backup(world, actions);
        }
        self.actions_of_replica(world, actions);
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = last.clone();
        self.act(&mut world, action);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        invariants::properties()
    }
}
