//! What must hold in every state: the invariants of ARCHITECTURE.md, in its words.

use std::collections::BTreeMap;

use pagevault_keystore::DataKeyVersion;
use stateright::Property;

use super::interim::Seal;
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
        Property::always(INVARIANTS[7], no_interim_page_is_without_a_mark),
        Property::always(INVARIANTS[8], no_interim_page_outlives_its_key),
        Property::sometimes(REACHED[0], |_, world| is_cut_off(world)),
        Property::sometimes(REACHED[1], |_, world| has_placeholder(world)),
        Property::sometimes(REACHED[2], |_, world: &World| world.follows_after_rewind()),
        Property::sometimes(REACHED[3], |_, world| has_replayed_tombstone(world)),
        Property::sometimes(REACHED[4], |_, world| is_behind_its_key_file(world)),
        Property::sometimes(REACHED[5], |_, world| has_reused_number(world)),
        Property::sometimes(REACHED[6], |_, world| has_plaintext_of_the_future(world)),
        Property::sometimes(REACHED[7], |_, world| has_plaintext_of_the_past(world)),
        Property::sometimes(REACHED[8], |_, world| promoted_with_interim_page(world)),
        Property::sometimes(REACHED[9], |_, world| has_interim_page_of_former_key(world)),
        Property::sometimes(REACHED[10], |bounds, world: &World| world.is_rekeyed(bounds)),
        Property::sometimes(REACHED[11], |_, world| is_copied_without_mark(world)),
        Property::sometimes(REACHED[12], |_, world| is_rewound_with_interim_page(world)),
        Property::sometimes(REACHED[13], |_, world| is_destroyed_while_locked(world)),
        Property::sometimes(REACHED[14], |_, world| is_stopped_by_locked_key(world)),
    ]
}

/// The names of the invariants.
pub const INVARIANTS: [&str; 9] = [
    "every page has its key",
    "a pair names one key",
    "a keystore says what WAL says",
    "destroyed keys stay destroyed",
    "commits stay readable",
    "no server stops",
    "no page is refused",
    "no interim page is without a mark",
    "no interim page outlives its data key",
];

/// States that some scenario must reach, or else its proof says little.
pub const REACHED: [&str; 15] = [
    "a start has cut off a staged batch",
    "redo gets a placeholder",
    "a former primary follows, behind a key that only it has made",
    "a replica has replayed a tombstone",
    "a key file says more than the replica has replayed",
    "a file number whose keys were destroyed has a new key",
    "a replica has a page in plaintext and has not replayed that it may",
    "a replica's keystore says that the file is proven, and its page is still in plaintext",
    "a promoted server has a page under an interim key",
    "a page is under the interim key of a former data key",
    "a file is rekeyed that had pages under interim keys, and is not marked any more",
    "a restored server has a page under an interim key, and no mark of its file",
    "a rewound server has a page under an interim key",
    "the keys of a file are destroyed while they are locked",
    "a locked key has stopped a replica",
];

fn promoted_with_interim_page(world: &World) -> bool {
    world.former.is_some() && world.primary.has_interim_pages()
}

fn has_interim_page_of_former_key(world: &World) -> bool {
    let servers = [Some(&world.primary), world.replica.as_ref()];
    servers.into_iter().flatten().filter(|server| server.serves()).any(|server| {
        let current = server.known().current;
        let seal = server.page.and_then(|page| page.seal);
        seal.is_some_and(|seal| seal.interim && Some(seal.key.version) < current)
    })
}

fn is_copied_without_mark(world: &World) -> bool {
    let is_one = |server: &Server| !server.marks.file && server.has_interim_pages();
    world.replica.as_ref().is_some_and(is_one)
}

fn is_rewound_with_interim_page(world: &World) -> bool {
    let replica = world.replica.as_ref().filter(|replica| replica.marks.any);
    replica.is_some_and(Server::has_interim_pages)
}

fn is_stopped_by_locked_key(world: &World) -> bool {
    world.replica.as_ref().is_some_and(|replica| replica.started_again)
}

fn is_destroyed_while_locked(world: &World) -> bool {
    let server = &world.primary;
    server.is_locked() && server.known().destroyed.is_some()
}

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
        replica.known().floor.is_some() && replica.page.is_some_and(|page| page.seal.is_none())
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
        let has_key = |Seal { key, .. }: Seal| known.key(key.version) == Some(key);
        !told(wal, bounds.in_use).lives || server.seals().all(has_key)
    })
}

/// A pair of file and version never names two keys: not in the WAL of a server, its directory and
/// its pages, taken together. On another timeline it may name another.
pub fn a_pair_names_one_key(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let mut names: BTreeMap<DataKeyVersion, u8> = BTreeMap::new();
        let lives = told(wal, bounds.in_use).lives;
        let on_disk = server.seals().map(|seal| seal.key).filter(|_| lives);
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
        if server.recovery().is_some() || server.keystore_is_free() {
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
        if server.recovery().is_none() && !server.keystore_is_free() {
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
        !told.lives
            || !is_placeholder
                && (told.row.is_none() || server.visible_row(bounds.order) == told.row)
    })
}

/// A start, a replay or a promotion never fails for want of a key, or because keystore and WAL
/// contradict each other. But a base backup that was taken while a file got another key may have to
/// be started twice while the key of the group is locked.
pub fn no_server_stops(_: &Bounds, world: &World) -> bool {
    let goes_on = |replica: &Server| replica.stopped.is_none() || replica.may_start_again();
    world.primary.stopped.is_none() && world.replica.as_ref().is_none_or(goes_on)
}

/// A file that contains sealed pages only has no page in plaintext on disk, nor one under a key
/// before the last that was proven: it would be refused. Before a server admits queries, nothing is
/// refused.
pub fn no_page_is_refused(_: &Bounds, world: &World) -> bool {
    let is_refused =
        |server: &Server| server.page.is_some_and(|page| server.known().refuses(page.key()));
    serving(world).all(|(server, _)| !is_refused(server))
}

/// A file that may have pages under interim keys is marked, durably, or all files are looked at.
pub fn no_interim_page_is_without_a_mark(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let marks = server.marks;
        let is_marked = marks.file || marks.any;
        is_marked || !server.has_interim_pages() || !told(wal, bounds.in_use).lives
    })
}

/// When data keys are destroyed, the pages under their interim keys are overwritten: the key of the
/// group from which these are derived may stay.
pub fn no_interim_page_outlives_its_key(bounds: &Bounds, world: &World) -> bool {
    serving(world).all(|(server, wal)| {
        let is_done = server.recovery().is_some() || server.keystore_is_free();
        let through = told(wal, bounds.in_use).destroyed.filter(|_| is_done);
        let is_left = |seal: Seal| seal.interim && Some(seal.key.version) <= through;
        !server.seals().any(is_left)
    })
}
