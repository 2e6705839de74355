//! Attributes of keys. KMIP 1.4 writes each as a name and a value (section 2.1.1), KMIP 2 as a
//! field of its own (KMIP 2.1 section 4). Both are read into the same [`Attributes`].

use super::message::Version;
use super::names::{self, tag};
use super::ttlv::{Items, Tag, Value, Writer};

/// Maximum length of a key's unique identifier, so that it fits into wrapped keys.
pub(super) const ID_LIMIT: usize = 255;

/// Maximum number of replacements of one key.
const LINK_LIMIT: usize = 16;

/// What the server tells about a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) object_type: Option<u32>,
    pub(super) algorithm: Option<u32>,
    pub(super) bits: Option<i32>,
    pub(super) usage: Option<i32>,
    pub(super) state: Option<u32>,
    /// When it was made, in seconds since 1970.
    pub(super) made: Option<i64>,
    /// When it becomes, or became, active.
    pub(super) activation: Option<i64>,
    pub(super) extractable: Option<bool>,
    pub(super) sensitive: Option<bool>,
    pub(super) never_extractable: Option<bool>,
    /// Unique identifiers of the keys that replace it.
    pub(super) replacements: Vec<String>,
}

/// The names in KMIP 1.4 of the attributes that are read or written.
const NAMES: &[(&str, Tag)] = &[
    ("Object Type", tag::OBJECT_TYPE),
    ("Cryptographic Algorithm", tag::CRYPTOGRAPHIC_ALGORITHM),
    ("Cryptographic Length", tag::CRYPTOGRAPHIC_LENGTH),
    ("Cryptographic Usage Mask", tag::CRYPTOGRAPHIC_USAGE_MASK),
    ("State", tag::STATE),
    ("Initial Date", tag::INITIAL_DATE),
    ("Activation Date", tag::ACTIVATION_DATE),
    ("Extractable", tag::EXTRACTABLE),
    ("Sensitive", tag::SENSITIVE),
    ("Never Extractable", tag::NEVER_EXTRACTABLE),
    ("Link", tag::LINK),
    ("Name", tag::NAME),
];

impl Attributes {
    /// Reads the payload of Get Attributes.
    pub(super) fn read(payload: Items<'_>, version: Version) -> Option<Attributes> {
        let mut attributes = Attributes::default();
        if version.has_fields() {
            for item in payload.structure(tag::ATTRIBUTES)? {
                attributes.take(item.tag, item.value)?;
            }
            return Some(attributes);
        }
        for attribute in payload.all(tag::ATTRIBUTE) {
            let Value::Structure(attribute) = attribute else { return None };
            let name = attribute.text(tag::ATTRIBUTE_NAME)?;
            let known = NAMES.iter().find(|(known, _)| *known == name);
            if let (Some((_, tag)), Some(value)) = (known, attribute.one(tag::ATTRIBUTE_VALUE)) {
                attributes.take(*tag, value)?;
            }
        }
        Some(attributes)
    }

    /// `None` if the value has not the type of such an attribute.
    fn take(&mut self, tag: Tag, value: Value<'_>) -> Option<()> {
        match (tag, value) {
            (tag::OBJECT_TYPE, Value::Enumeration(number)) => self.object_type = Some(number),
            (tag::CRYPTOGRAPHIC_ALGORITHM, Value::Enumeration(number)) => {
                self.algorithm = Some(number);
            }
            (tag::STATE, Value::Enumeration(number)) => self.state = Some(number),
            (tag::CRYPTOGRAPHIC_LENGTH, Value::Integer(bits)) => self.bits = Some(bits),
            (tag::CRYPTOGRAPHIC_USAGE_MASK, Value::Integer(mask)) => self.usage = Some(mask),
            (tag::INITIAL_DATE, Value::DateTime(time)) => self.made = Some(time),
            (tag::ACTIVATION_DATE, Value::DateTime(time)) => self.activation = Some(time),
            (tag::EXTRACTABLE, Value::Boolean(on)) => self.extractable = Some(on),
            (tag::SENSITIVE, Value::Boolean(on)) => self.sensitive = Some(on),
            (tag::NEVER_EXTRACTABLE, Value::Boolean(on)) => self.never_extractable = Some(on),
            (tag::LINK, Value::Structure(link)) => {
                if link.enumeration(tag::LINK_TYPE)? == names::REPLACEMENT {
                    let id = link.text(tag::LINKED_OBJECT_IDENTIFIER)?;
                    self.replacements.push(identifier(id)?);
                }
                if self.replacements.len() > LINK_LIMIT {
                    return None;
                }
            }
            (tag::NAME, _) => {}
            (tag, _) if NAMES.iter().any(|(_, known)| *known == tag) => return None,
            _ => {}
        }
        Some(())
    }
}

/// A unique identifier that can be stored and printed.
pub(super) fn identifier(text: &str) -> Option<String> {
    let fits = (1..=ID_LIMIT).contains(&text.len()) && !text.chars().any(char::is_control);
    fits.then(|| text.to_owned())
}

/// An attribute in a request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Given<'a> {
    /// The object is a symmetric key.
    SymmetricKey,
    /// The algorithm is AES.
    Aes,
    /// The length in bits.
    Bits(i32),
    /// It may encrypt and decrypt.
    Use,
    /// Its value never leaves the server unencrypted.
    Sensitive,
    /// Its value leaves the server, or does not.
    Extractable(bool),
    /// A name.
    Name(&'a str),
    /// The unique identifier of the key that replaces it.
    Replacement(&'a str),
}

impl Given<'_> {
    fn tag(self) -> Tag {
        match self {
            Given::SymmetricKey => tag::OBJECT_TYPE,
            Given::Aes => tag::CRYPTOGRAPHIC_ALGORITHM,
            Given::Bits(_) => tag::CRYPTOGRAPHIC_LENGTH,
            Given::Use => tag::CRYPTOGRAPHIC_USAGE_MASK,
            Given::Sensitive => tag::SENSITIVE,
            Given::Extractable(_) => tag::EXTRACTABLE,
            Given::Name(_) => tag::NAME,
            Given::Replacement(_) => tag::LINK,
        }
    }

    /// Writes it as this version does.
    pub(super) fn write(self, version: Version, writer: &mut Writer) {
        if version.has_fields() {
            return self.put(self.tag(), writer);
        }
        let name = NAMES.iter().find(|(_, tag)| *tag == self.tag()).map_or("", |(name, _)| name);
        writer.structure(tag::ATTRIBUTE, |attribute| {
            attribute.put(tag::ATTRIBUTE_NAME, Value::Text(name));
            self.put(tag::ATTRIBUTE_VALUE, attribute);
        });
    }

    fn put(self, tag: Tag, writer: &mut Writer) {
        match self {
            Given::SymmetricKey => writer.put(tag, Value::Enumeration(names::SYMMETRIC_KEY)),
            Given::Aes => writer.put(tag, Value::Enumeration(names::AES)),
            Given::Bits(bits) => writer.put(tag, Value::Integer(bits)),
            Given::Use => {
                writer.put(tag, Value::Integer(names::MAY_ENCRYPT | names::MAY_DECRYPT));
            }
            Given::Sensitive => writer.put(tag, Value::Boolean(true)),
            Given::Extractable(on) => writer.put(tag, Value::Boolean(on)),
            Given::Name(name) => writer.structure(tag, |value| {
                value.put(tag::NAME_VALUE, Value::Text(name));
                value.put(tag::NAME_TYPE, Value::Enumeration(names::PLAIN_NAME));
            }),
            Given::Replacement(id) => writer.structure(tag, |value| {
                value.put(tag::LINK_TYPE, Value::Enumeration(names::REPLACEMENT));
                value.put(tag::LINKED_OBJECT_IDENTIFIER, Value::Text(id));
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::providers::kmip::ttlv::parse;

    /// What a server tells that was given these attributes.
    fn told(version: Version, given: &[Given<'_>]) -> Option<Attributes> {
        let mut writer = Writer::default();
        writer.structure(tag::RESPONSE_PAYLOAD, |payload| {
            let all = |writer: &mut Writer| given.iter().for_each(|one| one.write(version, writer));
            if version.has_fields() {
                payload.structure(tag::ATTRIBUTES, all)
            } else {
                all(payload)
            }
        });
        let bytes = writer.into_bytes();
        let Value::Structure(payload) = parse(&bytes).unwrap().value else { panic!() };
        Attributes::read(payload, version)
    }

    #[test]
    fn attributes_are_the_same_in_all_versions() {
        let given = [
            Given::SymmetricKey,
            Given::Aes,
            Given::Bits(256),
            Given::Use,
            Given::Sensitive,
            Given::Extractable(false),
            Given::Name("db-kek"),
            Given::Replacement("b"),
            Given::Replacement("c"),
        ];
        let expected = Attributes {
            object_type: Some(2),
            algorithm: Some(3),
            bits: Some(256),
            usage: Some(12),
            extractable: Some(false),
            sensitive: Some(true),
            replacements: vec!["b".to_owned(), "c".to_owned()],
            ..Attributes::default()
        };
        for version in Version::ALL {
            assert_eq!(told(version, &given), Some(expected.clone()), "{version:?}");
            assert_eq!(told(version, &[]), Some(Attributes::default()), "{version:?}");
            let long = "x".repeat(ID_LIMIT + 1);
            for id in ["", "a\nb", &long] {
                assert_eq!(told(version, &[Given::Replacement(id)]), None);
            }
            assert_eq!(told(version, &[Given::Replacement("b"); LINK_LIMIT + 1]), None);
        }
    }

    #[test]
    fn a_value_of_another_type_is_refused_and_unknown_attributes_are_not() {
        for (version, known) in [
            (Version::V1_4, true),
            (Version::V1_4, false),
            (Version::V2_1, true),
            (Version::V2_1, false),
        ] {
            let mut writer = Writer::default();
            writer.structure(tag::RESPONSE_PAYLOAD, |payload| {
                let other = |writer: &mut Writer| match version {
                    Version::V1_4 => writer.structure(tag::ATTRIBUTE, |attribute| {
                        let name = if known { "State" } else { "x-State" };
                        attribute.put(tag::ATTRIBUTE_NAME, Value::Text(name));
                        attribute.put(tag::ATTRIBUTE_VALUE, Value::Text("Active"));
                    }),
                    _ => writer.put(
                        if known { tag::STATE } else { Tag(0x54_0001) },
                        Value::Text("Active"),
                    ),
                };
                if version.has_fields() {
                    payload.structure(tag::ATTRIBUTES, other)
                } else {
                    other(payload)
                }
            });
            let bytes = writer.into_bytes();
            let Value::Structure(payload) = parse(&bytes).unwrap().value else { panic!() };
            let read = Attributes::read(payload, version);
            assert_eq!(read, (!known).then(Attributes::default), "{version:?}");
        }
    }
}
