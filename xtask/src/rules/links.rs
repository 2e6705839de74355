//! Links in Markdown must point to an existing file or directory of this checkout and, if they name
//! one, to an existing heading. The same holds for pages of docs/ named in other files.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::Finding;
use crate::workspace::Workspace;

/// Here tests use invented pages.
const MADE_UP: &[&str] = &["xtask/src"];

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in &workspace.files {
        if file.path.ends_with(".md") {
            for (line, link) in links(&file.text) {
                if let Some(problem) = problem(workspace, &file.path, &link) {
                    findings.push(Finding::new(&file.path, line, problem));
                }
            }
        } else if !file.is_below(MADE_UP) {
            for (line, text) in file.lines() {
                for page in pages(text).filter(|page| !workspace.has(page)) {
                    let problem = format!("there is no {page} (name the page that says it)");
                    findings.push(Finding::new(&file.path, line, problem));
                }
            }
        }
    }
    Ok(findings)
}

fn problem(workspace: &Workspace, from: &str, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() { Some(from.to_owned()) } else { join(from, file) };
    let Some(target) = target.filter(|target| target.is_empty() || workspace.has(target)) else {
        return Some(format!("{link} leads to no file (correct the path)"));
    };
    if anchor.is_empty() {
        return None;
    }
    let text = workspace.file(&target).map_or("", |file| &file.text);
    (!anchors(text).contains(anchor))
        .then(|| format!("{link} leads to no heading (correct what follows #)"))
}

/// The target of a relative link, from the root; `None` if outside the checkout.
fn join(page: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The links and images of a page, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let parser = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
    parser
        .filter_map(|(event, range)| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                Some((1 + text[..range.start].matches('\n').count(), dest_url.into_string()))
            }
            _ => None,
        })
        .collect()
}

/// The anchors of a page's headings, as GitHub generates them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let anchor = anchor(&heading.take().unwrap_or_default());
                let before = seen.entry(anchor.clone()).or_default();
                anchors.insert(match *before {
                    0 => anchor,
                    before => format!("{anchor}-{before}"),
                });
                *before += 1;
            }
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            _ => {}
        }
    }
    anchors
}

fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The pages `docs/NAME.md` that a line names by their path from the root.
fn pages(line: &str) -> impl Iterator<Item = &str> {
    let in_path = |c: char| c.is_alphanumeric() || "/_-".contains(c);
    line.match_indices("docs/").filter_map(move |(at, _)| {
        let path = &line[at..];
        let page = &path[..path.find(|c| !in_path(c))?];
        let is_whole = !line[..at].ends_with(|c| in_path(c) || c == '.');
        (is_whole && path[page.len()..].starts_with(".md")).then(|| &path[..page.len() + 3])
    })
}

#[cfg(test)]
mod tests {
    use super::super::places;
    use super::*;

    #[test]
    fn links_lead_to_files_and_headings() {
        let page = "# A page\n\n## The `key`: how?\n\n[up](../README.md) [here](#the-key-how) [out](https://a.b/c#d)\n\n\
                    [gone](gone.md)\n[no such](#the-key)\n[up](../README.md#two)\n![no](image.png)\n[dir](../docs/)\n[above](../..)\n";
        let readme = "# Name\n\n[page](docs/page.md#a-page)\n\n[second](#name-1)\n\n# Name\n\n[third](#name-2)\n";
        let files = [
            ("README.md", readme),
            ("docs/page.md", page),
            (
                "a.rs",
                "// docs/page.md says why,\n// docs/gone.md no more; see old/docs/x.md, docs/page.md.in\n",
            ),
        ];
        let expected = [
            "README.md:9",
            "a.rs:2",
            "docs/page.md:7",
            "docs/page.md:8",
            "docs/page.md:9",
            "docs/page.md:10",
            "docs/page.md:12",
        ];
        assert_eq!(places(check, &files), expected);
    }
}
