//! Messages quoted in the pages exist in the code, so that readers can search for them; errors in
//! the golden files of the cluster tests are in the pages.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::reference::golden_errors;

/// Messages of PostgreSQL and other programs, and texts that are not messages.
const NOT_OURS: &[&str] = &[
    "invalid page in block ... of relation ...",
    "resource manager with ID 161 not registered",
    "could not access file \"pagevault\"",
    "\"...\" is not a table",
    "permission denied for relation ...",
    "permission denied for function ...",
    "permission denied for view ...",
    "must be owner of ...",
    "invalid configuration parameter name \"pagevault....\"",
    "invalid value for parameter \"pagevault....\"",
    "canceling statement due to ...",
    "could not fsync file \"pagevault/...\": ...",
    "could not create temporary file \"...\": Operation not supported",
    "ERRORDATA_STACK_SIZE exceeded",
    "could not open file \"pg_replslot/...\": Operation not supported",
    "Could not open file \"pg_notify/...\": Operation not supported",
];

/// Messages composed of pieces that are not next to each other in the code.
const COMPOSED: &[&str] = &[
    "no WAL key of version ... for the WAL page at ...",
    "wrong WAL key of version ... for the WAL page at ...",
    "cannot encrypt the WAL page at ...: the key of the cluster is locked",
    "cannot open the WAL page at ...: the key of the cluster is locked",
    "there is no room for more rekey jobs",
    "reply from ... is not a Cloud KMS reply",
    "reply from ... is not a Key Vault reply",
];

/// In these pages the first column of a table contains messages.
const PAGES: &[&str] = &[
    "troubleshooting.md",
    "aws-kms.md",
    "azure-key-vault.md",
    "gcp-kms.md",
    "vault.md",
    "escrow.md",
];

/// Every message in a table under a heading about errors occurs in the code, except for omitted
/// parts.
pub(crate) fn are_in_the_code() -> Result<()> {
    let mut code = String::new();
    for folder in
        ["extension/src", "keyring/src", "keystore/src", "interpose/src", "cipher/src", "sql"]
    {
        read(&crate::root().join(folder), &mut code)?;
    }
    let code = normal(&code);
    let mut compared = 0;
    let mut strange = Vec::new();
    for page in PAGES {
        let text = fs::read_to_string(crate::root().join("docs").join(page))?;
        for message in messages(&text) {
            if [NOT_OURS, COMPOSED].concat().contains(&message.as_str()) {
                continue;
            }
            compared += 1;
            let pieces = message.split("...").flat_map(|piece| piece.split(['"', '`']));
            let lacking = pieces
                .map(normal)
                .map(|piece| piece.trim_matches(|c: char| " :;,".contains(c)).to_owned())
                .filter(|piece| piece.chars().filter(|c| c.is_alphabetic()).count() > 2)
                .find(|piece| !code.contains(piece.as_str()));
            if let Some(lacking) = lacking {
                strange.push(format!("{page}: {message}   ({lacking})"));
            }
        }
    }
    let quoted: Vec<String> = PAGES
        .iter()
        .map(|page| fs::read_to_string(crate::root().join("docs").join(page)))
        .collect::<Result<Vec<_>, _>>()?
        .iter()
        .flat_map(|text| messages(text))
        .collect();
    for (_, message) in golden_errors()? {
        if !quoted.iter().any(|quoted| matches(quoted, &message)) {
            strange.push(format!("not in the pages: {message}"));
        }
    }
    ensure!(compared > 80, "only {compared} messages were compared");
    ensure!(
        strange.is_empty(),
        "messages that are not in the code, or not in the pages:\n{}",
        strange.join("\n")
    );
    Ok(())
}

/// Whether `message` contains all parts of `quoted` around its omissions, in this order.
fn matches(quoted: &str, message: &str) -> bool {
    let plain = |text: &str| text.replace(['"', '`'], "");
    let message = plain(message);
    let mut rest = message.as_str();
    quoted.split("...").all(|piece| {
        let piece = plain(piece);
        let piece = piece.trim();
        rest.find(piece).is_some_and(|at| {
            rest = &rest[at + piece.len()..];
            true
        })
    })
}

/// Code in the first column of tables whose heading begins with "message" or "in the log".
fn messages(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut wanted, mut in_head, mut column) = (false, false, 0);
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::TableHead) => (in_head, wanted, column) = (true, false, 0),
            Event::End(TagEnd::TableHead) => in_head = false,
            Event::Start(Tag::TableRow) => column = 0,
            Event::End(TagEnd::TableCell) => column += 1,
            Event::Text(head) if in_head && column == 0 => {
                wanted = ["message", "in the log"].contains(&&*head);
            }
            Event::Code(message) if wanted && !in_head && column == 0 => {
                found.push(message.into_string());
            }
            _ => {}
        }
    }
    found
}

fn read(folder: &Path, code: &mut String) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            read(&path, code)?;
        } else {
            code.push_str(&fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Replaces each gap by one space, and removes quotes, escapes and line continuations.
fn normal(text: &str) -> String {
    let text = text.replace("\\\n", "\n").replace("\\\"", "\"");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
