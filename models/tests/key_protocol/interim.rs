//! Outages of the key provider of the file's group: recovery writes pages under interim keys.

use pagevault_models::protocol::Bounds;

use super::Scenario;

const NONE: Bounds = Bounds::NONE;

/// The server crashes while the provider is away, and once more: before, or while the file is
/// rekeyed.
pub(super) const OUTAGE: Scenario = Scenario {
    name: "an outage",
    bounds: Bounds { keys: 1, rows: 2, checkpoints: 1, crashes: 2, outages: 1, ..NONE },
    deep: |bounds| Bounds { outages: 2, ..bounds },
    least: 240_000,
    reaches: &[10],
};

/// Two outages of a file that is sealed from the beginning.
pub(super) const OUTAGE_OF_NEW_FILE: Scenario = Scenario {
    name: "outages, a new file",
    bounds: Bounds {
        in_use: false,
        keys: 1,
        rows: 1,
        checkpoints: 1,
        crashes: 2,
        outages: 2,
        ..NONE
    },
    deep: |bounds| Bounds { rows: 2, ..bounds },
    least: 65_000,
    reaches: &[10],
};

/// A job proves that no page is under an interim key, or a former one.
pub(super) const OUTAGE_PROVEN: Scenario = Scenario {
    name: "an outage, and a proof",
    bounds: Bounds {
        in_use: false,
        keys: 1,
        proofs: 1,
        rows: 1,
        checkpoints: 1,
        crashes: 2,
        outages: 1,
        ..NONE
    },
    deep: |bounds| Bounds { decryptions: 1, ..bounds },
    least: 17_000,
    reaches: &[10],
};

/// Keys are destroyed while they are locked, or later.
pub(super) const OUTAGE_DESTROYED: Scenario = Scenario {
    name: "destroyed keys, an outage",
    bounds: Bounds {
        keys: 1,
        destructions: 1,
        rows: 1,
        checkpoints: 1,
        crashes: 2,
        outages: 1,
        ..NONE
    },
    deep: |bounds| Bounds { rows: 2, ..bounds },
    least: 170_000,
    reaches: &[13],
};

/// A replica starts locked, and crashes.
pub(super) const OUTAGE_REPLICA: Scenario = Scenario {
    name: "a locked replica",
    bounds: Bounds {
        keys: 1,
        rows: 2,
        checkpoints: 1,
        backups: 1,
        replica_crashes: 1,
        outages: 2,
        ..NONE
    },
    deep: |bounds| Bounds { restart_points: 1, ..bounds },
    least: 160_000,
    reaches: &[14],
};

/// The same, and it is promoted, locked or not.
pub(super) const OUTAGE_PROMOTED: Scenario = Scenario {
    name: "a locked replica, promoted",
    bounds: Bounds { rows: 1, promotions: 1, ..OUTAGE_REPLICA.bounds },
    deep: |bounds| Bounds { crashes: 1, ..bounds },
    least: 90_000,
    reaches: &[8],
};

/// The same, and the primary gives the file another key.
pub(super) const OUTAGE_TWO_KEYS: Scenario = Scenario {
    name: "a locked replica of a file with two keys",
    bounds: Bounds { in_use: false, keys: 2, outages: 1, ..OUTAGE_PROMOTED.bounds },
    deep: |bounds| Bounds { in_use: true, ..bounds },
    least: 222_000,
    reaches: &[9],
};

/// The same, and the primary destroys the keys.
pub(super) const OUTAGE_DESTROYED_REPLICA: Scenario = Scenario {
    name: "a locked replica and destroyed keys",
    bounds: Bounds { destructions: 1, promotions: 0, ..OUTAGE_PROMOTED.bounds },
    deep: |bounds| Bounds { promotions: 1, ..bounds },
    least: 196_000,
    reaches: &[3],
};

/// A backup is taken while pages under interim keys are rewritten.
pub(super) const OUTAGE_BACKUP: Scenario = Scenario {
    name: "a backup after an outage",
    bounds: Bounds { keys: 1, rows: 1, checkpoints: 1, crashes: 1, backups: 1, outages: 1, ..NONE },
    deep: |bounds| Bounds { destructions: 1, ..bounds },
    least: 90_000,
    reaches: &[11],
};

/// A former primary with pages under interim keys follows.
pub(super) const OUTAGE_TIMELINES: Scenario = Scenario {
    name: "an outage and two timelines",
    bounds: Bounds { in_use: false, promotions: 1, rewinds: 1, ..OUTAGE_BACKUP.bounds },
    deep: |bounds| Bounds { destructions: 1, ..bounds },
    least: 307_000,
    reaches: &[12],
};
