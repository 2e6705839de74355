//! Finds lines of the audit trail in files of any kind: the server log as text, CSV or JSON, and
//! the trail's own file.
//!
//! Any role that can log something may have written these texts. So this module only returns
//! candidates.

use std::io::{self, BufRead};

use pagevault_keystore::audit::{MARK, MAX_LINE};

/// Maximum length of a line of a file in bytes; the rest is ignored. Quoting can double a line of
/// the trail, and the server adds text before and after it.
const MAX_FILE_LINE: usize = 16 * MAX_LINE;
/// Maximum number of candidates in one line of a file.
const MAX_MARKS: usize = 16;

/// Calls `found` for each line of a file that contains the mark of the trail, with the number of
/// the line and all candidates in it.
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

/// Reads the next line, without its end and truncated to [`MAX_FILE_LINE`]; false at the end of the
/// file.
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
        line.extend_from_slice(&piece[..piece.len().min(MAX_FILE_LINE - line.len())]);
        let used = end.map_or(bytes.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// The candidates in a line of a file; `None` if it does not contain the mark.
fn candidates(line: &[u8]) -> Option<Vec<String>> {
    if line.starts_with(b"{\"run\":\"") {
        return Some(object(line).into_iter().collect());
    }
    let marks = positions(line, MARK.as_bytes());
    let mut candidates = Vec::new();
    let mut any = false;
    for at in marks.take(MAX_MARKS) {
        let text = &line[at + MARK.len()..];
        let decoded = match text {
            [b'{', b'"', b'"', ..] => object(&unquote_csv(text)),
            [b'{', b'\\', b'"', ..] => unquote_json(text).and_then(|text| object(text.as_bytes())),
            [b'{', ..] => object(text),
            // The mark alone, as in a message about the trail.
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

/// The JSON object at the beginning of a text, up to its closing brace. Lines of the trail contain
/// no nested objects.
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

/// The rest of a quoted CSV field, with its quotes no longer doubled.
fn unquote_csv(text: &[u8]) -> Vec<u8> {
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

/// The rest of a JSON string, without escapes.
fn unquote_json(text: &[u8]) -> Option<String> {
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
    fn text_with_the_mark_is_a_candidate() {
        let twice = format!("{MARK}{{}} {MARK}{LINE}");
        let text = format!("x\n{MARK}{{\"run\n{MARK}says\n{twice}\n{{\"run\":\"cut");
        let expected = [(2, vec![]), (4, vec!["{}".to_owned(), LINE.to_owned()]), (5, vec![])];
        assert_eq!(found(&text), expected);
    }

    #[test]
    fn endless_lines_and_arbitrary_bytes_are_skipped() {
        let mut bytes = vec![b'x'; 10 * MAX_FILE_LINE];
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
