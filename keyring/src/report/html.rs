//! A page of HTML. All text is escaped here, and nowhere else: names in reports may be anything.

use crate::visible::visible;

/// HTML, made of texts that are not.
pub(super) struct Html(String);

impl Html {
    pub(super) fn new() -> Self {
        Self(String::new())
    }

    /// Markup of this program's own.
    pub(super) fn raw(&mut self, markup: &str) {
        self.0.push_str(markup);
    }

    pub(super) fn element(&mut self, tag: &str, text: &str) {
        self.element_of("", tag, text);
    }

    /// An element of a class.
    pub(super) fn element_of(&mut self, class: &str, tag: &str, text: &str) {
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        self.0.push_str(&format!("<{tag}{class}>{}</{tag}>\n", escaped(text)));
    }

    /// Several lines, as a program has printed them.
    pub(super) fn lines(&mut self, text: &str) {
        let lines: Vec<_> = text.lines().map(escaped).collect();
        self.0.push_str(&format!("<pre>{}</pre>\n", lines.join("\n")));
    }

    pub(super) fn paragraph(&mut self, text: &str) {
        self.element("p", text);
    }

    /// A number with what it counts.
    pub(super) fn tile(&mut self, class: &str, number: &str, what: &str) {
        let (number, what) = (escaped(number), escaped(what));
        self.0
            .push_str(&format!("<li class=\"{class}\"><b>{number}</b><span>{what}</span></li>\n"));
    }

    /// A table; its text if there are no rows.
    pub(super) fn table(&mut self, heads: &[&str], rows: &[Vec<String>], without: &str) {
        if rows.is_empty() {
            return self.element_of("empty", "p", without);
        }
        self.raw("<div class=\"table\"><table>\n<thead><tr>");
        for head in heads {
            self.0.push_str(&format!("<th>{}</th>", escaped(head)));
        }
        self.raw("</tr></thead>\n<tbody>\n");
        for row in rows {
            self.raw("<tr>");
            for cell in row {
                let class = if is_number(cell) { " class=\"number\"" } else { "" };
                self.0.push_str(&format!("<td{class}>{}</td>", escaped(cell)));
            }
            self.raw("</tr>\n");
        }
        self.raw("</tbody></table></div>\n");
    }

    /// A table with a heading, closed if it is not short; the first `LISTED` rows.
    pub(super) fn details(&mut self, summary: &str, heads: &[&str], rows: &[Vec<String>]) {
        const LISTED: usize = 1000;
        const SHORT: usize = 25;
        if rows.is_empty() {
            return;
        }
        let open = if rows.len() <= SHORT { " open" } else { "" };
        self.0.push_str(&format!("<details{open}><summary>{}</summary>\n", escaped(summary)));
        let listed = &rows[..rows.len().min(LISTED)];
        self.table(heads, listed, "");
        if rows.len() > listed.len() {
            let more = rows.len() - listed.len();
            self.paragraph(&format!("And {more} more, which are in the JSON document."));
        }
        self.raw("</details>\n");
    }

    pub(super) fn section(&mut self, title: &str, what: &str) {
        self.element("h2", title);
        if !what.is_empty() {
            self.element_of("lead", "p", what);
        }
    }

    pub(super) fn into_text(self) -> String {
        self.0
    }
}

/// Numbers, sizes and shares are aligned to the right.
fn is_number(text: &str) -> bool {
    let number = ["%", " B", " kB", " MB", " GB", " TB", " ms"]
        .iter()
        .find_map(|unit| text.strip_suffix(unit))
        .unwrap_or(text);
    !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | ','))
}

/// Text as HTML shows it, in elements and attributes; without characters that are invisible, or
/// that change the order of others.
pub(super) fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in visible(text).chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            other => html.push(other),
        }
    }
    html
}

/// A size as people read it.
pub(super) fn size(bytes: u64) -> String {
    let mut number = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if number < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{number:.1} {unit}") };
        }
        number /= 1024.0;
    }
    format!("{number:.1} TB")
}

/// A share in percent; never 100 % of a part, nor 0 % of something.
pub(super) fn percent(part: u64, whole: u64) -> String {
    match (part, whole) {
        (_, 0) => String::new(),
        (part, whole) if part == whole => "100%".to_owned(),
        (0, _) => "0%".to_owned(),
        _ => format!("{:.1}%", (100.0 * part as f64 / whole as f64).clamp(0.1, 99.9)),
    }
}

/// A time of the server, to the minute.
pub(super) fn time(text: &str) -> String {
    match text.get(..16) {
        Some(minute) => minute.replace('T', " "),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_markup() {
        let mut html = Html::new();
        let name = "<script>'\"&\u{202e}\u{1b}";
        html.element("p", name);
        html.table(&[name], &[vec![name.to_owned()]], "");
        html.details(name, &["x"], &[vec!["y".to_owned()]]);
        html.tile("good", name, name);
        let text = html.into_text();
        assert!(!text.contains("<script"), "{text}");
        assert!(!text.contains('\u{202e}') && !text.contains('\u{1b}'), "{text}");
        let shown = "&lt;script&gt;&#39;&quot;&amp;\\u{202e}\\u{1b}";
        assert_eq!(text.matches(shown).count(), 6, "{text}");
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!([0, 1023, 1024, 1 << 40].map(size), ["0 B", "1023 B", "1.0 kB", "1.0 TB"]);
        let percents = [(0, 0), (0, 9), (1, 100_000), (99_999, 100_000), (9, 9)];
        let shown = percents.map(|(part, whole)| percent(part, whole));
        assert_eq!(shown, ["", "0%", "0.1%", "99.9%", "100%"]);
        assert_eq!(time("2026-11-28T16:31:17.3+00:00"), "2026-11-28 16:31");
        assert!(is_number("99.9%") && is_number("1.0 kB") && !is_number("a1") && !is_number(""));
    }
}
