//! Pointers to the server's functions, to which ours forward calls.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The address of a server function of type `F`, set once in the postmaster before any process is
/// forked, read on every call.
pub(crate) struct Forward<F> {
    address: AtomicPtr<()>,
    _function: PhantomData<fn() -> F>,
}

impl<F: Copy> Forward<F> {
    /// The initial value.
    pub(crate) const fn unresolved() -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut ()>()) };
        Forward { address: AtomicPtr::new(std::ptr::null_mut()), _function: PhantomData }
    }

    /// Stores the address of the server's function.
    pub(crate) fn resolve(&self, address: *const ()) {
        self.address.store(address.cast_mut(), Ordering::Release);
    }

    /// The server's function.
    ///
    /// # Safety
    /// [`Forward::resolve`] was called with the address of a function of type `F`.
    #[inline]
    pub(crate) unsafe fn get(&self) -> F {
        let address = self.address.load(Ordering::Relaxed);
        debug_assert!(!address.is_null());
        // SAFETY: F is a function pointer of pointer size (checked above), and the caller
        // guarantees that the address is one of that type.
        unsafe { std::mem::transmute_copy::<*mut (), F>(&address) }
    }
}
