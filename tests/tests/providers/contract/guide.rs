//! The contract in docs/testing.md is that of the code, and covers every kind of provider.

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::installation::run;

use super::subjects::all;
use super::{Group, Point};
use crate::Test;

pub(super) const TESTS: [Test; 3] = [
    Test { name: "contract::every_kind_of_provider_keeps_it", needs: &[], run: every_kind },
    Test { name: "contract::the_guide_says_what_it_is", needs: &[], run: guide },
    Test { name: "contract::each_page_says_what_it_was_tried_against", needs: &[], run: pages },
];

fn kinds() -> Result<Vec<String>> {
    let output = run(Installation::get()?.command("pagevault-keyring").arg("providers"))?;
    let names = output.lines().filter_map(|line| line.split(' ').next());
    let kinds: Vec<String> = names.map(str::to_owned).collect();
    ensure!(kinds.len() > 7, "{output}");
    Ok(kinds)
}

fn pages() -> Result<()> {
    for kind in kinds()? {
        let page = match kind.as_str() {
            "file" | "command" => format!("{kind}-provider"),
            kind => kind.replace('_', "-"),
        };
        let path = format!("{}/../docs/{page}.md", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let (_, section) = text.split_once("\n## Tried against\n\n").context(path.clone())?;
        ensure!(section.starts_with("tried against:"), "{path}: {section}");
        // What no test has used is said, too, except where there is nothing that could differ.
        ensure!(kind == "file" || section.contains("Not tried"), "{path}: {section}");
    }
    Ok(())
}

fn every_kind() -> Result<()> {
    for kind in kinds()? {
        ensure!(all().iter().any(|row| row.name == kind), "{kind} does not keep the contract");
    }
    let groups = [Group::Keys, Group::Versions, Group::States, Group::Outages, Group::Moved];
    let verified: Vec<Point> = groups.iter().flat_map(|group| group.points()).copied().collect();
    for point in Point::ALL {
        ensure!(verified.contains(&point), "{point:?} is verified nowhere");
    }
    for row in all() {
        for (point, reason) in row.lacks {
            ensure!(Point::ALL.contains(point) && reason.len() > 10, "{}: {point:?}", row.name);
        }
    }
    Ok(())
}

fn guide() -> Result<()> {
    let guide = include_str!("../../../../docs/testing.md");
    let mut text = String::from("| point | promise |\n|---|---|\n");
    for point in Point::ALL {
        let (name, promise) = point.promise();
        text += &format!("| {name} | {promise} |\n");
    }
    let mut lacks = String::from("| without | point | because |\n|---|---|---|\n");
    for row in all() {
        for (point, reason) in row.lacks {
            lacks += &format!("| `{}` | {} | {reason} |\n", row.name, point.promise().0);
        }
    }
    for table in [text, lacks] {
        let section = guide.split("\n## The contract of providers\n").nth(1);
        let section = section.context("docs/testing.md has no section of the contract")?;
        ensure!(section.contains(&table), "docs/testing.md should have this table:\n{table}");
    }
    Ok(())
}
