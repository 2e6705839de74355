mod kinds;

use std::collections::HashMap;

use self::kinds::{Kind, any_kind, page_of};
use super::*;
use crate::key::{CipherId, DataKey};
use crate::layout::{LOWER, SPECIAL, UPPER, is_zero};
use crate::page::{open as open_any, seal as seal_any};
use crate::xts::Backend;
use proptest::prelude::*;

const VERSION: DataKeyVersion = DataKeyVersion::new(4711).unwrap();
const HERE: Position = Position { block: 3, fork: Fork::Main };
/// Those with this format.
const CIPHERS: [CipherId; 2] = [CipherId::Aes256XtsAuth, CipherId::Aes256XtsHmac];

fn data_key(seed: u8, cipher: CipherId) -> DataKey {
    let bytes: [u8; 64] = core::array::from_fn(|i| seed.wrapping_add(i as u8));
    DataKey::from_bytes(cipher, &bytes).unwrap()
}

fn key(cipher: CipherId) -> PageKey {
    PageKey::new(&data_key(1, cipher))
}

/// With every kernel that this CPU has, in one pass and in two.
fn all_keys(seed: u8, cipher: CipherId) -> impl Iterator<Item = PageKey> {
    let key = data_key(seed, cipher);
    Backend::ALL.into_iter().flat_map(move |backend| {
        let keys = [PageKey::with_backend, PageKey::in_two_passes].map(|new| new(&key, backend));
        keys.into_iter().flatten()
    })
}

fn any_cipher() -> impl Strategy<Value = CipherId> {
    prop::sample::select(&CIPHERS[..])
}

fn seal(page: &mut Page, key: &PageKey, position: Position, checksums: bool) -> Option<Strength> {
    super::seal(page, Key::of(key).unwrap(), VERSION, position, checksums)
}

fn open(
    page: &mut Page,
    key: &PageKey,
    position: Position,
    checksums: bool,
) -> Result<Strength, NotAuthentic> {
    super::open(page, Key::of(key).unwrap(), position, checksums)
}

fn sealed(plain: &Page, key: &PageKey, position: Position, checksums: bool) -> Page {
    let mut page = *plain;
    assert!(seal(&mut page, key, position, checksums).is_some());
    page
}

#[test]
fn zero_and_plaintext_pages_are_not_authentic() {
    let key = key(CipherId::Aes256XtsAuth);
    let mut page = [0; PAGE_SIZE];
    assert!(!seal_any(&mut page, &key, VERSION, 3, Fork::Main, false));
    assert!(is_zero(&page));
    assert_eq!(open(&mut page, &key, HERE, false), Err(NotAuthentic));
    assert!(is_zero(&page));
    let plain = page_of(Kind::Heap, 1);
    let mut page = plain;
    assert_eq!(open(&mut page, &key, HERE, false), Err(NotAuthentic));
    assert!(page == plain);
}

/// The place and strength that each kind of page is here for.
#[test]
fn each_kind_of_page_has_its_place() {
    for kind in Kind::ALL {
        let mut seen = HashMap::new();
        for seed in 0..20 {
            let page = page_of(kind, seed);
            let place = Place::lossless(&page, kind.fork());
            let place = place.or_else(|| place::is_sane(&page).then_some(Place::Short));
            let name = match place {
                Some(Place::Zeros(at)) if at < usize::from(get(&page, UPPER)) => "hole",
                Some(Place::Zeros(_)) => "zeros",
                Some(Place::Items(_)) => "items",
                Some(Place::PackedMap) => "packed",
                Some(Place::Short) => "short",
                None => "none",
            };
            *seen.entry(name).or_insert(0) += 1;
        }
        assert_eq!(seen.get(kind.place()), Some(&20), "{kind:?}: {seen:?}");
    }
}

/// Every bit of a sealed page of each kind. Without data checksums, so that nothing but the tag
/// can notice; then the two bytes of `pd_checksum` mean nothing, and do not matter.
#[test]
fn every_flipped_bit_is_noticed() {
    for cipher in CIPHERS {
        let key = key(cipher);
        for kind in Kind::ALL {
            let position = Position { fork: kind.fork(), ..HERE };
            let plain = page_of(kind, 1);
            let sealed = sealed(&plain, &key, position, false);
            // HMAC is slow, so of most kinds of pages it gets fewer bits.
            let step = match (cipher, kind) {
                (CipherId::Aes256XtsAuth, _) | (_, Kind::Heap) => 1,
                _ => 37,
            };
            for bit in (0..PAGE_SIZE * 8).step_by(step) {
                let mut page = sealed;
                page[bit / 8] ^= 1 << (bit % 8);
                let opened = open(&mut page, &key, position, false);
                if (CHECKSUM * 8..FLAGS * 8).contains(&bit) {
                    assert!(opened.is_ok() && page == plain, "{kind:?}, bit {bit}");
                } else {
                    assert_eq!(opened, Err(NotAuthentic), "{kind:?}, bit {bit}");
                }
            }
        }
    }
}

#[test]
fn with_checksums_a_flipped_bit_of_the_checksum_is_noticed_too() {
    let key = key(CipherId::Aes256XtsAuth);
    let sealed = sealed(&page_of(Kind::Heap, 1), &key, HERE, true);
    assert_eq!(get(&sealed, CHECKSUM), page_checksum(&sealed, HERE.block));
    for bit in CHECKSUM * 8..FLAGS * 8 {
        let mut page = sealed;
        page[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(open(&mut page, &key, HERE, true), Err(NotAuthentic));
    }
}

#[test]
fn every_move_is_noticed() {
    for cipher in CIPHERS {
        let keys = [1, 2].map(|seed| PageKey::new(&data_key(seed, cipher)));
        let blocks = [0, 1, 2, 3, 0x0100_0000, 1 << 31, u32::MAX];
        let forks = (0..4).map(|number| Fork::from_number(number).unwrap());
        let positions: Vec<(usize, Position)> = forks
            .flat_map(|fork| blocks.map(|block| Position { block, fork }))
            .flat_map(|position| [0, 1].map(|key| (key, position)))
            .collect();
        for kind in [Kind::Heap, Kind::NoRoom] {
            let plain = page_of(kind, 1);
            for (from_key, from) in &positions {
                let sealed = sealed(&plain, &keys[*from_key], *from, false);
                for (to_key, to) in &positions {
                    let is_same = from_key == to_key
                        && from.block == to.block
                        && from.fork.tweak_byte() == to.fork.tweak_byte();
                    let mut page = sealed;
                    let opened = open(&mut page, &keys[*to_key], *to, false).is_ok();
                    assert_eq!(opened, is_same, "{from:?} {to:?}");
                }
            }
        }
    }
}

/// Tags of one kind do not authenticate pages of the other, nor does format 1.
#[test]
fn ciphers_and_formats_do_not_mix() {
    let keys = CIPHERS.map(key);
    let plain = page_of(Kind::Heap, 1);
    for (one, other) in [(0, 1), (1, 0)] {
        let mut page = sealed(&plain, &keys[one], HERE, false);
        assert_eq!(open(&mut page, &keys[other], HERE, false), Err(NotAuthentic));
    }
    let v1_key = PageKey::new(&data_key(1, CipherId::Aes256Xts));
    for kind in Kind::ALL {
        let mut page = page_of(kind, 1);
        seal_any(&mut page, &v1_key, VERSION, HERE.block, kind.fork(), false);
        let position = Position { fork: kind.fork(), ..HERE };
        for key in &keys {
            assert_eq!(open(&mut page.clone(), key, position, false), Err(NotAuthentic));
        }
    }
}

/// Somebody who has guessed the right 20 bits for a page that has room for 128, and has changed the
/// header, which is not encrypted.
#[test]
fn a_short_tag_is_refused_where_a_full_one_has_room() {
    for cipher in CIPHERS {
        let key = key(cipher);
        for kind in Kind::ALL {
            let position = Position { fork: kind.fork(), ..HERE };
            let plain = page_of(kind, 1);
            let [lower, upper] = [LOWER, UPPER].map(|at| get(&plain, at));
            for (lower, upper) in [(lower, upper), (24, 24), (24, upper), (upper, upper)] {
                let mut page = plain;
                put(&mut page, LOWER, lower);
                put(&mut page, UPPER, upper);
                put(&mut page, FLAGS, VERSION.get() << VERSION_SHIFT);
                Place::Short.prepare(&mut page);
                encrypt(&mut page, Key::of(&key).unwrap(), position, Place::Short);
                let opened = open(&mut page, &key, position, false);
                assert_eq!(opened.is_ok(), kind.place() == "short", "{kind:?} {lower} {upper}");
            }
        }
    }
}

/// Parts of two versions of a page with the same LSN, as a torn write leaves them.
#[test]
fn a_mixture_of_two_versions_is_noticed() {
    let key = key(CipherId::Aes256XtsAuth);
    let old_plain = page_of(Kind::Heap, 1);
    let mut new_plain = old_plain;
    new_plain[PAGE_SIZE - 5] ^= 1;
    let old = sealed(&old_plain, &key, HERE, false);
    let new = sealed(&new_plain, &key, HERE, false);
    for tear in (1..16).map(|sector| sector * 512) {
        for (head, tail) in [(&old, &new), (&new, &old)] {
            let mut page = *head;
            page[tear..].copy_from_slice(&tail[tear..]);
            assert_eq!(open(&mut page, &key, HERE, false), Err(NotAuthentic), "{tear}");
        }
    }
}

#[test]
fn what_postgresql_refuses_opens_nowhere() {
    let key = key(CipherId::Aes256XtsAuth);
    for (lower, upper, special) in
        [(8192, 8192, 8193), (8192, 8192, 0x6000), (8192, 8191, 8192), (8192, 8192, 8184)]
    {
        let mut page = page_of(Kind::NoRoom, 1);
        for (at, value) in [(LOWER, lower), (UPPER, upper), (SPECIAL, special)] {
            put(&mut page, at, value);
        }
        assert_eq!(seal(&mut page, &key, HERE, false), None);
        assert_eq!(open(&mut page, &key, HERE, false), Err(NotAuthentic));
        assert_ne!(get(&page, FLAGS) & !VALID_FLAGS, 0, "PostgreSQL would accept its flags");
    }
}

#[test]
fn a_refused_page_is_not_one_that_postgresql_accepts() {
    let key = key(CipherId::Aes256XtsAuth);
    for kind in Kind::ALL {
        let mut page =
            sealed(&page_of(kind, 1), &key, Position { fork: kind.fork(), ..HERE }, false);
        page[4000] ^= 1;
        assert_eq!(open(&mut page, &key, HERE, false), Err(NotAuthentic));
        assert_ne!(get(&page, FLAGS) & !VALID_FLAGS, 0);
    }
}

proptest! {
    /// On all bytes.
    #[test]
    fn opening_reverses_sealing(
        cipher in any_cipher(), kind in any_kind(), seed: u64, key_seed: u8, block: u32,
        version in 1..8192_u16, checksums: bool, flags in 0..=VALID_FLAGS,
    ) {
        let fork = kind.fork();
        let version = DataKeyVersion::new(version).unwrap();
        let mut plain = page_of(kind, seed);
        put(&mut plain, FLAGS, flags);
        let checksum = if checksums { page_checksum(&plain, block) } else { 0 };
        put(&mut plain, CHECKSUM, checksum);
        let mut first: Option<Page> = None;
        for key in all_keys(key_seed, cipher) {
            let mut page = plain;
            prop_assert!(seal_any(&mut page, &key, version, block, fork, checksums));
            prop_assert!(*first.get_or_insert(page) == page, "{} differs", key.backend());
            prop_assert_eq!(version_of(&page), Some(version));
            prop_assert_eq!(&page[..8], &plain[..8]);
            prop_assert_eq!(&page[12..16], &plain[12..16]);
            prop_assert_eq!(get(&page, FLAGS) & VALID_FLAGS, flags);
            let sum = if checksums { page_checksum(&page, block) } else { 0 };
            prop_assert_eq!(get(&page, CHECKSUM), sum);
            prop_assert!(page[16..].iter().zip(&plain[16..]).filter(|(a, b)| a == b).count() < 200);

            let strength = if kind.place() == "short" { Strength::Short } else { Strength::Full };
            let opened = open_any(&mut page, &key, block, fork, checksums);
            prop_assert_eq!(opened, Ok(Some(strength)));
            prop_assert!(page == plain);
        }
    }

    #[test]
    fn any_change_is_noticed(
        cipher in any_cipher(), kind in any_kind(), seed: u64, block: u32,
        changes in prop::collection::vec((0..PAGE_SIZE, 1..=u8::MAX), 1..40), checksums: bool,
    ) {
        let key = key(cipher);
        let position = Position { block, fork: kind.fork() };
        let sealed = sealed(&page_of(kind, seed), &key, position, checksums);
        let mut page = sealed;
        for (at, change) in changes {
            page[at] ^= change;
        }
        page[CHECKSUM..FLAGS].copy_from_slice(&sealed[CHECKSUM..FLAGS]);
        prop_assume!(page != sealed);
        // As good as somebody can make it.
        let checksum = if checksums { page_checksum(&page, block) } else { 0 };
        put(&mut page, CHECKSUM, checksum);
        prop_assert_eq!(open(&mut page, &key, position, checksums), Err(NotAuthentic));
    }

    /// Every place, also such as no page of PostgreSQL offers: what is put in is taken out, in
    /// whatever parts.
    #[test]
    fn a_tag_comes_out_as_it_went_in(
        form in 0..4_u8, at: u16, tag: u128, fill: u64, boundary in 0..GROUPS,
    ) {
        let place = match form {
            0 => Place::Zeros(24 + usize::from(at) % (PAGE_SIZE - 40) / 2 * 2),
            1 => Place::Items(24 + usize::from(at) % (PAGE_SIZE - 100) / 4 * 4),
            2 => Place::PackedMap,
            _ => Place::Short,
        };
        let kind = if place == Place::PackedMap { Kind::MapMixed } else { Kind::Garbage };
        let mut page = page_of(kind, fill);
        put(&mut page, SPECIAL, 8184);
        match place {
            Place::Zeros(_) => page[place.bytes()].fill(0),
            Place::Items(_) => {
                for item in page[place.bytes()].as_chunks_mut::<4>().0 {
                    *item = [item[0] & 0xF8, item[1] & 0x9F, item[2], item[3] & 0x3F];
                }
            }
            Place::PackedMap | Place::Short => {}
        }
        let plain = page;
        place.prepare(&mut page);
        let prepared = page;
        let tag = if place == Place::Short { tag & ((1 << SHORT_BITS) - 1) } else { tag };
        place.put(&mut page, tag);
        prop_assert_eq!(Place::read(&page), Some(place));
        let boundary = boundary * GROUP;
        let first = place.take(&mut page, 0..boundary);
        let second = place.take(&mut page, boundary..PAGE_SIZE);
        prop_assert_eq!(first | second, tag);
        prop_assert!(page == prepared);
        place.restore(&mut page);
        page[PAGESIZE_VERSION..20].copy_from_slice(&plain[PAGESIZE_VERSION..20]);
        prop_assert!(page == plain);
    }

    /// A page that decrypts to anything at all is refused or opened, without a panic.
    #[test]
    fn any_plaintext_can_be_looked_at(word: u16, seed: u64, fork in 0..4_u8) {
        let fork = Fork::from_number(fork).unwrap();
        for cipher in CIPHERS {
            let key = key(cipher);
            let mut page = page_of(Kind::Garbage, seed);
            put(&mut page, PAGESIZE_VERSION, word);
            put(&mut page, FLAGS, VERSION.get() << VERSION_SHIFT);
            let position = Position { fork, ..HERE };
            key.schedule.run(Direction::Encrypt, tweak(&page, position), v1::unit(&mut page));
            prop_assert_eq!(open(&mut page, &key, position, false), Err(NotAuthentic));
        }
    }
}
