//! Prints the arrows: for each crate a matrix, its cycles, and the places of the arrows that close
//! them.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::graph::cycles;
use super::{Arrows, all};
use crate::workspace::Workspace;

/// Width of a number in the matrix.
const WIDTH: usize = 4;

/// All crates, one after the other.
pub(crate) fn show(workspace: &Workspace) -> String {
    let crates = all(workspace);
    let shown: Vec<_> = crates.iter().map(|(name, arrows)| of_crate(name, arrows)).collect();
    shown.join("\n")
}

fn of_crate(name: &str, arrows: &Arrows) -> String {
    let pairs: BTreeSet<(&str, &str)> =
        arrows.keys().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    let mut text =
        format!("{name}: {} arrows (rows use columns, in so many places)\n\n", pairs.len());
    matrix(&mut text, arrows, &pairs);
    let cycles = cycles(&pairs);
    if cycles.is_empty() {
        text.push_str("\n  no cycles\n");
    }
    for cycle in cycles {
        let modules = cycle.iter().copied().collect::<Vec<_>>().join(", ");
        let _ = write!(text, "\n  each of these uses each, if indirectly: {modules}\n");
        for ((from, to), places) in arrows {
            if cycle.contains(from.as_str()) && cycle.contains(to.as_str()) {
                let _ = writeln!(text, "    {from} -> {to}: {}", places.len());
                for (path, line) in places {
                    let _ = writeln!(text, "      {path}:{line}");
                }
            }
        }
    }
    text
}

fn matrix(text: &mut String, arrows: &Arrows, pairs: &BTreeSet<(&str, &str)>) {
    let modules: BTreeSet<&str> = pairs.iter().flat_map(|&(from, to)| [from, to]).collect();
    let widest = modules.iter().map(|module| module.len()).max().unwrap_or(0);
    let _ = write!(text, "  {:widest$}    ", "");
    for number in 1..=modules.len() {
        let _ = write!(text, "{number:>WIDTH$}");
    }
    text.push('\n');
    for (row, from) in modules.iter().enumerate() {
        let _ = write!(text, "  {from:widest$} {:>3}", row + 1);
        for to in &modules {
            let places = arrows.get(&((*from).to_owned(), (*to).to_owned()));
            let cell = match places {
                Some(places) => places.len().to_string(),
                None if from == to => "\\".to_owned(),
                None => ".".to_owned(),
            };
            let _ = write!(text, "{cell:>WIDTH$}");
        }
        text.push('\n');
    }
}
