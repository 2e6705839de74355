//! Versions of keys. Both types are numbers from 1; where bytes or words hold 0 for "none", an
//! `Option` does here.

use core::fmt;
use core::num::{NonZeroU16, NonZeroU32};

/// Version of a relation file's data key, 1 to 8191: the 13 bits of `pd_flags` that PostgreSQL
/// never sets. There, 0 marks a plaintext page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DataKeyVersion(NonZeroU16);

impl DataKeyVersion {
    /// The first version of a relation file's key.
    pub const FIRST: Self = Self(NonZeroU16::MIN);
    /// The last one that a page can name.
    pub const LAST: Self = match Self::new(8191) {
        Some(last) => last,
        None => Self::FIRST,
    };

    /// `None` if `number` is not within 1 to 8191.
    #[inline]
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        match NonZeroU16::new(number) {
            Some(number) if number.get() <= 8191 => Some(Self(number)),
            _ => None,
        }
    }

    /// The number, 1 to 8191.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0.get()
    }

    /// The number, or 0 for none.
    #[inline]
    #[must_use]
    pub const fn get_or_zero(version: Option<Self>) -> u16 {
        match version {
            Some(version) => version.get(),
            None => 0,
        }
    }

    /// The last one that a relation file's own key can have. Pages name the others for
    /// [`interim`](crate::interim) keys.
    pub const LAST_OF_FILE: Self = match Self::new(7167) {
        Some(last) => last,
        None => Self::FIRST,
    };

    /// The version after the last one so far; `None` if there are no more.
    #[inline]
    #[must_use]
    pub const fn after(last: Option<Self>) -> Option<Self> {
        let next = Self::get_or_zero(last) + 1;
        if next <= Self::LAST_OF_FILE.get() { Self::new(next) } else { None }
    }
}

impl fmt::Display for DataKeyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Version of a database key or of the WAL key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct KeyVersion(NonZeroU32);

impl KeyVersion {
    /// The first version of a key.
    pub const FIRST: Self = Self(NonZeroU32::MIN);
    /// The last one that a number of 32 bits can name.
    pub const LAST: Self = Self(NonZeroU32::MAX);

    /// `None` if `number` is 0.
    #[inline]
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        match NonZeroU32::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The number, from 1.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// The number, or 0 for none.
    #[inline]
    #[must_use]
    pub const fn get_or_zero(version: Option<Self>) -> u32 {
        match version {
            Some(version) => version.get(),
            None => 0,
        }
    }

    /// The version after the last one so far; `None` if there are no more.
    #[inline]
    #[must_use]
    pub const fn after(last: Option<Self>) -> Option<Self> {
        match Self::get_or_zero(last).checked_add(1) {
            Some(next) => Self::new(next),
            None => None,
        }
    }
}

impl fmt::Display for KeyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_key_version_fits_thirteen_bits_and_is_not_zero() {
        assert_eq!(DataKeyVersion::new(0), None);
        assert_eq!(DataKeyVersion::new(1), Some(DataKeyVersion::FIRST));
        assert_eq!(DataKeyVersion::new(8191), Some(DataKeyVersion::LAST));
        assert_eq!(DataKeyVersion::new(8192), None);
        assert_eq!(DataKeyVersion::new(u16::MAX), None);
    }

    #[test]
    fn versions_are_counted_from_one_to_the_last() {
        assert_eq!(DataKeyVersion::after(None), Some(DataKeyVersion::FIRST));
        let last = Some(DataKeyVersion::LAST_OF_FILE);
        assert_eq!(DataKeyVersion::after(DataKeyVersion::new(7166)), last);
        assert_eq!(DataKeyVersion::after(last), None);
        assert_eq!(DataKeyVersion::after(Some(DataKeyVersion::LAST)), None);
        assert_eq!(KeyVersion::after(None), Some(KeyVersion::FIRST));
        assert_eq!(KeyVersion::after(KeyVersion::new(u32::MAX - 1)), Some(KeyVersion::LAST));
        assert_eq!(KeyVersion::after(Some(KeyVersion::LAST)), None);
    }
}
