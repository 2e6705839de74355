mod stack;

use super::super::{Backend, Direction, KeySize, Schedule, multiply_by_x};
use super::*;
use proptest::prelude::*;

fn reference(key: &Block, context: &Block, page: &Page) -> Block {
    let mut hash = Polyval::new(&Array(*key));
    hash.update(&[Array(*context)]);
    hash.update(Array::cast_slice_from_core(page.as_chunks().0));
    hash.finalize().0
}

fn any_block() -> impl Strategy<Value = Block> {
    prop_oneof![4 => any::<Block>(), 1 => Just([0; 16]), 1 => Just([0xFF; 16])]
}

/// Those that have a kernel of their own.
fn kernels() -> impl Iterator<Item = Backend> {
    Backend::ALL
        .into_iter()
        .filter(|backend| !matches!(backend, Backend::AwsLc | Backend::Portable))
}

proptest! {
    #[test]
    fn division_reverses_multiplication(tweak: u128) {
        prop_assert_eq!(divide_by_x(multiply_by_x(tweak)), tweak);
        prop_assert_eq!(multiply_by_x(divide_by_x(tweak)), tweak);
    }

    /// The kernels, against XTS and the `polyval` crate one after the other.
    #[test]
    fn one_pass_is_both(
        size in prop::sample::select(&[KeySize::Aes128, KeySize::Aes256][..]),
        xts_key in prop::array::uniform32(any::<u8>()), key in any_block(), context in any_block(),
        tweak: Tweak, blocks in prop::collection::vec(any_block(), PAGE_SIZE / 16),
        first in 0..GROUPS, count in 0..3_usize, change: u8,
    ) {
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&xts_key);
        bytes[32..].copy_from_slice(&xts_key.map(|byte| !byte));
        let mut plain: Page = [0; PAGE_SIZE];
        plain.copy_from_slice(blocks.as_flattened());
        let expected_hash = reference(&key, &context, &plain);
        let late = first..(first + count).min(GROUPS);
        let powers = Powers::new(&key);
        let job = Job { tweak, powers: &powers, context: &context };

        // What `finish` changes is encrypted, but not hashed.
        let mut changed = plain;
        for group in late.clone() {
            changed[group * GROUP + 20] ^= change;
        }
        let portable = Schedule::new(size, &bytes, Backend::Portable).unwrap();
        let mut sealed = changed;
        portable.run(Direction::Encrypt, tweak, sealed[16..].as_chunks_mut().0);

        for backend in kernels() {
            let Some(schedule) = Schedule::new(size, &bytes, backend) else { continue };
            let mut page = plain;
            let mut hash = [0; 16];
            let ran = seal(&schedule, &job, &mut page, late.clone(), |computed, page| {
                hash = computed;
                for group in late.clone() {
                    page[group * GROUP + 20] ^= change;
                }
            });
            prop_assert!(ran.is_ok());
            prop_assert_eq!(hash, expected_hash);
            prop_assert!(page == sealed, "{} encrypts differently", backend);

            let mut visited = Vec::new();
            let hash = open(&schedule, &job, &mut page, |group, page| {
                visited.push(group);
                assert!(page[group * GROUP..][..GROUP] == changed[group * GROUP..][..GROUP]);
                if late.contains(&group) {
                    page[group * GROUP + 20] ^= change;
                }
                late.clone().find(|late| *late > group).unwrap_or(GROUPS)
            });
            prop_assert_eq!(hash, Some(expected_hash));
            prop_assert!(page == plain, "{} decrypts differently", backend);
            prop_assert!(visited.len() == late.len() + usize::from(!late.contains(&0)));
        }
        prop_assert!(open(&portable, &job, &mut plain.clone(), |_, _| 0).is_none());
    }
}
