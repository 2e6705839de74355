//! Which class of file each descriptor of this process is open on.
//!
//! Set when the server opens a file and cleared when it closes it. A child that is forked inherits
//! the descriptors and the table alike.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use super::{Class, File};

/// Descriptors that can have a class. A file of a class that gets a higher one is not opened.
const DESCRIPTORS: usize = 1 << 16;

/// What a class remembers about an open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag(pub(crate) [u64; 2]);

impl Tag {
    /// Nothing.
    pub(crate) const EMPTY: Tag = Tag([0; 2]);
}

/// A byte per descriptor, so that the look-up that every call pays for stays in the cache.
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

/// The descriptor was opened. False if it is too high to be remembered.
#[inline]
pub(super) fn opened(fd: c_int, class: Class, tag: Tag) -> bool {
    let Some(entry) = CLASSES.get(fd as usize) else { return class == Class::None };
    if class != Class::None
        && let Some(words) = TAGS.get(fd as usize)
    {
        words[0].store(tag.0[0], Relaxed);
        words[1].store(tag.0[1], Relaxed);
    }
    // Most descriptors never have a class: leave their memory alone.
    if entry.load(Relaxed) != class as u8 {
        entry.store(class as u8, Relaxed);
    }
    true
}

/// The descriptor is about to be closed.
#[inline]
pub(super) fn closing(fd: c_int) {
    opened(fd, Class::None, Tag::EMPTY);
}
