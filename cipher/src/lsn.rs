//! Addresses in WAL.

use core::fmt;
use core::ops::Add;

/// An address in WAL (`XLogRecPtr`, src/include/access/xlogdefs.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Lsn(pub u64);

impl Lsn {
    /// `InvalidXLogRecPtr`: no address.
    pub const INVALID: Self = Self(0);
    /// Behind all WAL.
    pub const MAX: Self = Self(u64::MAX);

    /// From the first bytes of a relation page, `pd_lsn` (`PageXLogRecPtr`, bufpage.h: the high
    /// half comes first).
    #[inline]
    #[must_use]
    pub const fn from_page(stored: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(stored).rotate_right(32))
    }

    /// As a relation page stores it.
    #[inline]
    #[must_use]
    pub const fn to_page(self) -> [u8; 8] {
        self.0.rotate_right(32).to_le_bytes()
    }

    /// Bytes from the last address before this one that is a multiple of `size`: where in a segment
    /// or page of this size it is.
    #[inline]
    #[must_use]
    pub const fn offset_in(self, size: u64) -> u64 {
        self.0 % size
    }

    /// Bytes from `earlier` to this address, 0 if it is the later one.
    #[inline]
    #[must_use]
    pub const fn bytes_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Lsn {
    type Output = Self;

    #[inline]
    fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// As PostgreSQL prints it.
impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

#[cfg(test)]
mod tests {
    use super::Lsn;

    #[test]
    fn an_address_is_printed_and_stored_as_postgresql_does() {
        let lsn = Lsn(0x1_0B37_4D8F);
        assert_eq!(lsn.to_string(), "1/B374D8F");
        assert_eq!(Lsn::INVALID.to_string(), "0/0");
        assert_eq!(lsn.to_page(), [1, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x0B]);
        assert_eq!(Lsn::from_page(lsn.to_page()), lsn);
        assert_eq!((lsn + 8).bytes_since(lsn), 8);
        assert_eq!(lsn.bytes_since(lsn + 8), 0);
        assert_eq!(lsn.offset_in(0x1_0000), 0x4D8F);
    }
}
