//! Tools for this workspace.
//!
//! `cargo xtask tidy` checks the rules in CONTRIBUTING.md ("Tidy"). It prints each violation as
//! `path:line: rule: message`, and fails if there is any. Each rule is a module in `rules`.
//!
//! `cargo xtask book` prepares the documentation for mdBook; `tools/book` does the rest.

#![forbid(unsafe_code)]

mod book;
mod cfg;
mod exceptions;
mod rules;
mod tree;
mod workspace;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use rules::arrows;
use workspace::Workspace;

const USAGE: &str = "\
cargo xtask tidy            says where rules are broken
cargo xtask tidy --bless    writes xtask/exceptions.toml and xtask/arrows.toml by what there is now
cargo xtask tidy --arrows   shows which module uses which, and the cycles among them
cargo xtask book DIRECTORY  writes there what mdBook makes a website of";

#[expect(clippy::print_stdout, reason = "what it finds is its output")]
fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no workspace above xtask/")?;
    let workspace = Workspace::read(root)?;
    match arguments[..] {
        ["tidy"] => {
            let broken = broken(&workspace)?;
            for line in &broken {
                println!("{line}");
            }
            if !broken.is_empty() {
                eprintln!("tidy: {} places (CONTRIBUTING.md, \"Tidy\")", broken.len());
                return Ok(ExitCode::FAILURE);
            }
        }
        ["tidy", "--bless"] => bless(&workspace)?,
        ["book", into] => book::write(root, Path::new(into))?,
        ["tidy", "--arrows"] => print!("{}", arrows::show(&workspace)),
        _ => bail!("usage:\n{USAGE}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Each violation, as printed.
fn broken(workspace: &Workspace) -> Result<Vec<String>> {
    let found = exceptions::find(workspace)?;
    let mut judged = exceptions::judge(workspace, found)?;
    judged.extend(arrows::check(workspace)?.into_iter().map(|finding| ("arrows", finding)));
    judged.sort_by(|(_, one), (_, other)| (&one.path, one.line).cmp(&(&other.path, other.line)));
    let shown = judged.iter().map(|(rule, finding)| {
        format!("{}:{}: {rule}: {}", finding.path, finding.line, finding.message)
    });
    Ok(shown.collect())
}

/// Writes both lists, and reports what got worse.
fn bless(workspace: &Workspace) -> Result<()> {
    let (list, raised) = exceptions::bless(workspace, &exceptions::find(workspace)?)?;
    for line in raised {
        eprintln!("more than before: {line}");
    }
    workspace.write(rules::EXCEPTIONS, &list)?;
    workspace.write(arrows::PATH, &arrows::bless(workspace)?)
}
