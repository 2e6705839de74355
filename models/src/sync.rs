//! Atomics that try every order of events (loom), and can be weakened: one place in the source is
//! then treated as if it said `Relaxed`, or the fence there as if it were missing. A model that
//! does not notice proves nothing about that place.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::Location;

pub use std::sync::atomic::Ordering;

use loom::sync::atomic;

/// A place in a source at which an ordering matters: file and line, and the operation.
pub type Place = (&'static str, u32, &'static str);

thread_local! {
    static MEET: Cell<bool> = const { Cell::new(false) };
    static WEAKENED: RefCell<Option<Place>> = const { RefCell::new(None) };
    static MET: RefCell<BTreeSet<Place>> = const { RefCell::new(BTreeSet::new()) };
}

/// Runs `f` with the ordering at one place taken away.
pub fn weakened<R>(place: Place, f: impl FnOnce() -> R) -> R {
    WEAKENED.set(Some(place));
    let result = f();
    WEAKENED.set(None);
    result
}

/// Runs `f`, and tells which places with an ordering it has come by.
pub fn places(f: impl FnOnce()) -> BTreeSet<Place> {
    MET.take();
    f();
    MET.take()
}

/// Runs `f`, a model in which several threads load and store the same word. It multiplies the
/// orders of events, and a thread that only reads does not need it: it may run last, and read
/// whatever was stored before.
pub fn meeting<R>(f: impl FnOnce() -> R) -> R {
    MEET.set(true);
    let result = f();
    MEET.set(false);
    result
}

/// Whether the ordering of this place is taken away.
fn is_weak(at: &'static Location<'static>, operation: &'static str) -> bool {
    let place = (at.file(), at.line(), operation);
    MET.with_borrow_mut(|met| met.insert(place));
    WEAKENED.with_borrow(|weakened| *weakened == Some(place))
}

#[track_caller]
fn ordering(wanted: Ordering, operation: &'static str) -> Ordering {
    if wanted == Ordering::Relaxed || is_weak(Location::caller(), operation) {
        return Ordering::Relaxed;
    }
    wanted
}

/// As in `std`.
#[track_caller]
pub fn fence(order: Ordering) {
    if !is_weak(Location::caller(), "fence") {
        atomic::fence(order);
    }
}

/// As in `std::hint`.
pub fn spin_loop() {
    loom::hint::spin_loop();
}

/// Where two threads meet at an atomic.
///
/// loom tries a store before another thread's load only if that load was the last access: a thread
/// that loads and then stores hides it. (`last_dependent_access` in its `rt/atomic.rs`; test
/// `a_load_before_a_store_hides_another`.) So where [`meeting`] says so every access is also a
/// store to a word of its own, which orders nothing and is not read.
#[derive(Debug)]
struct Met(atomic::AtomicBool);

impl Met {
    fn new() -> Self {
        Self(atomic::AtomicBool::new(false))
    }

    fn meet(&self) {
        if MEET.get() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// As in `std`. What is `SeqCst` has a fence beside it: loom knows that order of fences
        /// only.
        #[derive(Debug)]
        pub struct $name(atomic::$name, Met);

        impl $name {
            /// As in `std`.
            pub fn new(value: $value) -> Self {
                Self(atomic::$name::new(value), Met::new())
            }

            /// As in `std`.
            #[track_caller]
            pub fn load(&self, wanted: Ordering) -> $value {
                self.1.meet();
                let order = ordering(wanted, "load");
                if order == Ordering::SeqCst {
                    atomic::fence(order);
                    return self.0.load(Ordering::Acquire);
                }
                self.0.load(order)
            }

            /// As in `std`.
            #[track_caller]
            pub fn store(&self, value: $value, wanted: Ordering) {
                self.1.meet();
                let order = ordering(wanted, "store");
                if order == Ordering::SeqCst {
                    self.0.store(value, Ordering::Release);
                    return atomic::fence(order);
                }
                self.0.store(value, order);
            }

            /// As in `std`.
            #[track_caller]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.1.meet();
                let (success, failure) =
                    (ordering(success, "exchange"), ordering(failure, "no exchange"));
                self.0.compare_exchange(current, new, success, failure)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(Default::default())
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicBool, bool);
