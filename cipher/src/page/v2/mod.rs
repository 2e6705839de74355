//! Page format version 2: a sealed page that cannot be changed or moved unnoticed. No cipher has
//! this format yet.
//!
//! ```text
//! byte   0        8    10   12   14   16   18   20                                   8192
//!        +--------+----+----+----+----+----+----+------------------------------------+
//! plain  | pd_lsn |sum |flag|low |up  |spec|2004| pd_prune_xid, line pointers, tuples|
//!        +--------+----+----+----+----+----+----+------------------------------------+
//! sealed | pd_lsn |SUM |FLAG|low |up  |######## AES-XTS, 511 whole blocks ###########|
//!        +--------+----+----+----+----+----------------------------------------------+
//!         clear     |    |   clear     inside, bytes 18-19 say where the tag is;
//!                   |    |             the tag is where the page has room for it
//!                   |    +- low 3 bits: pd_flags; high 13 bits: version of the data key
//!                   +- PostgreSQL's checksum over the sealed page (0 when checksums are off)
//! ```
//!
//! From outside this is a page of version 1, with the same tweak. Within it, the tag takes bytes
//! that PostgreSQL does not need, and that opening restores (module `place`). The tag depends on
//! every byte of the page but `pd_checksum`, and on the position of the page (module `tag`).
//!
//! A change of the sealed page changes whole blocks of the opened one to random bits, and the tag
//! is wrong. Only [`Strength::Short`] leaves an attacker a chance that matters. It is accepted only
//! for a page in which no other place fits, so that a page with a full tag is not passed off as one
//! with a short tag: to do this, somebody would have to make random garbage of each possible place
//! in the page, and of bytes 16 to 31 so that they give the right 20 bits, 1 bit and `pd_special`.
//!
//! The design record is docs/design/0040-authenticated-pages.md.

mod packed;
mod place;
mod tag;

#[cfg(test)]
mod tests;

use subtle::ConstantTimeEq;

use self::place::{Place, SHORT_BITS};
use self::tag::{Mac, PolyvalMac, Tag};
use super::{NotAuthentic, VERSION_SHIFT, is_zero, v1, version_of};
use crate::checksum::page_checksum;
use crate::key::{CipherId, DataKey, Fork};
use crate::layout::{
    CHECKSUM, FLAGS, PAGE_SIZE, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE, Page, VALID_FLAGS, get,
    put,
};
use crate::version::DataKeyVersion;
use crate::xts::hashed::{self, GROUP, GROUPS, Groups, Job};
use crate::xts::{Backend, Direction, KeySize, Schedule};

/// How tags are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Authenticator {
    /// AES-256 over POLYVAL (RFC 8452).
    Polyval,
    /// HMAC-SHA-256 (FIPS 198-1), cut to 128 bits: approved algorithms only, and several times
    /// slower.
    HmacSha256,
}

impl Authenticator {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Polyval, Self::HmacSha256];
}

/// Where a page belongs. Relation, database and cluster are bound by the data key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The block number in the fork.
    pub block: u32,
    /// The fork. Init and main count as one, because recovery copies the first over the second.
    pub fork: Fork,
    /// A number of the caller's. Pages of another epoch are not authentic.
    pub epoch: u32,
}

/// What a page is sealed with besides its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealing {
    /// The version of the data key.
    pub version: DataKeyVersion,
    /// Data checksums are on.
    pub checksums: bool,
    /// All that writes this relation logs images without the hole (`REGBUF_STANDARD`). Then the
    /// bytes in the hole of a page of the main fork mean nothing, and 16 of them may become zero.
    pub holes_are_unused: bool,
}

/// How much of a tag a page has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strength {
    /// 128 bits.
    Full,
    /// 20 bits: the page has no room for more.
    Short,
}

/// What became of a page that was to be sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealed {
    /// It is sealed, with a tag.
    With(Strength),
    /// It is encrypted, but opens nowhere: it has no room for a full tag, and a header that
    /// PostgreSQL refuses to read (`PageIsVerified`), whose spare bits are in use.
    Unreadable,
    /// It is all zeros, and was not changed.
    Zero,
}

/// A data key, expanded for this format.
///
/// Has a fixed size, uses no heap, and is wiped when dropped.
pub struct Key {
    xts: Schedule,
    mac: Mac,
    /// Whether XTS and hash may run in one pass, where this CPU has a kernel for it.
    fused: bool,
}

impl Key {
    /// Expands `key` for the fastest kernel of this CPU; `None` if it is not a key of AES-256.
    #[must_use]
    pub fn new(key: &DataKey, authenticator: Authenticator) -> Option<Self> {
        Self::with_backend(key, authenticator, Backend::detect(), true)
    }

    /// Expands `key` for the given kernel; `None` also if this CPU cannot run it. Without `fused`,
    /// the page is encrypted and hashed one after the other. For tests and benchmarks.
    #[must_use]
    pub fn with_backend(
        key: &DataKey,
        authenticator: Authenticator,
        backend: Backend,
        fused: bool,
    ) -> Option<Self> {
        if key.cipher() != CipherId::Aes256Xts {
            return None;
        }
        let bytes = key.expose().first_chunk()?;
        let xts = Schedule::new(KeySize::Aes256, bytes, backend)?;
        Some(Self { xts, mac: Mac::new(authenticator, key), fused })
    }

    /// The hash that can run in one pass with XTS.
    fn fused(&self) -> Option<&PolyvalMac> {
        match &self.mac {
            Mac::Polyval(mac) if self.fused => Some(mac),
            _ => None,
        }
    }
}

/// Seals a plaintext page in place. Nothing that PostgreSQL reads changes by sealing and opening,
/// but with [`Sealing::holes_are_unused`] 16 bytes in the hole may become zero.
pub fn seal(page: &mut Page, key: &Key, position: Position, how: Sealing) -> Sealed {
    if is_zero(page) {
        return Sealed::Zero;
    }
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, how.version.get() << VERSION_SHIFT | flags);
    put(page, CHECKSUM, 0);
    let place = choose_place(page, position.fork, how.holes_are_unused);
    let sealed = match place {
        Some(place) => {
            place.prepare(page);
            encrypt(page, key, position, place);
            Sealed::With(place.strength())
        }
        None => {
            Place::prepare_none(page);
            key.xts.run(Direction::Encrypt, tweak(page, position), v1::unit(page));
            Sealed::Unreadable
        }
    };
    let checksum = if how.checksums { page_checksum(page, position.block) } else { 0 };
    put(page, CHECKSUM, checksum);
    sealed
}

/// Opens a sealed page in place, with the key of its version ([`version_of`]).
///
/// With `checksums`, the opened page gets its plaintext checksum, without it 0.
///
/// # Errors
/// [`NotAuthentic`], if anything in it was changed, if it was sealed for another position, with
/// another key or in another format, and if it is a plaintext page or all zeros. The content of the
/// page is undefined then, but still not one that PostgreSQL accepts: unless it was zero or
/// plaintext, its flags still name a key version.
pub fn open(
    page: &mut Page,
    key: &Key,
    position: Position,
    checksums: bool,
) -> Result<Strength, NotAuthentic> {
    let is_damaged = checksums && get(page, CHECKSUM) != page_checksum(page, position.block);
    if version_of(page).is_none() || is_damaged {
        return Err(NotAuthentic);
    }
    put(page, CHECKSUM, 0);
    let (place, found, expected) = decrypt(page, key, position).ok_or(NotAuthentic)?;
    let strength = place.strength();
    // A short tag is the low bits of the whole.
    let expected = match strength {
        Strength::Full => expected,
        Strength::Short => expected & ((1 << SHORT_BITS) - 1),
    };
    if !bool::from(found.to_le_bytes().ct_eq(&expected.to_le_bytes())) {
        return Err(NotAuthentic);
    }
    if strength == Strength::Short && !needs_short(page, position.fork) {
        return Err(NotAuthentic);
    }
    place.restore(page);
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, flags);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = if checksums { page_checksum(page, position.block) } else { 0 };
    put(page, CHECKSUM, checksum);
    Ok(strength)
}

/// Where the tag of a plaintext page will be. The hole is cleared there if that is needed.
fn choose_place(page: &mut Page, fork: Fork, holes_are_unused: bool) -> Option<Place> {
    if holes_are_unused && let Some(start) = place::unlogged_hole(page, fork) {
        let place = Place::Zeros(start);
        page[place.bytes()].fill(0);
        return Some(place);
    }
    Place::lossless(page, fork).or_else(|| place::is_sane(page).then_some(Place::Short))
}

/// Whether sealing would give this opened page a short tag, too.
fn needs_short(page: &Page, fork: Fork) -> bool {
    place::is_sane(page) && Place::lossless(page, fork).is_none()
}

/// Encrypts a prepared page and puts its tag in.
fn encrypt(page: &mut Page, key: &Key, position: Position, place: Place) {
    let context = tag::context(position);
    let number = tweak(page, position);
    if let Some(mac) = key.fused() {
        let job = Job { tweak: number, powers: &mac.powers, context: &context };
        let finish = |hash, page: &mut Page| place.put(page, mac.finish(hash));
        if hashed::seal(&key.xts, &job, page, place.groups(), finish).is_ok() {
            return;
        }
    }
    let tag = key.mac.tag(&context, page);
    place.put(page, tag);
    key.xts.run(Direction::Encrypt, number, v1::unit(page));
}

/// Decrypts a page and takes its tag out. Returns the tag that was in it and the right one; `None`
/// if it cannot have been sealed.
fn decrypt(page: &mut Page, key: &Key, position: Position) -> Option<(Place, Tag, Tag)> {
    let context = tag::context(position);
    let number = tweak(page, position);
    if let Some(mac) = key.fused() {
        let job = Job { tweak: number, powers: &mac.powers, context: &context };
        let (mut place, mut found) = (None, 0);
        let visit = |group, page: &mut Page| {
            if group == 0 {
                place = Place::read(page);
            }
            place.map_or(GROUPS, |place: Place| {
                found |= place.take(page, group * GROUP..(group + 1) * GROUP);
                place.groups().find(|next| *next > group).unwrap_or(GROUPS)
            })
        };
        if let Some(hash) = hashed::open(&key.xts, &job, page, visit) {
            return Some((place?, found, mac.finish(hash)));
        }
    }
    key.xts.run(Direction::Decrypt, number, v1::unit(page));
    let place = Place::read(page)?;
    let found = place.take(page, 0..PAGE_SIZE);
    Some((place, found, key.mac.tag(&context, page)))
}

impl Place {
    fn strength(self) -> Strength {
        match self {
            Self::Zeros(_) | Self::Items(_) | Self::PackedMap => Strength::Full,
            Self::Short => Strength::Short,
        }
    }

    /// The groups of the page among which the tag is.
    fn groups(self) -> Groups {
        let bytes = self.bytes();
        bytes.start / GROUP..bytes.end.div_ceil(GROUP)
    }
}

fn tweak(page: &Page, position: Position) -> crate::xts::Tweak {
    v1::tweak(page, position.block, position.fork)
}
