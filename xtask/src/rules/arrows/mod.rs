//! The modules of a crate that each module uses. xtask/arrows.toml lists the permitted arrows, and
//! those that should be removed because they close a cycle. A new arrow is an error until it is
//! added to the table.

mod graph;
mod paths;
mod show;
mod table;

use std::collections::BTreeMap;

use anyhow::Result;

use super::Finding;
use crate::workspace::Workspace;

pub(crate) use show::show;
pub(crate) use table::{PATH, Table};

/// A top-level module and one that it uses; the root of the crate is called [`ROOT`].
type Arrow = (String, String);

/// The root module of the crate (lib.rs, main.rs).
const ROOT: &str = "crate";

/// The places of an arrow: file and line.
type Places = Vec<(String, usize)>;

/// The arrows of a crate.
type Arrows = BTreeMap<Arrow, Places>;

/// Compares the arrows of each crate with the table.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let table = Table::read(workspace)?;
    let found = all(workspace);
    let mut findings = Vec::new();
    for (name, arrows) in &found {
        for (arrow, places) in arrows {
            findings.extend(table.judge(name, arrow, places));
        }
    }
    findings.extend(table.faults(&found));
    Ok(findings)
}

/// The updated table.
pub(crate) fn bless(workspace: &Workspace) -> Result<String> {
    Ok(Table::read(workspace)?.blessed(&all(workspace)).to_string())
}

/// The arrows of all crates, by their directories.
fn all(workspace: &Workspace) -> BTreeMap<String, Arrows> {
    let mut crates = BTreeMap::new();
    for file in workspace.rust() {
        let Some((name, "src/lib.rs" | "src/main.rs")) = file.path.split_once('/') else {
            continue;
        };
        crates.entry(name.to_owned()).or_insert_with(|| paths::arrows(workspace, name));
    }
    crates.retain(|_, arrows| !arrows.is_empty());
    crates
}
