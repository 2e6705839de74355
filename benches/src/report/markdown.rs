//! Tables for a document.

use std::fmt::Write;

use super::{HEADINGS, method, row};
use crate::results::Results;

pub(crate) fn report(all: &[Results]) -> String {
    let mut text = String::from("# pagevault: what encryption costs\n\n");
    let _ = writeln!(text, "{}\n", method(all));
    for results in all {
        let machine = &results.machine;
        let _ =
            writeln!(text, "## {}\n", results.postgres.split(" on ").next().unwrap_or_default());
        let _ = writeln!(
            text,
            "{}, {} cores, cipher {}, {} MB of memory, Linux {}; profile {}, {} UTC; pagevault-bench {}.\n",
            machine.cpu,
            machine.cores,
            machine.cipher,
            machine.memory_mb,
            machine.kernel,
            results.profile,
            results.taken,
            results.program
        );
        for note in &results.notes {
            let _ = writeln!(text, "- {note}");
        }
        for cell in &results.cells {
            let _ = writeln!(text, "\n### {}\n\nPer {}.\n", cell.id, cell.unit);
            let _ = writeln!(text, "| {} |", HEADINGS.join(" | "));
            let _ = writeln!(text, "|---|{}", "---:|".repeat(HEADINGS.len() - 1));
            for contender in &cell.contenders {
                let _ = writeln!(text, "| {} |", row(contender).join(" | "));
            }
            for note in &cell.notes {
                let _ = writeln!(text, "\n{note}.");
            }
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::report;
    use crate::results::tests::example;

    #[test]
    fn every_row_has_as_many_columns_as_the_heading() {
        let text = report(&[example()]);
        let columns: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with('|'))
            .map(|line| line.matches('|').count())
            .collect();
        assert_eq!(columns.len(), 4, "{text}");
        assert!(columns.iter().all(|columns| *columns == columns_of_first(&text)), "{text}");
    }

    fn columns_of_first(text: &str) -> usize {
        text.lines().find(|line| line.starts_with('|')).map_or(0, |line| line.matches('|').count())
    }
}
