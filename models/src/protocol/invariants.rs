//! What must hold in every state: the invariants of ARCHITECTURE.md, in its words.

use std::collections::BTreeMap;

use pagevault_keystore::DataKeyVersion;
use stateright::Property;

use super::server::{Buffer, Server};
use super::wal::{Key, KeyChange, WalRecord, keys_made, told};
use super::{Bounds, World};

/// The invariants, and states that must be reachable, or else these would prove nothing.
pub fn properties() -> Vec<Property<Bounds>> {
    vec![
        Property::always(INVARIANTS[0], every_page_has_its_key),
        Property::always(INVARIANTS[1], a_pair_names_one_key),
        Property::always(INVARIANTS[2], a_keystore_says_what_wal_says),
        Property::always(INVARIANTS[3], destroyed_keys_stay_destroyed),
        Property::always(INVARIANTS[4], commits_stay_readable),
        Property::always(INVARIANTS[5], no_server_stops),
        Property::always(INVARIANTS[6], no_page_is_refused),
        Property::sometimes(REACHED[0], |_, world| is_cut_off(world)),
        Property::sometimes(REACHED[1], |_, world| has_placeholder(world)),
        Property::sometimes(REACHED[2], |_, world: &World| world.follows_after_rewind()),
        Property::sometimes(REACHED[3], |_, world| has_replayed_tombstone(world)),
        Property::sometimes(REACHED[4], |_, world| is_behind_its_key_file(world)),
        Property::sometimes(REACHED[5], |_, world| has_reused_number(world)),
        Property::sometimes(REACHED[6], |_, world| has_plaintext_of_the_future(world)),
        Property::sometimes(REACHED[7], |_, world| has_plaintext_of_the_past(world)),
    ]
}

/// The names of the invariants.
pub const INVARIANTS: [&str; 7] = [
    "every page has its key",
    "a pair names one key",
    "a keystore says what WAL says",
    "destroyed keys stay destroyed",
    "commits stay readable",
    "no server stops",
    "no page is refused",
];

/// States that some scenario must reach, or else its proof says little.
pub const REACHED: [&str; 8] = [
    "a start has cut off a staged batch",
    "redo gets a placeholder",
    "a former primary follows, behind a key that only it has made",
    "a replica has replayed a tombstone",
    "a key file says more than the replica has replayed",
    "a file number whose keys were destroyed has a new key",
    "a replica has a page in plaintext and has not replayed that it may",
    "a replica's keystore says that the file is proven, and its page is still in plaintext",
];

fn is_cut_off(world: &World) -> bool {
    world.replica.iter().any(|replica| replica.has_put_aside() && replica.recovery().is_some())
}

fn has_placeholder(world: &World) -> bool {
    let memory = world.replica.as_ref().and_then(|replica| replica.memory.as_ref());
    memory.is_some_and(|memory| memory.buffer == Buffer::Placeholder)
}

fn has_replayed_tombstone(world: &World) -> bool {
    world.replica.as_ref().is_some_and(|replica| replica.known().destroyed.is_some())
}

fn is_behind_its_key_file(world: &World) -> bool {
    world.replica.as_ref().is_some_and(|replica| {
        let replayed = replica.recovery().map_or(0, |recovery| recovery.replayed);
        let wal = &world.primary.wal;
        let told = wal.get(..replayed).map_or(0, |wal| keys_made(wal).count());
        replica.known().keys.len() > told
    })
}

fn has_reused_number(world: &World) -> bool {
    let known = world.primary.known();
    known.destroyed.is_some() && !known.keys.is_empty()
}

fn has_plaintext_of_the_future(world: &World) -> bool {
    world.replica.as_ref().is_some_and(|replica| {
        replica.known().floor.is_some() && replica.page.is_some_and(|page| page.key.is_none())
    })
}

fn has_plaintext_of_the_past(world: &World) -> bool {
    let is_proof = |record: &WalRecord| matches!(record, WalRecord::Keys(KeyChange::Proven { .. }));
    world.primary.wal.iter().any(is_proof) && has_plaintext_of_the_future(world)
}

/// Each server that admits queries, and the WAL that it has written or replayed.
fn serving(world: &World) -> impl Iterator<Item = (&Server, &[WalRecord])> {
    let primary = Some((&world.primary, &world.primary.wal[..]));
    let replica = world.replica.as_ref().and_then(|replica| {
        let replayed = replica.recovery()?.replayed;
        Some((replica, &world.primary.wal[..replayed]))
    });
    [primary, replica].into_iter().flatten().filter(|(server, _)| server.serves())
}

/// No page is on the disk of a server that admits queries whose key this server does not have.
/// Pages of a file whose keys were destroyed are nobody's.
pub fn every_page_has_its_key(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let known = server.known();
        let keys = [server.page.and_then(|page| page.key), server.map];
        !told(wal, bounds.in_use).lives
            || keys.into_iter().flatten().all(|key| known.key(key.version) == Some(key))
    })
}

/// A pair of file and version never names two keys: not in the WAL of a server, its directory and
/// its pages, taken together. On another timeline it may name another.
pub fn a_pair_names_one_key(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let mut names: BTreeMap<DataKeyVersion, u8> = BTreeMap::new();
        let lives = told(wal, bounds.in_use).lives;
        let on_disk = [server.page.and_then(|page| page.key), server.map];
        let on_disk = on_disk.into_iter().flatten().filter(|_| lives);
        let mut all = keys_made(wal).chain(server.known().keys).chain(on_disk);
        all.all(|Key { version, identity }| *names.entry(version).or_insert(identity) == identity)
    })
}

/// A key file is never ahead of WAL, and never behind it: what a server knows is what the WAL says
/// that it has written or replayed. (While a process makes a key, WAL may be one record ahead.)
pub fn a_keystore_says_what_wal_says(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let known = server.known();
        let told = told(wal, bounds.in_use);
        let is_left = |key: &Key| Some(key.version) > told.destroyed;
        let mut made: Vec<Key> = keys_made(wal).filter(is_left).collect();
        made.sort_unstable();
        if server.recovery().is_some() || server.is_unlocked() {
            known.keys == made && known.destroyed == told.destroyed
        } else {
            known.keys.iter().all(|key| made.contains(key) || Some(key.version) <= told.destroyed)
        }
    })
}

/// Destroyed keys do not come back: neither those whose tombstone a server has written or replayed,
/// nor those whose destruction was reported.
pub fn destroyed_keys_stay_destroyed(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        if server.recovery().is_none() && !server.is_unlocked() {
            return true;
        }
        let reported = world.reported.filter(|(_, end)| *end <= wal.len());
        let through = told(wal, bounds.in_use).destroyed.max(reported.map(|(through, _)| through));
        let is_back = server.known().keys.iter().any(|key| Some(key.version) <= through);
        !is_back && !server.log_holds_key_through(through)
    })
}

/// An acknowledged commit is readable: on the primary after each crash, on a replica, and on a
/// server that was restored to any point behind the commit.
pub fn commits_stay_readable(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let told = told(wal, bounds.in_use);
        let is_placeholder =
            server.memory.as_ref().is_some_and(|memory| memory.buffer == Buffer::Placeholder);
        !told.lives || !is_placeholder && (told.row.is_none() || server.visible_row() == told.row)
    })
}

/// A start, a replay or a promotion never fails for want of a key, or because keystore and WAL
/// contradict each other.
pub fn no_server_stops(_: &Bounds, world: &World) -> bool {
    world.primary.stopped.is_none()
        && world.replica.as_ref().is_none_or(|replica| replica.stopped.is_none())
}

/// A file that contains sealed pages only has no page in plaintext on disk, nor one under a key
/// before the last that was proven: it would be refused. Before a server admits queries, nothing is
/// refused.
pub fn no_page_is_refused(_: &Bounds, world: &World) -> bool {
    let is_refused =
        |server: &Server| server.page.is_some_and(|page| server.known().refuses(page.key));
    serving(world).all(|(server, _)| !is_refused(server))
}
