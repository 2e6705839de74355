//! Text that anybody may have written, for terminals.

/// The text without control characters, and without those that are not visible or change the order
/// of others: a terminal would obey them, and show something else than what was printed.
pub(crate) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            // Its escapes, so that nothing is escaped twice.
            '\\' | '"' | '\'' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    shown
}

/// As [`visible`], for text of several lines.
pub(crate) fn visible_lines(text: &str) -> String {
    text.split('\n').map(visible).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::{visible, visible_lines};

    #[test]
    fn a_terminal_has_nothing_to_obey() {
        let hostile = "a\u{1b}[1A\r\u{9b}2K\u{7f}\u{202e}\n\0";
        let shown = visible(hostile);
        assert_eq!(shown, r"a\u{1b}[1A\r\u{9b}2K\u{7f}\u{202e}\n\0");
        assert_eq!(visible(&shown), shown);
        let usual = "could not read \"/srv/Größe 日本/it's\": C:\\x";
        assert_eq!(visible(usual), usual);
        assert_eq!(visible_lines("one\n\u{1b}two"), "one\n\\u{1b}two");
    }
}
