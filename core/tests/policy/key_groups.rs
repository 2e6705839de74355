//! Whose key wraps the data keys of relations.

use pagevault_core::policy::storage::{Answer, Makes, NewFile};
use pagevault_core::policy::{Label, Labelled, Mixture, Named, Policy, Sealing};
use pagevault_keystore::KeyGroup;

use crate::world::*;

const ENCRYPTED: Option<Label> = Some(Label::Encrypted(None));

fn group(number: u32) -> KeyGroup {
    KeyGroup::new(number).unwrap()
}

fn named(number: u32) -> Option<Named> {
    Some(Named::Group(group(number)))
}

/// Relations that are in the group of the table, wherever that has it from.
const FOLLOWERS: [u32; 7] = [INDEX, NEW_INDEX, TOAST, TOAST_INDEX, SEQUENCE, TRANSIENT, COPY];

fn in_group(world: &World, oid: u32) -> Option<KeyGroup> {
    let sealing = Policy::of(world).for_new_relation(&world.get(oid)).unwrap();
    sealing.and_then(|sealing| sealing.group)
}

/// Of the labels from the table outwards, the first one that names a group counts.
#[test]
fn the_innermost_label_that_names_a_group_counts() {
    let places = [OF_TABLE, OF_PARENT, OF_GRANDPARENT, OF_SCHEMA, OF_TABLESPACE];
    for naming in 0..1_u32 << places.len() {
        for labelled in 0..1_u32 << places.len() {
            let mut world = World { levels: 2, ..World::default() };
            for (at, place) in places.into_iter().enumerate() {
                let names = naming >> at & 1 == 1;
                world.groups[place] = if names { named(100 + at as u32) } else { None };
                // A label that names a group requires encryption.
                let has_label = names || labelled >> at & 1 == 1;
                world.labels[place] = if has_label { ENCRYPTED } else { None };
            }
            let first = (0..places.len()).find(|at| naming >> at & 1 == 1);
            let expected = first.map(|at| group(100 + at as u32));
            for oid in [TABLE].into_iter().chain(FOLLOWERS) {
                assert_eq!(in_group(&world, oid), expected, "{oid} in {world:?}");
            }
            // The schema of pg_repack's tables has no label.
            let around = (3..places.len()).find(|at| naming >> at & 1 == 1);
            let around = around.map(|at| group(100 + at as u32));
            assert_eq!(in_group(&world, VIEW), around, "{world:?}");
        }
    }
}

#[test]
fn nothing_in_plaintext_and_no_catalog_is_in_a_group() {
    let mut world = World { labels: [ENCRYPTED; 8], groups: [named(100); 8], ..World::default() };
    assert_eq!(in_group(&world, CATALOG), None);
    assert_eq!(in_group(&world, SHARED_CATALOG), None);
    world.labels[OF_TABLE] = Some(Label::Plaintext);
    world.groups[OF_TABLE] = None;
    let table = world.get(TABLE);
    assert_eq!(Policy::of(&world).for_new_relation(&table), Ok(None));
    assert_eq!(Policy::of(&world).for_replacement(&table, table.file), Ok(None));
}

/// A relation stays in its group where no label says anything, and leaves it where one requires
/// encryption and names none.
#[test]
fn a_relation_stays_in_its_group_until_a_label_decides() {
    let mut world = World {
        table: Some(AES_256),
        table_group: Some(group(7_000)),
        others: Some(AES_256),
        ..World::default()
    };
    let kept = Some(Sealing { cipher: AES_256, group: Some(group(7_000)) });
    for (default_encryption, label, expected) in [
        (false, None, kept),
        (true, None, kept),
        (false, ENCRYPTED, Some(Sealing { cipher: AES_256, group: None })),
    ] {
        world.default_encryption = default_encryption;
        world.labels[OF_SCHEMA] = label;
        let policy = Policy::of(&world);
        for oid in [TABLE, TRANSIENT] {
            let relation = world.get(oid);
            let new = policy.for_replacement(&relation, relation.file).unwrap();
            assert_eq!(new, expected, "{oid} in {world:?}");
        }
        let table = world.get(TABLE);
        let moves = expected != kept;
        assert_eq!(policy.for_altered(&table).unwrap(), expected.filter(|_| moves));
        assert_eq!(policy.drift_of(&table, Mixture::None, |_| Ok(0)).unwrap().is_some(), moves);
        assert_eq!(policy.for_rekeying(&table, AES_256).map(Some), Ok(expected));
    }
}

/// The name of a copy by pg_squeeze does not take a table out of the group around it.
#[test]
fn a_name_leads_into_no_other_group() {
    let mut world = World { table: Some(AES_256), others: Some(AES_256), ..World::default() };
    world.labels[OF_TABLE] = ENCRYPTED;
    world.groups[OF_TABLE] = named(100);
    assert_eq!(in_group(&world, SQUEEZED), Some(group(100)));
    world.labels[OF_SCHEMA] = ENCRYPTED;
    world.groups[OF_SCHEMA] = named(101);
    assert_eq!(in_group(&world, SQUEEZED), Some(group(101)));
    assert_eq!(in_group(&world, TRANSIENT), Some(group(100)));
    // Nor out of the one in which it is, or into another one.
    for of_schema in [None, ENCRYPTED] {
        world.labels[OF_SCHEMA] = of_schema;
        world.groups[OF_SCHEMA] = None;
        for of_table in [None, named(100)] {
            world.groups[OF_TABLE] = of_table;
            for own in [None, Some(group(7_000))] {
                world.others_group = own;
                let policy = Policy::of(&world);
                let squeezed = world.get(SQUEEZED);
                let new = policy.for_replacement(&squeezed, squeezed.file).unwrap();
                assert_eq!(new.map(|new| new.group), Some(own), "{world:?}");
                assert_eq!(policy.for_rekeying(&squeezed, AES_256).unwrap().group, own);
                assert!(!policy.is_in_other_key_group(&squeezed).unwrap());
                // A real copy, which is new, is in the group of its original.
                assert_eq!(in_group(&world, SQUEEZED), of_table.map(|_| group(100)));
            }
        }
    }
}

#[test]
fn a_group_that_does_not_exist_is_an_error_for_new_files_and_drift() {
    let schema = Labelled::Schema(SCHEMA);
    let mut world = World { table: Some(AES_256), ..World::default() };
    world.labels[OF_SCHEMA] = ENCRYPTED;
    world.groups[OF_SCHEMA] = Some(Named::Missing(schema));
    let (policy, table) = (Policy::of(&world), world.get(TABLE));
    assert_eq!(policy.for_new_relation(&table), Err(Missing(schema)));
    assert_eq!(policy.for_replacement(&table, table.file), Err(Missing(schema)));
    assert!(policy.drift_of(&table, Mixture::None, |_| Ok(0)).unwrap().is_some());
    // The label of the table outranks it.
    world.labels[OF_TABLE] = ENCRYPTED;
    world.groups[OF_TABLE] = named(100);
    assert_eq!(in_group(&world, TABLE), Some(group(100)));
}

/// A new file may belong to any locked relation. If they are not all in one group, that is said.
#[test]
fn a_file_between_groups_is_in_doubt() {
    let world = World::default();
    let policy = Policy::of(&world);
    let of = |number: Option<u32>| {
        Answer::Encrypted(Sealing { cipher: AES_256, group: number.map(group) })
    };
    for (answers, expected, in_doubt) in [
        (vec![of(Some(100)), of(Some(100))], Some(100), false),
        (vec![of(Some(100)), Answer::NotApplicable], Some(100), false),
        (vec![of(None), Answer::Plaintext], None, false),
        (vec![of(Some(100)), Answer::Plaintext], None, true),
    ] {
        let place = file(900, TABLESPACE, DATABASE);
        let new =
            |makes| policy.for_new_file(place, makes, answers.iter().map(|answer| Ok(*answer)));
        let sealing = Some(Sealing { cipher: AES_256, group: expected.map(group) });
        assert_eq!(new(Makes::Storage), Ok(NewFile { sealing, in_doubt }));
        // A new relation is none of them, and gets its group when it is known.
        let sealing = Some(Sealing { cipher: AES_256, group: None });
        let in_doubt = in_doubt || expected.is_some();
        assert_eq!(new(Makes::Relations), Ok(NewFile { sealing, in_doubt }));
    }
    for answers in [[of(Some(100)), of(Some(101))], [of(None), of(Some(101))]] {
        let place = file(900, TABLESPACE, DATABASE);
        let new = policy.for_new_file(place, Makes::Storage, answers.into_iter().map(Ok));
        let sealing = Some(Sealing { cipher: AES_256, group: None });
        assert_eq!(new, Ok(NewFile { sealing, in_doubt: true }));
    }
    // Nothing is locked: the label of the tablespace.
    let mut world = World::default();
    world.labels[OF_TABLESPACE] = ENCRYPTED;
    world.groups[OF_TABLESPACE] = named(102);
    let place = file(900, TABLESPACE, DATABASE);
    let new = Policy::of(&world).for_new_file(place, Makes::Storage, []).unwrap();
    assert_eq!(new.sealing.and_then(|sealing| sealing.group), Some(group(102)));
}

/// Tables may have the names of each other's copy.
#[test]
fn names_that_lead_in_a_circle_come_to_an_end() {
    for state in [None, Some(AES_256)] {
        let mut world = World { circle: true, table: state, others: state, ..World::default() };
        for (place, expected) in [(OF_ELSEWHERE, None), (OF_SCHEMA, named(100))] {
            world.groups = [None; 8];
            world.groups[place] = named(100);
            for oid in [TABLE, SQUEEZED, INDEX, TOAST, SEQUENCE] {
                let relation = world.get(oid);
                let found = Policy::of(&world).named_key_group(&relation, relation.tablespace);
                assert_eq!(found, Ok(expected), "{oid}");
            }
        }
    }
}
