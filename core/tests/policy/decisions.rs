//! The policy for each kind of relation.

use pagevault_core::policy::relation::{named_for, squeezes};
use pagevault_core::policy::{
    Catalog, Label, Labelled, Policy, RelationKind, Setting, Source, catalogs,
};

use crate::rule::{decided, expected};
use crate::world::*;

/// All labels that can decide about a table.
const ABOVE_A_TABLE: [usize; 6] =
    [OF_TABLE, OF_PARENT, OF_GRANDPARENT, OF_SCHEMA, OF_TABLESPACE, OF_DATABASE];
/// All labels that can decide about relations that follow the table.
const ABOVE_A_FOLLOWER: [usize; 5] = [OF_TABLE, OF_SCHEMA, OF_TABLESPACE, OF_DATABASE, OF_OTHERS];

#[test]
fn a_table_is_decided_by_the_rule() {
    let mut count = 0;
    for world in World::all(&ABOVE_A_TABLE, 2) {
        assert_eq!(decided(&world, world.wanted(TABLE)), expected(&world, TABLE), "{world:?}");
        count += 1;
    }
    assert_eq!(count, 4 * (1 + 4 + 16) * 4 * 4 * 4 * 2 * 3);
}

#[test]
fn what_follows_a_table_is_decided_by_the_rule() {
    for world in World::all(&ABOVE_A_FOLLOWER, 0) {
        for oid in USERS {
            let wanted = decided(&world, world.wanted(oid));
            assert_eq!(wanted, expected(&world, oid), "{oid} in {world:?}");
        }
    }
}

#[test]
fn partitioned_tables_decide_for_what_follows_a_partition() {
    for world in World::all(&[OF_TABLE, OF_PARENT, OF_GRANDPARENT, OF_SCHEMA, OF_OTHERS], 2) {
        for oid in [INDEX, TOAST, SEQUENCE, TRANSIENT, COPY] {
            let wanted = decided(&world, world.wanted(oid));
            assert_eq!(wanted, expected(&world, oid), "{oid} in {world:?}");
        }
    }
}

/// The tablespace of an index or sequence does not affect its policy.
#[test]
fn the_tablespace_of_an_index_does_not_count() {
    for world in World::all(&[OF_TABLE, OF_TABLESPACE, OF_ELSEWHERE, OF_DATABASE], 0) {
        let moved = world.with_label(OF_ELSEWHERE, None);
        for oid in [TABLE, INDEX, NEW_INDEX, TOAST, TOAST_INDEX, SEQUENCE] {
            assert_eq!(world.wanted(oid), moved.wanted(oid), "{oid} in {world:?}");
        }
        assert_eq!(
            decided(&world, world.wanted(FREE_SEQUENCE)),
            expected(&world, FREE_SEQUENCE),
            "{world:?}"
        );
    }
}

#[test]
fn the_nearest_label_wins() {
    // Tablespace and database are left out: neither is nearer than the other.
    let order = [OF_TABLE, OF_PARENT, OF_GRANDPARENT, OF_SCHEMA];
    for world in World::all(&ABOVE_A_TABLE, 2) {
        let Some(nearest) = order.into_iter().find_map(|place| world.label(place)) else {
            continue;
        };
        assert_eq!(world.wanted(TABLE).unwrap().label, nearest, "{world:?}");
    }
}

/// Labels farther away than the one that decides are not read: each is a catalog look-up.
#[test]
fn labels_behind_the_nearest_one_are_not_read() {
    for world in World::all(&ABOVE_A_TABLE, 2) {
        world.asked.set(0);
        world.wanted(TABLE);
        let parents = world.levels;
        let most = match () {
            () if world.label(OF_TABLE).is_some() => 1,
            () if world.label(OF_PARENT).is_some() => 2,
            () if world.label(OF_GRANDPARENT).is_some() => 3,
            () if world.label(OF_SCHEMA).is_some() => 2 + parents,
            () => 4 + parents,
        };
        assert_eq!(world.asked.get(), most, "{world:?}");
    }
}

/// A relation that follows an encrypted table may become plaintext only by a label: the table's or
/// its own.
#[test]
fn only_labels_take_encryption_from_followers() {
    for world in World::all(&ABOVE_A_FOLLOWER, 0).filter(|world| world.table.is_some()) {
        let is_plaintext = |place| world.label(place) == Some(Label::Plaintext);
        for oid in [INDEX, NEW_INDEX, TOAST, TOAST_INDEX] {
            assert!(world.wants_encryption(oid) || is_plaintext(OF_TABLE), "{oid} in {world:?}");
        }
        for oid in [SEQUENCE, TRANSIENT, COPY, COPY_OF_OTHER, COPY_OF_SUPERUSER, SQUEEZED] {
            let labelled_plaintext = match world.label(OF_OTHERS) {
                None => is_plaintext(OF_TABLE),
                own => own == Some(Label::Plaintext),
            };
            assert!(world.wants_encryption(oid) || labelled_plaintext, "{oid} in {world:?}");
        }
    }
}

/// A role with CREATE on pg_repack's schema that does not own the original cannot create a table
/// there that is less protected than tables it creates elsewhere.
#[test]
fn copies_of_others_are_at_least_as_encrypted_as_their_place() {
    for world in World::all(&ABOVE_A_FOLLOWER, 0) {
        if world.label(OF_OTHERS).is_some() {
            continue;
        }
        let policy = Policy::of(&world);
        let place = policy.wanted_of_place(TABLESPACE).unwrap();
        if place.is_some_and(|place| place.is_encrypted()) {
            assert!(world.wants_encryption(COPY_OF_OTHER), "{world:?}");
        }
    }
}

#[test]
fn catalogs_follow_the_database_and_their_settings() {
    for database in LABELS {
        for bits in 0..16 {
            let on = |bit: u32| bits >> bit & 1 == 1;
            let world = World {
                labels: [Some(Label::Encrypted(Some(AES_128))); 8],
                default_encryption: true,
                data_catalog_encryption: on(0),
                shared_catalog_encryption: on(1),
                others: on(2).then_some(AES_256),
                table: on(3).then_some(AES_256),
                ..World::default()
            }
            .with_label(OF_DATABASE, database);
            let by_database = match database {
                Some(label @ Label::Encrypted(_)) => {
                    Some((label, Source::Around(Labelled::Database(DATABASE))))
                }
                _ => None,
            };
            let by = |setting| Some((Label::Encrypted(None), Source::Setting(setting)));
            let wanted = |oid| world.wanted(oid).map(|wanted| (wanted.label, wanted.source));
            assert_eq!(wanted(CATALOG), by_database);
            let protected = on(0) && (on(2) || on(3));
            for oid in catalogs::WITH_VALUES {
                let expected = by_database.or(by(Setting::DataCatalogs).filter(|_| protected));
                assert_eq!(wanted(oid), expected, "{world:?}");
            }
            let shared = by(Setting::SharedCatalogs).filter(|_| on(1));
            assert_eq!(wanted(SHARED_CATALOG), shared, "{world:?}");
        }
    }
}

#[test]
fn changed_labels_are_foreseen() {
    for world in World::all(&[OF_TABLE, OF_PARENT, OF_SCHEMA, OF_DATABASE], 1) {
        for (place, object) in [
            (OF_TABLE, Labelled::Relation(TABLE)),
            (OF_PARENT, Labelled::Relation(PARENT)),
            (OF_SCHEMA, Labelled::Schema(SCHEMA)),
            (OF_DATABASE, Labelled::Database(DATABASE)),
        ] {
            for label in LABELS {
                let foreseen =
                    Policy::if_labelled(&world, object, label).wanted(&world.get(TABLE)).unwrap();
                assert_eq!(foreseen, world.with_label(place, label).wanted(TABLE));
            }
        }
    }
}

#[test]
fn indexes_and_toast_tables_belong_to_their_table() {
    let world = World::default();
    let policy = Policy::of(&world);
    for oid in [TABLE, INDEX, NEW_INDEX, TOAST, TOAST_INDEX] {
        let root = policy.root_of(&world.get(oid)).unwrap();
        assert_eq!(root.oid, TABLE);
    }
    for oid in [SEQUENCE, TRANSIENT, COPY, VIEW] {
        let root = policy.root_of(&world.get(oid)).unwrap();
        assert_eq!(root.oid, oid);
    }
}

/// A relation whose leader does not exist has no policy.
#[test]
fn a_leader_that_does_not_exist() {
    let world = World { default_encryption: true, ..World::default() };
    let policy = Policy::of(&world);
    let mut orphan = world.get(TOAST);
    orphan.named_for = Some(0);
    let wanted = policy.wanted(&orphan).unwrap();
    assert_eq!(wanted, None);
    let root = policy.root_of(&orphan).unwrap();
    assert_eq!(root, orphan);
}

#[test]
fn numbers_in_names() {
    use RelationKind::{Index, MaterializedView, Table, Toast};
    for (kind, name, number) in [
        (Toast, "pg_toast_16384", Some(16384)),
        (Toast, "pg_toast_16384_index", None),
        (Toast, "pg_toast_4294967296", None),
        (Toast, "pg_toast_", None),
        (Toast, "pg_toast_+1", None),
        (Toast, "table_1", None),
        (Table, "table_16384", Some(16384)),
        (Table, "log_16384", Some(16384)),
        (Table, "table_x", None),
        (Table, "pg_toast_16384", None),
        (MaterializedView, "table_16384", None),
        (Index, "pg_toast_16384", None),
    ] {
        assert_eq!(named_for(kind, name.as_bytes()), number, "{name}");
    }
    assert_eq!(squeezes(Table, b"tmp_16384"), Some(16384));
    assert_eq!(squeezes(Table, b"tmp_"), None);
    assert_eq!(squeezes(MaterializedView, b"tmp_16384"), None);
}

/// Outside of pg_repack's schema such a name has no effect, nor that of pg_squeeze's copy in the
/// hands of another owner.
#[test]
fn a_namesake_follows_nothing() {
    let world = World { table: Some(AES_128), ..World::default() };
    assert_eq!(world.wanted(NAMESAKE), None);
    assert_eq!(world.wanted(SQUEEZED_OF_OTHER), None);
    let default = world.default_cipher();
    let wanted = Policy::of(&world).cipher_wanted_of(&world.get(NAMESAKE)).unwrap();
    assert_eq!(wanted, default);
    let like = Policy::of(&world).cipher_wanted_of(&world.get(COPY)).unwrap();
    assert_eq!(like, AES_128);
}
