//! The files of the checkout, for the rules.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::LineColumn;

use crate::tree::{self, Tree};

/// Generated files: they exist for links, but are not read.
const UNREAD: &[&str] = &["Cargo.lock", "fuzz/corpus", "tests/golden"];

/// Files of git and of builds.
const BUILT: &[&str] = &[".git", "target", "fuzz/artifacts"];

/// Hidden directories of the project; others belong to git, editors and the like.
const HIDDEN: &[&str] = &[".cargo", ".ci", ".github"];

/// All files, ordered by path.
pub(crate) struct Workspace {
    root: PathBuf,
    /// The text files.
    pub(crate) files: Vec<File>,
    /// Every file and directory.
    paths: BTreeSet<String>,
}

/// A text file.
pub(crate) struct File {
    /// Relative to the root, with `/`.
    pub(crate) path: String,
    /// Its content.
    pub(crate) text: String,
    /// Its tokens, if it contains Rust.
    pub(crate) trees: Vec<Tree>,
}

impl Workspace {
    /// Reads the checkout at `root`.
    pub(crate) fn read(root: &Path) -> Result<Workspace> {
        let mut workspace =
            Workspace { root: root.to_owned(), files: Vec::new(), paths: BTreeSet::new() };
        workspace.read_directory("")?;
        workspace.files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(workspace)
    }

    fn read_directory(&mut self, directory: &str) -> Result<()> {
        let absolute = self.root.join(directory);
        let entries = fs::read_dir(&absolute).with_context(|| absolute.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            let kind = entry.file_type()?;
            let hidden = kind.is_dir() && path.starts_with('.') && !HIDDEN.contains(&path.as_str());
            if hidden || BUILT.contains(&path.as_str()) {
                continue;
            }
            self.paths.insert(path.clone());
            if UNREAD.contains(&path.as_str()) {
                continue;
            }
            if kind.is_dir() {
                self.read_directory(&path)?;
            } else if kind.is_file()
                && let Ok(text) = String::from_utf8(fs::read(entry.path())?)
            {
                self.files.push(File::new(path, text)?);
            }
        }
        Ok(())
    }

    /// A file by its path.
    pub(crate) fn file(&self, path: &str) -> Option<&File> {
        let at = self.files.binary_search_by(|file| file.path.as_str().cmp(path)).ok()?;
        self.files.get(at)
    }

    /// The files that contain Rust.
    pub(crate) fn rust(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.path.ends_with(".rs"))
    }

    /// Whether there is such a file or directory.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.paths.contains(path)
    }

    /// Writes a file.
    pub(crate) fn write(&self, path: &str, text: &str) -> Result<()> {
        fs::write(self.root.join(path), text).with_context(|| path.to_owned())
    }
}

impl File {
    fn new(path: String, text: String) -> Result<File> {
        let trees = if path.ends_with(".rs") {
            tree::parse(&text).with_context(|| path.clone())?
        } else {
            Vec::new()
        };
        Ok(File { path, text, trees })
    }

    /// The lines with their numbers, from 1.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// Its string literals.
    pub(crate) fn strings(&self) -> Strings {
        let mut strings = Vec::new();
        tree::walk(&self.trees, &mut |_, here| {
            if here[0].string().is_some() {
                strings.push(here[0].start..here[0].end);
            }
        });
        Strings(strings)
    }

    /// Whether the file is, or is below, one of these paths.
    pub(crate) fn is_below(&self, paths: &[&str]) -> bool {
        paths.iter().any(|path| {
            self.path
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }
}

/// The positions of strings.
pub(crate) struct Strings(Vec<Range<LineColumn>>);

impl Strings {
    /// Whether the character at this position is part of a string.
    pub(crate) fn cover(&self, line: usize, column: usize) -> bool {
        self.0.iter().any(|string| string.contains(&LineColumn { line, column }))
    }
}

#[cfg(test)]
impl Workspace {
    /// A workspace of these files, for tests of rules.
    pub(crate) fn of(files: &[(&str, &str)]) -> Workspace {
        let mut paths = BTreeSet::new();
        for (path, _) in files {
            paths.extend(path.match_indices('/').map(|(at, _)| path[..at].to_owned()));
            paths.insert((*path).to_owned());
        }
        let mut files: Vec<_> = files
            .iter()
            .map(|(path, text)| File::new((*path).to_owned(), (*text).to_owned()).unwrap())
            .collect();
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Workspace { root: PathBuf::new(), files, paths }
    }
}
