//! The text of a security label: `encrypted`, `encrypted CIPHER` or `plaintext`.

use core::fmt;
use core::str::FromStr;

use pagevault_cipher::CipherId;

/// What a label requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Label {
    /// Encrypted, with this cipher or the default one.
    Encrypted(Option<CipherId>),
    /// Plaintext.
    Plaintext,
}

/// Why a text is not a label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// `encrypted`, followed by a word that is not the name of a cipher.
    #[error("unknown cipher \"{0}\" in pagevault label")]
    UnknownCipher(String),
    /// None of the three forms.
    #[error("invalid pagevault label \"{0}\"")]
    Malformed(String),
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Label::Encrypted(Some(cipher)) => write!(f, "encrypted {cipher}"),
            Label::Encrypted(None) => f.write_str("encrypted"),
            Label::Plaintext => f.write_str("plaintext"),
        }
    }
}

impl FromStr for Label {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        let mut words = text.split_ascii_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some("plaintext"), None, None) => Ok(Label::Plaintext),
            (Some("encrypted"), None, None) => Ok(Label::Encrypted(None)),
            (Some("encrypted"), Some(cipher), None) => match cipher.parse() {
                Ok(cipher) => Ok(Label::Encrypted(Some(cipher))),
                Err(_) => Err(LabelError::UnknownCipher(cipher.to_owned())),
            },
            _ => Err(LabelError::Malformed(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_forms_and_nothing_else() {
        for (text, label) in [
            ("plaintext", Label::Plaintext),
            ("encrypted", Label::Encrypted(None)),
            ("encrypted aes-256-xts", Label::Encrypted(Some(CipherId::Aes256Xts))),
            (" encrypted\t aes-128-xts\n", Label::Encrypted(Some(CipherId::Aes128Xts))),
        ] {
            assert_eq!(text.parse(), Ok(label), "{text:?}");
            assert_eq!(label.to_string().parse(), Ok(label));
        }
        let unknown = LabelError::UnknownCipher("rot13".into());
        assert_eq!("encrypted rot13".parse::<Label>(), Err(unknown));
        let forms = [
            "",
            " ",
            "Plaintext",
            "plain",
            "plaintext aes-256-xts",
            "encrypted aes-256-xts 2",
            "aes-256-xts",
        ];
        for text in forms.into_iter().chain(["encrypted\u{a0}aes-256-xts"]) {
            assert_eq!(text.parse::<Label>(), Err(LabelError::Malformed(text.into())), "{text:?}");
        }
    }
}
