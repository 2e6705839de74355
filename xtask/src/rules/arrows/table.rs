//! The table of arrows, xtask/arrows.toml.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::graph::{cycles, leads};
use super::{Arrow, Arrows, Finding, Places};
use crate::workspace::Workspace;

/// Its path.
pub(crate) const PATH: &str = "xtask/arrows.toml";

const HEAD: &str = "\
# The modules of each crate, and the modules that each may use (`crate` is the root). Uses in tests do
# not count. A use that is not listed is an error: if it is justified, add it in the commit that needs
# it. \"against\" lists uses that close a cycle, with the number of places; the numbers may only fall.
# `cargo xtask tidy --arrows` shows the places.
";

/// The arrows of all crates, by their directories.
#[derive(Deserialize, Default, PartialEq, Eq, Debug)]
#[serde(transparent)]
pub(crate) struct Table {
    crates: BTreeMap<String, Allowed>,
}

/// The arrows of a crate.
#[derive(Deserialize, Default, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
struct Allowed {
    /// The modules that each module may use, without cycles.
    #[serde(default)]
    uses: BTreeMap<String, BTreeSet<String>>,
    /// Arrows that close a cycle, with the number of places.
    #[serde(default)]
    against: BTreeMap<String, BTreeMap<String, usize>>,
}

impl Table {
    /// The table of the workspace, empty if there is none.
    pub(super) fn read(workspace: &Workspace) -> Result<Table> {
        match workspace.file(PATH) {
            Some(file) => toml::from_str(&file.text).context(PATH),
            None => Ok(Table::default()),
        }
    }

    /// Findings about an existing arrow.
    pub(super) fn judge(&self, name: &str, arrow: &Arrow, places: &Places) -> Vec<Finding> {
        let allowed = self.crates.get(name);
        let (from, to) = arrow;
        if allowed.is_some_and(|allowed| allowed.may_use(arrow)) {
            return Vec::new();
        }
        let excepted = allowed.and_then(|allowed| allowed.excepted(arrow)).unwrap_or(0);
        if places.len() <= excepted {
            return Vec::new();
        }
        let message = if excepted == 0 {
            format!(
                "{from} does not use {to} (move what is needed, or add the arrow to {PATH} on purpose)"
            )
        } else {
            format!(
                "{from} uses {to} in {} places, which closes a cycle; {excepted} are excepted (go another way; see {PATH})",
                places.len()
            )
        };
        places.iter().map(|(path, line)| Finding::new(path, *line, message.clone())).collect()
    }

    /// Findings about the table: cycles, and arrows that no longer exist.
    pub(super) fn faults(&self, found: &BTreeMap<String, Arrows>) -> Vec<Finding> {
        let mut faults = Vec::new();
        let mut fault = |message: String| faults.push(Finding::new(PATH, 1, message));
        for (name, allowed) in &self.crates {
            for cycle in cycles(&allowed.arrows()) {
                let modules = cycle.into_iter().collect::<Vec<_>>().join(", ");
                fault(format!(
                    "{name}: a cycle of {modules} (put an arrow of it under \"against\")"
                ));
            }
            let count = |from: &String, to: &String| {
                let arrow = (from.clone(), to.clone());
                found.get(name).and_then(|arrows| arrows.get(&arrow)).map_or(0, Vec::len)
            };
            for (from, targets) in &allowed.uses {
                for to in targets.iter().filter(|to| count(from, to) == 0) {
                    fault(format!(
                        "{name}: {from} does not use {to} any more (cargo xtask tidy --bless)"
                    ));
                }
            }
            for (from, targets) in &allowed.against {
                for (to, excepted) in targets {
                    let count = count(from, to);
                    if count < *excepted {
                        fault(format!(
                            "{name}: {from} uses {to} in {count} places, not {excepted} (cargo xtask tidy --bless)"
                        ));
                    }
                }
            }
        }
        faults
    }

    /// This table with the existing arrows. Permitted ones stay permitted; of the others, those
    /// that close a cycle become exceptions.
    pub(super) fn blessed(&self, found: &BTreeMap<String, Arrows>) -> Table {
        let mut table = Table::default();
        for (name, arrows) in found {
            let before = self.crates.get(name);
            let allowed = table.crates.entry(name.clone()).or_default();
            let mut others: Vec<(&Arrow, usize)> = Vec::new();
            for (arrow, places) in arrows {
                if before.is_some_and(|before| before.may_use(arrow)) {
                    allowed.allow(arrow);
                } else {
                    others.push((arrow, places.len()));
                }
            }
            // New arrows first. Between two modules, the direction with more places is permitted.
            others.sort_by_key(|&(arrow, places)| {
                let excepted = before.and_then(|before| before.excepted(arrow)).is_some();
                (excepted, Reverse(places), arrow)
            });
            for (arrow, places) in others {
                if leads(&allowed.arrows(), &arrow.1, &arrow.0) {
                    allowed.except(arrow, places);
                } else {
                    allowed.allow(arrow);
                }
            }
        }
        table
    }
}

impl Allowed {
    fn may_use(&self, (from, to): &Arrow) -> bool {
        self.uses.get(from).is_some_and(|targets| targets.contains(to))
    }

    fn excepted(&self, (from, to): &Arrow) -> Option<usize> {
        self.against.get(from)?.get(to).copied()
    }

    fn allow(&mut self, (from, to): &Arrow) {
        self.uses.entry(from.clone()).or_default().insert(to.clone());
    }

    fn except(&mut self, (from, to): &Arrow, places: usize) {
        self.against.entry(from.clone()).or_default().insert(to.clone(), places);
    }

    fn arrows(&self) -> BTreeSet<(&str, &str)> {
        self.uses
            .iter()
            .flat_map(|(from, targets)| targets.iter().map(move |to| (from.as_str(), to.as_str())))
            .collect()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEAD)?;
        for (name, allowed) in &self.crates {
            write!(f, "\n[{name}.uses]\n")?;
            for (from, targets) in &allowed.uses {
                let targets: Vec<_> = targets.iter().map(|to| format!("\"{to}\"")).collect();
                writeln!(f, "{from} = [{}]", targets.join(", "))?;
            }
            if !allowed.against.is_empty() {
                write!(f, "\n[{name}.against]\n")?;
            }
            for (from, targets) in &allowed.against {
                let targets: Vec<_> = targets.iter().map(|(to, n)| format!("{to} = {n}")).collect();
                writeln!(f, "{from} = {{ {} }}", targets.join(", "))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::places;
    use super::super::{all, check};
    use super::*;

    const LIB: (&str, &str) = ("x/src/lib.rs", "mod a; mod b; mod c;\n");
    const A: (&str, &str) = ("x/src/a.rs", "use crate::b;\nfn f() { crate::b::g() }\n");
    const B: (&str, &str) = ("x/src/b.rs", "use crate::c;\nuse crate::a;\n");
    const C: (&str, &str) = ("x/src/c.rs", "");

    fn judged(table: &str) -> Vec<String> {
        places(check, &[LIB, A, B, C, (PATH, table)])
    }

    #[test]
    fn the_table_matches_the_sources() {
        let exact = "[x.uses]\na = [\"b\"]\nb = [\"c\"]\n[x.against]\nb = { a = 1 }\n";
        assert_eq!(judged(exact), [""; 0]);
        assert_eq!(judged(&exact.replace("[\"c\"]", "[]")), ["x/src/b.rs:1"]);
        assert_eq!(judged(&exact.replace("a = 1", "a = 2")), [format!("{PATH}:1")]);
        assert_eq!(judged(&exact.replace("a = 1", "a = 0")), ["x/src/b.rs:2"]);
        assert_eq!(judged(&exact.replace("[\"b\"]", "[\"b\", \"c\"]")), [format!("{PATH}:1")]);
        let circular = "[x.uses]\na = [\"b\"]\nb = [\"a\", \"c\"]\n";
        assert_eq!(judged(circular), [format!("{PATH}:1")]);
    }

    #[test]
    fn blessing_keeps_permitted_arrows_and_the_direction_of_most() {
        let found = all(&Workspace::of(&[LIB, A, B, C]));
        let blessed = Table::default().blessed(&found);
        let text = "[x.uses]\na = [\"b\"]\nb = [\"c\"]\n\n[x.against]\nb = { a = 1 }\n";
        assert_eq!(blessed.to_string(), format!("{HEAD}\n{text}"));
        let decided = "[x.uses]\nb = [\"a\", \"c\"]\n\n[x.against]\na = { b = 9, c = 1 }\n";
        let blessed = toml::from_str::<Table>(decided).unwrap().blessed(&found);
        let text = "[x.uses]\nb = [\"a\", \"c\"]\n\n[x.against]\na = { b = 2 }\n";
        assert_eq!(blessed.to_string(), format!("{HEAD}\n{text}"));
    }
}
