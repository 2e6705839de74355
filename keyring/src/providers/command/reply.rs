//! A program's output: lines of a name, a space and a value.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

/// The values in a program's output.
#[derive(Default)]
pub struct Reply {
    /// A wrapped key in the program's own form, see [`is_opaque`].
    pub wrapped: Option<String>,
    /// The key that was unwrapped.
    pub plaintext: Option<Zeroizing<[u8; 32]>>,
    /// From 1; fits an SQL bigint.
    pub key_version: Option<u64>,
}

impl Reply {
    /// Parses an output that may contain the `known` names, each once: of `wrapped`, `plaintext`,
    /// `key_version`.
    ///
    /// # Errors
    /// A sentence about what is wrong. It repeats nothing of the output, which may contain a key.
    pub fn read(text: &[u8], known: &[&str]) -> Result<Reply, String> {
        let text = std::str::from_utf8(text).map_err(|_| "It is not text.".to_owned())?;
        let mut reply = Reply::default();
        for (index, line) in text.lines().enumerate() {
            let named = line.split_once(' ').filter(|(name, _)| known.contains(name));
            let (name, value) = named.ok_or_else(|| {
                let names = known.join("\" or \"");
                format!("Its line {} does not begin with \"{names}\" and a space.", index + 1)
            })?;
            // `Some(true)` for the first value of this name, `None` if it has the wrong form.
            let first = match name {
                "wrapped" => {
                    is_opaque(value).then(|| reply.wrapped.replace(value.to_owned()).is_none())
                }
                "plaintext" => key(value).map(|key| reply.plaintext.replace(key).is_none()),
                _ => version(value).map(|version| reply.key_version.replace(version).is_none()),
            };
            match first {
                Some(true) => {}
                Some(false) => return Err(format!("It gives \"{name}\" twice.")),
                None => return Err(format!("Its \"{name}\" is not {}.", form(name))),
            }
        }
        Ok(reply)
    }
}

/// Values that may be unwrapped keys, also in an output that is not valid.
pub(super) fn opened(answer: &[u8]) -> impl Iterator<Item = &[u8]> {
    let lines = answer.split(|byte| *byte == b'\n');
    lines.filter_map(|line| line.strip_prefix(b"plaintext "))
}

fn form(name: &str) -> &'static str {
    match name {
        "wrapped" => "printable ASCII without spaces",
        "plaintext" => "32 bytes in base64",
        _ => "a whole number from 1 to 9223372036854775807",
    }
}

/// Whether `text` is a valid wrapped key of a program: printable ASCII without spaces.
#[must_use]
pub fn is_opaque(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn key(text: &str) -> Option<Zeroizing<[u8; 32]>> {
    // Longer than the key: the decoder needs space for whole groups of three bytes.
    let mut room = Zeroizing::new([0; 36]);
    let length = STANDARD.decode_slice(text, room.as_mut_slice()).ok()?;
    let mut key = Zeroizing::new([0; 32]);
    key.copy_from_slice(room.get(..length).filter(|key| key.len() == 32)?);
    Some(key)
}

fn version(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let version = text.parse::<i64>().ok().filter(|version| digits && *version > 0)?;
    u64::try_from(version).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &[&str] = &["wrapped", "plaintext", "key_version"];
    const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn wrong(text: &str) -> String {
        Reply::read(text.as_bytes(), ALL).err().unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn an_answer_is_read() {
        let text = format!("key_version 7\nwrapped vault:v1:ab+/=\nplaintext {KEY}\n");
        for text in [text.clone(), text.trim().to_owned(), text.replace('\n', "\r\n")] {
            let reply = Reply::read(text.as_bytes(), ALL).unwrap();
            assert_eq!(reply.wrapped.as_deref(), Some("vault:v1:ab+/="));
            assert_eq!(reply.plaintext.unwrap()[31], 31);
            assert_eq!(reply.key_version, Some(7));
        }
        let reply = Reply::read(b"", ALL).unwrap();
        assert!(reply.wrapped.is_none() && reply.plaintext.is_none());
    }

    #[test]
    fn errors_repeat_nothing_of_the_output() {
        let begin = "\"wrapped\" or \"plaintext\" or \"key_version\" and a space.";
        for (text, line) in [("S3CRET\n", 1), ("wrapped a\nS3CRET=", 2), ("wrapped", 1), ("\n", 1)]
        {
            let expected = format!("Its line {line} does not begin with {begin}");
            assert_eq!(wrong(text), expected);
        }
        for text in ["wrapped ", "wrapped a b", "wrapped \u{e4}", "wrapped  a", "wrapped a\tb"] {
            assert_eq!(wrong(text), "Its \"wrapped\" is not printable ASCII without spaces.");
        }
        let (short, long) = (&KEY[4..], format!("AAAA{KEY}"));
        for text in ["", "S3CRET", &KEY[1..], short, &long, &format!("{KEY} "), &KEY.repeat(99)] {
            let text = format!("plaintext {text}");
            assert_eq!(wrong(&text), "Its \"plaintext\" is not 32 bytes in base64.");
        }
        for text in ["", "0", "-1", "+1", "1.0", "x", "9223372036854775808"] {
            let said = wrong(&format!("key_version {text}"));
            assert!(said.starts_with("Its \"key_version\" is not a whole number"), "{said}");
        }
        assert_eq!(wrong("wrapped a\nwrapped a\n"), "It gives \"wrapped\" twice.");
        assert!(Reply::read(b"wrapped \xff", ALL).is_err());
        assert!(Reply::read(b"plaintext x", &["wrapped"]).is_err());
    }
}
