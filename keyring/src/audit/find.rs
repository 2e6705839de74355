//! Lines of the audit trail in files of any kind: the server's log as text, CSV or JSON, the
//! trail's own file.
//!
//! Whoever can log something may have written any of it, so nothing is concluded here but where a
//! line may be.

use std::io::{self, BufRead};

use pagevault_keystore::audit::{MARK, MAX_LINE};

/// Longest line of a file that is looked into. Quoting can double a line of the trail, and the
/// server puts as much before and behind it.
const LONGEST: usize = 16 * MAX_LINE;
/// How often a line of a file may say that one of the trail begins.
const MOST_MARKS: usize = 16;

/// Calls `found` with the number of each line of a file that says that it holds one of the trail,
/// and all that may be it.
pub(super) fn lines(
    reader: &mut impl BufRead,
    mut found: impl FnMut(u64, &[String]) -> io::Result<()>,
) -> io::Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        if !next(reader, &mut line)? {
            break;
        }
        if let Some(candidates) = candidates(&line) {
            found(number, &candidates)?;
        }
    }
    Ok(())
}

/// The next line, without its end and cut to [`LONGEST`]; false at the end of the file.
fn next(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut any = false;
    loop {
        let bytes = match reader.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            bytes => bytes?,
        };
        if bytes.is_empty() {
            return Ok(any);
        }
        any = true;
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let piece = &bytes[..end.unwrap_or(bytes.len())];
        line.extend_from_slice(&piece[..piece.len().min(LONGEST - line.len())]);
        let used = end.map_or(bytes.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// What in a line of a file may be a line of the trail; `None` if nothing says so.
fn candidates(line: &[u8]) -> Option<Vec<String>> {
    if line.starts_with(b"{\"run\":\"") {
        return Some(object(line).into_iter().collect());
    }
    let marks = positions(line, MARK.as_bytes());
    let mut candidates = Vec::new();
    let mut any = false;
    for at in marks.take(MOST_MARKS) {
        let text = &line[at + MARK.len()..];
        let decoded = match text {
            [b'{', b'"', b'"', ..] => object(&out_of_csv(text)),
            [b'{', b'\\', b'"', ..] => out_of_json(text).and_then(|text| object(text.as_bytes())),
            [b'{', ..] => object(text),
            // In words only, as in a message about the trail.
            _ => continue,
        };
        any = true;
        candidates.extend(decoded);
    }
    any.then_some(candidates)
}

fn positions<'a>(line: &'a [u8], mark: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    line.windows(mark.len()).enumerate().filter(move |(_, part)| *part == mark).map(|(at, _)| at)
}

/// The object that a text begins with, to its closing brace. Lines of the trail hold no object
/// within.
fn object(text: &[u8]) -> Option<String> {
    let (mut within, mut escaped) = (false, false);
    for (at, byte) in text.iter().enumerate().take(MAX_LINE) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if within => escaped = true,
            b'"' => within = !within,
            b'}' if !within => return String::from_utf8(text[..=at].to_vec()).ok(),
            _ => {}
        }
    }
    None
}

/// What stands in a field of CSV from here on to its end, its quotes no longer doubled.
fn out_of_csv(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut bytes = text.iter().peekable();
    while let Some(byte) = bytes.next() {
        if *byte == b'"' && bytes.next_if(|next| **next == b'"').is_none() {
            break;
        }
        plain.push(*byte);
    }
    plain
}

/// What stands in a string of JSON from here on to its end, without escapes.
fn out_of_json(text: &[u8]) -> Option<String> {
    let mut escaped = false;
    let end = text.iter().position(|byte| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    })?;
    let text = std::str::from_utf8(&text[..end]).ok()?;
    serde_json::from_str(&format!("\"{text}\"")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"run":"0a","object":"a \"b\\\" } ü","mac":"00"}"#;

    fn found(text: &str) -> Vec<(u64, Vec<String>)> {
        let mut all = Vec::new();
        let collect = |number, candidates: &[String]| {
            all.push((number, candidates.to_vec()));
            Ok(())
        };
        lines(&mut text.as_bytes(), collect).unwrap();
        all
    }

    #[test]
    fn a_line_is_found_in_every_kind_of_log() {
        let json = serde_json::to_string(&format!("{MARK}{LINE}")).unwrap();
        let csv = format!("{MARK}{LINE}").replace('"', "\"\"");
        for text in [
            LINE.to_owned(),
            format!("2026-01-01 [1] LOG:  {MARK}{LINE}"),
            format!("{MARK}{LINE}\r"),
            format!("2026-01-01,,,\"{csv}\",,,,\"\""),
            format!("{{\"timestamp\":\"x\",\"message\":{json},\"backend_type\":\"y\"}}"),
        ] {
            assert_eq!(found(&text), [(1, vec![LINE.to_owned()])], "{text}");
        }
    }

    #[test]
    fn what_says_that_it_is_one_is_found_too() {
        let twice = format!("{MARK}{{}} {MARK}{LINE}");
        let text = format!("x\n{MARK}{{\"run\n{MARK}says\n{twice}\n{{\"run\":\"cut");
        let expected = [(2, vec![]), (4, vec!["{}".to_owned(), LINE.to_owned()]), (5, vec![])];
        assert_eq!(found(&text), expected);
    }

    #[test]
    fn lines_without_end_and_bytes_of_any_kind_are_passed_over() {
        let mut bytes = vec![b'x'; 10 * LONGEST];
        bytes.extend_from_slice(MARK.as_bytes());
        bytes.extend_from_slice(b"{\n\xff\xfe\0");
        bytes.extend_from_slice(MARK.as_bytes());
        bytes.extend_from_slice(b"{\"run\":\"\xff\"}\n");
        let mut numbers = Vec::new();
        lines(&mut &bytes[..], |number, candidates| {
            numbers.push((number, candidates.len()));
            Ok(())
        })
        .unwrap();
        assert_eq!(numbers, [(2, 0)]);
    }
}
