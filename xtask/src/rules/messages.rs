//! Messages follow PostgreSQL's style: the message begins with a lower-case letter and has no full
//! stop; DETAIL and HINT are whole sentences.

use anyhow::Result;

use super::Finding;
use crate::tree::{Tree, after_colons, split_at_commas, walk};
use crate::workspace::Workspace;

/// Constructors of reports to users: extension/src/pg/report.rs, keystore/src/failure.rs.
const REPORTS: &[&str] = &["Report", "Failure"];
const SENTENCES: &[&str] = &["detail", "hint", "with_detail", "with_hint"];
/// Macros of pgrx, whose first argument is the message.
const MACROS: &[&str] = &["error", "warning", "notice", "info", "log"];
/// Names that keep their spelling everywhere, besides those with several capital letters.
const NAMES: &[&str] = &["Vault", "pagevault", "pagevault-keyring"];

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in workspace.rust() {
        walk(&file.trees, &mut |before, here| {
            let problem = if let Some(text) = message(here) {
                fault_of_message(text)
            } else if let Some(text) = sentence(before, here) {
                fault_of_sentence(text)
            } else {
                None
            };
            if let Some(problem) = problem {
                findings.push(Finding::new(&file.path, here[0].line(), problem));
            }
        });
    }
    Ok(findings)
}

/// The text of the message in `Report::new(code, "..")`, `log!("..")`, or `#[error("..")]` of an
/// error type.
fn message(here: &[Tree]) -> Option<&str> {
    let (name, rest) = here.split_first()?;
    if MACROS.iter().any(|message| name.is(message)) {
        let rest = match rest {
            [mark, rest @ ..] if mark.is_punct('!') => rest,
            rest if name.is("error") => rest,
            _ => return None,
        };
        return text(rest.first()?.group('(')?);
    }
    if !REPORTS.iter().any(|report| name.is(report)) {
        return None;
    }
    let (new, rest) = after_colons(rest)?.split_first()?;
    if !new.is("new") {
        return None;
    }
    text(split_at_commas(rest.first()?.group('(')?).nth(1)?)
}

/// The text in `.detail("..")` or `.hint("..")`.
fn sentence<'t>(before: Option<&Tree>, here: &'t [Tree]) -> Option<&'t str> {
    let (name, rest) = here.split_first()?;
    if !before?.is_punct('.') || !SENTENCES.iter().any(|method| name.is(method)) {
        return None;
    }
    text(rest.first()?.group('(')?)
}

/// The string, or the format string, of an expression.
fn text(expression: &[Tree]) -> Option<&str> {
    match expression {
        [string, ..] if string.string().is_some() => string.string(),
        [format, mark, arguments, ..] if format.is("format") && mark.is_punct('!') => {
            arguments.group('(')?.first()?.string()
        }
        _ => None,
    }
}

fn fault_of_message(text: &str) -> Option<&'static str> {
    let word: String = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let capitals = word.chars().filter(|c| c.is_uppercase()).count();
    if word.starts_with(char::is_uppercase) && capitals == 1 && !NAMES.contains(&word.as_str()) {
        Some("a message begins with a capital letter (write it in lower case)")
    } else if text.ends_with(['.', '!']) && !text.ends_with("...") {
        Some("a message ends as a sentence (leave the full stop out)")
    } else if text.contains("\\n") {
        Some("a message of several lines (put the rest into DETAIL or HINT)")
    } else {
        None
    }
}

fn fault_of_sentence(text: &str) -> Option<&'static str> {
    // A name, such as that of a setting or function, keeps its spelling.
    let word = text.split(' ').next().unwrap_or(text);
    let is_name = word.contains(['_', '.', '(', '"', '{', '\\']);
    // A command at the end has no full stop: "Restore it: vault write ...".
    let ends_with_command = text.rsplit(". ").next().is_some_and(|last| last.contains(": "));
    if text.starts_with(char::is_lowercase) && !is_name && !NAMES.contains(&word) {
        Some("DETAIL and HINT are sentences (begin with a capital letter)")
    } else if text.ends_with(|c: char| c.is_alphanumeric() || c == ',') && !ends_with_command {
        Some("DETAIL and HINT are sentences (end with a full stop)")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    #[test]
    fn messages_are_no_sentences_and_sentences_are() {
        let source = r#"
            Report::new(CODE, "Key is locked")
                .detail("it was refused.")
                .hint("Unlock it");
            Report::new(CODE, format!("key {} is locked.", name));
            Report::new(f(a, b), "WAL is sealed").detail("Its key is.").hint(hint);
            Report::new(CODE, "key \"{}\" is locked").hint("pagevault.unlock() asks again.");
            Report::new(CODE, "PostgreSQL 14 is too old").detail(format!("{error}"));
            #[error("Wrong key")]
            #[error("wrong key: {0}")]
            Other::new(CODE, "Anything.");
            detail("no method");
            pgrx::warning!("Job {} failed", id);
            Report::new(CODE, "Vault is away").detail("pagevault asked it.").hint("Ask it: vault status");
        "#;
        let expected = [2, 3, 4, 5, 9, 13].map(|line| format!("a.rs:{line}"));
        assert_eq!(places(check, &[("a.rs", source)]), expected);
    }
}
