//! Differences between policy and actual state.

use pagevault_cipher::DataKeyVersion;
use pagevault_core::page::PageState;
use pagevault_core::policy::{Catalog, Decision, Label, Mixture, Policy, Source};

use crate::world::*;

fn differs(world: &World, oid: u32, pages: &[PageState]) -> bool {
    let stray =
        |wanted: &Decision| Ok(pages.iter().filter(|page| wanted.is_stray(**page)).count() as i64);
    let drift = Policy::of(world).drift_of(&world.get(oid), Mixture::None, stray).unwrap();
    drift.is_some()
}

/// Nobody else may know of it: a copy of a database has no jobs.
#[test]
fn a_file_that_was_not_rewritten_wholly_is_drift() {
    for world in World::all(&[OF_TABLE, OF_SCHEMA], 0) {
        let as_it_is = differs(&world, TABLE, &[]);
        let wanted = world.wanted(TABLE).map(|wanted| wanted.is_encrypted());
        let wanted = wanted.or(world.table.map(|_| true));
        for (mixture, of) in [
            (Mixture::None, None),
            (Mixture::WithPlaintext, Some(true)),
            (Mixture::WithSealed, Some(false)),
        ] {
            let drift = Policy::of(&world).drift_of(&world.get(TABLE), mixture, |_| Ok(0));
            let drift = drift.unwrap();
            let is_left = of.is_some() && of == wanted;
            assert_eq!(drift.is_some(), as_it_is || is_left, "{mixture:?} in {world:?}");
            let unfinished = drift.is_some_and(|drift| drift.unfinished);
            assert_eq!(unfinished, is_left && !as_it_is, "{mixture:?} in {world:?}");
        }
    }
}

#[test]
fn drift_is_what_a_new_file_would_not_be() {
    for mut world in World::all(&[OF_TABLE, OF_SCHEMA, OF_DATABASE, OF_OTHERS], 0) {
        for others in FILES {
            world.others = others;
            for oid in USERS {
                let current = world.cipher_of(world.get(oid).file);
                let expected = match world.wanted(oid).map(|wanted| wanted.label) {
                    None => false,
                    Some(Label::Plaintext) => current.is_some(),
                    Some(Label::Encrypted(None)) => current.is_none(),
                    Some(Label::Encrypted(named)) => current != named,
                };
                assert_eq!(differs(&world, oid, &[]), expected, "{oid} in {world:?}");
            }
        }
    }
}

#[test]
fn pages_in_the_other_state_are_drift() {
    let sealed = PageState::Sealed(DataKeyVersion::new(3).unwrap());
    for world in World::all(&[OF_TABLE, OF_SCHEMA], 0) {
        let as_it_is = differs(&world, TABLE, &[PageState::Empty]);
        let wanted = world.wanted(TABLE).map(|wanted| wanted.is_encrypted());
        // Where no label or setting applies, an encrypted relation is to be encrypted throughout.
        let wanted = wanted.or(world.table.map(|_| true));
        let plaintext = differs(&world, TABLE, &[sealed, PageState::Plaintext]);
        assert_eq!(plaintext, as_it_is || wanted.is_some(), "one of the two is wrong: {world:?}");
        assert_eq!(differs(&world, TABLE, &[sealed]), as_it_is || wanted == Some(false));
        assert_eq!(
            differs(&world, TABLE, &[PageState::Plaintext]),
            as_it_is || wanted == Some(true)
        );
    }
}

#[test]
fn an_encrypted_relation_without_policy_stays_encrypted() {
    let world = World { table: Some(AES_128), ..World::default() };
    let wanted = Policy::of(&world).wanted_or_kept(&world.get(TABLE)).unwrap();
    let wanted = wanted.unwrap();
    assert_eq!(wanted.source, Source::Own(TABLE));
    assert!(wanted.is_encrypted() && wanted.is_met_by(Some(AES_128)));
    let nothing = Policy::of(&World::default()).wanted_or_kept(&world.get(TABLE)).unwrap();
    assert_eq!(nothing, None);
}
