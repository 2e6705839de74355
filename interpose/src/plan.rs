//! Collects replacements, checks all of them, and installs them.

use crate::error::Error;
use crate::executable::{Code, Executable};
use crate::find;
use crate::got::{self, Slot};
use crate::owner;
use crate::patch::{self, Patch};
use crate::program::{Program, TABLE_WINDOW};

/// The value that a pointer must hold to be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Any function of the executable itself.
    OwnFunction,
    /// This function.
    Exactly(Code),
}

/// Replacements that were found and checked, but not made yet.
#[derive(Debug)]
pub struct Plan<'exe> {
    exe: &'exe Executable,
    patches: Vec<Patch>,
}

impl<'exe> Plan<'exe> {
    /// An empty plan.
    #[must_use]
    pub fn new(exe: &'exe Executable) -> Self {
        Plan { exe, patches: Vec::new() }
    }

    /// Replaces functions in a table of constants.
    ///
    /// The table is the one place in the executable's read-only data where the exported functions
    /// named in `replaced` and `anchors` occur within [`TABLE_WINDOW`](crate::TABLE_WINDOW) words
    /// of each other, each once. `table` is a name for messages. Name every member you know: more
    /// members make a wrong match less likely.
    ///
    /// Returns the original functions in the order of `replaced`.
    ///
    /// # Errors
    ///
    /// [`Error::SymbolMissing`], [`Error::TableNotOnce`], [`Error::TableMemberRepeated`],
    /// [`Error::ReplacedBefore`], and as for every entry of a plan [`Error::BadReplacement`] and
    /// [`Error::PlannedTwice`].
    pub fn table(
        &mut self,
        table: &str,
        replaced: &[(&str, *const ())],
        anchors: &[&str],
    ) -> Result<Vec<Code>, Error> {
        let names: Vec<&str> =
            replaced.iter().map(|&(name, _)| name).chain(anchors.iter().copied()).collect();
        let members = self
            .exe
            .table(table, &names)
            .map_err(|error| self.replaced_before(table, &names).unwrap_or(error))?;
        let mut patches = Vec::new();
        let mut originals = Vec::new();
        for (&(name, new), member) in replaced.iter().zip(members) {
            originals.push(self.exe.function(name)?);
            patches.push(Patch::new(member.what, member.address, member.value, new)?);
        }
        self.add(patches)?;
        Ok(originals)
    }

    /// Replaces the function pointer at `offset` bytes into an exported object.
    ///
    /// Returns the original function.
    ///
    /// # Errors
    ///
    /// [`Error::SymbolMissing`], [`Error::FieldOutside`], and [`Error::Unexpected`] if the pointer
    /// does not hold the expected value.
    pub fn pointer(
        &mut self,
        object: &str,
        offset: usize,
        expected: Expected,
        new: *const (),
    ) -> Result<Code, Error> {
        let field = match expected {
            Expected::OwnFunction => self.exe.own_function(object, offset)?,
            Expected::Exactly(code) => {
                let field = self.exe.field(object, offset)?;
                if field.value != code.address() {
                    return Err(field.unexpected(format!("{:#x}", code.address())));
                }
                field
            }
        };
        let Some(original) = Code::at(field.value) else {
            return Err(field.unexpected("a function".to_owned()));
        };
        self.add(vec![Patch::new(field.what, field.address, field.value, new)?])?;
        Ok(original)
    }

    /// Requires the pointer at `offset` bytes into an exported object to be null. This checks an
    /// assumption about a structure before anything is swapped, and changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::SymbolMissing`], [`Error::FieldOutside`], [`Error::Unexpected`].
    pub fn require_null(&self, object: &str, offset: usize) -> Result<(), Error> {
        self.exe.null(object, offset)
    }

    /// Replaces an imported function for calls by the executable itself, in all its GOT slots.
    ///
    /// Returns the function that the slots are or would be bound to, never a stub of the
    /// executable.
    ///
    /// Calls made by libraries do not pass through these slots, with one exception. An executable
    /// that is not position independent and takes the function's address makes its own PLT entry
    /// the canonical address. Libraries that call through a pointer (the Rust standard library
    /// among them) then arrive at the replacement too. So a replacement must expect calls from
    /// anywhere, and must itself call only the function returned here, never the symbol.
    ///
    /// # Errors
    ///
    /// [`Error::NotImported`], [`Error::Unresolved`], [`Error::SlotsDisagree`].
    pub fn got(&mut self, symbol: &str, new: *const ()) -> Result<Code, Error> {
        self.got_if_imported(symbol, new)?.ok_or_else(|| Error::NotImported {
            symbol: symbol.to_owned(),
            executable: self.exe.path().to_owned(),
        })
    }

    /// As [`Plan::got`], for symbols that only some builds import (`pwrite64`, `__read_chk`):
    /// `None` if this one does not.
    ///
    /// # Errors
    ///
    /// As [`Plan::got`], without [`Error::NotImported`].
    pub fn got_if_imported(&mut self, symbol: &str, new: *const ()) -> Result<Option<Code>, Error> {
        let Some((slots, original)) = got::slots(self.exe, symbol)? else { return Ok(None) };
        let mut patches = Vec::new();
        for Slot { address, value } in slots {
            let what = format!("the GOT slot of \"{symbol}\"");
            // A call between plan and swap may bind a lazy slot, so both values are correct.
            let patch = Patch::new(what.clone(), address, value, new)?;
            patches.push(patch.or_bound_to(original.address())?);
        }
        self.add(patches)?;
        Ok(Some(original))
    }

    /// Swaps everything, or nothing.
    ///
    /// All words are compared with the plan. Then each page that needs it is made writable, the
    /// words are swapped and read back, and the pages get their previous protection. Signals are
    /// blocked meanwhile. Words in writable memory (lazy GOT slots) stay writable.
    ///
    /// # Errors
    ///
    /// A failure leaves the process unchanged, except for [`Error::NotRolledBack`], after which the
    /// process must end.
    ///
    /// # Safety
    ///
    /// - Each replacement has the signature and calling convention of the original, and fulfils its
    ///   contract towards every caller.
    /// - The library that holds the replacements is never unloaded.
    /// - No other thread runs.
    pub unsafe fn install(self) -> Result<Installed, Error> {
        // SAFETY: handed on to the caller. The addresses are words of the main program: the plan
        // takes them from its tables, objects and GOT only.
        let installed = Installed { patches: unsafe { patch::swap(self.patches) }? };
        Ok(installed)
    }

    /// The cause if a table was not found because another library has replaced members of it.
    fn replaced_before(&self, table: &str, names: &[&str]) -> Option<Error> {
        let members: Vec<usize> = names
            .iter()
            .map(|name| self.exe.function_address(name))
            .collect::<Result<_, _>>()
            .ok()?;
        let words = self
            .exe
            .search_read_only(|regions| find::remains(regions, &members, TABLE_WINDOW).concat())
            .ok()?;
        let library =
            words.into_iter().filter(|word| !self.exe.owns(*word)).find_map(owner::path)?;
        Some(Error::ReplacedBefore {
            table: table.to_owned(),
            executable: self.exe.path().to_owned(),
            library,
        })
    }

    fn add(&mut self, patches: Vec<Patch>) -> Result<(), Error> {
        for patch in patches {
            if self.patches.iter().any(|planned| planned.address() == patch.address()) {
                let address = patch.address();
                return Err(Error::PlannedTwice { what: patch.into_what(), address });
            }
            self.patches.push(patch);
        }
        Ok(())
    }
}

/// Proof that a plan was installed.
#[derive(Debug)]
pub struct Installed {
    patches: Vec<patch::Swapped>,
}

impl Installed {
    /// Reads back every word and the protection of its page. A process that inherited the memory by
    /// fork may call this too.
    ///
    /// # Errors
    ///
    /// [`Error::Unexpected`] for a word that does not hold the replacement,
    /// [`Error::ProtectionChanged`], [`Error::Maps`].
    pub fn verify(&self) -> Result<(), Error> {
        patch::verify(&self.patches)
    }

    /// The words that other libraries have replaced since: what each is, and the library's path. A
    /// library may do that if it calls what was there.
    pub fn replaced_since(&self) -> impl Iterator<Item = (String, String)> {
        patch::replaced(&self.patches)
    }

    /// How many words were swapped.
    #[must_use]
    pub fn words(&self) -> usize {
        self.patches.len()
    }
}
