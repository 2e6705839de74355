//! Plots of a report: SVG in the page, coloured by its style sheet.

use super::html::escaped;

const WIDTH: u32 = 720;
const ROW: u32 = 26;
/// Where bars begin and end; names are before, numbers after.
const LEFT: u32 = 220;
const RIGHT: u32 = 580;
/// Rows of a plot; of more only the first are shown.
const ROWS: usize = 25;
/// Names are cut after this number of characters.
const NAME: usize = 26;

/// A row of bars on top of each other: a name, parts of one in their order with their classes, and
/// a number.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) parts: Vec<(&'static str, f64)>,
    /// A mark at a part of one.
    pub(super) mark: Option<f64>,
    pub(super) number: String,
}

/// Horizontal bars, one a row. `what` is read out by screen readers.
pub(super) fn bars(what: &str, rows: &[Row]) -> String {
    let rows = &rows[..rows.len().min(ROWS)];
    let height = ROW * rows.len() as u32 + 8;
    let mut svg = format!(
        "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n",
        escaped(what)
    );
    let span = f64::from(RIGHT - LEFT);
    for (row, number) in rows.iter().zip(0..) {
        let top = 4 + ROW * number;
        let baseline = top + 17;
        let mut name: String = row.name.chars().take(NAME).collect();
        if name.len() < row.name.len() {
            name.push('\u{2026}');
        }
        svg.push_str(&format!(
            "<text class=\"name\" x=\"{}\" y=\"{baseline}\">{}<title>{}</title></text>\n",
            LEFT - 10,
            escaped(&name),
            escaped(&row.name)
        ));
        let bar = top + 4;
        svg.push_str(&format!(
            "<rect class=\"track\" x=\"{LEFT}\" y=\"{bar}\" width=\"{span}\" height=\"16\"/>\n"
        ));
        let mut from = f64::from(LEFT);
        for (class, part) in &row.parts {
            let width = (part.clamp(0.0, 1.0) * span).min(f64::from(RIGHT) - from);
            if width > 0.0 {
                svg.push_str(&format!(
                    "<rect class=\"{class}\" x=\"{from:.1}\" y=\"{bar}\" width=\"{width:.1}\" height=\"16\"/>\n"
                ));
            }
            from += width;
        }
        if let Some(mark) = row.mark {
            let x = f64::from(LEFT) + mark.clamp(0.0, 1.0) * span;
            svg.push_str(&format!(
                "<line class=\"mark\" x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{}\"/>\n",
                top + 24
            ));
        }
        svg.push_str(&format!(
            "<text x=\"{}\" y=\"{baseline}\">{}</text>\n",
            RIGHT + 10,
            escaped(&row.number)
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

/// What the colours mean.
pub(super) fn legend(entries: &[(&str, &str)]) -> String {
    let entry = |(class, text): &(&str, &str)| {
        format!("<li><i class=\"{class}\"></i>{}</li>", escaped(text))
    };
    format!("<ul class=\"legend\">{}</ul>\n", entries.iter().map(entry).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_stay_within_the_plot() {
        let row = |parts: Vec<(&'static str, f64)>| Row {
            name: "<b>".repeat(20),
            parts,
            mark: Some(7.0),
            number: "<i>".to_owned(),
        };
        let parts = vec![("a", 0.7), ("b", 0.7), ("c", f64::NAN), ("d", -1.0)];
        let svg = bars("\"x\"", &[row(parts)]);
        assert!(svg.contains("width=\"252.0\"") && svg.contains("width=\"108.0\""), "{svg}");
        assert!(!svg.contains("class=\"c\"") && !svg.contains("class=\"d\""), "{svg}");
        assert!(!svg.contains("<b>") && !svg.contains("<i>") && svg.contains("x1=\"580.0\""));
        assert!(svg.contains("aria-label=\"&quot;x&quot;\""));
    }
}
