//! TTLV, the encoding of KMIP's messages: tag, type, length, value (KMIP 1.4 section 9.1, KMIP 2.1
//! section 10.1).
//!
//! ```text
//! byte   0         3      4          8
//!        +---------+------+----------+---------------------+--------------------------+
//!        | tag     | type | length n | value, n bytes      | padding to a multiple    |
//!        |         |      |          |                     | of 8 bytes               |
//!        +---------+------+----------+---------------------+--------------------------+
//! ```
//!
//! Big-endian. A structure's value is a sequence of items. [`parse`] checks a whole message at
//! once: lengths, types, text, depth. After it, reading items cannot fail. Padding is not examined.

use zeroize::Zeroizing;

/// Deepest nesting of structures. KMIP's own messages have 8 levels.
const DEPTH: usize = 16;

/// Bytes before a value.
pub(super) const HEADER: usize = 8;

/// Initial capacity of a message, so that usual requests never move: a buffer that grows leaves
/// copies behind.
const CAPACITY: usize = 16 * 1024;

/// The name of a field: three bytes, of which the first is 0x42 for those of the standard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag(pub u32);

/// A value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// A sequence of items.
    Structure(Items<'a>),
    /// A signed number of 32 bits.
    Integer(i32),
    /// A signed number of 64 bits.
    LongInteger(i64),
    /// A signed number of a multiple of 64 bits.
    BigInteger(&'a [u8]),
    /// One of a list of numbers.
    Enumeration(u32),
    /// A truth value.
    Boolean(bool),
    /// Text.
    Text(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// Seconds since 1970.
    DateTime(i64),
    /// Seconds.
    Interval(u32),
    /// Microseconds since 1970.
    DateTimeExtended(i64),
}

/// A field with its value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Item<'a> {
    /// The field's name.
    pub tag: Tag,
    /// Its value.
    pub value: Value<'a>,
}

/// The items of a structure, in their order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Items<'a>(&'a [u8]);

/// Bytes that are not well-formed TTLV, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Reads one item that has exactly these bytes, and checks everything in it.
///
/// # Errors
/// If any of it is not well formed.
pub fn parse(bytes: &[u8]) -> Result<Item<'_>, Malformed> {
    let (item, rest) = split(bytes)?;
    if !rest.is_empty() {
        return Err(Malformed("there is something after its end"));
    }
    check(&item, DEPTH)?;
    Ok(item)
}

fn check(item: &Item<'_>, depth: usize) -> Result<(), Malformed> {
    let Value::Structure(Items(mut bytes)) = item.value else { return Ok(()) };
    let depth = depth.checked_sub(1).ok_or(Malformed("it is nested too deeply"))?;
    while !bytes.is_empty() {
        let (item, rest) = split(bytes)?;
        check(&item, depth)?;
        bytes = rest;
    }
    Ok(())
}

/// The first item of `bytes`, whose own items are not checked, and what follows it.
fn split(bytes: &[u8]) -> Result<(Item<'_>, &[u8]), Malformed> {
    let short = Malformed("it ends too early");
    let ([a, b, c, kind, length @ ..], rest) = bytes.split_first_chunk::<HEADER>().ok_or(short)?;
    let length = u32::from_be_bytes(*length) as usize;
    let padded = length.checked_next_multiple_of(8).ok_or(short)?;
    let (value, rest) = rest.split_at_checked(padded).ok_or(short)?;
    let value = value_of(*kind, &value[..length])?;
    Ok((Item { tag: Tag(u32::from_be_bytes([0, *a, *b, *c])), value }, rest))
}

fn value_of(kind: u8, bytes: &[u8]) -> Result<Value<'_>, Malformed> {
    let wrong = Malformed("a value has another length than its type");
    let four = || <[u8; 4]>::try_from(bytes).map_err(|_| wrong);
    let eight = || <[u8; 8]>::try_from(bytes).map_err(|_| wrong);
    Ok(match kind {
        1 if bytes.len().is_multiple_of(8) => Value::Structure(Items(bytes)),
        2 => Value::Integer(i32::from_be_bytes(four()?)),
        3 => Value::LongInteger(i64::from_be_bytes(eight()?)),
        4 if bytes.len().is_multiple_of(8) && !bytes.is_empty() => Value::BigInteger(bytes),
        5 => Value::Enumeration(u32::from_be_bytes(four()?)),
        6 => match u64::from_be_bytes(eight()?) {
            0 => Value::Boolean(false),
            1 => Value::Boolean(true),
            _ => return Err(Malformed("a truth value is neither 0 nor 1")),
        },
        7 => Value::Text(
            str::from_utf8(bytes).map_err(|_| Malformed("a text is not encoded in UTF-8"))?,
        ),
        8 => Value::Bytes(bytes),
        9 => Value::DateTime(i64::from_be_bytes(eight()?)),
        10 => Value::Interval(u32::from_be_bytes(four()?)),
        11 => Value::DateTimeExtended(i64::from_be_bytes(eight()?)),
        1 | 4 => return Err(wrong),
        _ => return Err(Malformed("a value has an unknown type")),
    })
}

impl<'a> Iterator for Items<'a> {
    type Item = Item<'a>;

    fn next(&mut self) -> Option<Item<'a>> {
        let (item, rest) = split(self.0).ok()?;
        self.0 = rest;
        Some(item)
    }
}

impl<'a> Items<'a> {
    /// No items.
    pub const NONE: Items<'static> = Items(&[]);

    /// The values of a field, which may be repeated.
    pub fn all(self, tag: Tag) -> impl Iterator<Item = Value<'a>> {
        self.filter(move |item| item.tag == tag).map(|item| item.value)
    }

    /// The value of a field that occurs at most once. `None` also if it is repeated.
    pub fn one(self, tag: Tag) -> Option<Value<'a>> {
        let mut values = self.all(tag);
        let value = values.next()?;
        values.next().is_none().then_some(value)
    }

    /// A field that is a structure.
    pub fn structure(self, tag: Tag) -> Option<Items<'a>> {
        match self.one(tag)? {
            Value::Structure(items) => Some(items),
            _ => None,
        }
    }

    /// A field that is an enumeration.
    pub fn enumeration(self, tag: Tag) -> Option<u32> {
        match self.one(tag)? {
            Value::Enumeration(number) => Some(number),
            _ => None,
        }
    }

    /// A field that is an integer.
    pub fn integer(self, tag: Tag) -> Option<i32> {
        match self.one(tag)? {
            Value::Integer(number) => Some(number),
            _ => None,
        }
    }

    /// A field that is a text.
    pub fn text(self, tag: Tag) -> Option<&'a str> {
        match self.one(tag)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A field that is a byte string.
    pub fn bytes(self, tag: Tag) -> Option<&'a [u8]> {
        match self.one(tag)? {
            Value::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// Writes items. What was written is wiped.
pub struct Writer(Zeroizing<Vec<u8>>);

impl Default for Writer {
    fn default() -> Writer {
        Writer(Zeroizing::new(Vec::with_capacity(CAPACITY)))
    }
}

impl Writer {
    /// The items as bytes.
    pub fn into_bytes(self) -> Zeroizing<Vec<u8>> {
        self.0
    }

    /// Writes a value.
    pub fn put(&mut self, tag: Tag, value: Value<'_>) {
        match value {
            Value::Structure(items) => self.structure(tag, |writer| {
                for item in items {
                    writer.put(item.tag, item.value);
                }
            }),
            Value::Integer(number) => self.item(tag, 2, &number.to_be_bytes()),
            Value::LongInteger(number) => self.item(tag, 3, &number.to_be_bytes()),
            Value::BigInteger(bytes) => self.item(tag, 4, bytes),
            Value::Enumeration(number) => self.item(tag, 5, &number.to_be_bytes()),
            Value::Boolean(on) => self.item(tag, 6, &u64::from(on).to_be_bytes()),
            Value::Text(text) => self.item(tag, 7, text.as_bytes()),
            Value::Bytes(bytes) => self.item(tag, 8, bytes),
            Value::DateTime(seconds) => self.item(tag, 9, &seconds.to_be_bytes()),
            Value::Interval(seconds) => self.item(tag, 10, &seconds.to_be_bytes()),
            Value::DateTimeExtended(time) => self.item(tag, 11, &time.to_be_bytes()),
        }
    }

    /// Writes a structure with the items that `fill` writes.
    pub fn structure(&mut self, tag: Tag, fill: impl FnOnce(&mut Writer)) {
        self.header(tag, 1, 0);
        let start = self.0.len();
        fill(self);
        let length = (self.0.len() - start) as u32;
        self.0[start - 4..start].copy_from_slice(&length.to_be_bytes());
    }

    fn item(&mut self, tag: Tag, kind: u8, value: &[u8]) {
        self.header(tag, kind, value.len() as u32);
        self.0.extend_from_slice(value);
        // Every item begins at a multiple of 8.
        let padded = self.0.len().next_multiple_of(8);
        self.0.resize(padded, 0);
    }

    fn header(&mut self, Tag(tag): Tag, kind: u8, length: u32) {
        self.0.extend_from_slice(&tag.to_be_bytes()[1..]);
        self.0.push(kind);
        self.0.extend_from_slice(&length.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: Tag = Tag(0x0042_0020);

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text
            .bytes()
            .filter(u8::is_ascii_hexdigit)
            .map(|digit| (digit as char).to_digit(16).unwrap() as u8)
            .collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    /// The examples of KMIP 1.4 section 9.1.2.
    #[test]
    fn the_examples_of_the_standard_are_read_and_written() {
        let big = hex("0000000003FD35EB6BC2DF4618080000");
        for (text, value) in [
            ("42002002 00000004 0000000800000000", Value::Integer(8)),
            ("42002003 00000008 01B69B4BA5749200", Value::LongInteger(123_456_789_000_000_000)),
            ("42002004 00000010 0000000003FD35EB6BC2DF4618080000", Value::BigInteger(&big)),
            ("42002005 00000004 000000FF00000000", Value::Enumeration(255)),
            ("42002006 00000008 0000000000000001", Value::Boolean(true)),
            ("42002007 0000000B 48656C6C6F20576F726C640000000000", Value::Text("Hello World")),
            ("42002008 00000003 0102030000000000", Value::Bytes(&[1, 2, 3])),
            ("42002009 00000008 0000000047DA67F8", Value::DateTime(0x47DA_67F8)),
            ("4200200A 00000004 000D2F0000000000", Value::Interval(864_000)),
        ] {
            let bytes = hex(text);
            assert_eq!(parse(&bytes), Ok(Item { tag: TAG, value }), "{text}");
            let mut writer = Writer::default();
            writer.put(TAG, value);
            assert_eq!(*writer.into_bytes(), bytes, "{text}");
        }
        let bytes = hex(
            "42002001 00000020 42000405 00000004 000000FE00000000 42000502 00000004 000000FF00000000",
        );
        let Item { value: Value::Structure(items), .. } = parse(&bytes).unwrap() else { panic!() };
        assert_eq!(items.enumeration(Tag(0x42_0004)), Some(254));
        assert_eq!(items.integer(Tag(0x42_0005)), Some(255));
        assert_eq!(items.text(Tag(0x42_0005)), None);
        let mut writer = Writer::default();
        writer.put(TAG, Value::Structure(items));
        assert_eq!(*writer.into_bytes(), bytes);
    }

    #[test]
    fn what_is_not_well_formed_is_refused() {
        for (text, why) in [
            ("", "too early"),
            ("420020", "too early"),
            ("42002002 00000004 00000008", "too early"),
            ("42002007 FFFFFFFF 4865", "too early"),
            ("42002007 FFFFFFF9 4865", "too early"),
            ("42002002 00000008 0000000000000008", "another length"),
            ("42002003 00000004 0000000800000000", "another length"),
            ("42002004 00000004 0000000800000000", "another length"),
            ("42002004 00000000", "another length"),
            ("42002001 00000004 0000000800000000", "another length"),
            ("42002005 00000000", "another length"),
            ("42002006 00000008 0000000000000002", "neither 0 nor 1"),
            ("42002007 00000001 FF00000000000000", "UTF-8"),
            ("42002000 00000000", "unknown type"),
            ("4200200C 00000000", "unknown type"),
            ("42002002 00000004 0000000800000000 00", "after its end"),
            ("42002001 00000008 42000405 00000004", "too early"),
        ] {
            let Malformed(told) = parse(&hex(text)).err().unwrap_or_else(|| panic!("{text}"));
            assert!(told.contains(why), "{text}: {told}");
        }
    }

    #[test]
    fn nesting_is_limited() {
        fn nested(depth: usize, writer: &mut Writer) {
            writer.structure(TAG, |inner| {
                if depth > 1 {
                    nested(depth - 1, inner);
                }
            });
        }
        for (depth, fits) in [(1, true), (DEPTH, true), (DEPTH + 1, false), (1000, false)] {
            let mut writer = Writer::default();
            nested(depth, &mut writer);
            assert_eq!(parse(&writer.into_bytes()).is_ok(), fits, "{depth}");
        }
    }

    #[test]
    fn a_repeated_field_is_not_one() {
        let mut writer = Writer::default();
        writer.structure(TAG, |inner| {
            inner.put(Tag(1), Value::Integer(1));
            inner.put(Tag(2), Value::Integer(2));
            inner.put(Tag(1), Value::Integer(3));
        });
        let bytes = writer.into_bytes();
        let Value::Structure(items) = parse(&bytes).unwrap().value else { panic!() };
        assert_eq!((items.integer(Tag(1)), items.integer(Tag(2))), (None, Some(2)));
        assert_eq!(items.all(Tag(1)).count(), 2);
    }
}
