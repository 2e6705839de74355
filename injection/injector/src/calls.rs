//! What happens to a call: it is counted, written down, and perhaps made to fail.

use std::ffi::{CStr, c_int};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::begin::{Orders, orders};
use crate::names::{self, Name};
use crate::order::{self, at};
use crate::{descriptors, process};

/// What happens to a call.
pub(crate) enum Fate {
    /// It is made.
    Made,
    /// It is made with half of the bytes.
    Shortened,
    /// It fails with this cause.
    Failed(c_int),
}

fn active() -> Option<&'static Orders> {
    orders().filter(|orders| orders.number(at::MODE).load(SeqCst) != order::OFF)
}

/// Of a call on a path.
pub(crate) fn on_path(function: &str, directory: c_int, path: &CStr) -> Fate {
    let Some(orders) = active() else { return Fate::Made };
    names::of_path(directory, path)
        .map_or(Fate::Made, |path| decide(orders, function, path.bytes()))
}

/// Of a call on a descriptor.
pub(crate) fn on_descriptor(function: &str, fd: c_int) -> Fate {
    let Some(orders) = active() else { return Fate::Made };
    let mut room = descriptors::ROOM;
    descriptors::find(fd, &mut room).map_or(Fate::Made, |path| decide(orders, function, path))
}

/// Of a call on neither.
pub(crate) fn on_nothing(function: &str) -> Fate {
    active().map_or(Fate::Made, |orders| decide(orders, function, b"-"))
}

/// By how many seconds the time of day is wrong.
pub(crate) fn shift() -> i64 {
    let Some(orders) = active() else { return 0 };
    let is_it = orders.number(at::ACTION).load(Relaxed) == order::SHIFT;
    if !is_it || orders.number(at::MODE).load(Relaxed) != order::ACT {
        return 0;
    }
    let number = orders.number(at::SEEN).fetch_add(1, Relaxed) + 1;
    if number < orders.number(at::NUMBER).load(Relaxed) {
        return 0;
    }
    orders.number(at::FIRED).fetch_add(1, Relaxed);
    orders.jump().load(Relaxed)
}

fn decide(orders: &Orders, function: &str, path: &[u8]) -> Fate {
    let mut name = Name::new();
    name.push(function.as_bytes());
    name.push(b" ");
    name.push(path);
    name.push(b" ");
    process::push_kind(&mut name);
    let entry = orders.number(at::CALLS).fetch_add(1, Relaxed);
    if let Some([length, text @ ..]) = orders.entry(entry as usize) {
        for (to, byte) in text.iter().zip(name.bytes()) {
            to.store(*byte, Relaxed);
        }
        length.store(name.bytes().len() as u8, Relaxed);
    }
    let is_it = orders.number(at::MODE).load(Relaxed) == order::ACT
        && orders.name().load(Relaxed) == order::hash(name.bytes());
    if !is_it {
        return Fate::Made;
    }
    let number = orders.number(at::SEEN).fetch_add(1, Relaxed) + 1;
    let wanted = orders.number(at::NUMBER).load(Relaxed);
    let always = orders.number(at::ALWAYS).load(Relaxed) != 0;
    if number != wanted && !(always && number > wanted) {
        return Fate::Made;
    }
    let fate = match orders.number(at::ACTION).load(Relaxed) {
        order::FAIL => Fate::Failed(orders.number(at::ERRNO).load(Relaxed) as c_int),
        order::SHORTEN => Fate::Shortened,
        _ => return Fate::Made,
    };
    orders.number(at::FIRED).fetch_add(1, Relaxed);
    fate
}

/// Sets `errno`.
pub(crate) fn fails(cause: c_int) {
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = cause }
}
