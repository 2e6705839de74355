//! A table for the terminal.

use std::fmt::Write;

use super::{HEADINGS, method, row};
use crate::results::Results;

pub(crate) fn table(results: &Results) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{}\n{}, {} cores, cipher {}, {} MB of memory; profile {}, {} UTC\n",
        results.postgres,
        results.machine.cpu,
        results.machine.cores,
        results.machine.cipher,
        results.machine.memory_mb,
        results.profile,
        results.taken
    );
    let rows: Vec<_> = results.cells.iter().flat_map(|cell| &cell.contenders).map(row).collect();
    let widths: Vec<usize> = (0..HEADINGS.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.chain([HEADINGS[column].chars().count()]).max().unwrap_or(0)
        })
        .collect();
    line(&mut text, HEADINGS, &widths);
    let mut rows = rows.iter();
    for cell in &results.cells {
        let _ = writeln!(text, "\n{} (per {})", cell.id, cell.unit);
        for row in rows.by_ref().take(cell.contenders.len()) {
            line(&mut text, row.each_ref().map(String::as_str), &widths);
        }
        for note in &cell.notes {
            let _ = writeln!(text, "  note: {note}");
        }
    }
    let _ = writeln!(text, "\n{}", method(std::slice::from_ref(results)));
    for note in &results.notes {
        let _ = writeln!(text, "Note: {note}");
    }
    text
}

fn line(text: &mut String, row: [&str; HEADINGS.len()], widths: &[usize]) {
    let mut out = String::from(" ");
    for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
        let _ = if column == 0 {
            write!(out, " {cell:<width$}")
        } else {
            write!(out, "  {cell:>width$}")
        };
    }
    let _ = writeln!(text, "{}", out.trim_end());
}

#[cfg(test)]
mod tests {
    use super::table;
    use crate::results::tests::example;

    #[test]
    fn the_table_shows_ratios_with_intervals_and_all_notes() {
        let mut results = example();
        results.cells[0].notes.push("not cold".into());
        let text = table(&results);
        for wanted in ["readonly/s10/c4", "0.900 [0.900, 0.900]", "1.200", "not cold", "a note"] {
            assert!(text.contains(wanted), "no {wanted} in:\n{text}");
        }
    }
}
