//! Which key files a data directory must have: a file beside the directory of the keystore names
//! them. Otherwise a data directory that was restored without its keystore would seem to be one
//! that never had keys.
//!
//! Lines end in a full stop: one that was cut within the address would have a lower one.
//!
//! * A key file's name and an address of WAL: a checkpoint that begins later has made the key file
//!   durable. So it must be there, if WAL is replayed from a later address on.
//! * A name, `has` and an address: the key file has all that WAL before this address says of it. So
//!   a file that has less is an older copy, if WAL is replayed from a later address on. There are
//!   several such lines, because a base backup may have copied this file later than it began.
//!
//! The file is written after key files, so it may lack some lines. What is not understood is passed
//! over, as is the end of a line that was not written completely.

use std::collections::BTreeMap;

use pagevault_cipher::Lsn;

use crate::Scope;
use crate::log::{file_name, scope_of};

/// Name of the file, in the data directory.
pub const NAME: &str = "pagevault.files";

/// Bytes of the file that are read at most.
pub const LIMIT: u64 = 16 << 20;

/// What the file says of a key file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    created: Lsn,
    has: Vec<Lsn>,
}

/// The line of a scope's key file. An empty line before it ends one that was cut short.
#[must_use]
pub fn line(scope: Scope, created: Lsn) -> String {
    format!("{} {created} .\n", file_name(scope))
}

/// The line that says what a scope's key file has.
#[must_use]
pub fn line_of_has(scope: Scope, logged: Lsn) -> String {
    format!("{} {HAS}{logged} .\n", file_name(scope))
}

const HAS: &str = "has ";

/// The scopes whose key files are named.
#[must_use]
pub fn parse(text: &str) -> BTreeMap<Scope, Named> {
    let mut all: BTreeMap<Scope, Named> = BTreeMap::new();
    for line in text.split_inclusive('\n') {
        let Some((name, said)) = line.strip_suffix(" .\n").and_then(|line| line.split_once(' '))
        else {
            continue;
        };
        let Some(scope) = scope_of(name) else { continue };
        if let Some(created) = parse_address(said) {
            // If there was one before, that was another file.
            all.insert(scope, Named { created, has: Vec::new() });
        } else if let Some(logged) = said.strip_prefix(HAS).and_then(parse_address)
            && let Some(named) = all.get_mut(&scope)
        {
            named.has.push(logged);
        }
    }
    all
}

fn parse_address(text: &str) -> Option<Lsn> {
    let (high, low) = text.split_once('/')?;
    let word = |digits| u32::from_str_radix(digits, 16).ok().map(u64::from);
    Some(Lsn(word(high)? << 32 | word(low)?))
}

impl Named {
    /// What this key file has is not known any more.
    pub fn forget_has(&mut self) {
        self.has.clear();
    }
}

/// The text with the latest lines only.
#[must_use]
pub fn condensed(named: &BTreeMap<Scope, Named>) -> String {
    let lines = named.iter().map(|(scope, named)| {
        let has = named.has.iter().max().map(|logged| line_of_has(*scope, *logged));
        line(*scope, named.created) + &has.unwrap_or_default()
    });
    lines.collect()
}

/// What a scope's key file must have at least, if WAL is replayed from `replayed_from` on.
#[must_use]
pub fn required(named: &BTreeMap<Scope, Named>, replayed_from: Lsn, scope: Scope) -> Option<Lsn> {
    named.get(&scope)?.has.iter().copied().filter(|logged| *logged < replayed_from).max()
}

/// The first key file that must be there and is not, with its address: WAL is replayed from
/// `replayed_from` on, and `is_there` says which are.
#[must_use]
pub fn missing(
    named: &BTreeMap<Scope, Named>,
    replayed_from: Lsn,
    is_there: impl Fn(Scope) -> bool,
) -> Option<(Scope, Lsn)> {
    let mut named = named.iter().map(|(scope, named)| (*scope, named.created));
    named.find(|(scope, created)| *created < replayed_from && !is_there(*scope))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed_as_written() {
        let all = [(Scope::CLUSTER, Lsn(0x1_2345_6789)), (Scope::database(5), Lsn(0))];
        let text: String = all.iter().map(|(scope, created)| line(*scope, *created)).collect();
        assert_eq!(text, "cluster.keys 1/23456789 .\n5.keys 0/0 .\n");
        assert_eq!(
            parse(&text),
            BTreeMap::from(all.map(|(scope, created)| (scope, named(created, []))))
        );
    }

    #[test]
    fn what_is_not_understood_is_passed_over() {
        let text = "\nx\n5.keys\n5.keys 1 .\n05.keys 0/1 .\n../5.keys 0/1 .\n5.keys 0/100000000 .\n7.keys 0/2 .\n8.keys 0/1\n6.keys has 0/3 .\n7.keys has 0/3\n7.keys has .\n9.keys 0/1 .";
        assert_eq!(parse(text), BTreeMap::from([(Scope::database(7), named(Lsn(2), []))]));
    }

    #[test]
    fn a_file_is_missing_when_a_checkpoint_has_made_it_durable() {
        let named = parse("cluster.keys 0/10 .\n5.keys 0/20 .\n");
        let none = |_| false;
        assert_eq!(missing(&named, Lsn(0x10), none), None);
        assert_eq!(missing(&named, Lsn(0x11), none), Some((Scope::CLUSTER, Lsn(0x10))));
        let five = Some((Scope::database(5), Lsn(0x20)));
        assert_eq!(missing(&named, Lsn(0x21), |scope| scope.is_cluster()), five);
        assert_eq!(missing(&named, Lsn(0x21), |_| true), None);
    }

    fn named<const N: usize>(created: Lsn, has: [u64; N]) -> Named {
        Named { created, has: has.map(Lsn).to_vec() }
    }

    #[test]
    fn a_file_must_have_what_it_had_where_replay_begins() {
        let five = Scope::database(5);
        let all = [line(five, Lsn(1)), line_of_has(five, Lsn(0x10)), line_of_has(five, Lsn(0x30))];
        let parsed = parse(&all.concat());
        assert_eq!(parsed, BTreeMap::from([(five, named(Lsn(1), [0x10, 0x30]))]));
        let required = |from| required(&parsed, Lsn(from), five);
        assert_eq!(
            [0x10, 0x11, 0x30, 0x31].map(required),
            [None, Some(Lsn(0x10)), Some(Lsn(0x10)), Some(Lsn(0x30))]
        );
        let text = condensed(&parsed);
        assert_eq!(text, all[0].clone() + &all[2]);
        let mut forgotten = parsed.clone();
        forgotten.values_mut().for_each(Named::forget_has);
        assert_eq!(condensed(&forgotten), all[0]);
        // Another file under the same name.
        let again = parse(&(text + &line(five, Lsn(0x40))));
        assert_eq!(again, BTreeMap::from([(five, named(Lsn(0x40), []))]));
    }
}
