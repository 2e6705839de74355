//! Finds the arrows of one crate: paths in its sources that begin with `crate` or `super`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Arrows, ROOT};
use crate::cfg::condition_at;
use crate::tree::{Tree, after_colons, split_at_commas};
use crate::workspace::{File, Workspace};

/// The arrows between the top-level modules of the crate in this directory. Uses in tests do not
/// count.
pub(super) fn arrows(workspace: &Workspace, directory: &str) -> Arrows {
    let sources = format!("{directory}/src/");
    let has_library = workspace.file(&format!("{sources}lib.rs")).is_some();
    let mut files: Vec<(Vec<&str>, &File)> = Vec::new();
    for file in workspace.rust() {
        let Some(path) = file.path.strip_prefix(&sources) else { continue };
        // A program next to a library is a separate crate, which uses the library by name.
        if path != "main.rs" || !has_library {
            files.push((module_of(path), file));
        }
    }
    let mut krate = Crate::default();
    for (module, file) in &files {
        krate.declare(module, &file.trees);
    }
    let mut arrows = Arrows::new();
    for (module, file) in &files {
        if !krate.is_test(module) {
            krate.find(&file.trees, module, &mut |from, to, line| {
                let place = (file.path.clone(), line);
                arrows.entry((from.to_owned(), to.to_owned())).or_default().push(place);
            });
        }
    }
    arrows
}

/// The module path of a file below src/.
fn module_of(path: &str) -> Vec<&str> {
    let path = path.trim_end_matches(".rs");
    let mut module: Vec<&str> = path.split('/').collect();
    if module.len() > 1 && module.last() == Some(&"mod") || matches!(path, "lib" | "main") {
        module.pop();
    }
    module
}

/// Declarations of a crate.
#[derive(Default)]
struct Crate {
    /// Top-level modules.
    top: BTreeSet<String>,
    /// Modules that exist only for tests.
    tests: BTreeSet<Vec<String>>,
    /// Names that the root re-exports from a module: `pub use module::Name`.
    exports: BTreeMap<String, String>,
}

impl Crate {
    /// Records the modules that this one declares, and what the root re-exports.
    fn declare(&mut self, module: &[&str], trees: &[Tree]) {
        for item in items(trees) {
            let (public, item_without) = without_visibility(item.trees);
            match item_without {
                [word, name, ..] if word.is("mod") => {
                    let Some(name) = name.ident() else { continue };
                    if item.test_only {
                        let path = module.iter().chain([&name]).map(|&part| part.to_owned());
                        self.tests.insert(path.collect());
                    } else if module.is_empty() {
                        self.top.insert(name.to_owned());
                    }
                }
                [word, name, rest @ ..] if word.is("use") && public && module.is_empty() => {
                    let Some(from) = name.ident() else { continue };
                    for export in last_names(rest) {
                        self.exports.insert(export.to_owned(), from.to_owned());
                    }
                }
                _ => {}
            }
        }
    }

    fn is_test(&self, module: &[&str]) -> bool {
        let module: Vec<String> = module.iter().map(|&part| part.to_owned()).collect();
        (1..=module.len()).any(|length| self.tests.contains(&module[..length]))
    }

    /// Calls `found` with each arrow from `module`, which contains these tokens, to another
    /// top-level module.
    fn find(&self, trees: &[Tree], module: &[&str], found: &mut dyn FnMut(&str, &str, usize)) {
        for item in items(trees).filter(|item| !item.test_only) {
            let (public, plain) = without_visibility(item.trees);
            let is_use = plain.first().is_some_and(|word| word.is("use"));
            if module.is_empty() && public && is_use {
                continue; // what uses the name has the arrow
            }
            self.find_in(item.trees, module, found);
        }
    }

    fn find_in(&self, trees: &[Tree], module: &[&str], found: &mut dyn FnMut(&str, &str, usize)) {
        for (at, tree) in trees.iter().enumerate() {
            let rest = &trees[at + 1..];
            if let Some(inner) = ['(', '[', ' '].into_iter().find_map(|bracket| tree.group(bracket))
            {
                self.find_in(inner, module, found);
            } else if let Some(inner) = tree.group('{') {
                match &trees[..at] {
                    [.., word, name] if word.is("mod") && name.ident().is_some() => {
                        let name = name.ident().unwrap_or_default();
                        self.find(inner, &[module, &[name]].concat(), found);
                    }
                    _ => self.find(inner, module, found),
                }
            } else {
                let continues = at > 0 && trees[at - 1].is_punct(':');
                for name in self.targets(tree, rest, module, continues) {
                    let to = self.module_with(name);
                    let from = module.first().copied().unwrap_or(ROOT);
                    if from != to {
                        found(from, to, tree.line());
                    }
                }
            }
        }
    }

    /// The names at the crate's root that the path beginning with this token refers to.
    fn targets<'t>(
        &self,
        tree: &'t Tree,
        rest: &'t [Tree],
        module: &[&str],
        continues: bool,
    ) -> Vec<&'t str> {
        let Some(mut rest) = after_colons(rest) else { return Vec::new() };
        if continues {
            return Vec::new();
        }
        let mut up = 0;
        if tree.is("super") {
            up = 1;
            while let [next, more @ ..] = rest
                && next.is("super")
                && let Some(more) = after_colons(more)
            {
                up += 1;
                rest = more;
            }
        }
        if tree.is("crate") || up > 0 && up == module.len() {
            first_names(rest)
        } else if module.is_empty() && tree.ident().is_some_and(|name| self.top.contains(name)) {
            tree.ident().into_iter().collect()
        } else {
            Vec::new()
        }
    }

    /// The top-level module that defines this name of the root.
    fn module_with<'a>(&'a self, name: &'a str) -> &'a str {
        if self.top.contains(name) {
            name
        } else {
            self.exports.get(name).map_or(ROOT, String::as_str)
        }
    }
}

/// Tokens up to `;` or a block: an item, a statement, or a part of one.
struct Item<'t> {
    /// The tokens without attributes.
    trees: &'t [Tree],
    /// Whether an attribute limits it to tests.
    test_only: bool,
}

/// Splits tokens into items.
fn items(trees: &[Tree]) -> impl Iterator<Item = Item<'_>> {
    let mut rest = trees;
    std::iter::from_fn(move || {
        let mut test_only = false;
        while let Some((attribute, after)) = attribute(rest) {
            test_only |= condition_at(attribute)
                .is_some_and(|condition| attribute[0].is("cfg") && condition.is_test_only());
            rest = after;
        }
        if rest.is_empty() {
            return None;
        }
        // In `use a::{b, c};` the block does not end the item.
        let (_, plain) = without_visibility(rest);
        let is_use = plain.first().is_some_and(|word| word.is("use"));
        let ends = |tree: &Tree| tree.is_punct(';') || !is_use && tree.group('{').is_some();
        let end = rest.iter().position(ends).map_or(rest.len(), |at| at + 1);
        let trees;
        (trees, rest) = rest.split_at(end);
        Some(Item { trees, test_only })
    })
}

/// The content of the attribute that begins here, and the tokens after it.
fn attribute(trees: &[Tree]) -> Option<(&[Tree], &[Tree])> {
    match trees {
        [hash, mark, inside, rest @ ..] if hash.is_punct('#') && mark.is_punct('!') => {
            Some((inside.group('[')?, rest))
        }
        [hash, inside, rest @ ..] if hash.is_punct('#') => Some((inside.group('[')?, rest)),
        _ => None,
    }
}

/// Whether an item is visible outside its module, and the item without its visibility.
fn without_visibility(trees: &[Tree]) -> (bool, &[Tree]) {
    match trees {
        [word, scope, rest @ ..] if word.is("pub") && scope.group('(').is_some() => (true, rest),
        [word, rest @ ..] if word.is("pub") => (true, rest),
        trees => (false, trees),
    }
}

/// The first names of the paths `a::b` or `{a::b, c}`. `*` and `self` stand for the root itself.
fn first_names(path: &[Tree]) -> Vec<&str> {
    let Some(first) = path.first() else { return Vec::new() };
    match first.group('{') {
        Some(inner) => split_at_commas(inner).flat_map(first_names).collect(),
        None => vec![first.ident().unwrap_or(ROOT)],
    }
}

/// The names that a `use` introduces: for `::a::{b, c as d};` b and d.
fn last_names(path: &[Tree]) -> Vec<&str> {
    let path = match path {
        [path @ .., end] if end.is_punct(';') => path,
        path => path,
    };
    match path.last() {
        Some(last) if last.group('{').is_some() => {
            last.group('{').into_iter().flat_map(split_at_commas).flat_map(last_names).collect()
        }
        Some(last) => last.ident().into_iter().collect(),
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let arrows = arrows(&Workspace::of(files), "x");
        let one = |((from, to), places): (&(String, String), &Vec<(String, usize)>)| {
            let lines: Vec<_> = places.iter().map(|(_, line)| line.to_string()).collect();
            format!("{from} -> {to}: {}", lines.join(" "))
        };
        arrows.iter().map(one).collect()
    }

    const LIB: (&str, &str) = (
        "x/src/lib.rs",
        "#![no_std] mod a; mod b; pub mod c;\npub use c::{Thing, other as Other};\nconst LIMIT: u8 = 1;\nfn f() { b::g() }\n#[cfg(test)] mod t;\n",
    );

    #[test]
    fn paths_of_every_form_are_arrows() {
        let source = "use crate::{b::{self, c}, c};\nfn f() { super::b::g(crate::c::h); m!(crate::b); }\npub(in crate::a) use super::super::x;\n";
        let files = [LIB, ("x/src/a.rs", source), ("x/src/b/mod.rs", ""), ("x/src/c.rs", "")];
        assert_eq!(found(&files), ["a -> b: 1 2 2", "a -> c: 1 2", "crate -> b: 4"]);
        let files = [LIB, ("x/src/a.rs", "m!(crate::b::f());\n")];
        assert_eq!(found(&files), ["a -> b: 1", "crate -> b: 4"]);
    }

    #[test]
    fn super_is_relative_to_its_module() {
        let files = [
            LIB,
            ("x/src/a/mod.rs", "use super::b;\nmod inner { use super::b; use super::super::c; }\n"),
            ("x/src/a/deep.rs", "use super::b;\nuse super::super::{b, c};\n"),
        ];
        assert_eq!(found(&files), ["a -> b: 2 1", "a -> c: 2 2", "crate -> b: 4"]);
    }

    #[test]
    fn a_name_of_the_root_belongs_to_the_module_that_defines_it() {
        let files = [LIB, ("x/src/b.rs", "use crate::{Other, Thing};\nuse crate::LIMIT;\n")];
        assert_eq!(found(&files), ["b -> c: 1 1", "b -> crate: 2", "crate -> b: 4"]);
    }

    #[test]
    fn uses_in_tests_are_no_arrows() {
        let files = [
            LIB,
            ("x/src/t.rs", "use crate::a;\n"),
            ("x/src/t/deep.rs", "use crate::a;\n"),
            (
                "x/src/c.rs",
                "#[cfg(test)]\nmod tests { use crate::a; }\n#[cfg(test)] use crate::{a::x, b::y};\nfn f() {}\nuse crate::a::z;\n",
            ),
            ("x/src/main.rs", "mod a; fn main() { a::f() }\n"),
        ];
        assert_eq!(found(&files), ["c -> a: 5", "crate -> b: 4"]);
    }
}
