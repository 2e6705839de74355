//! The table in docs/compatibility.md.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::described::Described;

const BEGIN: &str = "<!-- made by tools/builds -->\n";
const END: &str = "<!-- end -->\n";
const HEAD: &str = "\
| build | PostgreSQL | C library | compiler | linking | result |
|---|---|---|---|---|---|
";

/// A tested build.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Line {
    major: u32,
    minor: u32,
    name: String,
    text: String,
}

impl Line {
    pub(crate) fn of(name: &str, described: &Described, result: &str) -> Line {
        let name = name.split('/').next().unwrap_or(name);
        let text = format!(
            "| {} | {} | {} | {} | {} | {result} |\n",
            name.replacen('-', " ", 1),
            described.version,
            described.c_library,
            compilers(&described.compilers),
            described.linking
        );
        Line::read(&text)
    }

    /// A line of the page.
    fn read(text: &str) -> Line {
        let mut columns = text.split('|').map(str::trim).skip(1);
        let name = columns.next().unwrap_or_default().to_owned();
        let mut numbers = columns.next().unwrap_or_default().split(|c: char| !c.is_ascii_digit());
        let mut number = || numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        Line { major: number(), minor: number(), name, text: text.to_owned() }
    }

    /// Whether both are of the same build. A package may contain several majors.
    fn is_of(&self, other: &Line) -> bool {
        (&self.name, self.major) == (&other.name, other.major)
    }
}

/// `GCC: (GNU) 10.2.1 20210130 (Red Hat 10.2.1-11)` and `GCC: (GNU) 4.8.5` as `GCC 10.2.1`: the
/// older one compiled the C library's start files, which are linked into every program.
fn compilers(named: &[String]) -> String {
    let mut newest: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for name in named {
        let kind = if name.starts_with("GCC") { "GCC" } else { "clang" };
        let is_version = |word: &&str| {
            word.starts_with(char::is_numeric) && word.contains('.') && !word.ends_with(')')
        };
        let version = name.split(' ').find(is_version).unwrap_or_default();
        let numbers: Vec<u32> = version.split('.').map_while(|n| n.parse().ok()).collect();
        let newest = newest.entry(kind).or_default();
        *newest = numbers.max(std::mem::take(newest));
    }
    let text = |(kind, numbers): (&str, Vec<u32>)| {
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        format!("{kind} {}", numbers.join("."))
    };
    let known: Vec<String> = newest.into_iter().map(text).collect();
    if known.is_empty() { "not named".to_owned() } else { known.join(", ") }
}

/// Writes the lines into the table, or looks for them in it.
pub(crate) fn keep(tested: &mut Vec<Line>) -> Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/compatibility.md");
    let text = fs::read_to_string(&page)?;
    let (before, rest) = text.split_once(BEGIN).context("docs/compatibility.md has no table")?;
    let (table, after) = rest.split_once(END).context("its table has no end")?;
    if std::env::var_os("PAGEVAULT_BLESS").is_some() {
        let kept = table.strip_prefix(HEAD).context("its table has another head")?;
        let mut lines: Vec<Line> =
            kept.lines().map(|line| Line::read(&format!("{line}\n"))).collect();
        lines.retain(|line| !tested.iter().any(|new| new.is_of(line)));
        lines.append(tested);
        lines.sort();
        let lines: String = lines.iter().map(|line| line.text.as_str()).collect();
        fs::write(&page, format!("{before}{BEGIN}{HEAD}{lines}{END}{after}"))?;
        return Ok(());
    }
    for Line { text, .. } in tested {
        ensure!(table.contains(text.as_str()), "docs/compatibility.md lacks this line:\n{text}");
    }
    Ok(())
}
