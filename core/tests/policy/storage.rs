//! The cipher of new files.

use pagevault_cipher::CipherId;
use pagevault_core::policy::storage::{Answer, Makes, NewFile};
use pagevault_core::policy::{Catalog, Label, Policy, RelationKind, Sealing, Source};

use crate::world::*;

/// In no key group.
fn plain(cipher: CipherId) -> Sealing {
    Sealing { cipher, group: None }
}

/// A file that replaces another keeps its cipher, unless the policy requires encryption, or the own
/// label of the relation (or of the one it follows) says `plaintext`.
#[test]
fn a_replacement_keeps_its_cipher_unless_more_is_required_or_it_is_labelled_plaintext() {
    for mut world in World::all(&[OF_TABLE, OF_SCHEMA, OF_TABLESPACE, OF_DATABASE, OF_OTHERS], 0) {
        for others in FILES {
            world.others = others;
            for oid in USERS {
                let relation = world.get(oid);
                let current = world.cipher_of(relation.file);
                let new = Policy::of(&world).for_replacement(&relation, relation.file).unwrap();
                let wanted = world.wanted(oid);
                let expected = match wanted {
                    Some(wanted) => match wanted.label {
                        Label::Encrypted(Some(named)) => Some(named),
                        Label::Encrypted(None) => match current {
                            Some(current) => Some(current),
                            None => Some(wanted.cipher(None, &world)),
                        },
                        // Not if only its owner's label says so.
                        Label::Plaintext
                            if relation.kind == RelationKind::Sequence
                                && wanted.source != Source::Own(oid) =>
                        {
                            current
                        }
                        Label::Plaintext if wanted.is_plaintext_by_own_label() => None,
                        Label::Plaintext => current,
                    },
                    None => current,
                };
                let new = new.map(|sealing| sealing.cipher);
                assert_eq!(new, expected, "{oid} in {world:?}");
                if current.is_some() && new.is_none() {
                    let is_said = world.label(OF_TABLE) == Some(Label::Plaintext)
                        || world.label(OF_OTHERS) == Some(Label::Plaintext);
                    assert!(is_said, "{oid} loses its encryption in {world:?}");
                }
                if wanted.is_some_and(|wanted| wanted.is_encrypted()) {
                    assert!(new.is_some(), "{oid} becomes plaintext in {world:?}");
                }
            }
        }
    }
}

/// A new partition is encrypted as it would be if it had been attached, also if it has the name of
/// another table's copy.
#[test]
fn a_new_partition_is_sealed_as_an_attached_one() {
    for mut world in World::all(&[OF_PARENT, OF_GRANDPARENT, OF_SCHEMA], 2) {
        world.levels = 2;
        let new = |world: &World, oid| {
            let sealing = Policy::of(world).for_new_partition(PARENT, &world.get(oid)).unwrap();
            sealing.map(|sealing| sealing.cipher)
        };
        let wanted = world.wanted(TABLE).filter(|wanted| wanted.is_encrypted());
        assert_eq!(new(&world, TABLE), wanted.map(|wanted| wanted.cipher(None, &world)));
        world.labels[OF_TABLE] = Some(Label::Encrypted(None));
        assert!(new(&world, SQUEEZED).is_some(), "{world:?}");
    }
}

/// A cipher that the server cannot use now is not handed on, but a label that names it is obeyed.
#[test]
fn an_unusable_cipher_is_not_inherited() {
    let label = |label| {
        let mut world = World { table: Some(AES_128), unusable: Some(AES_128), ..World::default() };
        world.labels[OF_TABLE] = label;
        world
    };
    for (world, expected) in [
        (label(None), AES_256),
        (label(Some(Label::Encrypted(None))), AES_256),
        (label(Some(Label::Encrypted(Some(AES_128)))), AES_128),
    ] {
        let policy = Policy::of(&world);
        for oid in [TABLE, INDEX] {
            let relation = world.get(oid);
            let new = policy.for_replacement(&relation, relation.file).unwrap();
            let new = if oid == TABLE { new } else { policy.for_new_relation(&relation).unwrap() };
            assert_eq!(new, Some(plain(expected)), "{oid} in {world:?}");
        }
    }
}

/// A table that moves follows the label of its new tablespace, an index that of its table's.
#[test]
fn a_moving_relation_follows_its_new_tablespace() {
    for world in World::all(&[OF_TABLESPACE, OF_ELSEWHERE, OF_DATABASE], 0) {
        let policy = Policy::of(&world);
        for oid in [TABLE, TOAST, TRANSIENT, INDEX] {
            let relation = world.get(oid);
            let target = file(900, ELSEWHERE, DATABASE);
            let new = policy.for_replacement(&relation, target).unwrap();
            let place = if oid == INDEX { TABLESPACE } else { ELSEWHERE };
            let wanted = policy.wanted_of_place(place).unwrap();
            let wanted = wanted.is_some_and(|wanted| wanted.is_encrypted());
            let follows = oid != TABLE && world.table.is_some();
            let was = oid == TABLE && world.table.is_some();
            assert_eq!(new.is_some(), wanted || follows || was, "{oid} in {world:?}");
        }
    }
}

#[test]
fn the_strongest_cipher_that_a_locked_relation_requires() {
    let answers = [
        Answer::NotApplicable,
        Answer::Plaintext,
        Answer::Encrypted(plain(AES_256)),
        Answer::Encrypted(plain(AES_128)),
    ];
    for world in World::all(&[OF_TABLESPACE, OF_DATABASE], 0) {
        let policy = Policy::of(&world);
        let new = file(900, TABLESPACE, DATABASE);
        let place = policy.wanted_of_place(TABLESPACE).unwrap();
        let by_place = policy.cipher_by(place);
        for number in 0..4usize.pow(3) * 4 {
            let all = [number % 4, number / 4 % 4, number / 16 % 4].map(|at| answers[at]);
            let given = &all[..number / 64];
            let new_file = policy
                .for_new_file(new, Makes::Storage, given.iter().map(|answer| Ok(*answer)))
                .unwrap();
            let required = given.iter().filter_map(|answer| match answer {
                Answer::Encrypted(sealing) => Some(sealing.cipher),
                _ => None,
            });
            // AES-128 only if nobody requires AES-256.
            let strongest = required.max_by_key(|cipher| *cipher == AES_256);
            let expected = match strongest {
                Some(cipher) => Some(cipher),
                None if given.contains(&Answer::Plaintext) => None,
                None => by_place,
            };
            let expected = NewFile { sealing: expected.map(plain), in_doubt: false };
            assert_eq!(new_file, expected, "{given:?} in {world:?}");
        }
    }
}

#[test]
fn shared_files_and_files_of_a_database_are_kept_apart() {
    let world = World { others: Some(AES_256), table: Some(AES_256), ..World::default() };
    let policy = Policy::of(&world);
    let (here, shared) = (file(900, TABLESPACE, DATABASE), file(900, TABLESPACE, 0));
    for (oid, own, not_own) in [(TABLE, here, shared), (SHARED_CATALOG, shared, here)] {
        let answer = policy.asked(&world.get(oid), own).unwrap();
        assert_eq!(answer, Answer::Encrypted(plain(AES_256)));
        let answer = policy.asked(&world.get(oid), not_own).unwrap();
        assert_eq!(answer, Answer::NotApplicable);
    }
    for oid in [TEMPORARY, PARENT] {
        let answer = policy.asked(&world.get(oid), here).unwrap();
        assert_eq!(answer, Answer::NotApplicable, "{oid} has no storage that lasts");
    }
}

#[test]
fn shared_files_follow_their_setting_alone() {
    for mut world in World::all(&[OF_TABLESPACE, OF_DATABASE], 0) {
        for protected in [false, true] {
            world.shared_catalog_encryption = protected;
            let new = file(900, TABLESPACE, 0);
            let new_file = Policy::of(&world).for_new_file(new, Makes::Storage, []).unwrap();
            let sealing = protected.then_some(plain(AES_256));
            assert_eq!(new_file, NewFile { sealing, in_doubt: false });
        }
    }
}

#[test]
fn new_relations() {
    for mut world in World::all(&[OF_TABLE, OF_SCHEMA, OF_DATABASE, OF_OTHERS], 0) {
        for others in FILES {
            world.others = others;
            for oid in USERS {
                let relation = world.get(oid);
                let sealing = Policy::of(&world).for_new_relation(&relation).unwrap();
                let cipher = sealing.map(|sealing| sealing.cipher);
                let wanted = world.wanted(oid).filter(|wanted| wanted.is_encrypted());
                match wanted {
                    Some(wanted) => {
                        let expected = wanted.cipher(None, &world);
                        assert_eq!(cipher, Some(expected));
                    }
                    // The sequence of a serial column: its locked table has decided.
                    None if [SEQUENCE, FREE_SEQUENCE].contains(&oid) => assert_eq!(cipher, others),
                    None => assert_eq!(cipher, None),
                }
            }
        }
    }
}

/// A relation that comes to follow another is encrypted if the policy requires it, never decrypted.
#[test]
fn altered_relations_are_never_decrypted() {
    for mut world in World::all(&[OF_TABLE, OF_SCHEMA, OF_DATABASE, OF_OTHERS], 0) {
        for others in FILES {
            world.others = others;
            for oid in USERS {
                let relation = world.get(oid);
                let cipher = Policy::of(&world).for_altered(&relation).unwrap();
                let current = world.cipher_of(relation.file);
                let wanted = world.wanted(oid).filter(|wanted| wanted.is_encrypted());
                let met = wanted.is_none_or(|wanted| wanted.is_met_by(current));
                assert_eq!(cipher.is_none(), met, "{oid} in {world:?}");
            }
        }
    }
}
