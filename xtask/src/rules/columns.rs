//! Lines of Rust have at most 100 columns. rustfmt ensures that for code; this rule is for
//! comments. Strings may be longer, because a message that is broken cannot be searched for.

use anyhow::Result;

use super::Finding;
use crate::workspace::Workspace;

/// `max_width` in rustfmt.toml.
const COLUMNS: usize = 100;

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in workspace.rust() {
        let strings = file.strings();
        for (line, text) in file.lines() {
            let columns = text.chars().count();
            let in_string = || strings.cover(line, 0) || strings.cover(line, COLUMNS);
            if columns > COLUMNS && !in_string() {
                let message = format!("{columns} columns (no more than {COLUMNS}: break the line)");
                findings.push(Finding::new(&file.path, line, message));
            }
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    #[test]
    fn long_comments_are_found_and_long_strings_are_not() {
        let long = "é".repeat(98);
        let source = format!(
            "/// {}\n// {long}\n/// {long}\nconst A: &str = \"{long}\";\nconst B: &str = \"a\n{long}---\n\";\n",
            &long[..2 * 96],
        );
        let found = places(check, &[("a.rs", &source), ("b.md", &source)]);
        assert_eq!(found, ["a.rs:2", "a.rs:3"]);
    }
}
