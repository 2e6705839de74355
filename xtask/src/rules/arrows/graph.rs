//! Circles among arrows.

use std::collections::{BTreeMap, BTreeSet};

/// Whether one can come from `from` to `to` along these arrows.
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

/// The strongly connected components of more than one module: each uses each of them, if
/// indirectly.
pub(super) fn circles<'a>(arrows: &BTreeSet<(&'a str, &'a str)>) -> Vec<BTreeSet<&'a str>> {
    let nodes: BTreeSet<&str> = arrows.iter().flat_map(|&(from, to)| [from, to]).collect();
    let mut circles: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for node in &nodes {
        let with = |other: &&&str| leads(arrows, node, other) && leads(arrows, other, node);
        let circle: BTreeSet<&str> = nodes.iter().filter(with).copied().collect();
        if circle.len() > 1 {
            circles.insert(circle.first().copied().unwrap_or_default(), circle);
        }
    }
    circles.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circles_are_found_and_nothing_else() {
        let arrows = BTreeSet::from([
            ("a", "b"),
            ("b", "c"),
            ("c", "a"),
            ("c", "d"),
            ("e", "f"),
            ("f", "e"),
        ]);
        let expected = [BTreeSet::from(["a", "b", "c"]), BTreeSet::from(["e", "f"])];
        assert_eq!(circles(&arrows), expected);
        assert!(leads(&arrows, "b", "d") && !leads(&arrows, "d", "b"));
        assert!(circles(&BTreeSet::from([("a", "b"), ("a", "c"), ("b", "c")])).is_empty());
    }
}
