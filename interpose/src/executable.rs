//! The running program: its load address, its exports, and its memory.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::elf::{Elf, Image, Import, Machine, Name};
use crate::error::Error;
use crate::find::Region;
use crate::maps::Maps;
use crate::program::{Object, Program};

const WORD: usize = size_of::<usize>();

/// The address of a function. The caller knows the signature and transmutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code(NonNull<()>);

// SAFETY: code is immutable and belongs to the process, not to a thread; the address is only a
// number until the caller makes a function pointer of it, which is unsafe.
unsafe impl Send for Code {}
// SAFETY: shared or sent, it stays a number; see Send.
unsafe impl Sync for Code {}

impl Code {
    pub(crate) fn at(address: usize) -> Option<Code> {
        NonNull::new(ptr::with_exposed_provenance_mut(address)).map(Code)
    }

    /// The address, to be transmuted to a function pointer.
    #[must_use]
    pub fn as_ptr(self) -> *const () {
        self.0.as_ptr()
    }

    /// The address as a number.
    #[must_use]
    pub fn address(self) -> usize {
        self.0.as_ptr().expose_provenance()
    }
}

/// The executable that this process runs (not the libraries it loaded).
#[derive(Debug)]
pub struct Executable {
    path: String,
    bias: usize,
    elf: Elf,
}

impl Executable {
    /// Reads the headers of the running program in memory.
    ///
    /// The file on disk is not read: it may have been replaced since the program started.
    ///
    /// # Errors
    ///
    /// [`Error::Maps`] or [`Error::Elf`].
    pub fn of_this_process() -> Result<Executable, Error> {
        let path = std::env::current_exe()
            .map_or_else(|_| "the executable".to_owned(), |path| path.display().to_string());
        let maps = Maps::of_this_process().map_err(Error::Maps)?;
        let (bias, program_headers) = main_program();
        let image = ProcessImage { bias, maps: &maps };
        let elf = Elf::parse(Machine::HOST, program_headers, bias as u64, &image)
            .map_err(|cause| Error::Elf { executable: path.clone(), cause })?;
        Ok(Executable { path, bias, elf })
    }

    /// The path of the executable, for messages.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The executable's own definition of an exported function.
    ///
    /// # Errors
    ///
    /// [`Error::SymbolMissing`] or [`Error::SymbolAmbiguous`], naming it.
    pub fn function(&self, symbol: &str) -> Result<Code, Error> {
        let address = self.function_address(symbol)?;
        Code::at(address).ok_or_else(|| self.missing("function", symbol))
    }

    /// The executable's own definition of an exported object.
    ///
    /// # Errors
    ///
    /// [`Error::SymbolMissing`] or [`Error::SymbolAmbiguous`], naming it.
    pub fn object(&self, symbol: &str) -> Result<Object, Error> {
        Program::object(self, symbol)
    }

    /// The GOT slots of a symbol imported from another library, with their run-time addresses.
    pub(crate) fn imports<'a>(
        &'a self,
        symbol: &'a str,
    ) -> impl Iterator<Item = (usize, &'a Import)> {
        let at = |import: &'a Import| (self.bias.wrapping_add(import.slot as usize), import);
        self.elf.imports(symbol.as_bytes()).map(at)
    }

    pub(crate) fn name(&self, name: Name) -> &[u8] {
        self.elf.name(name)
    }
}

impl Program for Executable {
    fn path(&self) -> &str {
        &self.path
    }

    fn elf(&self) -> &Elf {
        &self.elf
    }

    fn bias(&self) -> usize {
        self.bias
    }

    fn word(&self, address: usize) -> Result<Option<usize>, Error> {
        let linked = address.wrapping_sub(self.bias) as u64;
        let inside = self.elf.segments.iter().any(|s| s.holds(linked, WORD as u64));
        let maps = Maps::of_this_process().map_err(Error::Maps)?;
        if !inside || !address.is_multiple_of(WORD) || !maps.readable(address..address + WORD) {
            return Ok(None);
        }
        Ok(Some(load(address)))
    }

    fn search_read_only<R>(&self, search: impl FnOnce(&[Region<'_>]) -> R) -> Result<R, Error> {
        let maps = Maps::of_this_process().map_err(Error::Maps)?;
        let constant = self.elf.segments.iter().filter(|segment| !segment.writable);
        let constant = constant.map(|segment| (segment.address, segment.size));
        let relro = self.elf.relro.as_ref().map(|range| (range.start, range.end - range.start));
        let mut regions = Vec::new();
        for (address, size) in constant.chain(relro) {
            let address = self.bias.wrapping_add(address as usize);
            let end = address.saturating_add(size as usize);
            let start = address.next_multiple_of(WORD);
            if start >= end || !maps.readable(start..end) {
                continue;
            }
            // SAFETY: the range is aligned to words, mapped and readable, as the map just said,
            // and belongs to the main program, which is never unmapped. Nothing writes there
            // while the slice lives, which is until this function returns: the range is
            // read-only data of the program, and a plan writes only in `install`, which holds
            // no slice of it.
            let words = unsafe {
                slice::from_raw_parts(
                    ptr::with_exposed_provenance::<usize>(start),
                    (end - start) / WORD,
                )
            };
            regions.push(Region { address: start, words });
        }
        Ok(search(&regions))
    }
}

/// Reads a word that another thread or the dynamic linker may write.
///
/// The caller has checked that the word is mapped, readable and aligned.
pub(crate) fn load(address: usize) -> usize {
    // SAFETY: every caller in this crate checks against the memory map first (`Executable::word`,
    // `patch`); the word belongs to the main program, which is never unmapped; atomic access is
    // sound against concurrent binding by the dynamic linker.
    let word = unsafe { AtomicUsize::from_ptr(ptr::with_exposed_provenance_mut(address)) };
    word.load(Ordering::SeqCst)
}

/// The load bias and the program header table of the main program.
fn main_program() -> (usize, &'static [u8]) {
    unsafe extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        result: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker passes a valid description, and `result` is the address of
        // the local below, which nothing else uses during the call.
        unsafe {
            let info = &*info;
            let headers = slice::from_raw_parts(
                info.dlpi_phdr.cast::<u8>(),
                usize::from(info.dlpi_phnum) * size_of::<libc::Elf64_Phdr>(),
            );
            *result.cast::<(usize, &'static [u8])>() = (info.dlpi_addr as usize, headers);
        }
        1 // stop: the main program comes first (dl_iterate_phdr(3))
    }
    let mut result: (usize, &'static [u8]) = (0, &[]);
    // SAFETY: `first` has the type the call asks for, does not unwind, and gets a pointer to a
    // local that outlives the call. The headers it stores are mapped as long as the main program,
    // that is, until the process ends, and are never written.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut result).cast()) };
    result
}

/// The memory of the running program, for the parser. Exists only while the headers are read.
struct ProcessImage<'a> {
    bias: usize,
    maps: &'a Maps,
}

impl Image for ProcessImage<'_> {
    fn bytes(&self, address: u64, len: u64) -> Option<&[u8]> {
        let start = self.bias.wrapping_add(usize::try_from(address).ok()?);
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        if start == 0 || !self.maps.readable(start..end) {
            return None;
        }
        // SAFETY: all of it is mapped and readable, as the map says, and `len` fits isize since
        // it is mapped. The parser asks for dynamic-linking tables only, which the dynamic linker
        // writes before the program starts and not again, so nothing changes under the slice,
        // which lives no longer than `Executable::of_this_process`.
        Some(unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(start), len as usize) })
    }
}
