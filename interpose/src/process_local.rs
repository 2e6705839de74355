//! State of one process, for code that may be entered again while it runs.
//!
//! A PostgreSQL process has one thread, so no lock is needed. But our functions replace functions
//! of the server and of the C library, and may be entered again
//!
//! - from within themselves: reporting an error calls `emit_log_hook`, a catalog lookup reads
//!   pages, the end of a transaction calls registered callbacks;
//! - from a signal handler that returns. The server's handlers set flags and wake the process, at
//!   most by `write` to a pipe. Our `write` reads a table of atomics and forwards the call;
//! - from a signal handler that does not return. `quickdie` (postgres.c, 15 to 18) writes to the
//!   client and ends the process. But `bgworker_die` (bgworker.c, 15 to 18), the initial handler of
//!   other extensions' background workers, raises FATAL wherever the process happens to be. Hooks,
//!   transaction callbacks and WAL writes then run on top of the interrupted function of ours. (The
//!   handlers of the postmaster of 15, which also fork children, are not such a case: they are
//!   admitted only where the postmaster waits.)
//!
//! So each value has a flag that says whether it is in use. A second use gets no reference but a
//! panic. Within pgrx's guard the panic becomes an ERROR. In a critical section, or without the
//! guard, it ends the process, and the server restarts and recovers from WAL. Within the callbacks
//! of the end of a process it keeps the server from releasing what the process has locked; so
//! nothing of ours ends a process while a value is in use ([`any_in_use`]).
//!
//! With one thread, a load and a store that compilers may not reorder are enough. They cost nothing
//! measurable.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*, compiler_fence};

/// Number of values that [`ProcessLocal::with`] lends at the moment.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// Whether any value of this process is in use by [`ProcessLocal::with`]. If the process ended
/// there, what is called at its end could be refused that value, and leave its work undone.
pub fn any_in_use() -> bool {
    LENT.load(Relaxed) > 0
}

/// A value of one process.
pub struct ProcessLocal<T> {
    value: UnsafeCell<T>,
    is_in_use: AtomicBool,
}

// SAFETY: nothing is shared between threads: PostgreSQL processes have only one, and neither we nor
// the crates we use in them start any. What signal handlers share with the code that they interrupt
// is guarded by `is_in_use`.
unsafe impl<T> Sync for ProcessLocal<T> {}

/// Marks the value as in use until it is dropped, also when a panic unwinds.
struct InUse<'a>(&'a AtomicBool);

impl Drop for InUse<'_> {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(SeqCst);
        self.0.store(false, Relaxed);
    }
}

/// One of [`LENT`] until it is dropped. A signal handler that runs in between and returns has given
/// back what it was lent.
struct Lent;

impl Lent {
    #[inline]
    fn begin() -> Lent {
        LENT.store(LENT.load(Relaxed) + 1, Relaxed);
        Lent
    }
}

impl Drop for Lent {
    #[inline]
    fn drop(&mut self) {
        LENT.store(LENT.load(Relaxed).saturating_sub(1), Relaxed);
    }
}

impl<T> ProcessLocal<T> {
    /// The initial value in each process (inherited from the postmaster by fork).
    pub const fn new(value: T) -> Self {
        ProcessLocal { value: UnsafeCell::new(value), is_in_use: AtomicBool::new(false) }
    }

    #[inline]
    fn acquire(&self) -> InUse<'_> {
        if self.is_in_use.load(Relaxed) {
            refuse();
        }
        // A handler that runs here and returns has released the value.
        self.is_in_use.store(true, Relaxed);
        compiler_fence(SeqCst);
        InUse(&self.is_in_use)
    }

    /// Runs `f` with a reference to the value.
    ///
    /// `f` may panic, but must not be left by longjmp: the value would stay in use for ever, and
    /// each later call would be refused. pgrx turns each ERROR of the functions that it binds into
    /// a panic, so this concerns only functions that are called without its guard. Where these may
    /// raise an error, take the value out ([`ProcessLocal::get`], [`ProcessLocal::take`]) and call
    /// them without a reference to it.
    ///
    /// # Panics
    ///
    /// If the value is in use. The other methods panic likewise.
    #[inline]
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _in_use = self.acquire();
        let _lent = Lent::begin();
        // SAFETY: any other use is refused until `_in_use` is dropped.
        f(unsafe { &mut *self.value.get() })
    }

    /// A copy of the value.
    #[inline]
    pub fn get(&self) -> T
    where
        T: Copy,
    {
        let _in_use = self.acquire();
        // SAFETY: any other use is refused until `_in_use` is dropped.
        unsafe { *self.value.get() }
    }

    /// Replaces the value.
    #[inline]
    pub fn set(&self, value: T) {
        // The old value is dropped after the value is released, because its destructor may run
        // anything.
        drop(self.replace(value));
    }

    /// Replaces the value and returns the old one.
    #[inline]
    pub fn replace(&self, value: T) -> T {
        let _in_use = self.acquire();
        // SAFETY: any other use is refused until `_in_use` is dropped.
        std::mem::replace(unsafe { &mut *self.value.get() }, value)
    }

    /// Takes the value and leaves the default.
    #[inline]
    pub fn take(&self) -> T
    where
        T: Default,
    {
        self.replace(T::default())
    }

    /// Address of the value, for madvise(2).
    pub fn as_ptr(&self) -> *const T {
        self.value.get()
    }
}

impl<T> ProcessLocal<Vec<T>> {
    /// Whether the list is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let _in_use = self.acquire();
        // SAFETY: any other use is refused until `_in_use` is dropped.
        unsafe { (*self.value.get()).is_empty() }
    }
}

#[cold]
#[inline(never)]
fn refuse() -> ! {
    panic!("pagevault: state of this process is used in the midst of being used");
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn is_refused(f: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(f)).is_err()
    }

    #[test]
    fn values_can_be_set_read_and_taken() {
        let value = ProcessLocal::new(vec![1]);
        value.with(|list| list.push(2));
        assert_eq!(value.take(), [1, 2]);
        assert_eq!(value.replace(vec![3]), []);
        value.set(vec![4]);
        assert_eq!(value.take(), [4]);
        let value = ProcessLocal::new(5);
        value.set(value.get() + 1);
        assert_eq!(value.get(), 6);
    }

    #[test]
    fn a_value_in_use_is_refused() {
        let value = ProcessLocal::new(1);
        value.with(|first| {
            assert!(is_refused(|| value.with(|second| *second = 2)));
            assert!(is_refused(|| value.set(3)));
            assert!(is_refused(|| _ = value.get()));
            *first += 10;
        });
        assert_eq!(value.get(), 11);
    }

    #[test]
    fn what_is_in_use_is_known() {
        // Other tests of this process use values, too.
        let value = ProcessLocal::new(1);
        value.with(|_| assert!(any_in_use()));
    }

    #[test]
    fn another_value_is_not_refused() {
        let (one, other) = (ProcessLocal::new(1), ProcessLocal::new(2));
        one.with(|first| other.with(|second| std::mem::swap(first, second)));
        assert_eq!((one.get(), other.get()), (2, 1));
    }

    #[test]
    fn a_panic_releases_the_value() {
        let value = ProcessLocal::new(1);
        assert!(is_refused(|| value.with(|_| panic!("expected"))));
        value.set(2);
        assert_eq!(value.get(), 2);
    }

    #[test]
    fn a_dropped_value_may_use_the_cell() {
        static VALUE: ProcessLocal<Option<Reader>> = ProcessLocal::new(None);
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        struct Reader;
        impl Drop for Reader {
            fn drop(&mut self) {
                VALUE.with(|value| SEEN.fetch_add(1 + usize::from(value.is_some()), Relaxed));
            }
        }
        VALUE.set(Some(Reader));
        VALUE.set(None);
        assert_eq!(SEEN.load(Relaxed), 1);
    }

    #[test]
    fn a_signal_handler_is_refused_the_interrupted_value() {
        static VALUE: ProcessLocal<u64> = ProcessLocal::new(7);
        static OTHER: ProcessLocal<u64> = ProcessLocal::new(0);
        static REFUSED: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn handler(_signal: libc::c_int) {
            REFUSED.fetch_add(usize::from(is_refused(|| VALUE.set(8))), Relaxed);
            OTHER.set(OTHER.get() + 1);
        }
        // SAFETY: the handler stays installed. raise() runs it on this thread before it returns, so
        // the allocator and the panic machinery are not in use.
        let interrupt = || unsafe { libc::raise(libc::SIGUSR2) };
        // SAFETY: a handler of the right signature, for a signal that nobody else here uses.
        unsafe { libc::signal(libc::SIGUSR2, handler as *const () as libc::sighandler_t) };
        VALUE.with(|value| {
            interrupt();
            assert_eq!(*value, 7);
        });
        assert_eq!((VALUE.get(), OTHER.get(), REFUSED.load(Relaxed)), (7, 1, 1));
        interrupt();
        assert_eq!((VALUE.get(), OTHER.get(), REFUSED.load(Relaxed)), (8, 2, 1));
    }
}
