//! Finds the one place where a set of words occurs close together.
//!
//! A table of functions is private to its source file, but its functions are exported. A single
//! address may also occur elsewhere, by chance or legitimately (in `.dynsym` of a program that is
//! not position independent). All of them within a few words of each other occur only in the table.
//! If they occur more than once, the search fails instead of guessing.

/// Read-only memory as words.
#[derive(Debug, Clone, Copy)]
pub struct Region<'a> {
    /// Address of the first word.
    pub address: usize,
    /// Its words.
    pub words: &'a [usize],
}

/// Why a search did not find exactly one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotOnce {
    /// Places that hold every member close enough together.
    pub places: usize,
    /// How often each member occurs in all regions, in the order asked for.
    pub occurrences: Vec<usize>,
    /// A member that occurs more than once in the one place or next to it.
    pub repeated: Option<usize>,
}

#[derive(Clone, Copy)]
struct Hit {
    index: usize,
    member: usize,
}

/// The address of each member in the one place where all of them stand within `window` words.
///
/// Exactly once means: there is one such place, and no member occurs a second time within
/// `window` words of the others.
///
/// # Errors
///
/// [`NotOnce`] with the counts. `members` that are empty or not distinct are never found.
pub fn exactly_once(
    regions: &[Region<'_>],
    members: &[usize],
    window: usize,
) -> Result<Vec<usize>, NotOnce> {
    let mut failure = NotOnce { places: 0, occurrences: vec![0; members.len()], repeated: None };
    let mut found = None;
    for region in regions {
        let hits = hits(region.words, members);
        for hit in &hits {
            failure.occurrences[hit.member] += 1;
        }
        for place in places(&hits, members.len(), window) {
            failure.places += 1;
            failure.repeated = failure.repeated.or_else(|| repeated(&hits, place, window));
            found = Some((region.address, place.to_vec()));
        }
    }
    match found {
        Some((address, mut place)) if failure.places == 1 && failure.repeated.is_none() => {
            place.sort_by_key(|hit| hit.member);
            Ok(place.iter().map(|hit| address + hit.index * size_of::<usize>()).collect())
        }
        _ => Err(failure),
    }
}

/// For a table some members of which were replaced: the words of each place that has at least half
/// of them within `window` words, but not all.
#[must_use]
pub fn remains<'a>(regions: &[Region<'a>], members: &[usize], window: usize) -> Vec<&'a [usize]> {
    let mut found = Vec::new();
    for region in regions {
        let hits = hits(region.words, members);
        for (at, first) in hits.iter().enumerate() {
            let mut seen = vec![false; members.len()];
            let near = hits[at..].iter().take_while(|hit| hit.index - first.index < window);
            let last = near.inspect(|hit| seen[hit.member] = true).last().unwrap_or(first);
            let count = seen.into_iter().filter(|seen| *seen).count();
            if 2 * count >= members.len() && count < members.len() {
                found.push(&region.words[first.index..=last.index]);
            }
        }
    }
    found
}

fn hits(words: &[usize], members: &[usize]) -> Vec<Hit> {
    // One comparison rejects almost every word: the members are functions of one program.
    let (Some(&low), Some(&high)) = (members.iter().min(), members.iter().max()) else {
        return Vec::new();
    };
    let candidates = words.iter().enumerate().filter(|(_, word)| (low..=high).contains(word));
    candidates
        .filter_map(|(index, word)| {
            let member = members.iter().position(|member| member == word)?;
            Some(Hit { index, member })
        })
        .collect()
}

/// The shortest runs of hits that hold every member and span at most `window` words.
fn places(hits: &[Hit], members: usize, window: usize) -> Vec<&[Hit]> {
    let mut inside = vec![0_usize; members];
    let mut missing = members;
    let mut places = Vec::new();
    let mut first = 0;
    for (last, hit) in hits.iter().enumerate() {
        if inside[hit.member] == 0 {
            missing -= 1;
        }
        inside[hit.member] += 1;
        if missing > 0 {
            continue;
        }
        while inside[hits[first].member] > 1 {
            inside[hits[first].member] -= 1;
            first += 1;
        }
        let place = &hits[first..=last];
        if hit.index - place[0].index < window {
            places.push(place);
        }
        // Without its first hit the run lacks that member, so any further place is a different one.
        inside[hits[first].member] -= 1;
        missing += 1;
        first += 1;
    }
    places
}

/// A member that occurs more than once in the place or within `window` words of it.
fn repeated(hits: &[Hit], place: &[Hit], window: usize) -> Option<usize> {
    let (first, last) = (place.first()?.index, place.last()?.index);
    let near = |hit: &&Hit| hit.index + window > last && hit.index < first + window;
    let mut members: Vec<usize> = hits.iter().filter(near).map(|hit| hit.member).collect();
    members.sort_unstable();
    members.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn search(words: &[usize], members: &[usize], window: usize) -> Result<Vec<usize>, NotOnce> {
        exactly_once(&[Region { address: 0x1000, words }], members, window)
    }

    #[test]
    fn finds_members_in_any_order_with_gaps() {
        let found = search(&[9, 9, 30, 0, 10, 20, 9], &[10, 20, 30], 4).unwrap();
        assert_eq!(found, [0x1020, 0x1028, 0x1010]);
    }

    #[test]
    fn single_addresses_elsewhere_do_not_matter() {
        let far = [10, 9, 9, 20, 9, 9, 30, 9, 9, 10, 20, 30];
        assert_eq!(search(&far, &[10, 20, 30], 3).unwrap(), [0x1048, 0x1050, 0x1058]);
    }

    #[test]
    fn wider_than_the_window_is_not_found() {
        let failure = search(&[10, 0, 0, 20], &[10, 20], 3).unwrap_err();
        assert_eq!(failure, NotOnce { places: 0, occurrences: vec![1, 1], repeated: None });
    }

    #[test]
    fn two_places_are_refused_in_one_region_and_in_two() {
        let words = [10, 20, 0, 0, 0, 10, 20];
        assert_eq!(search(&words, &[10, 20], 2).unwrap_err().places, 2);
        let regions =
            [Region { address: 0, words: &[10, 20] }, Region { address: 800, words: &[20, 10] }];
        let failure = exactly_once(&regions, &[10, 20], 2).unwrap_err();
        assert_eq!((failure.places, failure.occurrences), (2, vec![2, 2]));
    }

    #[test]
    fn overlapping_places_are_refused() {
        assert_eq!(search(&[10, 20, 30, 10], &[10, 20, 30], 3).unwrap_err().places, 2);
    }

    #[test]
    fn a_repeated_member_nearby_is_refused_and_named() {
        let before = search(&[20, 20, 10], &[10, 20], 3).unwrap_err();
        assert_eq!((before.places, before.repeated), (1, Some(1)));
        let inside = search(&[10, 20, 20, 30], &[10, 20, 30], 4).unwrap_err();
        assert_eq!((inside.places, inside.repeated), (1, Some(1)));
        let after = search(&[20, 10, 10], &[10, 20], 3).unwrap_err();
        assert_eq!((after.places, after.repeated), (1, Some(0)));
    }

    #[test]
    fn nothing_and_duplicates_are_never_found() {
        assert!(search(&[1, 2, 3], &[], 3).is_err());
        assert!(search(&[1, 2, 3], &[2, 2], 3).is_err());
        assert!(search(&[], &[2], 3).is_err());
    }

    #[test]
    fn a_table_with_replaced_members_is_found_by_the_others() {
        let remains = |words: &[usize]| {
            let other = Region { address: 0, words: &[30; 4] };
            let regions = [other, Region { address: 0x1000, words }];
            remains(&regions, &[10, 20, 30, 40], 6).concat()
        };
        assert_eq!(remains(&[9, 10, 77, 30, 9, 9]), [10, 77, 30]);
        assert_eq!(remains(&[9, 10, 77, 78, 79, 9]), [0; 0], "too few are left");
        assert_eq!(remains(&[40, 10, 20, 30, 0, 0, 0, 0]), [10, 20, 30, 20, 30], "all, then fewer");
        // Symbols of the others, as in a program that is not position independent.
        let symbols = [10, 0, 0, 0, 0, 0, 20, 0, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 10, 77, 40];
        assert_eq!(remains(&symbols), [10, 77, 40]);
    }

    /// The definition, tested word by word, to compare the search with.
    fn by_definition(words: &[usize], members: &[usize], window: usize) -> bool {
        let mut covers = Vec::new();
        for start in 0..words.len() {
            for end in start + 1..=words.len().min(start + window) {
                let run = &words[start..end];
                let all = members.iter().all(|m| run.contains(m));
                let shorter = |run: &[usize]| members.iter().all(|m| run.contains(m));
                if all && !shorter(&run[1..]) && !shorter(&run[..run.len() - 1]) {
                    covers.push((start, end));
                }
            }
        }
        let &[(start, end)] = covers.as_slice() else { return false };
        let near = &words[end.saturating_sub(window)..words.len().min(start + window)];
        members.iter().all(|m| near.iter().filter(|&w| w == m).count() == 1)
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(
            words in prop::collection::vec(0_usize..5, 0..24),
            members in prop::collection::hash_set(0_usize..5, 1..4),
            window in 0_usize..8,
        ) {
            let members: Vec<usize> = members.into_iter().collect();
            let found = search(&words, &members, window);
            prop_assert_eq!(found.is_ok(), by_definition(&words, &members, window));
            for (address, member) in found.into_iter().flatten().zip(&members) {
                prop_assert_eq!(words[(address - 0x1000) / 8], *member);
            }
        }

        #[test]
        fn finds_a_table_hidden_in_noise(
            noise in prop::collection::vec(1000_usize.., 64..128),
            at in 0_usize..50,
        ) {
            let members: Vec<usize> = (1..=14).collect();
            let mut words = noise;
            words[at..at + 14].copy_from_slice(&members);
            let found = search(&words, &members, 32).unwrap();
            prop_assert_eq!(found[0], 0x1000 + at * 8);
        }
    }
}
