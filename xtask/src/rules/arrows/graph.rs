//! Cycles among arrows.

use std::collections::{BTreeMap, BTreeSet};

/// Whether these arrows lead from `from` to `to`.
pub(super) fn leads(arrows: &BTreeSet<(&str, &str)>, from: &str, to: &str) -> bool {
    let (mut seen, mut ahead) = (BTreeSet::new(), vec![from]);
    while let Some(node) = ahead.pop() {
        if node == to {
            return true;
        }
        if seen.insert(node) {
            ahead.extend(arrows.iter().filter(|arrow| arrow.0 == node).map(|arrow| arrow.1));
        }
    }
    false
}

/// The strongly connected components of more than one module, in which each module uses each other
/// one, directly or indirectly.
pub(super) fn cycles<'a>(arrows: &BTreeSet<(&'a str, &'a str)>) -> Vec<BTreeSet<&'a str>> {
    let nodes: BTreeSet<&str> = arrows.iter().flat_map(|&(from, to)| [from, to]).collect();
    let mut cycles: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for node in &nodes {
        let with = |other: &&&str| leads(arrows, node, other) && leads(arrows, other, node);
        let cycle: BTreeSet<&str> = nodes.iter().filter(with).copied().collect();
        if cycle.len() > 1 {
            cycles.insert(cycle.first().copied().unwrap_or_default(), cycle);
        }
    }
    cycles.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_are_found_and_nothing_else() {
        let arrows = BTreeSet::from([
            ("a", "b"),
            ("b", "c"),
            ("c", "a"),
            ("c", "d"),
            ("e", "f"),
            ("f", "e"),
        ]);
        let expected = [BTreeSet::from(["a", "b", "c"]), BTreeSet::from(["e", "f"])];
        assert_eq!(cycles(&arrows), expected);
        assert!(leads(&arrows, "b", "d") && !leads(&arrows, "d", "b"));
        assert!(cycles(&BTreeSet::from([("a", "b"), ("a", "c"), ("b", "c")])).is_empty());
    }
}
