//! Texts in statements and commands that this program proposes or runs: each on one line, and no
//! text ends where it should not.

use std::fmt::Write;

/// A text as SQL, whatever `standard_conforming_strings` says.
pub(crate) fn literal(text: &str) -> String {
    let mut inner = String::with_capacity(text.len());
    let mut has_escapes = false;
    for character in text.chars() {
        match character {
            '\'' => inner.push_str("''"),
            '\\' => {
                has_escapes = true;
                inner.push_str("\\\\");
            }
            '"' => inner.push('"'),
            _ if character.escape_debug().len() > 1 => {
                has_escapes = true;
                // Writing to a string does not fail.
                let _ = write!(inner, "\\U{:08X}", u32::from(character));
            }
            _ => inner.push(character),
        }
    }
    format!("{}'{inner}'", if has_escapes { "E" } else { "" })
}

/// A name as SQL, in a statement that is shown: control characters are shown as escapes.
pub(crate) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as a word of a POSIX shell. Control characters are not shown, so the word is another one
/// then; but it is one.
pub(crate) fn shell_word(text: &str) -> String {
    crate::visible::visible(&format!("'{}'", text.replace('\'', "'\\''")))
}

#[cfg(test)]
mod tests {
    use super::{literal, shell_word};

    #[test]
    fn every_text_is_one_word_on_one_line() {
        assert_eq!(literal("it's \"Größe\""), "'it''s \"Größe\"'");
        assert_eq!(literal("a\\'\n\u{202e}"), r"E'a\\''\U0000000A\U0000202E'");
        assert_eq!(shell_word("a'$(b)\n"), r"'a'\''$(b)\n'");
    }
}
