//! Compares output displayed in a page with actual output.

use anyhow::{Result, bail};

/// Compares `shown`, in which `...` matches anything, with `printed`. Column widths are ignored.
pub(crate) fn compare(shown: &str, printed: &str) -> Result<()> {
    let (pattern, text) = (normal(shown), normal(printed));
    let pieces: Vec<&str> = pattern.split("...").map(str::trim).collect();
    let mut rest = text.as_str();
    for (number, piece) in pieces.iter().enumerate() {
        let found = match number {
            0 => rest.starts_with(piece).then_some(0),
            last if last == pieces.len() - 1 => {
                rest.ends_with(piece).then(|| rest.len() - piece.len())
            }
            _ => rest.find(piece),
        };
        match found {
            Some(at) => rest = &rest[at + piece.len()..],
            None => bail!("printed:\n{printed}\nshown:\n{shown}\nfirst that differs: {piece}"),
        }
    }
    if pieces.len() == 1 && !rest.is_empty() {
        bail!("printed:\n{printed}\nshown:\n{shown}");
    }
    Ok(())
}

/// Replaces each gap by one space, and each rule by one dash.
fn normal(text: &str) -> String {
    let mut normal = String::new();
    for character in text.chars() {
        let character = if character.is_whitespace() { ' ' } else { character };
        let last = normal.chars().last();
        if !(matches!(character, ' ' | '-') && last == Some(character)) {
            normal.push(character);
        }
    }
    normal.trim().to_owned()
}
