//! State of one process, for code that the process may enter in the midst of itself.
//!
//! A PostgreSQL process has one thread, so there is nobody to exclude by a lock. But our functions
//! stand in for ones of the server and of the C library, and are entered again
//!
//! - from within themselves: an error that is reported calls `emit_log_hook`, a look into a catalog
//!   reads pages, the end of a transaction calls who asked for it;
//! - from a signal handler that returns. Those of the server set flags and wake the process, at
//!   most by `write` to a pipe: our `write` looks at a table of atomics and forwards it;
//! - from a signal handler that does not. `quickdie` (postgres.c, 15 to 18) writes to the client
//!   and ends the process. But `bgworker_die` (bgworker.c, 15 to 18), with which background workers
//!   of others begin, raises FATAL wherever it strikes: hooks, callbacks of the transaction and
//!   writes of WAL come after it, on top of whatever function of ours was interrupted. (What the
//!   postmaster of 15 does in handlers, forking children among it, is none of these: it lets them
//!   in only where it waits.)
//!
//! So each value knows whether somebody is at it. Who comes second gets no reference to it but a
//! panic: an ERROR where pgrx stands around our function, and in a critical section or where nobody
//! does, the end of the process, after which the server starts anew from WAL. In a process that is
//! about to end both are the end that it was about to have.
//!
//! One thread: a load and a store, which compilers may not move, are enough, and cost nothing that
//! could be measured.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering::*, compiler_fence};

/// A value of one process.
pub struct ProcessLocal<T> {
    value: UnsafeCell<T>,
    is_in_use: AtomicBool,
}

// SAFETY: nothing is shared between threads, for there is one: PostgreSQL processes have no other,
// and neither we nor the crates we use in them start any. What signal handlers share with the code
// that they interrupt stands behind `is_in_use`.
unsafe impl<T> Sync for ProcessLocal<T> {}

/// Somebody is at the value. Also given back when a panic unwinds.
struct InUse<'a>(&'a AtomicBool);

impl Drop for InUse<'_> {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(SeqCst);
        self.0.store(false, Relaxed);
    }
}

impl<T> ProcessLocal<T> {
    /// A value that each process starts with (inherited from the postmaster by fork).
    pub const fn new(value: T) -> Self {
        ProcessLocal { value: UnsafeCell::new(value), is_in_use: AtomicBool::new(false) }
    }

    #[inline]
    fn use_it(&self) -> InUse<'_> {
        if self.is_in_use.load(Relaxed) {
            refuse();
        }
        // A handler that strikes here, and returns, has given the value back.
        self.is_in_use.store(true, Relaxed);
        compiler_fence(SeqCst);
        InUse(&self.is_in_use)
    }

    /// Runs `f` with the value where it stands.
    ///
    /// `f` may panic, but must not be left by longjmp: the value would be in use for ever, and each
    /// later call be refused. pgrx makes a panic of each ERROR that comes out of the functions that
    /// it binds, so this concerns only those that are called past it. Where these may raise, take
    /// the value out ([`ProcessLocal::get`], [`ProcessLocal::take`]) and call them without it.
    ///
    /// # Panics
    /// When the value is in use, as all others here.
    #[inline]
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _in_use = self.use_it();
        // SAFETY: whoever comes here before `_in_use` is dropped is refused.
        f(unsafe { &mut *self.value.get() })
    }

    /// A copy of the value.
    #[inline]
    pub fn get(&self) -> T
    where
        T: Copy,
    {
        self.with(|value| *value)
    }

    /// Puts another value in its place.
    #[inline]
    pub fn set(&self, value: T) {
        // What was there is dropped when nobody is at the value any more: that may run anything.
        drop(self.replace(value));
    }

    /// Puts another value in its place, which is returned.
    #[inline]
    pub fn replace(&self, value: T) -> T {
        self.with(|there| std::mem::replace(there, value))
    }

    /// Takes the value away, and leaves one of a new process.
    #[inline]
    pub fn take(&self) -> T
    where
        T: Default,
    {
        self.replace(T::default())
    }

    /// Address of the value, for advice to the kernel.
    pub fn as_ptr(&self) -> *const T {
        self.value.get()
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
    fn values_come_and_go() {
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
    fn nobody_gets_a_value_that_is_in_use() {
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
    fn others_are_not_refused() {
        let (one, other) = (ProcessLocal::new(1), ProcessLocal::new(2));
        one.with(|first| other.with(|second| std::mem::swap(first, second)));
        assert_eq!((one.get(), other.get()), (2, 1));
    }

    #[test]
    fn a_panic_gives_the_value_back() {
        let value = ProcessLocal::new(1);
        assert!(is_refused(|| value.with(|_| panic!("expected"))));
        value.set(2);
        assert_eq!(value.get(), 2);
    }

    #[test]
    fn what_is_dropped_may_use_the_value() {
        static VALUE: ProcessLocal<Option<Reader>> = ProcessLocal::new(None);
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        struct Reader;
        impl Drop for Reader {
            fn drop(&mut self) {
                VALUE.with(|there| SEEN.fetch_add(1 + usize::from(there.is_some()), Relaxed));
            }
        }
        VALUE.set(Some(Reader));
        VALUE.set(None);
        assert_eq!(SEEN.load(Relaxed), 1);
    }

    #[test]
    fn a_signal_handler_is_refused_what_it_interrupts() {
        static VALUE: ProcessLocal<u64> = ProcessLocal::new(7);
        static OTHER: ProcessLocal<u64> = ProcessLocal::new(0);
        static REFUSED: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn handler(_signal: libc::c_int) {
            REFUSED.fetch_add(usize::from(is_refused(|| VALUE.set(8))), Relaxed);
            OTHER.set(OTHER.get() + 1);
        }
        // SAFETY: the handler stays; raise() runs it on this thread before it returns, so it meets
        // the allocator and the panic machinery at rest.
        let strike = || unsafe { libc::raise(libc::SIGUSR2) };
        // SAFETY: a handler of the right signature, for a signal that nobody else here uses.
        unsafe { libc::signal(libc::SIGUSR2, handler as *const () as libc::sighandler_t) };
        VALUE.with(|value| {
            strike();
            assert_eq!(*value, 7);
        });
        assert_eq!((VALUE.get(), OTHER.get(), REFUSED.load(Relaxed)), (7, 1, 1));
        strike();
        assert_eq!((VALUE.get(), OTHER.get(), REFUSED.load(Relaxed)), (8, 2, 1));
    }
}
