//! Secrets are not compared with `==`, which takes longer the more bytes match, but with their own
//! methods (`Secret32::matches`, `DataKey::is_same`).

use anyhow::Result;

use super::Finding;
use crate::tree::{Tree, walk};
use crate::workspace::Workspace;

/// The method that returns the bytes of a secret.
const EXPOSE: &str = "expose";

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in workspace.rust() {
        walk(&file.trees, &mut |_, here| {
            if is_on_the_left(here) || is_on_the_right(here) {
                let message = "the bytes of a secret are compared (use Secret32::matches or DataKey::is_same)";
                findings.push(Finding::new(&file.path, here[0].line(), message));
            }
        });
    }
    Ok(findings)
}

/// `expose() == ..`
fn is_on_the_left(here: &[Tree]) -> bool {
    let [name, call, rest @ ..] = here else { return false };
    name.is(EXPOSE) && call.group('(').is_some() && is_comparison(rest)
}

/// `== ...expose()`
fn is_on_the_right(here: &[Tree]) -> bool {
    let ends = |trees: &[Tree]| {
        let [first, second, ..] = trees else { return false };
        let twice = |mark| first.is_punct(mark) && second.is_punct(mark);
        first.is_punct(',') || first.is_punct(';') || twice('&') || twice('|')
    };
    is_comparison(here)
        && (2..here.len())
            .take_while(|at| !ends(&here[*at..]) && here[*at].group('{').is_none())
            .any(|at| here[at].is(EXPOSE))
}

fn is_comparison(trees: &[Tree]) -> bool {
    let [first, second, ..] = trees else { return false };
    (first.is_punct('=') || first.is_punct('!')) && second.is_punct('=')
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    #[test]
    fn bytes_of_secrets_are_not_compared() {
        let wrong = "fn f() {\n    a.expose() == b\n        || b != c?.d().expose();\n    if a == *b.expose() {}\n}\n";
        let right = "fn f() {\n    a.matches(b.expose()) == c && g(d.expose());\n    if a == b { c.expose() }\n    x = a.expose();\n    match a { 1 => b.expose(), _ => c }\n}\n";
        let found = places(check, &[("a.rs", wrong), ("b.rs", right)]);
        assert_eq!(found, ["a.rs:2", "a.rs:3", "a.rs:4"]);
    }
}
