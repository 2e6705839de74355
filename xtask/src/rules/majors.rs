//! Code that depends on PostgreSQL's major version is in few files, and the next major will be
//! treated as the newest one.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Finding;
use crate::cfg::conditions;
use crate::tree::walk;
use crate::workspace::{File, Workspace};

/// Files that may depend on the major version.
const PLACES: &[&str] = &[
    "extension/src/pg/compat",
    // what functions are called that pgrx does not bind
    "extension/src/pg/externs.rs",
    "extension/src/hooks/install.rs",
];

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in extension(workspace).filter(|file| !file.is_below(PLACES)) {
        let mut lines: Vec<usize> = conditions(&file.trees)
            .iter()
            .filter_map(|(line, condition)| condition.asks_for_major().then_some(*line))
            .collect();
        walk(&file.trees, &mut |_, here| {
            if here[0].is("MAJOR") {
                lines.push(here[0].line());
            }
        });
        findings.extend(lines.into_iter().map(|line| {
            let message = "a difference between majors (move it to extension/src/pg/compat)";
            Finding::new(&file.path, line, message)
        }));
    }
    Ok(findings)
}

/// A condition that names the newest major instead of the older ones is false for the next major:
/// the guarded code is then missing, or the code for the oldest major is used. So each condition
/// must give the same result for the newest major and for the one after it.
pub(super) fn check_newest(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in extension(workspace) {
        let newest = newest(workspace)?;
        for (line, condition) in conditions(&file.trees) {
            if condition.asks_for_major()
                && condition.holds_on(newest) != condition.holds_on(newest + 1)
            {
                let message = format!(
                    "PostgreSQL {} would not be treated as {newest} (name the older majors: `any(..)` of them, `not(any(..))`)",
                    newest + 1
                );
                findings.push(Finding::new(&file.path, line, message));
            }
        }
        walk(&file.trees, &mut |_, here| {
            if let [name, first, second, ..] = here
                && name.is("MAJOR")
                && (first.is_punct('=') || first.is_punct('!'))
                && second.is_punct('=')
            {
                let message = "what holds for one major only (compare by >= or <)";
                findings.push(Finding::new(&file.path, name.line(), message));
            }
        });
    }
    Ok(findings)
}

fn extension(workspace: &Workspace) -> impl Iterator<Item = &File> {
    workspace.rust().filter(|file| file.is_below(&["extension"]))
}

/// The highest NN among the features pgNN of the extension.
fn newest(workspace: &Workspace) -> Result<u32> {
    #[derive(Deserialize)]
    struct Manifest {
        features: std::collections::BTreeMap<String, Vec<String>>,
    }
    const MANIFEST: &str = "extension/Cargo.toml";
    let manifest = workspace.file(MANIFEST).context(MANIFEST)?;
    let manifest: Manifest = toml::from_str(&manifest.text).context(MANIFEST)?;
    let majors = manifest.features.keys().filter_map(|name| name.strip_prefix("pg")?.parse().ok());
    majors.max().with_context(|| format!("{MANIFEST} has no features for majors"))
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    const MANIFEST: (&str, &str) =
        ("extension/Cargo.toml", "[features]\npg15 = []\npg17 = []\npg18 = []\npg_test = []\n");

    #[test]
    fn majors_are_named_in_few_files() {
        let source = "#[cfg(test)]\nfn f() {}\n#[cfg(not(feature = \"pg15\"))]\nfn g() { if MAJOR > 16 {} }\nmacro_rules! m { () => {\n#[cfg_attr(feature = \"pg15\", inline)]\n} }\n";
        let files = [
            ("extension/src/hooks/install.rs", source),
            ("extension/src/hooks/smgr.rs", source),
            ("tests/src/version.rs", source),
        ];
        let expected = [3, 6, 4].map(|line| format!("extension/src/hooks/smgr.rs:{line}"));
        assert_eq!(places(check, &files), expected);
    }

    #[test]
    fn conditions_hold_on_the_next_major_as_on_the_newest() {
        let source = r#"
            #[cfg(any(feature = "pg15", feature = "pg17"))]     // 2: of the older ones
            #[cfg(not(any(feature = "pg15", feature = "pg17")))] // 3: of the newest and later
            #[cfg(feature = "pg18")]                             // 4: nothing on 19
            #[cfg(any(feature = "pg17", feature = "pg18"))]      // 5: nothing on 19
            #[cfg(not(feature = "pg18"))]                        // 6: the old way on 19
            #[cfg(all(unix, not(feature = "pg15")))]             // 7: as 3
            #[cfg(any(feature = "pg18", test))]                  // 8: perhaps nothing on 19
            const OLD: bool = MAJOR < 16 || MAJOR >= 18;
            const NEW: bool = compat::MAJOR == 18;               // 10
        "#;
        let files = [MANIFEST, ("extension/src/pg/compat/mod.rs", source)];
        let expected =
            [4, 5, 6, 8, 10].map(|line| format!("extension/src/pg/compat/mod.rs:{line}"));
        assert_eq!(places(check_newest, &files), expected);
    }
}
