//! Rust as trees of tokens: without comments, with the position of each token, and easier to match
//! than those of `proc_macro2`.

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, LineColumn, TokenStream, TokenTree};

/// A token, or the content of brackets.
pub(crate) struct Tree {
    /// Position of its first character; columns count characters, from 0.
    pub(crate) start: LineColumn,
    /// Position after its last character.
    pub(crate) end: LineColumn,
    kind: Kind,
}

enum Kind {
    Ident(String),
    Punct(char),
    Literal(String),
    Group(char, Vec<Tree>),
}

/// The tokens of a file, without comments and doc comments.
pub(crate) fn parse(text: &str) -> Result<Vec<Tree>> {
    let stream: TokenStream =
        text.parse().map_err(|error: proc_macro2::LexError| anyhow!("not Rust: {error}"))?;
    let lines: Vec<&str> = text.lines().collect();
    Ok(convert(stream, &lines))
}

fn convert(stream: TokenStream, lines: &[&str]) -> Vec<Tree> {
    let mut trees = Vec::new();
    let mut tokens = stream.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let (start, end) = (token.span().start(), token.span().end());
        let kind = match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' && is_comment(lines, start) => {
                // `///` appears here as `#` and `[doc = ""]`; `//!` has a `!` between them.
                let inner = |next: &TokenTree| matches!(next, TokenTree::Punct(_));
                tokens.next_if(inner);
                tokens.next();
                continue;
            }
            TokenTree::Ident(name) => Kind::Ident(name.to_string()),
            TokenTree::Punct(mark) => Kind::Punct(mark.as_char()),
            TokenTree::Literal(literal) => Kind::Literal(literal.to_string()),
            TokenTree::Group(group) => {
                let bracket = match group.delimiter() {
                    Delimiter::Parenthesis => '(',
                    Delimiter::Brace => '{',
                    Delimiter::Bracket => '[',
                    Delimiter::None => ' ',
                };
                Kind::Group(bracket, convert(group.stream(), lines))
            }
        };
        trees.push(Tree { start, end, kind });
    }
    trees
}

fn is_comment(lines: &[&str], at: LineColumn) -> bool {
    lines.get(at.line - 1).is_some_and(|line| line.chars().nth(at.column) == Some('/'))
}

impl Tree {
    /// The line on which it starts.
    pub(crate) fn line(&self) -> usize {
        self.start.line
    }

    /// The name, if the token is one.
    pub(crate) fn ident(&self) -> Option<&str> {
        if let Kind::Ident(name) = &self.kind { Some(name) } else { None }
    }

    /// Whether the token is this name or keyword.
    pub(crate) fn is(&self, name: &str) -> bool {
        self.ident() == Some(name)
    }

    /// Whether the token is this punctuation mark.
    pub(crate) fn is_punct(&self, mark: char) -> bool {
        matches!(self.kind, Kind::Punct(found) if found == mark)
    }

    /// The content, if these are brackets of this kind.
    pub(crate) fn group(&self, bracket: char) -> Option<&[Tree]> {
        match &self.kind {
            Kind::Group(found, trees) if *found == bracket => Some(trees),
            _ => None,
        }
    }

    /// The text of a string literal as written, without its quotes.
    pub(crate) fn string(&self) -> Option<&str> {
        let Kind::Literal(text) = &self.kind else { return None };
        let text = text.trim_start_matches(['b', 'c', 'r']).trim_matches('#');
        text.strip_prefix('"')?.strip_suffix('"')
    }
}

/// Calls `visit` for each token, also within brackets, with the preceding token and the tokens from
/// this one on.
pub(crate) fn walk<'t>(trees: &'t [Tree], visit: &mut dyn FnMut(Option<&'t Tree>, &'t [Tree])) {
    for (at, tree) in trees.iter().enumerate() {
        visit(at.checked_sub(1).map(|before| &trees[before]), &trees[at..]);
        if let Kind::Group(_, inner) = &tree.kind {
            walk(inner, visit);
        }
    }
}

/// The tokens after `::`, if these begin with it.
pub(crate) fn after_colons(trees: &[Tree]) -> Option<&[Tree]> {
    match trees {
        [first, second, rest @ ..] if first.is_punct(':') && second.is_punct(':') => Some(rest),
        _ => None,
    }
}

/// The parts between commas.
pub(crate) fn split_at_commas(trees: &[Tree]) -> impl Iterator<Item = &[Tree]> {
    trees.split(|tree| tree.is_punct(',')).filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_left_out_and_lines_are_right() {
        let trees =
            parse("//! unsafe\n/// unsafe\nfn f() {\n    // unsafe\n    \"unsafe\"; g()\n}\n")
                .unwrap();
        let mut names = Vec::new();
        walk(&trees, &mut |_, here| {
            names.extend(here[0].ident().map(|name| (name.to_owned(), here[0].line())));
        });
        assert_eq!(names, [("fn".into(), 3), ("f".into(), 3), ("g".into(), 5)]);
    }

    #[test]
    fn strings_of_every_kind_have_their_text() {
        let trees = parse(r##" "a" r#"b"# c"d" b"e" 'f' 7 "##).unwrap();
        let texts: Vec<_> = trees.iter().map(Tree::string).collect();
        assert_eq!(texts, [Some("a"), Some("b"), Some("d"), Some("e"), None, None]);
    }
}
