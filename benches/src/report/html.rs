//! One self-contained page: plots, tables, and an explanation of the figures.

use std::fmt::Write;

use anyhow::Result;

use super::plots::{Plot, Series, colour};
use super::{HEADINGS, method, row};
use crate::results::{Cell, Contender, Results};

const STYLE: &str = include_str!("style.css");

pub(crate) fn report(all: &[Results]) -> Result<String> {
    let mut page =
        String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    let _ = write!(page, "<title>pagevault: what encryption costs</title><style>{STYLE}</style>");
    page.push_str("</head><body><main><h1>What encryption costs</h1>");
    for results in all {
        head(&mut page, results);
    }
    legend(&mut page, all);
    page.push_str("<section class=\"plots\">");
    for plot in plots(all) {
        if let Some(svg) = plot.svg()? {
            let _ = write!(
                page,
                "<figure><figcaption>{}</figcaption>{svg}</figure>",
                escaped(&plot.title)
            );
        }
    }
    page.push_str("</section>");
    let _ = write!(page, "<p class=\"method\">{}</p>", escaped(&method(all)));
    for results in all {
        let several = if all.len() > 1 { short(results) } else { "Cells".into() };
        let _ = write!(page, "<h2>{}</h2>", escaped(&several));
        for cell in &results.cells {
            table(&mut page, cell);
        }
    }
    page.push_str("</main></body></html>\n");
    Ok(page)
}

/// Escapes text for HTML content and attributes.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn short(results: &Results) -> String {
    let version = results.postgres.split([' ', '(']).nth(1).unwrap_or(&results.postgres);
    format!("PostgreSQL {version}, {}", results.taken)
}

fn head(page: &mut String, results: &Results) {
    let machine = &results.machine;
    let _ = write!(
        page,
        "<p class=\"machine\"><strong>{}</strong><br>{}, {} cores, cipher {}, {} MB of memory, Linux {}; profile {}; \
         {} UTC; pagevault-bench {}</p>",
        escaped(results.postgres.split(" on ").next().unwrap_or_default()),
        escaped(&machine.cpu),
        machine.cores,
        escaped(&machine.cipher),
        machine.memory_mb,
        escaped(&machine.kernel),
        escaped(&results.profile),
        escaped(&results.taken),
        escaped(&results.program)
    );
    if !results.notes.is_empty() {
        page.push_str("<ul class=\"notes\">");
        for note in &results.notes {
            let _ = write!(page, "<li>{}</li>", escaped(note));
        }
        page.push_str("</ul>");
    }
}

/// Names of the contenders in cells with the usual contenders, in order.
fn names(all: &[Results]) -> Vec<String> {
    let mut names = Vec::new();
    for contender in cells(all).flat_map(|cell| &cell.contenders) {
        if colour(&contender.name) < 4 && !names.contains(&contender.name) {
            names.push(contender.name.clone());
        }
    }
    names
}

fn cells(all: &[Results]) -> impl Iterator<Item = &Cell> + Clone {
    all.iter().flat_map(|results| &results.cells)
}

fn legend(page: &mut String, all: &[Results]) {
    page.push_str("<p class=\"legend\">");
    for name in names(all) {
        let what = match name.as_str() {
            "stock" => "stock: without the library",
            "loaded" => "loaded: nothing encrypted",
            "relations" => "relations: tables and indexes encrypted",
            "everything" => "everything: relations, WAL, temporary data",
            other => other,
        };
        let _ = write!(
            page,
            "<span><i style=\"background:var(--series-{})\"></i>{}</span>",
            colour(&name),
            escaped(what)
        );
    }
    page.push_str("</p>");
}

fn table(page: &mut String, cell: &Cell) {
    let _ = write!(page, "<h3>{}</h3><p class=\"parameters\">per {}", escaped(&cell.id), cell.unit);
    for (name, value) in &cell.parameters {
        let _ = write!(page, " · {} {}", escaped(&name.replace('_', " ")), escaped(value));
    }
    page.push_str("</p><div class=\"scroll\"><table><thead><tr>");
    for heading in HEADINGS {
        let _ = write!(page, "<th>{heading}</th>");
    }
    page.push_str("</tr></thead><tbody>");
    for contender in &cell.contenders {
        page.push_str("<tr>");
        for (column, value) in row(contender).iter().enumerate() {
            if column == 0 {
                let _ = write!(
                    page,
                    "<th><i style=\"background:var(--series-{})\"></i>{}</th>",
                    colour(value),
                    escaped(value)
                );
            } else {
                let _ = write!(page, "<td>{}</td>", escaped(value));
            }
        }
        page.push_str("</tr>");
    }
    page.push_str("</tbody></table></div>");
    for note in &cell.notes {
        let _ = write!(page, "<p class=\"note\">{}</p>", escaped(note));
    }
}

/// The difference from a ratio of 1, in percent.
fn percent(contender: &Contender, figure: &str) -> Option<f64> {
    contender.ratio(figure).map(|estimate| (estimate.ratio - 1.0) * 100.0)
}

/// One series for each contender, from the cells for which `point` returns a value.
fn series<'a>(
    cells: impl Iterator<Item = &'a Cell> + Clone,
    names: &[String],
    line: bool,
    point: impl Fn(&Cell, &Contender) -> Option<(f64, f64)>,
) -> Vec<Series> {
    names
        .iter()
        .map(|name| {
            let points = cells
                .clone()
                .filter_map(|cell| {
                    let contender = cell.contenders.iter().find(|one| one.name == *name)?;
                    point(cell, contender)
                })
                .collect();
            Series { name: name.clone(), points, line }
        })
        .collect()
}

fn plots(all: &[Results]) -> Vec<Plot> {
    let names = names(all);
    let others = names.get(1..).unwrap_or_default();
    let pgbench = || cells(all).filter(|cell| cell.parameters.contains_key("stratum"));
    let mut plots = Vec::new();
    for (figure, title, y) in [
        (
            "cpu_us",
            "Processor time added, by hit ratio of shared buffers",
            "CPU per transaction, %",
        ),
        (
            "rate",
            "Throughput gained or lost, by hit ratio of shared buffers",
            "transactions per second, %",
        ),
    ] {
        plots.push(Plot {
            title: title.into(),
            x: "hit ratio",
            y,
            log_x: false,
            around_zero: true,
            series: series(pgbench(), others, false, |_, contender| {
                Some((contender.figure("hit_ratio")?, percent(contender, figure)?))
            }),
        });
    }
    for results in all {
        by_clients(&mut plots, results, &names, all.len() > 1);
    }
    if all.iter().any(|results| results.major != all[0].major) {
        plots.push(by_version(all, others));
    }
    plots
}

/// Rate, and cost, of cells that differ only in the number of clients.
fn by_clients(plots: &mut Vec<Plot>, results: &Results, names: &[String], several: bool) {
    let one = std::slice::from_ref(results);
    let of = if several { format!("PostgreSQL {}: ", results.major) } else { String::new() };
    for group in groups(one) {
        let curve = || cells(one).filter(|cell| group_of(cell).as_deref() == Some(&group));
        let clients = |cell: &Cell| cell.parameter("clients")?.parse::<f64>().ok();
        plots.push(Plot {
            title: format!("{of}{group}: rate by clients"),
            x: "clients",
            y: "per second",
            log_x: true,
            around_zero: false,
            series: series(curve(), names, true, |cell, contender| {
                Some((clients(cell)?, contender.figure("rate")?))
            }),
        });
        plots.push(Plot {
            title: format!("{of}{group}: processor time added, by clients"),
            x: "clients",
            y: "CPU per unit, %",
            log_x: true,
            around_zero: true,
            series: series(curve(), &names[1..], true, |cell, contender| {
                Some((clients(cell)?, percent(contender, "cpu_us")?))
            }),
        });
    }
}

/// The median overhead over the cells of a version.
fn by_version(all: &[Results], names: &[String]) -> Plot {
    let series = names
        .iter()
        .map(|name| {
            let points = all
                .iter()
                .filter_map(|results| {
                    let added = results
                        .cells
                        .iter()
                        .flat_map(|cell| &cell.contenders)
                        .filter(|contender| contender.name == *name)
                        .filter_map(|contender| percent(contender, "cpu_us"));
                    Some((f64::from(results.major), crate::statistics::median(added)?))
                })
                .collect();
            Series { name: name.clone(), points, line: true }
        })
        .collect();
    Plot {
        title: "Processor time added, by version: median of all cells".into(),
        x: "PostgreSQL",
        y: "CPU per unit, %",
        log_x: false,
        around_zero: true,
        series,
    }
}

/// A name for the group of cells that differ only in the number of clients.
fn group_of(cell: &Cell) -> Option<String> {
    let clients = cell.parameter("clients")?;
    let parts: Vec<&str> = cell
        .id
        .split('/')
        .filter(|part| *part != format!("c{clients}") && *part != format!("t{clients}"))
        .collect();
    Some(parts.join("/"))
}

/// Groups with more than one number of clients.
fn groups(all: &[Results]) -> Vec<String> {
    let mut counted: Vec<(String, Vec<&str>)> = Vec::new();
    for cell in cells(all) {
        let (Some(group), Some(clients)) = (group_of(cell), cell.parameter("clients")) else {
            continue;
        };
        match counted.iter_mut().find(|(known, _)| *known == group) {
            Some((_, seen)) if !seen.contains(&clients) => seen.push(clients),
            Some(_) => {}
            None => counted.push((group, vec![clients])),
        }
    }
    counted.into_iter().filter(|(_, seen)| seen.len() > 1).map(|(group, _)| group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    #[test]
    fn the_page_is_complete_and_self_contained() {
        let mut many = example();
        many.cells[0].parameters.insert("stratum".into(), "shared".into());
        let mut more = many.cells[0].clone();
        more.id = "readonly/s10/c16".into();
        more.parameters.insert("clients".into(), "16".into());
        many.cells.push(more);
        let page = report(&[many]).expect("a page");
        assert!(page.contains("&lt;test&gt;") && !page.contains("<test>"));
        assert!(page.contains("readonly/s10: rate by clients"));
        assert_eq!(page.matches("<svg").count(), 4);
        for elsewhere in ["src=", "href=", "@import", "url("] {
            assert!(!page.contains(elsewhere), "{elsewhere}");
        }
    }

    #[test]
    fn several_versions_have_a_plot_of_their_own() {
        let mut older = example();
        older.major = 15;
        let page = report(&[older, example()]).expect("a page");
        assert!(page.contains("by version"));
        assert!(!report(&[example()]).expect("a page").contains("by version"));
    }
}
