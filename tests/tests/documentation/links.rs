//! Links between the pages, and to files of the repository.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// Every relative link of every page leads to a file that is there and, if it names one, to a heading in it.
pub(crate) fn lead_somewhere() -> Result<()> {
    let root = crate::root().canonicalize()?;
    let mut pages = crate::pages();
    for name in ["ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
        pages.push(root.join(name));
    }
    let mut anchors: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    let mut broken = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).with_context(|| page.display().to_string())?;
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap_or(Path::new("")).join(file),
            };
            let leads = target.canonicalize().is_ok_and(|target| {
                anchor.is_empty()
                    || anchors
                        .entry(target.clone())
                        .or_insert_with(|| {
                            headings(&fs::read_to_string(&target).unwrap_or_default())
                        })
                        .contains(anchor)
            });
            if !leads {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    ensure!(broken.is_empty(), "these links lead nowhere:\n{}", broken.join("\n"));
    Ok(())
}

fn links(text: &str) -> Vec<String> {
    Parser::new_ext(text, Options::ENABLE_TABLES)
        .filter_map(|event| match event {
            Event::Start(Tag::Link { dest_url, .. }) => Some(dest_url.into_string()),
            _ => None,
        })
        .collect()
}

/// The anchors that a page has by its headings, as GitHub makes them.
fn headings(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let text = heading.take().unwrap_or_default().to_lowercase();
                anchors.insert(
                    text.chars()
                        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                        .map(|c| if c == ' ' { '-' } else { c })
                        .collect(),
                );
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
