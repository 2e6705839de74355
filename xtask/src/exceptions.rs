//! Violations that are older than their rule: xtask/exceptions.toml has their number for each file.
//! The numbers may only fall, and they are exact: a number that is too high is an error too.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result};
use toml::Spanned;

use crate::rules::{EXCEPTIONS, Finding, RULES};
use crate::workspace::Workspace;

const HEAD: &str = "\
# Known violations of the rules of `cargo xtask tidy`: for each rule (xtask/src/rules), their number
# in each file. The numbers may only fall, and they are exact: after a correction, `cargo xtask tidy
# --bless` writes the list again.
";

/// The findings of each rule, by its name.
pub(crate) type Found = BTreeMap<&'static str, Vec<Finding>>;

/// Runs all rules that may have exceptions.
pub(crate) fn find(workspace: &Workspace) -> Result<Found> {
    RULES.iter().map(|rule| Ok((rule.name, (rule.check)(workspace)?))).collect()
}

/// Findings that the list does not except, and unnecessary exceptions, with the rule's name.
pub(crate) fn judge(workspace: &Workspace, found: Found) -> Result<Vec<(&'static str, Finding)>> {
    let (list, text) = read(workspace)?;
    let line_of = |entry: &Spanned<usize>| 1 + text[..entry.span().start].matches('\n').count();
    let mut judged = Vec::new();
    for (rule, findings) in &found {
        let counts = counts(findings);
        for (path, excepted) in list.get(*rule).into_iter().flatten() {
            let count = counts.get(path.as_str()).copied().unwrap_or(0);
            if count < *excepted.get_ref() {
                let message = format!(
                    "{path}: {count}, not {} (cargo xtask tidy --bless lowers it)",
                    excepted.get_ref()
                );
                let (path, line) = (EXCEPTIONS.to_owned(), line_of(excepted));
                judged.push((*rule, Finding { path, line, count: 1, message }));
            }
        }
    }
    for rule in list.keys().filter(|rule| !found.contains_key(rule.as_str())) {
        let message = format!("there is no rule \"{rule}\" (remove it)");
        judged.push((
            "exceptions",
            Finding { path: EXCEPTIONS.to_owned(), line: 1, count: 1, message },
        ));
    }
    for (rule, findings) in found {
        let counts: BTreeMap<String, usize> =
            counts(&findings).into_iter().map(|(path, count)| (path.to_owned(), count)).collect();
        for mut finding in findings {
            let excepted = list.get(rule).and_then(|paths| paths.get(&finding.path));
            let excepted = excepted.map_or(0, |excepted| *excepted.get_ref());
            let count = counts.get(&finding.path).copied().unwrap_or(0);
            if count > excepted {
                if excepted > 0 {
                    let _ = write!(finding.message, " [{count} in this file, {excepted} excepted]");
                }
                judged.push((rule, finding));
            }
        }
    }
    Ok(judged)
}

/// The list for these findings, and each number in it that is higher than before.
pub(crate) fn bless(workspace: &Workspace, found: &Found) -> Result<(String, Vec<String>)> {
    let (list, _) = read(workspace)?;
    let (mut text, mut raised) = (HEAD.to_owned(), Vec::new());
    for rule in RULES {
        let counts = found.get(rule.name).map(|findings| counts(findings)).unwrap_or_default();
        if !counts.is_empty() {
            let _ = write!(text, "\n[{}]\n", rule.name);
        }
        for (path, count) in counts {
            let _ = writeln!(text, "\"{path}\" = {count}");
            let before = list.get(rule.name).and_then(|paths| paths.get(path));
            let before = before.map_or(0, |before| *before.get_ref());
            if count > before {
                raised.push(format!("{}: {path}: {before} -> {count}", rule.name));
            }
        }
    }
    Ok((text, raised))
}

type List = BTreeMap<String, BTreeMap<String, Spanned<usize>>>;

fn read(workspace: &Workspace) -> Result<(List, &str)> {
    let text = workspace.file(EXCEPTIONS).map_or("", |file| &file.text);
    Ok((toml::from_str(text).context(EXCEPTIONS)?, text))
}

fn counts(findings: &[Finding]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for finding in findings {
        *counts.entry(finding.path.as_str()).or_default() += finding.count;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Found {
        let finding = |path: &str, line| Finding {
            path: path.to_owned(),
            line,
            count: 1,
            message: "wrong".to_owned(),
        };
        BTreeMap::from([(
            "unsafe",
            vec![finding("a.rs", 1), finding("a.rs", 7), finding("b.rs", 3)],
        )])
    }

    fn judged(list: &str) -> Vec<String> {
        let judged = judge(&Workspace::of(&[(EXCEPTIONS, list)]), found()).unwrap();
        judged.iter().map(|(rule, at)| format!("{rule} {}:{}", at.path, at.line)).collect()
    }

    #[test]
    fn numbers_are_exact() {
        assert_eq!(judged("[unsafe]\n\"a.rs\" = 2\n\"b.rs\" = 1\n"), [""; 0]);
        assert_eq!(judged("[unsafe]\n\"a.rs\" = 2\n"), ["unsafe b.rs:3"]);
        let more = judged("[unsafe]\n\"a.rs\" = 1\n\"b.rs\" = 1\n");
        assert_eq!(more, ["unsafe a.rs:1", "unsafe a.rs:7"]);
        let fewer = judged("[unsafe]\n\"a.rs\" = 2\n\"b.rs\" = 2\n\"c.rs\" = 1\n");
        assert_eq!(fewer, [format!("unsafe {EXCEPTIONS}:3"), format!("unsafe {EXCEPTIONS}:4")]);
        let unknown = judged("[unsafe]\n\"a.rs\" = 2\n\"b.rs\" = 1\n[other]\n\"a.rs\" = 1\n");
        assert_eq!(unknown, [format!("exceptions {EXCEPTIONS}:1")]);
    }

    #[test]
    fn blessing_reports_the_numbers_that_it_raises() {
        let workspace = Workspace::of(&[(EXCEPTIONS, "[unsafe]\n\"a.rs\" = 1\n\"b.rs\" = 5\n")]);
        let (text, raised) = bless(&workspace, &found()).unwrap();
        assert_eq!(text, format!("{HEAD}\n[unsafe]\n\"a.rs\" = 2\n\"b.rs\" = 1\n"));
        assert_eq!(raised, ["unsafe: a.rs: 1 -> 2"]);
    }
}
