//! Which key files a data directory must have: a file beside the directory of the keystore names
//! them. Otherwise a data directory that was restored without its keystore would seem to be one
//! that never had keys.
//!
//! Each line is a key file's name, an address of WAL, and a full stop: a line that was cut within
//! the address would have a lower one. A checkpoint that begins later has made the key file
//! durable. So it must be there, if WAL is replayed from a later address on.
//!
//! The file is written after key files, so it may lack some. What is not understood is passed over,
//! as is the end of a line that was not written completely.

use std::collections::BTreeMap;

use pagevault_cipher::Lsn;

use crate::Scope;
use crate::log::{file_name, scope_of};

/// Name of the file, in the data directory.
pub const NAME: &str = "pagevault.files";

/// Bytes of the file that are read at most.
pub const LIMIT: u64 = 16 << 20;

/// The line of a scope's key file. An empty line before it ends one that was cut short.
#[must_use]
pub fn line(scope: Scope, created: Lsn) -> String {
    format!("{} {created} .\n", file_name(scope))
}

/// The scopes whose key files are named, and their addresses.
#[must_use]
pub fn parse(text: &str) -> BTreeMap<Scope, Lsn> {
    text.split_inclusive('\n').filter_map(|line| parse_line(line.strip_suffix(" .\n")?)).collect()
}

fn parse_line(line: &str) -> Option<(Scope, Lsn)> {
    let (name, address) = line.split_once(' ')?;
    let (high, low) = address.split_once('/')?;
    let word = |digits| u32::from_str_radix(digits, 16).ok().map(u64::from);
    Some((scope_of(name)?, Lsn(word(high)? << 32 | word(low)?)))
}

/// The first key file that must be there and is not, with its address: WAL is replayed from
/// `replayed_from` on, and `is_there` says which are.
#[must_use]
pub fn missing(
    named: &BTreeMap<Scope, Lsn>,
    replayed_from: Lsn,
    is_there: impl Fn(Scope) -> bool,
) -> Option<(Scope, Lsn)> {
    let mut named = named.iter().map(|(scope, created)| (*scope, *created));
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
        assert_eq!(parse(&text), BTreeMap::from(all));
    }

    #[test]
    fn what_is_not_understood_is_passed_over() {
        let text = "\nx\n5.keys\n5.keys 1 .\n05.keys 0/1 .\n../5.keys 0/1 .\n5.keys 0/100000000 .\n7.keys 0/2 .\n8.keys 0/1\n9.keys 0/1 .";
        assert_eq!(parse(text), BTreeMap::from([(Scope::database(7), Lsn(2))]));
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
}
