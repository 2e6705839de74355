//! Page format version 2: a sealed page that cannot be changed or moved unnoticed.
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
//! every byte of the page but `pd_checksum`, and on the position of the page ([`crate::tag`]).
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

#[cfg(test)]
mod tests;

use subtle::ConstantTimeEq;

use self::place::{Place, SHORT_BITS};
use super::{NotAuthentic, Strength, VERSION_SHIFT, v1, version_of};
use crate::checksum::page_checksum;
use crate::key::Fork;
use crate::layout::{
    CHECKSUM, FLAGS, PAGE_SIZE, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE, Page, VALID_FLAGS, get,
    put,
};
use crate::page_key::PageKey;
use crate::tag::{self, Position, Tag, Tagging};
use crate::version::DataKeyVersion;
use crate::xts::hashed::{self, GROUP, GROUPS, Groups, Job};
use crate::xts::{Direction, Schedule};

/// The two expanded parts of a data key of this format.
#[derive(Clone, Copy)]
pub(super) struct Key<'a> {
    xts: &'a Schedule,
    tagging: &'a Tagging,
}

impl<'a> Key<'a> {
    /// `None`, if pages of the key's cipher have no tag.
    pub(super) fn of(key: &'a PageKey) -> Option<Self> {
        key.tagging.as_ref().map(|tagging| Self { xts: &key.schedule, tagging })
    }
}

/// Seals a plaintext page in place that is not all zeros; see [`super::seal`]. Returns the strength
/// of its tag. `None`: it is encrypted, but opens nowhere. It has no room for a full tag, and a
/// header that PostgreSQL refuses to read (`PageIsVerified`), whose spare bits are in use.
pub(super) fn seal(
    page: &mut Page,
    key: Key<'_>,
    version: DataKeyVersion,
    position: Position,
    checksums: bool,
) -> Option<Strength> {
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, version.get() << VERSION_SHIFT | flags);
    put(page, CHECKSUM, 0);
    let place = Place::lossless(page, position.fork);
    let place = place.or_else(|| place::is_sane(page).then_some(Place::Short));
    match place {
        Some(place) => {
            place.prepare(page);
            encrypt(page, key, position, place);
        }
        None => {
            Place::prepare_none(page);
            key.xts.run(Direction::Encrypt, tweak(page, position), v1::unit(page));
        }
    }
    let checksum = if checksums { page_checksum(page, position.block) } else { 0 };
    put(page, CHECKSUM, checksum);
    place.map(Place::strength)
}

/// Opens a sealed page in place, with the key of its version ([`version_of`]); see
/// [`super::open`].
///
/// # Errors
/// [`NotAuthentic`], if anything in it was changed, if it was sealed for another position, with
/// another key or in another format, and if it is a plaintext page or all zeros. The content of the
/// page is undefined then, but still not one that PostgreSQL accepts: unless it was zero or
/// plaintext, its flags still name a key version.
pub(super) fn open(
    page: &mut Page,
    key: Key<'_>,
    position: Position,
    checksums: bool,
) -> Result<Strength, NotAuthentic> {
    let is_damaged = checksums && get(page, CHECKSUM) != page_checksum(page, position.block);
    if version_of(page).is_none() || is_damaged {
        return Err(NotAuthentic);
    }
    put(page, CHECKSUM, 0);
    let (place, found, expected) = decrypt(page, key, position).ok_or(NotAuthentic)?;
    // A short tag is the low bits of the whole.
    let (expected, may_be_short) = match place {
        Place::Short => (expected & ((1 << SHORT_BITS) - 1), needs_short(page, position.fork)),
        _ => (expected, true),
    };
    if !bool::from(found.to_le_bytes().ct_eq(&expected.to_le_bytes())) || !may_be_short {
        return Err(NotAuthentic);
    }
    place.restore(page);
    let flags = get(page, FLAGS) & VALID_FLAGS;
    put(page, FLAGS, flags);
    put(page, PAGESIZE_VERSION, PAGESIZE_VERSION_VALUE);
    let checksum = if checksums { page_checksum(page, position.block) } else { 0 };
    put(page, CHECKSUM, checksum);
    Ok(place.strength())
}

/// Whether sealing would give this opened page a short tag, too.
fn needs_short(page: &Page, fork: Fork) -> bool {
    place::is_sane(page) && Place::lossless(page, fork).is_none()
}

/// Encrypts a prepared page and puts its tag in.
fn encrypt(page: &mut Page, key: Key<'_>, position: Position, place: Place) {
    let context = tag::context(position);
    let number = tweak(page, position);
    if let Some(mac) = key.tagging.fused() {
        let job = Job { tweak: number, powers: &mac.powers, context: &context };
        let finish = |hash, page: &mut Page| place.put(page, mac.finish(hash));
        if hashed::seal(key.xts, &job, page, place.groups(), finish).is_ok() {
            return;
        }
    }
    let tag = key.tagging.tag(&context, page);
    place.put(page, tag);
    key.xts.run(Direction::Encrypt, number, v1::unit(page));
}

/// Decrypts a page and takes its tag out. Returns the tag that was in it and the right one; `None`
/// if it cannot have been sealed.
fn decrypt(page: &mut Page, key: Key<'_>, position: Position) -> Option<(Place, Tag, Tag)> {
    let context = tag::context(position);
    let number = tweak(page, position);
    if let Some(mac) = key.tagging.fused() {
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
        if let Some(hash) = hashed::open(key.xts, &job, page, visit) {
            return Some((place?, found, mac.finish(hash)));
        }
    }
    key.xts.run(Direction::Decrypt, number, v1::unit(page));
    let place = Place::read(page)?;
    let found = place.take(page, 0..PAGE_SIZE);
    Some((place, found, key.tagging.tag(&context, page)))
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
