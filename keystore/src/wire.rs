//! Little-endian fields, written and read by hand: formats on disk must not depend on the
//! compiler's memory layout or on other libraries.

use crate::error::{FormatError, Problem};

pub(crate) fn put_u8(out: &mut Vec<u8>, value: u8) {
    out.push(value);
}

pub(crate) fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_i64(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Length (u32) and bytes. Callers have checked the much smaller limit of the field.
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_u32(out, u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    out.extend_from_slice(bytes);
}

/// Reads fields in order, and tracks the offset for error messages.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    base: u64,
}

impl<'a> Reader<'a> {
    /// `base`: the offset of `bytes[0]` in the file or message.
    pub(crate) fn new(bytes: &'a [u8], base: u64) -> Self {
        Self { bytes, at: 0, base }
    }

    pub(crate) fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(crate) fn error(&self, problem: Problem) -> FormatError {
        FormatError { offset: self.offset(), problem }
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], FormatError> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.bytes.len());
        let taken = end.and_then(|end| Some((end, self.bytes.get(self.at..end)?)));
        let (end, bytes) = taken.ok_or_else(|| self.error(Problem::Short))?;
        self.at = end;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let at = self.offset();
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| FormatError { offset: at, problem: Problem::Short })
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FormatError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FormatError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn i64(&mut self) -> Result<i64, FormatError> {
        self.array().map(i64::from_le_bytes)
    }

    /// Reads what [`put_bytes`] wrote. Allocates nothing.
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], FormatError> {
        let length = self.u32()?;
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, FormatError> {
        let at = self.offset();
        let bytes = self.bytes()?;
        std::str::from_utf8(bytes)
            .map_err(|_| FormatError { offset: at, problem: Problem::Field("text", "not UTF-8") })
    }
}
