//! Which descriptor is open on which file with a name. A child that is forked inherits descriptors
//! and table alike.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Descriptors that can be watched; PostgreSQL keeps to some thousand.
const DESCRIPTORS: usize = 1 << 13;
const LONGEST: usize = 63;

struct Slot {
    length: AtomicU8,
    name: [AtomicU8; LONGEST],
}

static SLOTS: [Slot; DESCRIPTORS] =
    [const { Slot { length: AtomicU8::new(0), name: [const { AtomicU8::new(0) }; LONGEST] } };
        DESCRIPTORS];

fn slot(fd: c_int) -> Option<&'static Slot> {
    SLOTS.get(usize::try_from(fd).ok()?)
}

pub(crate) fn opened(fd: c_int, name: Option<&[u8]>) {
    let Some(slot) = slot(fd) else { return };
    let name = name.unwrap_or_default();
    let length = name.len().min(LONGEST);
    for (to, byte) in slot.name.iter().zip(&name[..length]) {
        to.store(*byte, Relaxed);
    }
    if slot.length.load(Relaxed) != length as u8 {
        slot.length.store(length as u8, Relaxed);
    }
}

/// The name of the file behind a descriptor, in `room`.
pub(crate) fn find(fd: c_int, room: &mut [u8; LONGEST]) -> Option<&[u8]> {
    let slot = slot(fd)?;
    let length = usize::from(slot.length.load(Relaxed));
    if length == 0 {
        return None;
    }
    for (to, byte) in room.iter_mut().zip(&slot.name[..length]) {
        *to = byte.load(Relaxed);
    }
    Some(&room[..length])
}

pub(crate) const ROOM: [u8; LONGEST] = [0; LONGEST];
