//! SVG plots that take their colours from the page, so that they follow its light or dark theme.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

/// The points of one contender in a plot.
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Joined by a line.
    pub(crate) line: bool,
}

pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: &'static str,
    pub(crate) y: &'static str,
    /// Logarithmic horizontal axis.
    pub(crate) log_x: bool,
    /// Vertical values are differences: zero is included and marked.
    pub(crate) around_zero: bool,
    pub(crate) series: Vec<Series>,
}

const SIZE: (u32, u32) = (560, 340);

/// Colours that represent custom properties of the page's style. Nothing else in a plot uses them.
const PLACEHOLDERS: [(RGBColor, &str, &str); 9] = [
    (RGBColor(1, 1, 1), "#010101", "var(--ink)"),
    (RGBColor(1, 1, 2), "#010102", "var(--grid)"),
    (RGBColor(1, 1, 3), "#010103", "var(--series-0)"),
    (RGBColor(1, 1, 4), "#010104", "var(--series-1)"),
    (RGBColor(1, 1, 5), "#010105", "var(--series-2)"),
    (RGBColor(1, 1, 6), "#010106", "var(--series-3)"),
    (RGBColor(1, 1, 7), "#010107", "var(--series-4)"),
    (RGBColor(1, 1, 8), "#010108", "var(--series-5)"),
    (RGBColor(1, 1, 9), "#010109", "var(--muted)"),
];
const INK: RGBColor = PLACEHOLDERS[0].0;
const GRID: RGBColor = PLACEHOLDERS[1].0;
const MUTED: RGBColor = PLACEHOLDERS[8].0;

/// The colour of a contender, the same in all plots and tables: 0 to 5.
pub(crate) fn colour(name: &str) -> usize {
    let known = ["stock", "loaded", "relations", "everything"];
    match name {
        "plain" => 0,
        "encrypted" => 2,
        _ => known.iter().position(|known| name.starts_with(known)).unwrap_or(4),
    }
}

impl Plot {
    /// The plot as an `svg` element; `None` without points.
    pub(crate) fn svg(&self) -> Result<Option<String>> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        if points().count() == 0 {
            return Ok(None);
        }
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
            self.draw(&area).map_err(|error| anyhow!("plot {}: {error}", self.title))?;
        }
        for (_, hex, variable) in PLACEHOLDERS {
            text = text.replace(hex, variable);
        }
        // The page determines the size.
        let fixed = format!("width=\"{}\" height=\"{}\"", SIZE.0, SIZE.1);
        let label = format!("role=\"img\" aria-label=\"{}\"", super::html::escaped(&self.title));
        Ok(Some(text.replacen(&fixed, &label, 1)))
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), String> {
        let text = |error: DrawingAreaErrorKind<_>| -> String { format!("{error:?}") };
        let x = |value: f64| if self.log_x { value.log2() } else { value };
        let points: Vec<(f64, f64)> = self
            .series
            .iter()
            .flat_map(|series| &series.points)
            .map(|(left, up)| (x(*left), *up))
            .collect();
        let (left, right) = padded(points.iter().map(|point| point.0), 0.06, false);
        let (low, high) = padded(points.iter().map(|point| point.1), 0.12, self.around_zero);
        let low = if self.around_zero { low } else { 0.0 };
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(20)
            .x_label_area_size(38)
            .y_label_area_size(62)
            .build_cartesian_2d(left..right, low..high)
            .map_err(text)?;
        let label = |value: &f64| {
            let value = if self.log_x { value.exp2() } else { *value };
            // PostgreSQL versions and numbers of clients are integers.
            let whole = self.log_x || self.x == "PostgreSQL";
            let between = whole && (value - value.round()).abs() > 0.02;
            if between { String::new() } else { axis_number(value, right - left) }
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(MUTED)
            .label_style(("sans-serif", 12).into_font().color(&INK))
            .axis_desc_style(("sans-serif", 12).into_font().color(&INK))
            .x_labels(if self.log_x { 1 + (right - left).ceil() as usize } else { 7 })
            .y_labels(6)
            .x_label_formatter(&label)
            .y_label_formatter(&|value| axis_number(*value, high - low))
            .x_desc(self.x)
            .y_desc(self.y)
            .draw()
            .map_err(text)?;
        if self.around_zero {
            let zero = LineSeries::new([(left, 0.0), (right, 0.0)], MUTED.stroke_width(2));
            chart.draw_series(zero).map_err(text)?;
        }
        for series in &self.series {
            let colour = PLACEHOLDERS[2 + colour(&series.name)].0;
            let mut points: Vec<_> =
                series.points.iter().map(|(left, up)| (x(*left), *up)).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            if series.line {
                chart
                    .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))
                    .map_err(text)?;
            }
            chart
                .draw_series(points.into_iter().map(|point| Circle::new(point, 4, colour.filled())))
                .map_err(text)?;
        }
        area.present().map_err(text)
    }
}

/// The range of the values, with some padding.
fn padded(values: impl Iterator<Item = f64>, share: f64, zero: bool) -> (f64, f64) {
    let start = if zero { (0.0, 0.0) } else { (f64::INFINITY, f64::NEG_INFINITY) };
    let (low, high) = values.fold(start, |(low, high), value| (low.min(value), high.max(value)));
    let room = ((high - low) * share).max(high.abs().max(1.0) * 0.02);
    (low - room, high + room)
}

/// The number of decimals that distinguishes the marks of an axis of this width.
fn axis_number(value: f64, width: f64) -> String {
    let digits = match width {
        0.0..0.02 => 4,
        0.02..0.2 => 3,
        0.2..2.0 => 2,
        2.0..10.0 => 1,
        _ => 0,
    };
    let text = format!("{value:.digits$}");
    // Integers stay without decimals.
    let whole =
        text.split_once('.').filter(|(_, decimals)| decimals.bytes().all(|digit| digit == b'0'));
    match whole {
        Some((whole, _)) => whole.to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        Plot {
            title: "a < b".into(),
            x: "clients",
            y: "TPS",
            log_x: true,
            around_zero: false,
            series: vec![Series { name: "relations".into(), points, line: true }],
        }
    }

    #[test]
    fn colours_come_from_the_page_and_titles_are_escaped() {
        let svg = plot(vec![(1.0, 10.0), (4.0, 30.0)]).svg().expect("drawn").expect("points");
        assert!(svg.contains("var(--series-2)") && svg.contains("var(--ink)"), "{svg}");
        assert!(!svg.contains("#0101"), "{svg}");
        assert!(svg.contains("a &lt; b"), "{svg}");
        assert!(svg.matches("<circle").count() == 2, "{svg}");
    }

    #[test]
    fn a_single_point_and_none_are_drawn_or_left_out() {
        assert!(plot(vec![(4.0, 10.0)]).svg().expect("drawn").is_some());
        assert!(plot(Vec::new()).svg().expect("drawn").is_none());
    }
}
