//! The key protocol holds its invariants in every state within bounds; and each order of steps that
//! is wrong breaks one, so the model would have noticed.
//!
//! `PAGEVAULT_MODELS=deep` (`make models`) goes further: minutes instead of seconds.

use std::time::Instant;

use pagevault_models::protocol::Bounds;
use pagevault_models::protocol::actions::Action;
use pagevault_models::protocol::invariants::{INVARIANTS, REACHED};
use pagevault_models::protocol::order::Order;
use stateright::{Checker, HasDiscoveries, Model};

mod interim;
mod scenarios;

use self::interim::*;
use self::scenarios::*;

/// What may happen together.
struct Scenario {
    name: &'static str,
    bounds: Bounds,
    /// What more may happen in the long run.
    deep: fn(Bounds) -> Bounds,
    /// The model visits at least so many states, or it has become blind.
    least: usize,
    /// States that it must come to, by their place in [`REACHED`].
    reaches: &'static [usize],
}

fn prove(scenario: &Scenario) {
    if std::env::var("PAGEVAULT_MODELS").is_ok_and(|depth| depth == "deep") {
        // Breadth first, gigabytes of states would wait for their turn.
        let checker = (scenario.deep)(scenario.bounds).checker();
        judge(scenario, |threads| checker.threads(threads).spawn_dfs().join());
    } else {
        let checker = scenario.bounds.checker();
        judge(scenario, |threads| checker.threads(threads).spawn_bfs().join());
    }
}

fn judge<C: Checker<Bounds>>(scenario: &Scenario, check: impl FnOnce(usize) -> C) {
    let start = Instant::now();
    let checked = check(2);
    let (states, took) = (checked.unique_state_count(), start.elapsed());
    eprintln!("key protocol, {}: {states} states in {took:.1?}", scenario.name);
    for invariant in INVARIANTS {
        if let Some(path) = checked.discovery(invariant) {
            panic!("{}: not \"{invariant}\" after {:#?}", scenario.name, path.into_actions());
        }
    }
    for reached in scenario.reaches.iter().map(|at| REACHED[*at]) {
        assert!(checked.discovery(reached).is_some(), "never: {reached}");
    }
    assert!(states >= scenario.least, "{states} states");
}

#[test]
fn crashes() {
    prove(&CRASHES);
}

#[test]
fn new_file() {
    prove(&NEW_FILE);
}

#[test]
fn decrypted() {
    prove(&DECRYPTED);
}

#[test]
fn decrypted_replica() {
    prove(&DECRYPTED_REPLICA);
}

#[test]
fn proven() {
    prove(&PROVEN);
}

#[test]
fn proven_crashes() {
    prove(&PROVEN_CRASHES);
}

#[test]
fn proven_timelines() {
    prove(&PROVEN_TIMELINES);
}

#[test]
fn rotated() {
    prove(&ROTATED);
}

#[test]
fn rotated_crashes() {
    prove(&ROTATED_CRASHES);
}

#[test]
fn rotated_timelines() {
    prove(&ROTATED_TIMELINES);
}

#[test]
fn without_fsync() {
    prove(&WITHOUT_FSYNC);
}

#[test]
fn destroyed() {
    prove(&DESTROYED);
}

#[test]
fn backup() {
    prove(&BACKUP);
}

#[test]
fn backup_that_lists_first() {
    prove(&LISTED);
}

#[test]
fn replica() {
    prove(&REPLICA);
}

#[test]
fn replica_of_new_file() {
    prove(&REPLICA_OF_NEW_FILE);
}

#[test]
fn timelines() {
    prove(&TIMELINES);
}

#[test]
fn outage() {
    prove(&OUTAGE);
}

#[test]
fn outage_of_new_file() {
    prove(&OUTAGE_OF_NEW_FILE);
}

#[test]
fn outage_proven() {
    prove(&OUTAGE_PROVEN);
}

#[test]
fn outage_destroyed() {
    prove(&OUTAGE_DESTROYED);
}

#[test]
fn outage_replica() {
    prove(&OUTAGE_REPLICA);
}

#[test]
fn outage_promoted() {
    prove(&OUTAGE_PROMOTED);
}

#[test]
fn outage_two_keys() {
    prove(&OUTAGE_TWO_KEYS);
}

#[test]
fn outage_destroyed_replica() {
    prove(&OUTAGE_DESTROYED_REPLICA);
}

#[test]
fn outage_backup() {
    prove(&OUTAGE_BACKUP);
}

#[test]
fn outage_timelines() {
    prove(&OUTAGE_TIMELINES);
}

/// A short way to break an invariant with a wrong order of steps.
fn break_it(order: Order, scenario: &Scenario) -> Option<(&'static str, Vec<Action>)> {
    let bounds = scenario.bounds.in_order(order);
    let is_broken = HasDiscoveries::AnyOf(INVARIANTS.into_iter().collect());
    let checked = bounds.checker().finish_when(is_broken).spawn_bfs().join();
    let found = INVARIANTS.into_iter().filter_map(|name| checked.discovery(name));
    let way = found.min_by_key(|way| way.clone().into_actions().len())?;
    // The checker looks at states in blocks, and may report one behind the first broken one.
    let mut actions = Vec::new();
    for (world, next) in way.into_vec() {
        let mut invariants =
            bounds.properties().into_iter().filter(|property| INVARIANTS.contains(&property.name));
        if let Some(broken) = invariants.find(|property| !(property.condition)(&bounds, &world)) {
            return Some((broken.name, actions));
        }
        actions.extend(next);
    }
    None
}

/// Where each wrong order shows.
const WHERE: [(Order, &Scenario); Order::FAULTS.len()] = [
    (Order::FileBeforeWal, &CRASHES),
    (Order::UsedBeforeWal, &CRASHES),
    (Order::PageBeforeWal, &CRASHES),
    (Order::NextKeyNotDurable, &CRASHES),
    (Order::UnsettledBelieved, &CRASHES),
    (Order::CheckpointSettlesNothing, &NEW_FILE),
    (Order::MarkBeforeSync, &CRASHES),
    (Order::MarkBeforeWal, &CRASHES),
    (Order::SyncRequestedLast, &NEW_FILE),
    (Order::CheckpointPassesStaged, &WITHOUT_FSYNC),
    (Order::TombstoneNotInWal, &LISTED),
    (Order::TombstoneNotDurable, &DESTROYED),
    (Order::NoTombstone, &DESTROYED),
    (Order::RedoMovesNoMinimum, &REPLICA),
    (Order::RedoSettlesLater, &REPLICA),
    (Order::NoPlaceholders, &BACKUP),
    (Order::RestartPointSettlesNothing, &REPLICA_OF_NEW_FILE),
    (Order::RewindKeepsKeystore, &TIMELINES),
    (Order::ProofByDiskOnly, &PROVEN),
    (Order::InterimMarkNotDurable, &OUTAGE),
    (Order::UnmarkedWhenLogged, &OUTAGE),
    (Order::LockedPagesDropped, &OUTAGE),
    (Order::LockedAsDestroyed, &OUTAGE),
    (Order::LockedInPlaintext, &OUTAGE_OF_NEW_FILE),
    (Order::InterimOfCurrentKey, &OUTAGE),
    (Order::InterimPagesOutliveKeys, &OUTAGE_DESTROYED),
    (Order::CopyBelievesMarks, &OUTAGE_TIMELINES),
];

#[test]
fn every_wrong_order_is_found() {
    assert_eq!(WHERE.map(|(order, _)| order), Order::FAULTS);
    for (order, scenario) in WHERE {
        let Some((broken, actions)) = break_it(order, scenario) else {
            panic!("{order:?} is not found in {}", scenario.name)
        };
        eprintln!("{order:?}: not \"{broken}\" after {actions:?}");
    }
}

/// A page under a former key is refused as one in plaintext is, so the proof must be as good.
#[test]
fn a_proof_by_disk_only_is_none_of_former_keys() {
    let (broken, actions) = break_it(Order::ProofByDiskOnly, &ROTATED).unwrap();
    assert_eq!(broken, "no page is refused", "{actions:?}");
}

/// The order that pagevault once had: killed between file and WAL, the server uses a key that no
/// other server will ever hear of.
#[test]
fn a_key_in_the_file_and_not_in_wal_is_found() {
    let (broken, actions) = break_it(Order::FileBeforeWal, &CRASHES).unwrap();
    assert_eq!(broken, "a keystore says what WAL says");
    let begins = [Action::MakeKey, Action::StepKeys];
    assert!(actions.starts_with(&begins) && actions.len() == 3, "{actions:?}");
    assert!(matches!(actions[2], Action::Crash { wal: 0, .. }), "{actions:?}");
}
