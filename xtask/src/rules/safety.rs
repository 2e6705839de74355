//! A SAFETY comment, or a "# Safety" section of a function, gives a reason. Clippy requires that
//! there is one; "by contract" is not a reason.

use anyhow::Result;

use super::Finding;
use crate::workspace::{File, Workspace};

/// A reason has more words than this.
const WORDS: usize = 5;

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in workspace.rust() {
        for (line, reason) in reasons(file) {
            if reason.split_whitespace().count() < WORDS {
                let message = format!(
                    "\"{reason}\" does not say why this is sound (say what makes it so, and who sees to that)"
                );
                findings.push(Finding::new(&file.path, line, message));
            }
        }
    }
    Ok(findings)
}

/// The text of each of these comments, with its line.
fn reasons(file: &File) -> Vec<(usize, String)> {
    let mut reasons = Vec::new();
    let strings = file.strings();
    let mut lines = file.lines().peekable();
    while let Some((line, text)) = lines.next() {
        // The marker of continuation lines, and the first line of the comment.
        let (mark, beginning) = match text.split_once("// SAFETY:") {
            Some((before, _)) if strings.cover(line, before.chars().count()) => continue,
            Some((_, beginning)) => ("//", beginning),
            None if text.trim() == "/// # Safety" && !strings.cover(line, 0) => ("///", ""),
            None => continue,
        };
        let mut reason = beginning.trim().to_owned();
        let continuation = |text: &str| {
            let next = text.trim_start().strip_prefix(mark)?.trim();
            (!next.starts_with(['#', '/']) && !next.starts_with("SAFETY:")).then(|| next.to_owned())
        };
        while let Some(next) = lines.peek().and_then(|(_, text)| continuation(text)) {
            reason = format!("{reason} {next}").trim().to_owned();
            lines.next();
        }
        reasons.push((line, reason));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    #[test]
    fn a_reason_is_more_than_by_contract() {
        let source = "
            // SAFETY: by contract.
            unsafe { f() }
            // SAFETY: by contract the caller holds the lock,
            // and nobody else writes.
            unsafe { f() }
            // SAFETY: the lock
            // is held.
            unsafe { f() }
            let x = // SAFETY: as above.
                unsafe { f() };
            // SAFETY: the pointer is one of our own and lives.
            /// # Safety
            /// None.
            unsafe fn g() {}
            /// # Safety
            ///
            /// The relation is open, and locked by the caller.
            unsafe fn h() {}
        ";
        let expected = [2, 7, 10, 13].map(|line| format!("a.rs:{line}"));
        assert_eq!(places(check, &[("a.rs", source)]), expected);
    }
}
