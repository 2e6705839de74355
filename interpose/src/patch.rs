//! The swap: makes the pages writable, exchanges the words, restores the protection; or undoes all
//! of it.
//!
//! Read-only data and RELRO are private file mappings. A write therefore copies the page for this
//! process and its children; the file does not change.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Error;
use crate::executable::load;
use crate::maps::{Maps, Protection};
use crate::owner;

const WORD: usize = size_of::<usize>();

/// A word to be swapped.
#[derive(Debug)]
pub(crate) struct Patch {
    what: String,
    address: usize,
    expected: usize,
    /// A second value that is also correct: a lazy GOT slot may be bound at any time.
    or: Option<usize>,
    new: usize,
}

impl Patch {
    pub(crate) fn new(
        what: String,
        address: usize,
        expected: usize,
        new: *const (),
    ) -> Result<Patch, Error> {
        let new = new.expose_provenance();
        if new == 0 || new == expected {
            return Err(Error::BadReplacement { what });
        }
        Ok(Patch { what, address, expected, or: None, new })
    }

    pub(crate) fn or_bound_to(mut self, function: usize) -> Result<Patch, Error> {
        if self.new == function {
            return Err(Error::BadReplacement { what: self.what });
        }
        self.or = Some(function);
        Ok(self)
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn into_what(self) -> String {
        self.what
    }
}

/// A word that was swapped, or is about to be.
#[derive(Debug)]
pub(crate) struct Swapped {
    what: String,
    address: usize,
    old: usize,
    new: usize,
    protection: Protection,
}

impl Swapped {
    /// Compares the word and its mapping with the plan.
    fn check(patch: Patch, maps: &Maps) -> Result<Swapped, Error> {
        let Patch { what, address, expected, or, new } = patch;
        let mapping = maps
            .at(address)
            .filter(|mapping| mapping.private && mapping.protection.read)
            .filter(|_| address.is_multiple_of(WORD));
        let Some(mapping) = mapping else { return Err(Error::NotPrivate { what, address }) };
        let old = load(address);
        if old != expected && Some(old) != or {
            let expected = format!("{expected:#x}");
            return Err(Error::Unexpected { what, address, found: old, expected });
        }
        Ok(Swapped { what, address, old, new, protection: mapping.protection })
    }

    fn holds(&self, expected: usize) -> Result<(), Error> {
        match load(self.address) {
            found if found == expected => Ok(()),
            found => Err(Error::Unexpected {
                what: self.what.clone(),
                address: self.address,
                found,
                expected: format!("{expected:#x}"),
            }),
        }
    }

    /// What the word is, and which library has replaced it since.
    fn replaced(&self) -> Option<(String, String)> {
        let found = load(self.address);
        if found == self.new {
            return None;
        }
        let library = owner::path(found).unwrap_or_else(|| "an unknown library".to_owned());
        Some((self.what.clone(), library))
    }

    /// # Safety
    ///
    /// The word lies in memory that is mapped, and writable now.
    unsafe fn exchange(&self, from: usize, to: usize) -> Result<(), Error> {
        // SAFETY: mapped and writable, as the caller says, aligned (`check`), and only accessed
        // atomically by this crate.
        let word = unsafe { AtomicUsize::from_ptr(ptr::with_exposed_provenance_mut(self.address)) };
        match word.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Ok(()),
            Err(_) => self.holds(from),
        }
    }
}

/// Swaps all words or none.
///
/// # Safety
///
/// Every address is a word of the main program that may hold the new value instead of the old,
/// as `Plan::install` requires; no other thread runs.
pub(crate) unsafe fn swap(patches: Vec<Patch>) -> Result<Vec<Swapped>, Error> {
    // SAFETY: handed on to the caller.
    unsafe { swap_on(&Kernel, patches) }
}

/// # Safety
///
/// As [`swap`], which calls this with the real system.
unsafe fn swap_on(system: &impl System, patches: Vec<Patch>) -> Result<Vec<Swapped>, Error> {
    // A handler that ran meanwhile would find half of the plan, or pages without a right.
    let _blocked = SignalsBlocked::new().map_err(Error::Signals)?;
    let maps = Maps::of_this_process().map_err(Error::Maps)?;
    let words: Vec<Swapped> =
        patches.into_iter().map(|patch| Swapped::check(patch, &maps)).collect::<Result<_, _>>()?;
    let mut windows = windows(system, &words);
    let mut done = 0;
    // SAFETY: handed on to the caller.
    match unsafe { exchange_all(&words, &mut windows, &mut done) } {
        Ok(()) => Ok(words),
        // SAFETY: the first `done` words have just been exchanged under the same contract.
        Err(cause) => Err(unsafe { roll_back(&words[..done], &mut windows, cause) }),
    }
}

/// # Safety
///
/// As [`swap`]; `windows` covers every word that lies in memory without the right to write.
unsafe fn exchange_all<S: System>(
    words: &[Swapped],
    windows: &mut [Window<'_, S>],
    done: &mut usize,
) -> Result<(), Error> {
    windows.iter_mut().try_for_each(Window::open)?;
    for word in words {
        // SAFETY: `check` found the word mapped; it is writable by itself or in an open window.
        unsafe { word.exchange(word.old, word.new) }?;
        *done += 1;
    }
    windows.iter_mut().try_for_each(Window::close)?;
    verify(words)
}

/// Puts the words back and closes the windows. Returns the error to report.
///
/// # Safety
///
/// As [`exchange_all`], which has exchanged exactly these words.
unsafe fn roll_back<S: System>(
    words: &[Swapped],
    windows: &mut [Window<'_, S>],
    cause: Error,
) -> Error {
    let mut stuck = None;
    for word in words.iter().rev() {
        let window = windows.iter_mut().find(|window| window.pages.contains(&word.address));
        if window.is_some_and(|window| window.open().is_err()) {
            stuck = Some(word.what.clone());
            continue;
        }
        // SAFETY: mapped (`check`), and writable by itself or in the window just opened.
        if unsafe { word.exchange(word.new, word.old) }.is_err() {
            stuck = Some(word.what.clone());
        }
    }
    for window in windows {
        if window.close().is_err() {
            stuck = Some(window.what.clone());
        }
    }
    match stuck {
        Some(what) => Error::NotRolledBack { what, cause: Box::new(cause) },
        None => cause,
    }
}

/// Reads back every word, and the protection of its page.
pub(crate) fn verify(words: &[Swapped]) -> Result<(), Error> {
    let maps = Maps::of_this_process().map_err(Error::Maps)?;
    for word in words {
        let mapping = maps.at(word.address);
        if mapping.is_none_or(|mapping| mapping.protection != word.protection) {
            let (what, address) = (word.what.clone(), word.address);
            return Err(Error::ProtectionChanged { what, address });
        }
        word.holds(word.new)?;
    }
    Ok(())
}

/// Which words were replaced since, and by which libraries.
pub(crate) fn replaced(words: &[Swapped]) -> impl Iterator<Item = (String, String)> {
    words.iter().filter_map(Swapped::replaced)
}

/// The system calls of the swap. A test replaces them to make them fail.
trait System {
    /// # Safety
    ///
    /// `pages` are whole mapped pages, and taking or giving these rights breaks no assumption of
    /// code that runs meanwhile.
    unsafe fn protect(&self, pages: &Range<usize>, protection: Protection) -> io::Result<()>;
}

struct Kernel;

impl System for Kernel {
    unsafe fn protect(&self, pages: &Range<usize>, protection: Protection) -> io::Result<()> {
        let mut rights = libc::PROT_NONE;
        for (given, right) in [
            (protection.read, libc::PROT_READ),
            (protection.write, libc::PROT_WRITE),
            (protection.execute, libc::PROT_EXEC),
        ] {
            rights |= if given { right } else { 0 };
        }
        let start = ptr::with_exposed_provenance_mut(pages.start);
        // SAFETY: the caller says that these are whole mapped pages, whose new rights are those
        // they had or more.
        match unsafe { libc::mprotect(start, pages.len(), rights) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Neighbouring pages of the same protection that are made writable for the swap.
///
/// The right to execute is kept: in a program linked without separate code segments, read-only data
/// shares pages with code.
struct Window<'a, S: System> {
    system: &'a S,
    pages: Range<usize>,
    before: Protection,
    what: String,
    is_open: bool,
}

impl<S: System> Window<'_, S> {
    fn open(&mut self) -> Result<(), Error> {
        if !self.is_open {
            self.protect(Protection { write: true, ..self.before }, "writable")?;
            self.is_open = true;
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), Error> {
        if self.is_open {
            self.protect(self.before, "read-only again")?;
            self.is_open = false;
        }
        Ok(())
    }

    fn protect(&self, protection: Protection, rights: &'static str) -> Result<(), Error> {
        // SAFETY: the pages hold words that the map shows as mapped with the rights `before`, and
        // the protection is that, or that and the right to write.
        unsafe { self.system.protect(&self.pages, protection) }.map_err(|cause| Error::Protect {
            start: self.pages.start,
            end: self.pages.end,
            what: self.what.clone(),
            rights,
            cause,
        })
    }
}

impl<S: System> Drop for Window<'_, S> {
    fn drop(&mut self) {
        // Only an unwinding panic leaves a window open: `exchange_all` and `roll_back` close
        // theirs.
        let _ = self.close();
    }
}

/// The windows for all words that lie in memory without the right to write.
fn windows<'a, S: System>(system: &'a S, words: &[Swapped]) -> Vec<Window<'a, S>> {
    let page_size = page_size();
    let mut words: Vec<&Swapped> = words.iter().filter(|word| !word.protection.write).collect();
    words.sort_by_key(|word| word.address);
    let mut windows: Vec<Window<'a, S>> = Vec::new();
    for word in words {
        let start = word.address - word.address % page_size;
        let pages = start..start + page_size;
        match windows.last_mut() {
            Some(last) if last.pages.end >= start && last.before == word.protection => {
                last.pages.end = pages.end;
            }
            _ => windows.push(Window {
                system,
                pages,
                before: word.protection,
                what: word.what.clone(),
                is_open: false,
            }),
        }
    }
    windows
}

fn page_size() -> usize {
    // SAFETY: no arguments but a constant; reads a property of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

/// Blocks all signals of this thread until it is dropped.
struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    fn new() -> io::Result<SignalsBlocked> {
        // SAFETY: sigset_t is a plain set of bits, for which zero is a valid value, and all three
        // pointers are to locals.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) {
                0 => Ok(SignalsBlocked { before }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: restores the set that pthread_sigmask filled in; the old set is not asked for.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests;
