use std::sync::atomic::{AtomicU32, Ordering};

use pagevault_cipher::wal::Mark;
use pagevault_keystore::state::{State, StateError};
use pagevault_keystore::wal::{
    Switch, Switches, WalPhase, for_receiving, is_key_place, key_place, stretch_at, version_at,
};
use pagevault_keystore::{KeyVersion, Lsn, Record, RelFile};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{fewer, file, key_version, version};

/// Room for all switches; under Miri, which is slow, for as many as are needed.
fn memory() -> Vec<AtomicU32> {
    let words = if cfg!(miri) { 200 } else { Switches::WORDS };
    (0..words).map(|_| AtomicU32::new(0)).collect()
}

/// In the order of decisions: encrypted with version n, plaintext after n, encrypted with n + 1.
fn sealed(start: u64, number: u32) -> Switch {
    let start = Lsn(start);
    Switch { step: 2 * number, start, phase: WalPhase::under(key_version(number)) }
}

fn plaintext(start: u64, number: u32) -> Switch {
    let phase = WalPhase { version: Some(key_version(number)), plaintext: true };
    Switch { step: 2 * number + 1, start: Lsn(start), phase }
}

#[test]
fn without_switches_wal_is_plaintext() {
    let memory = memory();
    let switches = Switches::new(&memory);
    assert_eq!(switches.newest(), None);
    assert_eq!((switches.at(Lsn(0)).from, switches.at(Lsn(0)).to), (Lsn(0), Lsn::MAX));
    assert!(!switches.is_sealed_from(Lsn(0)));
}

/// In any order, as they are in a keystore.
#[test]
fn what_is_received_after_the_last_switch_of_a_copy_is_encrypted() {
    let all = [sealed(300, 2), plaintext(400, 2), sealed(100, 1), plaintext(200, 1)];
    let received = for_receiving(all);
    for (address, version) in
        [(99, None), (100, Some(1)), (200, None), (300, Some(2)), (400, Some(2)), (900, Some(2))]
    {
        let phase = stretch_at(received.iter().copied(), Lsn(address)).phase;
        assert_eq!(phase.sealed().map(KeyVersion::get), version, "{address}");
    }
    assert_eq!(for_receiving([sealed(100, 1)]), [sealed(100, 1)]);
    assert_eq!(for_receiving([]), []);
}

#[test]
fn the_order_in_which_switches_are_added_does_not_matter() {
    let all = [sealed(100, 1), plaintext(200, 1), sealed(300, 2), sealed(400, 3)];
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let memory = memory();
        let switches = Switches::new(&memory);
        order.iter().for_each(|at| switches.add(all[*at]).unwrap());
        for (address, from, to, version) in [
            (0, 0, 100, None),
            (99, 0, 100, None),
            (100, 100, 200, Some(1)),
            (199, 100, 200, Some(1)),
            (200, 200, 300, None),
            (300, 300, 400, Some(2)),
            (400, 400, u64::MAX, Some(3)),
            (u64::MAX, 400, u64::MAX, Some(3)),
        ] {
            let stretch = switches.at(Lsn(address));
            assert_eq!((stretch.from, stretch.to), (Lsn(from), Lsn(to)), "{address}");
            assert_eq!(stretch.phase.sealed().map(KeyVersion::get), version, "{address}");
        }
        assert_eq!(switches.newest(), Some(sealed(400, 3)));
    }
}

#[test]
fn of_two_switches_at_one_address_the_later_step_counts() {
    for order in [[sealed(100, 1), plaintext(100, 1)], [plaintext(100, 1), sealed(100, 1)]] {
        let memory = memory();
        let switches = Switches::new(&memory);
        order.iter().for_each(|switch| switches.add(*switch).unwrap());
        assert_eq!(switches.newest(), Some(plaintext(100, 1)));
        switches.add(sealed(100, 2)).unwrap();
        assert_eq!(switches.newest(), Some(sealed(100, 2)));
        assert_eq!(switches.at(Lsn(100)).phase, sealed(100, 2).phase);
    }
}

/// WAL was lost before it reached a switch, and continues from an address before it.
#[test]
fn a_switch_that_was_decided_later_counts_from_an_earlier_address_on() {
    let memory = memory();
    let switches = Switches::new(&memory);
    let again = Switch { step: 4, start: Lsn(150), phase: sealed(0, 1).phase };
    [sealed(100, 1), plaintext(200, 1), again].iter().for_each(|s| switches.add(*s).unwrap());
    for address in [100, 149, 150, 199, 200, u64::MAX] {
        assert_eq!(switches.at(Lsn(address)).phase.sealed(), Some(KeyVersion::FIRST), "{address}");
    }
    assert_eq!((switches.at(Lsn(149)).to, switches.at(Lsn(150)).to), (Lsn(150), Lsn::MAX));
    assert!(switches.is_sealed_from(Lsn(200)));
}

#[test]
fn wal_behind_an_address_may_need_keys() {
    let memory = memory();
    let switches = Switches::new(&memory);
    [sealed(100, 1), plaintext(200, 1)].iter().for_each(|switch| switches.add(*switch).unwrap());
    assert!(switches.is_sealed_from(Lsn(0)) && switches.is_sealed_from(Lsn(150)));
    assert!(!switches.is_sealed_from(Lsn(200)) && !switches.is_sealed_from(Lsn::MAX));
}

#[test]
#[cfg_attr(miri, ignore = "searches all switches again and again")]
fn a_switch_is_added_once_and_a_full_table_is_reported() {
    let memory = memory();
    let switches = Switches::new(&memory);
    for version in 1..=Switches::CAPACITY as u32 {
        switches.add(sealed(u64::from(version), version)).unwrap();
        switches.add(sealed(u64::from(version), version)).unwrap();
        if version == 3 {
            assert_eq!(switches.count(), 3);
        }
        if version > 64 {
            // The rest is filled directly: `add` searches all switches.
            break;
        }
    }
    memory[0].store(Switches::CAPACITY as u32, Ordering::Release);
    assert!(switches.add(sealed(7, 7)).is_ok(), "is there already");
    assert!(switches.add(sealed(1 << 40, 7)).is_err());
    switches.reset();
    assert_eq!(switches.count(), 0);
    assert_eq!(switches.newest(), None);
}

#[test]
fn each_version_has_its_own_file_that_no_relation_has() {
    let place =
        |relation, number| (RelFile { tablespace: 0, database: 0, relation }, version(number));
    for (number, expected) in [
        (1, place(1, 1)),
        (8191, place(1, 8191)),
        (8192, place(2, 1)),
        (u32::MAX, place(524_353, 63)),
    ] {
        assert_eq!(key_place(key_version(number)), expected);
        assert_eq!(version_at(expected.0, expected.1), KeyVersion::new(number));
        assert!(is_key_place(expected.0));
    }
    assert!(!is_key_place(file(1)));
}

#[test]
fn a_switch_to_a_missing_key_is_refused() {
    let mut state = State::default();
    let (file, version) = key_place(key_version(8192));
    let refused = state.apply(Record::WalSwitch(sealed(1, 8192)));
    assert_eq!(refused, Err(StateError::NoKey { file, version }));
    assert_eq!(state, State::default());
}

/// The marks in pages repeat after 4095 versions: an old page still finds the key under which it
/// was encrypted.
#[test]
fn repeated_marks_denote_the_key_in_use_at_the_address() {
    let memory = memory();
    let switches = Switches::new(&memory);
    // Every 1000th version, from 1 to 12001, for a thousand pages each.
    for step in 0..=12_u32 {
        switches.add(sealed(u64::from(step) * 8_192_000 + 8192, step * 1000 + 1)).unwrap();
    }
    for step in 0..=12_u32 {
        let address = u64::from(step) * 8_192_000 + 81_920;
        let written = switches.at(Lsn(address)).phase.sealed().unwrap();
        assert_eq!(written.get(), step * 1000 + 1);
        // Read where the switch itself is unknown: the preceding or the following one decides.
        for known in [written.get().saturating_sub(1000), written.get(), written.get() + 1000] {
            let known = KeyVersion::new(known);
            assert_eq!(Mark::of_version(written).version_near(known), written);
        }
    }
}

proptest! {
    #[test]
    fn a_stretch_has_the_stated_bounds(
        starts in vec((1..9_u32, 0..50_u64, 1..5_u32, any::<bool>()), 0..fewer(20)),
        address in 0..60_u64,
    ) {
        let memory = memory();
        let switches = Switches::new(&memory);
        for (step, start, version, plaintext) in starts {
            let phase = WalPhase { version: KeyVersion::new(version), plaintext };
            switches.add(Switch { step, start: Lsn(start), phase }).unwrap();
        }
        let (stretch, address) = (switches.at(Lsn(address)), Lsn(address));
        prop_assert!(stretch.from <= address && address < stretch.to);
        for other in (0..60).step_by(if cfg!(miri) { 7 } else { 1 }).map(Lsn) {
            let inside = stretch.from <= other && other < stretch.to;
            prop_assert_eq!(inside, switches.at(other) == stretch, "{}", other);
        }
    }
}
