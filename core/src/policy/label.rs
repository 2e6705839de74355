//! The text of a security label: `encrypted`, `encrypted CIPHER` or `plaintext`; the first two may
//! be followed by `key_group=NAME`.

use core::fmt;
use core::str::FromStr;

use pagevault_cipher::CipherId;
use pagevault_keystore::record::is_key_group_name;

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
    /// A text that cannot be the name of a key group.
    #[error("invalid key group name \"{0}\" in pagevault label")]
    KeyGroupName(String),
    /// None of the forms.
    #[error("invalid pagevault label \"{0}\"")]
    Malformed(String),
}

/// What precedes the name of a key group.
const KEY_GROUP: &str = "key_group=";

impl Label {
    /// Reads a label, and the name of the key group in it.
    ///
    /// # Errors
    /// If it is no label.
    pub fn parse(text: &str) -> Result<(Self, Option<&str>), LabelError> {
        let malformed = || LabelError::Malformed(text.to_owned());
        let mut words = text.split_ascii_whitespace().peekable();
        match words.next() {
            Some("plaintext") => {
                let is_all = words.next().is_none();
                return if is_all { Ok((Self::Plaintext, None)) } else { Err(malformed()) };
            }
            Some("encrypted") => {}
            _ => return Err(malformed()),
        }
        let cipher = words.next_if(|word| !word.starts_with(KEY_GROUP));
        let group = words.next_if(|word| word.starts_with(KEY_GROUP));
        if words.next().is_some() {
            return Err(malformed());
        }
        let group = group.and_then(|word| word.strip_prefix(KEY_GROUP));
        let cipher =
            cipher.map(|name| name.parse().map_err(|_| LabelError::UnknownCipher(name.to_owned())));
        if let Some(name) = group.filter(|name| !is_key_group_name(name)) {
            return Err(LabelError::KeyGroupName(name.to_owned()));
        }
        Ok((Self::Encrypted(cipher.transpose()?), group))
    }
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
        Label::parse(text).map(|(label, _)| label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_may_name_a_key_group() {
        let aes_128 = Some(CipherId::Aes128Xts);
        for (text, cipher) in [
            ("encrypted key_group=acme", None),
            ("encrypted aes-128-xts  key_group=acme ", aes_128),
        ] {
            assert_eq!(Label::parse(text), Ok((Label::Encrypted(cipher), Some("acme"))));
        }
        assert_eq!(Label::parse("encrypted"), Ok((Label::Encrypted(None), None)));
        let longest = "a".repeat(63);
        assert!(Label::parse(&format!("encrypted key_group={longest}")).is_ok());
        for name in ["", "Acme", "-a", "_a", "a.b", "ä", "a=b", &"a".repeat(64)] {
            let found = Label::parse(&format!("encrypted key_group={name}")).map(|_| ());
            assert_eq!(found, Err(LabelError::KeyGroupName(name.into())), "{name}");
        }
        for text in [
            "plaintext key_group=acme",
            "encrypted key_group=acme aes-128-xts",
            "encrypted key_group=acme key_group=acme",
            "key_group=acme",
        ] {
            assert_eq!(Label::parse(text), Err(LabelError::Malformed(text.into())), "{text}");
        }
    }

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
