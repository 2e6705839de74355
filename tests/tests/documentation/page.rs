//! A page of documentation as a test.
//!
//! Fenced blocks are run, depending on their language:
//!
//! | block | action |
//! |---|---|
//! | `sql` | run by psql, as superuser |
//! | `sh` | run by a shell, as the server user; variables and functions stay until the page ends |
//! | `conf` | added to postgresql.conf; the server restarts |
//! | `console` | compared with the output of the previous block; `...` matches anything |
//! | `json` | parsed as JSON |
//!
//! Any other block, and any of these that cannot be run, has a comment before it with the reason:
//! `<!-- not run: REASON -->`. Readers do not see comments, so they also contain directions for the
//! test only:
//!
//! | comment | effect |
//! |---|---|
//! | `<!-- test: sql`, newline, statements `-->`; also `sh`, `conf` | runs them |
//! | `<!-- test: fails with TEXT -->` | the next block must fail, with TEXT in its output |
//! | `<!-- test: starts with STATE -->` | server: `nothing`, `extension`, `keys` (default) |
//! | `<!-- test: needs SERVER -->` | a key server: `vault`, `kms`, `token`, `kmip` |
//! | `<!-- test: reads A as B -->` | replaces A by B in the page's blocks |

use std::path::Path;

use pagevault_tests::key_servers::Server;
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// How a block is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Sql,
    Sh,
    Conf,
}

/// The server at the beginning of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// A stock server.
    Nothing,
    /// pagevault is loaded, and the extension is created.
    Extension,
    /// In addition, the key file `/etc/pagevault/keys` with the key `main`, as provider `local` of
    /// the cluster.
    Keys,
}

/// One block to be run.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) line: usize,
    pub(crate) language: Language,
    pub(crate) text: String,
    pub(crate) fails_with: Option<String>,
    pub(crate) prints: Option<String>,
}

/// One page.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) name: String,
    pub(crate) start: Start,
    pub(crate) needs: Vec<Server>,
    pub(crate) read_as: Vec<(String, String)>,
    pub(crate) blocks: Vec<Block>,
    /// Errors in the page itself, with their lines.
    pub(crate) problems: Vec<String>,
}

#[derive(Default)]
struct Pending {
    not_run: bool,
    fails_with: Option<String>,
}

impl Page {
    /// Reads the page at `path`, whose text is `text`.
    pub(crate) fn parse(path: &Path, text: &str) -> Page {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().replace('-', "_");
        let mut page = Page {
            name: name.to_lowercase(),
            start: Start::Keys,
            needs: Vec::new(),
            read_as: Vec::new(),
            blocks: Vec::new(),
            problems: Vec::new(),
        };
        let mut pending = Pending::default();
        let mut events = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
        while let Some((event, range)) = events.next() {
            let line = text[..range.start].matches('\n').count() + 1;
            match event {
                Event::Start(Tag::CodeBlock(kind)) => {
                    let mut content = String::new();
                    for (event, _) in events.by_ref() {
                        match event {
                            Event::Text(part) => content.push_str(&part),
                            Event::End(TagEnd::CodeBlock) => break,
                            _ => {}
                        }
                    }
                    let language = match &kind {
                        CodeBlockKind::Fenced(info) => info.split_whitespace().next(),
                        CodeBlockKind::Indented => None,
                    };
                    page.code(line, language, content, std::mem::take(&mut pending));
                }
                Event::Start(Tag::HtmlBlock) => {
                    let mut content = String::new();
                    for (event, _) in events.by_ref() {
                        match event {
                            Event::Html(part) => content.push_str(&part),
                            Event::End(TagEnd::HtmlBlock) => break,
                            _ => {}
                        }
                    }
                    page.comments(line, &content, &mut pending);
                }
                _ => {}
            }
        }
        page
    }

    fn code(&mut self, line: usize, language: Option<&str>, text: String, pending: Pending) {
        if pending.not_run {
            return;
        }
        let language = match language {
            Some("sql") => Language::Sql,
            Some("sh") => Language::Sh,
            Some("conf") => Language::Conf,
            Some("console") => {
                match self.blocks.last_mut() {
                    Some(block) if block.prints.is_none() => block.prints = Some(text),
                    _ => self.problems.push(format!("line {line}: no block printed this")),
                }
                return;
            }
            Some("json") => {
                if let Err(error) = serde_json::from_str::<serde_json::Value>(&text) {
                    self.problems.push(format!("line {line}: {error}"));
                }
                return;
            }
            _ => {
                let problem = "neither run nor `<!-- not run: REASON -->`";
                self.problems.push(format!("line {line}: {problem}:\n{text}"));
                return;
            }
        };
        let fails_with = pending.fails_with;
        self.blocks.push(Block { line, language, text, fails_with, prints: None });
    }

    fn comments(&mut self, line: usize, html: &str, pending: &mut Pending) {
        for comment in html.split("<!--").skip(1).filter_map(|rest| rest.split("-->").next()) {
            let comment = comment.trim();
            if let Some(reason) = comment.strip_prefix("not run:") {
                pending.not_run = true;
                if reason.trim().is_empty() {
                    self.problems.push(format!("line {line}: no reason"));
                }
            } else if let Some(direction) = comment.strip_prefix("test:")
                && self.direct(line, direction.trim(), pending).is_none()
            {
                self.problems.push(format!("line {line}: not understood: {comment}"));
            }
        }
    }

    /// Executes the direction in a comment; `None` if it is unknown.
    fn direct(&mut self, line: usize, direction: &str, pending: &mut Pending) -> Option<()> {
        let (word, rest) = direction.split_once(char::is_whitespace)?;
        let language = match word {
            "fails" => {
                pending.fails_with = Some(rest.strip_prefix("with ")?.to_owned());
                return Some(());
            }
            "starts" => {
                self.start = match rest.strip_prefix("with ")? {
                    "nothing" => Start::Nothing,
                    "extension" => Start::Extension,
                    "keys" => Start::Keys,
                    _ => return None,
                };
                return Some(());
            }
            "needs" => {
                self.needs.extend(match rest {
                    "vault" => vec![Server::Vault],
                    "kms" => vec![Server::Moto, Server::AwsCli],
                    "token" => vec![Server::SoftHsm],
                    "kmip" => vec![Server::PyKmip],
                    _ => return None,
                });
                return Some(());
            }
            "reads" => {
                let (name, meaning) = rest.split_once(" as ")?;
                self.read_as.push((name.to_owned(), meaning.to_owned()));
                return Some(());
            }
            "sql" => Language::Sql,
            "sh" => Language::Sh,
            "conf" => Language::Conf,
            _ => return None,
        };
        let text = rest.to_owned();
        let fails_with = pending.fails_with.take();
        self.blocks.push(Block { line, language, text, fails_with, prints: None });
        Some(())
    }
}
