//! A source file has one subject, and so no more than 500 lines.

use anyhow::Result;

use super::Finding;
use crate::workspace::Workspace;

const LINES: usize = 500;

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in workspace.rust() {
        let lines = file.lines().count();
        if lines > LINES {
            let message =
                format!("{lines} lines, {} too many (split it by subject)", lines - LINES);
            let finding = Finding::new(&file.path, LINES + 1, message);
            findings.push(Finding { count: lines - LINES, ..finding });
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surplus_lines_are_counted() {
        let (fits, too_long) = ("\n".repeat(500), "\n".repeat(503));
        let workspace = Workspace::of(&[("a.rs", &fits), ("b.rs", &too_long), ("c.md", &too_long)]);
        let found = check(&workspace).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].path.as_str(), found[0].line, found[0].count), ("b.rs", 501, 3));
    }
}
