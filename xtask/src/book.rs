//! `cargo xtask book DIRECTORY`: what mdBook makes a website of, from the pages as they are. The
//! table of contents is that of the user guide, `docs/README.md`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// The user guide, whose links are the chapters, and whose bold lines are the parts.
const GUIDE: &str = "docs/README.md";
/// Pages beside the guide.
const PROJECT: [&str; 4] = ["SECURITY.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
const FIRST: &str = "README.md";

/// A link in a page: where its destination is written, and the path that it leads to from the root
/// of the project, with what is behind `#`.
struct Link {
    place: Range<usize>,
    path: PathBuf,
    anchor: String,
}

/// Writes `SUMMARY.md`, all pages, and the files that they link to.
pub(crate) fn write(root: &Path, into: &Path) -> Result<()> {
    let summary = summary(root)?;
    let mut left: Vec<PathBuf> = vec![FIRST.into()];
    left.extend(summary.pages.iter().cloned());
    let mut known: BTreeSet<PathBuf> = left.iter().cloned().collect();
    while let Some(path) = left.pop() {
        let text = read(root, &path)?;
        let links = links(&path, &text);
        for link in &links {
            let is_page = link.path.extension() == Some(OsStr::new("md"));
            ensure!(
                !is_page || known.contains(&link.path),
                "{} is linked from {}, and in no part of {GUIDE}",
                link.path.display(),
                path.display()
            );
            if !is_page && known.insert(link.path.clone()) {
                copy(root, &link.path, into)?;
            }
        }
        put(into, &named(&path), rewritten(&path, &text, &links))?;
    }
    put(into, Path::new("SUMMARY.md"), &summary.text)
}

struct Summary {
    text: String,
    pages: Vec<PathBuf>,
}

fn summary(root: &Path) -> Result<Summary> {
    let guide = read(root, Path::new(GUIDE))?;
    let mut summary = Summary {
        text: "# Summary\n\n[pagevault](index.md)\n[User guide](docs/index.md)\n".to_owned(),
        pages: vec![GUIDE.into()],
    };
    let links = links(Path::new(GUIDE), &guide);
    let mut is_bold = false;
    for (event, place) in Parser::new_ext(&guide, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Strong) => is_bold = true,
            Event::End(TagEnd::Strong) => is_bold = false,
            Event::Text(part) if is_bold => write!(summary.text, "\n# {part}\n\n")?,
            Event::Start(Tag::Link { .. }) => {
                let is_here = |link: &&Link| place.contains(&link.place.start);
                let of_guide = links.iter().find(is_here).filter(|link| !is_of_project(&link.path));
                if let Some(link) = of_guide {
                    add(root, &link.path, 0, &mut summary)?;
                }
            }
            _ => {}
        }
    }
    summary.text.push_str("\n# Project\n\n");
    PROJECT.iter().try_for_each(|page| add(root, Path::new(page), 0, &mut summary))?;
    Ok(summary)
}

fn is_of_project(page: &Path) -> bool {
    PROJECT.iter().any(|known| page == Path::new(known))
}

/// A chapter; below it those that an index links to, which is the `README.md` of a folder.
fn add(root: &Path, page: &Path, depth: usize, summary: &mut Summary) -> Result<()> {
    let is_page = page.extension() == Some(OsStr::new("md")) && page != Path::new(FIRST);
    if !is_page || summary.pages.iter().any(|known| known == page) {
        return Ok(());
    }
    let text = read(root, page)?;
    let indent = "    ".repeat(depth);
    writeln!(summary.text, "{indent}- [{}]({})", title(&text), named(page).display())?;
    summary.pages.push(page.to_owned());
    if page.file_name() == Some(OsStr::new("README.md")) {
        for link in links(page, &text) {
            if link.path.parent() == page.parent() {
                add(root, &link.path, depth + 1, summary)?;
            }
        }
    }
    Ok(())
}

/// The first heading.
fn title(text: &str) -> String {
    let first = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or_default();
    first.replace(['[', ']', '`'], "")
}

/// The links of a page to files of the project.
fn links(page: &Path, text: &str) -> Vec<Link> {
    let parser = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
    let found = parser.filter_map(|(event, place)| {
        let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else {
            return None;
        };
        if dest_url.starts_with('#') || dest_url.contains(':') {
            return None;
        }
        let start = place.start + text[place.clone()].rfind(&*dest_url)?;
        let (path, anchor) = match dest_url.split_once('#') {
            Some((path, anchor)) => (path, format!("#{anchor}")),
            None => (&*dest_url, String::new()),
        };
        let path = normal(&page.parent()?.join(path));
        Some(Link { place: start..start + dest_url.len(), path, anchor })
    });
    found.collect()
}

/// Without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// The name of a page in the book: mdBook does not follow links to `README.md`.
fn named(path: &Path) -> PathBuf {
    match path.file_name() == Some(OsStr::new("README.md")) {
        true => path.with_file_name("index.md"),
        false => path.to_owned(),
    }
}

/// A page with the names of the book in its links.
fn rewritten(page: &Path, text: &str, links: &[Link]) -> String {
    let up = "../".repeat(page.components().count() - 1);
    let mut whole = text.to_owned();
    let mut links: Vec<&Link> = links.iter().collect();
    links.sort_by_key(|link| link.place.start);
    for link in links.into_iter().rev() {
        let to = named(&link.path);
        whole.replace_range(link.place.clone(), &format!("{up}{}{}", to.display(), link.anchor));
    }
    whole
}

/// Copies a file; of a folder all files, with a list of them.
fn copy(root: &Path, path: &Path, into: &Path) -> Result<()> {
    let from = root.join(path);
    if !from.is_dir() {
        let bytes = fs::read(&from).with_context(|| format!("read {}", path.display()))?;
        return put(into, path, bytes);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(&from)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let mut list = format!("<!DOCTYPE html><title>{0}</title><h1>{0}</h1><ul>\n", path.display());
    for name in names {
        writeln!(list, "<li><a href=\"{name}\">{name}</a></li>")?;
        copy(root, &path.join(name), into)?;
    }
    put(into, &path.join("index.html"), list + "</ul>\n")
}

fn put(into: &Path, path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    let to = into.join(path);
    fs::create_dir_all(to.parent().context("a file is in a folder")?)?;
    fs::write(&to, content).with_context(|| format!("write {}", to.display()))
}

fn read(root: &Path, path: &Path) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("read {}", path.display()))
}
