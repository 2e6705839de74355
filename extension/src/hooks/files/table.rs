//! The class of the file behind each descriptor of this process.
//!
//! Set when the server opens a file and cleared when it closes the file. A forked child inherits
//! both descriptors and table.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use super::{Class, File};

/// Number of descriptors that can have a class. Opening a file of a class fails if its descriptor
/// is higher.
const DESCRIPTORS: usize = 1 << 16;

/// What a class stores about an open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag(pub(crate) [u64; 2]);

impl Tag {
    /// No information.
    pub(crate) const EMPTY: Tag = Tag([0; 2]);
}

/// One byte for each descriptor, so that the look-up in every call hits the cache.
static CLASSES: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(0) }; DESCRIPTORS];

static TAGS: [[AtomicU64; 2]; DESCRIPTORS] =
    [const { [const { AtomicU64::new(0) }; 2] }; DESCRIPTORS];

/// The class of a descriptor, and the file.
#[inline]
pub(super) fn look_up(fd: c_int) -> (Class, File) {
    let class = CLASSES.get(fd as usize).map_or(0, |class| class.load(Relaxed));
    if class == Class::None as u8 {
        return (Class::None, File { fd, tag: Tag::EMPTY });
    }
    let tag =
        TAGS.get(fd as usize).map_or([0; 2], |tag| [tag[0].load(Relaxed), tag[1].load(Relaxed)]);
    (Class::of(class), File { fd, tag: Tag(tag) })
}

/// Stores the class of an opened descriptor. False if the descriptor is too high.
#[inline]
pub(super) fn opened(fd: c_int, class: Class, tag: Tag) -> bool {
    let Some(entry) = CLASSES.get(fd as usize) else { return class == Class::None };
    if class != Class::None
        && let Some(words) = TAGS.get(fd as usize)
    {
        words[0].store(tag.0[0], Relaxed);
        words[1].store(tag.0[1], Relaxed);
    }
    // Most descriptors never have a class: do not touch their memory.
    if entry.load(Relaxed) != class as u8 {
        entry.store(class as u8, Relaxed);
    }
    true
}

/// Called before the descriptor is closed.
#[inline]
pub(super) fn closing(fd: c_int) {
    opened(fd, Class::None, Tag::EMPTY);
}
