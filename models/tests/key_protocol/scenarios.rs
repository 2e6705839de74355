//! What may happen together, but for outages of key providers ([`super::interim`]).

use pagevault_models::protocol::Bounds;

use super::Scenario;

const NONE: Bounds = Bounds::NONE;

/// A file in use gets keys, and the server crashes.
pub(super) const CRASHES: Scenario = Scenario {
    name: "crashes",
    bounds: Bounds { keys: 2, rows: 2, checkpoints: 1, crashes: 1, ..NONE },
    deep: |bounds| Bounds { crashes: 2, ..bounds },
    least: 150_000,
    reaches: &[],
};

/// A key is made for a file that is created after it.
pub(super) const NEW_FILE: Scenario = Scenario {
    name: "a new file",
    bounds: Bounds { in_use: false, keys: 2, rows: 1, checkpoints: 1, crashes: 2, ..NONE },
    deep: |bounds| Bounds { rows: 2, ..bounds },
    least: 33_000,
    reaches: &[],
};

/// A file that is sealed from the beginning is decrypted.
pub(super) const DECRYPTED: Scenario = Scenario {
    name: "a new file is decrypted",
    bounds: Bounds {
        in_use: false,
        keys: 2,
        decryptions: 1,
        rows: 1,
        checkpoints: 1,
        crashes: 1,
        ..NONE
    },
    deep: |bounds| Bounds { rows: 2, crashes: 2, ..bounds },
    least: 128_000,
    reaches: &[],
};

/// The same, and a replica follows.
pub(super) const DECRYPTED_REPLICA: Scenario = Scenario {
    name: "replica of a file that is decrypted",
    bounds: Bounds {
        in_use: false,
        keys: 1,
        decryptions: 1,
        rows: 2,
        checkpoints: 1,
        backups: 1,
        replica_crashes: 1,
        ..NONE
    },
    deep: |bounds| Bounds { checkpoints: 2, restart_points: 1, promotions: 1, ..bounds },
    least: 120_000,
    reaches: &[6],
};

/// A file in use is encrypted, and a job proves that no page is in plaintext. A replica may have
/// written the page before.
pub(super) const PROVEN: Scenario = Scenario {
    name: "a file is proven",
    bounds: Bounds {
        keys: 1,
        proofs: 1,
        rows: 2,
        checkpoints: 1,
        backups: 1,
        replica_crashes: 1,
        restart_points: 1,
        ..NONE
    },
    deep: |bounds| Bounds { decryptions: 1, checkpoints: 2, ..bounds },
    least: 100_000,
    reaches: &[7],
};

/// The same on a server that crashes.
pub(super) const PROVEN_CRASHES: Scenario = Scenario {
    name: "a file is proven, and the server crashes",
    bounds: Bounds {
        keys: 1,
        proofs: 1,
        decryptions: 1,
        rows: 2,
        checkpoints: 1,
        crashes: 1,
        ..NONE
    },
    deep: |bounds| Bounds { keys: 2, crashes: 2, ..bounds },
    least: 100_000,
    reaches: &[],
};

/// The same, and a former primary follows.
pub(super) const PROVEN_TIMELINES: Scenario = Scenario {
    name: "a file is proven on one of two timelines",
    bounds: Bounds { proofs: 1, keys: 1, rows: 2, ..TIMELINES.bounds },
    deep: |bounds| Bounds { keys: 2, ..bounds },
    least: 100_000,
    reaches: &[],
};

/// A file that is sealed from the beginning gets another key, and a job proves that no page is
/// under the former one. A replica may have written the page before.
pub(super) const ROTATED: Scenario = Scenario {
    name: "a file is rotated and proven",
    bounds: Bounds { in_use: false, keys: 2, restart_points: 0, ..PROVEN.bounds },
    deep: |bounds| Bounds { rows: 3, ..bounds },
    least: 500_000,
    reaches: &[],
};

/// The same on a server that crashes.
pub(super) const ROTATED_CRASHES: Scenario = Scenario {
    name: "a file is rotated and proven, and the server crashes",
    bounds: Bounds { in_use: false, keys: 2, decryptions: 0, ..PROVEN_CRASHES.bounds },
    deep: |bounds| Bounds { decryptions: 1, crashes: 2, ..bounds },
    least: 100_000,
    reaches: &[],
};

/// The same, and a former primary follows.
pub(super) const ROTATED_TIMELINES: Scenario = Scenario {
    name: "a file is rotated and proven on one of two timelines",
    bounds: Bounds { in_use: false, keys: 2, rows: 1, ..PROVEN_TIMELINES.bounds },
    deep: |bounds| Bounds { rows: 2, ..bounds },
    least: 100_000,
    reaches: &[],
};

/// Nobody syncs, and processes are killed.
pub(super) const WITHOUT_FSYNC: Scenario = Scenario {
    name: "fsync = off",
    bounds: Bounds { fsync: false, keys: 2, rows: 1, checkpoints: 1, crashes: 2, ..NONE },
    deep: |bounds| Bounds { checkpoints: 2, ..bounds },
    least: 46_000,
    reaches: &[],
};

/// Keys are destroyed, and the file's number is used again.
pub(super) const DESTROYED: Scenario = Scenario {
    name: "destroyed keys",
    bounds: Bounds { keys: 2, destructions: 1, rows: 1, checkpoints: 1, crashes: 1, ..NONE },
    deep: |bounds| Bounds { rows: 2, ..bounds },
    least: 92_000,
    reaches: &[5],
};

/// A backup is taken meanwhile, and restored.
pub(super) const BACKUP: Scenario = Scenario {
    name: "a backup",
    bounds: Bounds { keys: 1, rows: 2, checkpoints: 1, backups: 1, ..NONE },
    deep: |bounds| Bounds { keys: 2, promotions: 1, ..bounds },
    least: 30_000,
    reaches: &[0, 1, 4],
};

/// The backup's copy of the key log ends where the log ended when it was listed.
pub(super) const LISTED: Scenario = Scenario {
    name: "a backup that lists first",
    bounds: Bounds {
        keys: 2,
        destructions: 1,
        checkpoints: 1,
        backups: 1,
        lists: true,
        replica_crashes: 1,
        ..NONE
    },
    deep: |bounds| Bounds { checkpoints: 2, restart_points: 1, ..bounds },
    least: 20_000,
    reaches: &[3, 5],
};

/// A replica makes restart points and crashes, while a file in use gets a key.
pub(super) const REPLICA: Scenario = Scenario {
    name: "a replica",
    bounds: Bounds {
        keys: 1,
        rows: 1,
        checkpoints: 2,
        backups: 1,
        replica_crashes: 1,
        restart_points: 1,
        ..NONE
    },
    deep: |bounds| Bounds { replica_crashes: 2, rows: 2, ..bounds },
    least: 50_000,
    reaches: &[0, 4],
};

/// The same with a key for a new file.
pub(super) const REPLICA_OF_NEW_FILE: Scenario = Scenario {
    name: "a replica of a new file",
    bounds: Bounds { in_use: false, ..REPLICA.bounds },
    deep: REPLICA.deep,
    least: 20_000,
    reaches: &[],
};

/// A replica is promoted, makes keys of its own, and the former primary follows it.
pub(super) const TIMELINES: Scenario = Scenario {
    name: "timelines",
    bounds: Bounds {
        keys: 2,
        rows: 1,
        checkpoints: 1,
        backups: 1,
        promotions: 1,
        rewinds: 1,
        ..NONE
    },
    deep: |bounds| Bounds { checkpoints: 2, ..bounds },
    least: 150_000,
    reaches: &[2],
};
