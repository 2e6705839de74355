use std::cell::Cell;

use super::*;

const WORDS: usize = 5;

/// Private pages of this test: read-only, writable, read-only.
struct Pages {
    start: usize,
}

impl Pages {
    fn new() -> Pages {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(ptr::null_mut(), 3 * page_size(), rights, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let pages = Pages { start: start.expose_provenance() };
        for (index, address) in pages.addresses().into_iter().enumerate() {
            pages.store(address, 100 + index);
        }
        for page in [0, 2] {
            let from = pages.start + page * page_size();
            let read_only = Protection { read: true, write: false, execute: false };
            // SAFETY: a whole page of the mapping just made, which only this test uses.
            unsafe { Kernel.protect(&(from..from + page_size()), read_only) }.unwrap();
        }
        pages
    }

    fn addresses(&self) -> [usize; WORDS] {
        let page = page_size();
        [0, page - WORD, page + 8 * WORD, 2 * page, 2 * page + WORD].map(|at| self.start + at)
    }

    fn store(&self, address: usize, value: usize) {
        // SAFETY: an aligned word of a page of this test that is writable now.
        let word = unsafe { AtomicUsize::from_ptr(ptr::with_exposed_provenance_mut(address)) };
        word.store(value, Ordering::SeqCst);
    }

    fn patches(&self) -> Vec<Patch> {
        let patch = |(index, address)| {
            let new = ptr::without_provenance(200 + index);
            Patch::new(format!("word {index}"), address, 100 + index, new).unwrap()
        };
        self.addresses().into_iter().enumerate().map(patch).collect()
    }

    fn values(&self) -> [usize; WORDS] {
        self.addresses().map(load)
    }

    fn writable(&self) -> [bool; 3] {
        let maps = Maps::of_this_process().unwrap();
        [0, 1, 2].map(|page| maps.at(self.start + page * page_size()).unwrap().protection.write)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start = ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: the mapping of this test, which nothing uses any more.
        unsafe { libc::munmap(start, 3 * page_size()) };
    }
}

/// The kernel, except that some calls fail, or another writer comes first.
struct Faulty<F: Fn(usize) -> bool> {
    calls: Cell<usize>,
    fails: F,
}

impl<F: Fn(usize) -> bool> System for Faulty<F> {
    unsafe fn protect(&self, pages: &Range<usize>, protection: Protection) -> io::Result<()> {
        let call = self.calls.replace(self.calls.get() + 1);
        if (self.fails)(call) {
            return Err(io::Error::from_raw_os_error(libc::EACCES));
        }
        // SAFETY: handed on to the caller.
        unsafe { Kernel.protect(pages, protection) }
    }
}

fn swap_with(fails: impl Fn(usize) -> bool, pages: &Pages) -> Result<Vec<Swapped>, Error> {
    let system = Faulty { calls: Cell::new(0), fails };
    // SAFETY: words of this test's pages, which are numbers that nobody calls.
    unsafe { swap_on(&system, pages.patches()) }
}

const OLD: [usize; WORDS] = [100, 101, 102, 103, 104];
const NEW: [usize; WORDS] = [200, 201, 202, 203, 204];
const PROTECTED: [bool; 3] = [false, true, false];

#[test]
fn swaps_all_and_restores_the_protection() {
    let pages = Pages::new();
    // SAFETY: words of this test's pages, which are numbers that nobody calls.
    let swapped = unsafe { swap(pages.patches()) }.unwrap();
    assert_eq!(pages.values(), NEW);
    assert_eq!(pages.writable(), PROTECTED);
    verify(&swapped).unwrap();
    pages.store(pages.addresses()[2], 9);
    let error = verify(&swapped).unwrap_err().to_string();
    assert!(error.starts_with("word 2 at 0x"), "{error}");
    assert!(error.ends_with("holds 0x9, expected 0xca"), "{error}");
}

#[test]
fn any_one_refusal_of_the_system_leaves_everything_as_it_was() {
    // Two windows: two calls open them, two close them.
    for failing in 0..4 {
        let pages = Pages::new();
        let error = swap_with(|call| call == failing, &pages).unwrap_err();
        assert!(matches!(error, Error::Protect { .. }), "call {failing}: {error}");
        assert_eq!(pages.values(), OLD, "call {failing}");
        assert_eq!(pages.writable(), PROTECTED, "call {failing}");
    }
    let pages = Pages::new();
    swap_with(|call| call == 4, &pages).unwrap();
}

#[test]
fn a_system_that_keeps_refusing_is_reported_as_such() {
    let pages = Pages::new();
    assert!(matches!(swap_with(|_| true, &pages), Err(Error::Protect { .. })));
    assert_eq!((pages.values(), pages.writable()), (OLD, PROTECTED));
    for from in 1..4 {
        let pages = Pages::new();
        let error = swap_with(|call| call >= from, &pages).unwrap_err();
        assert!(matches!(error, Error::NotRolledBack { .. }), "from {from}: {error}");
        let text = error.to_string();
        assert!(text.contains("cannot undo the change of word"), "{text}");
        assert!(text.contains("Permission denied"), "{text}");
    }
}

#[test]
fn a_word_that_changes_during_the_swap_undoes_it() {
    let pages = Pages::new();
    let interfere = |call: usize| {
        if call == 0 {
            pages.store(pages.addresses()[2], 9);
        }
        false
    };
    let error = swap_with(interfere, &pages).unwrap_err().to_string();
    assert!(error.starts_with("word 2 at 0x") && error.contains("holds 0x9"), "{error}");
    assert_eq!(pages.values(), [100, 101, 9, 103, 104]);
    assert_eq!(pages.writable(), PROTECTED);
}

#[test]
fn a_wrong_value_is_found_before_any_page_is_opened() {
    let pages = Pages::new();
    pages.store(pages.addresses()[2], 9);
    let opened = Cell::new(false);
    let error = swap_with(|_| opened.replace(true), &pages).unwrap_err();
    assert!(matches!(error, Error::Unexpected { found: 9, .. }), "{error}");
    assert!(!opened.get());
}

#[test]
fn unmapped_and_unaligned_words_are_refused() {
    for address in [WORD, Pages::new().start + 1] {
        let patch = Patch::new("it".to_owned(), address, 1, ptr::without_provenance(2)).unwrap();
        // SAFETY: the addresses are refused before anything is written to them.
        let error = unsafe { swap(vec![patch]) }.unwrap_err();
        assert!(matches!(error, Error::NotPrivate { .. }), "{error}");
    }
}

/// Code and constants share pages in a program linked with `-z noseparate-code`.
#[test]
fn code_stays_executable_while_its_page_is_open() {
    let pages = Pages::new();
    let first = pages.start..pages.start + page_size();
    let code = Protection { read: true, write: false, execute: true };
    // SAFETY: a whole page of this test.
    unsafe { Kernel.protect(&first, code) }.unwrap();
    let executable =
        |_| !Maps::of_this_process().unwrap().at(first.start).unwrap().protection.execute;
    // Fails, and so rolls back, at the first call that lacks the right to execute.
    swap_with(executable, &pages).unwrap();
    assert_eq!(Maps::of_this_process().unwrap().at(first.start).unwrap().protection, code);
}

#[test]
fn signals_are_blocked_for_the_swap_only() {
    let blocked = || {
        // SAFETY: zero is a valid set; only asks for the current one.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_SETMASK, ptr::null(), &raw mut set);
            libc::sigismember(&raw const set, libc::SIGUSR1) == 1
        }
    };
    let pages = Pages::new();
    let during = Cell::new(false);
    let observe = |_| {
        during.set(blocked());
        false
    };
    swap_with(observe, &pages).unwrap();
    assert!(during.get() && !blocked());
}
