//! Words that are not used, and their replacements: xtask/words.toml.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{EXCEPTIONS, Finding};
use crate::workspace::Workspace;

/// The list.
const LIST: &str = "xtask/words.toml";

#[derive(Deserialize)]
struct List {
    word: Vec<Word>,
}

/// An entry: a word, its replacement, and the reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    /// The forms of the word. A form with a capital letter matches only that name; one that begins
    /// with `/` matches the beginning of a path; others match words in any case, also as a part of
    /// a name.
    forms: Vec<String>,
    instead: String,
    reason: String,
    /// Files and directories where it may be used.
    #[serde(default)]
    allowed_in: Vec<String>,
}

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let list = workspace.file(LIST).context(LIST)?;
    let list: List = toml::from_str(&list.text).context(LIST)?;
    let mut findings = Vec::new();
    let is_list = |path: &str| path == LIST || path == EXCEPTIONS;
    for file in workspace.files.iter().filter(|file| !is_list(&file.path)) {
        let in_lower_case = file.text.to_lowercase();
        for word in &list.word {
            let allowed: Vec<_> = word.allowed_in.iter().map(String::as_str).collect();
            let has_it = word.forms.iter().any(|form| in_lower_case.contains(&form.to_lowercase()));
            if file.is_below(&allowed) || !has_it {
                continue;
            }
            for (line, text) in file.lines() {
                let uses: usize = word.forms.iter().map(|form| uses(text, form)).sum();
                if uses > 0 {
                    let (form, instead, reason) = (&word.forms[0], &word.instead, &word.reason);
                    let message = format!("\"{form}\": {reason} (write {instead})");
                    let finding = Finding::new(&file.path, line, message);
                    findings.push(Finding { count: uses, ..finding });
                }
            }
        }
    }
    Ok(findings)
}

/// Number of occurrences of a form in a line.
fn uses(line: &str, form: &str) -> usize {
    let is_name = form.contains(char::is_uppercase);
    let is_path = form.starts_with('/');
    let (line, form) = if is_name || is_path {
        (line.to_owned(), form.to_owned())
    } else {
        (line.to_lowercase(), form.to_lowercase())
    };
    let goes_on =
        |c: char| if is_name { c.is_alphanumeric() || c == '_' } else { c.is_alphabetic() };
    let is_whole = |&(at, _): &(usize, &str)| {
        let (before, after) = (&line[..at], &line[at + form.len()..]);
        if is_path {
            // Not within a longer path, a variable or an address.
            !before.ends_with(|c: char| c.is_alphanumeric() || "._-*~/})>".contains(c))
        } else {
            !before.ends_with(goes_on) && !after.starts_with(goes_on)
        }
    };
    line.match_indices(&form).filter(is_whole).count()
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    const LIST_OF_TWO: (&str, &str) = (
        LIST,
        "[[word]]\nforms = [\"colour\", \"colours\"]\ninstead = \"color\"\nreason = \"why\"\nallowed_in = [\"docs\"]\n\
         [[word]]\nforms = [\"/srv/\"]\ninstead = \"$HOME\"\nreason = \"why\"\n",
    );

    #[test]
    fn words_are_found_in_every_kind_of_file() {
        let text = "a color\nColour: colours\nfn one_colour() {}\ncolourful\n/srv/x\n";
        let files = [LIST_OF_TWO, ("a.rs", "// colour\n"), ("docs/b.md", text), ("b.sh", text)];
        let expected = ["a.rs:1", "b.sh:2", "b.sh:3", "b.sh:5", "docs/b.md:5"];
        assert_eq!(places(check, &files), expected);
        let counts: Vec<_> =
            check(&Workspace::of(&files)).unwrap().iter().map(|found| found.count).collect();
        assert_eq!(counts, [1, 2, 1, 1, 1]);
    }

    #[test]
    fn a_capitalized_form_matches_only_that_name() {
        assert_eq!(uses("enum Shade { Deep }", "Shade"), 1);
        assert_eq!(uses("shade, Shades, DeepShade, Shade_2", "Shade"), 0);
    }

    #[test]
    fn a_path_begins_at_the_root() {
        assert_eq!(uses("cd /srv/x; cat \"/srv/y\"", "/srv/"), 2);
        assert_eq!(uses("https://example.org/srv/ ~/srv/ $root/srv/ ./srv/ ${x}/srv/", "/srv/"), 0);
    }
}
