//! Errors of planning and swapping. Each text fits the server's log: what, where, and the cause.

use std::io;

use thiserror::Error;

use crate::elf::ElfError;

/// Something could not be found, planned or swapped.
///
/// The process is unchanged, except after [`Error::NotRolledBack`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The memory map could not be read.
    #[error("cannot read /proc/self/maps: {0}")]
    Maps(#[source] io::Error),
    /// The headers of the executable in memory cannot be parsed.
    #[error("cannot read the ELF headers of {executable}: {cause}")]
    Elf {
        /// Path of the executable.
        executable: String,
        /// What is wrong with them.
        #[source]
        cause: ElfError,
    },
    /// The executable does not export this function or object.
    #[error("cannot find {kind} \"{symbol}\" among the exported symbols of {executable}")]
    SymbolMissing {
        /// `function` or `object`.
        kind: &'static str,
        /// Symbol name.
        symbol: String,
        /// Path of the executable.
        executable: String,
    },
    /// The executable exports several definitions at different addresses.
    #[error("found {count} different definitions of \"{symbol}\" in {executable}, expected one")]
    SymbolAmbiguous {
        /// Symbol name.
        symbol: String,
        /// How many.
        count: usize,
        /// Path of the executable.
        executable: String,
    },
    /// Not exactly one place holds all members of a table.
    #[error(
        "cannot find table \"{table}\" in the read-only data of {executable}: \
         {places} places hold all its members within {window} words, expected one; {occurrences}"
    )]
    TableNotOnce {
        /// Name given by the caller.
        table: String,
        /// Path of the executable.
        executable: String,
        /// How many places hold all members.
        places: usize,
        /// Longest distance of two members, in words.
        window: usize,
        /// Each member and how often it occurs, for the log.
        occurrences: String,
    },
    /// Another library has replaced a member of a table.
    #[error("a function in table \"{table}\" of {executable} was replaced by {library}")]
    ReplacedBefore {
        /// Name given by the caller.
        table: String,
        /// Path of the executable.
        executable: String,
        /// Path of the library.
        library: String,
    },
    /// A member of a table occurs twice in the place of that table.
    #[error(
        "cannot tell which word of table \"{table}\" in {executable} is \"{symbol}\": \
         it occurs there more than once"
    )]
    TableMemberRepeated {
        /// Name given by the caller.
        table: String,
        /// Path of the executable.
        executable: String,
        /// The member.
        symbol: String,
    },
    /// The executable has no GOT slot for this symbol.
    #[error("cannot find a GOT slot of \"{symbol}\" in {executable}")]
    NotImported {
        /// Symbol name.
        symbol: String,
        /// Path of the executable.
        executable: String,
    },
    /// No loaded library defines the symbol that a slot is to be bound to.
    #[error("cannot find the definition of \"{symbol}\" ({version}) that {executable} is bound to")]
    Unresolved {
        /// Symbol name.
        symbol: String,
        /// Required version and library.
        version: String,
        /// Path of the executable.
        executable: String,
    },
    /// The GOT slots of one symbol lead to different functions.
    #[error("the GOT slots of \"{symbol}\" in {executable} lead to {count} different functions")]
    SlotsDisagree {
        /// Symbol name.
        symbol: String,
        /// How many functions.
        count: usize,
        /// Path of the executable.
        executable: String,
    },
    /// A field lies outside the object, or is not aligned.
    #[error("\"{symbol}\" has {size} bytes: no pointer at offset {offset}")]
    FieldOutside {
        /// Symbol name.
        symbol: String,
        /// Its size in bytes.
        size: usize,
        /// Offset asked for.
        offset: usize,
    },
    /// A word does not hold the expected value.
    #[error("{what} at {address:#x} holds {found:#x}, expected {expected}")]
    Unexpected {
        /// Table member, field or slot.
        what: String,
        /// Address of the word.
        address: usize,
        /// Its value.
        found: usize,
        /// What it should be.
        expected: String,
    },
    /// The replacement is null or equal to the original.
    #[error("the replacement of {what} is null or the function itself")]
    BadReplacement {
        /// Table member, field or slot.
        what: String,
    },
    /// Two parts of the plan replace the same word.
    #[error("{what} at {address:#x} is in the plan twice")]
    PlannedTwice {
        /// Table member, field or slot.
        what: String,
        /// Address of the word.
        address: usize,
    },
    /// The word lies in memory that is not mapped readable and private.
    #[error("{what} at {address:#x} does not lie in readable private memory")]
    NotPrivate {
        /// Table member, field or slot.
        what: String,
        /// Address of the word.
        address: usize,
    },
    /// The system refused a change of memory protection.
    #[error("cannot make {start:#x}-{end:#x} (for {what}) {rights}: {cause}")]
    Protect {
        /// First page.
        start: usize,
        /// End of the last page.
        end: usize,
        /// A table member, field or slot on these pages.
        what: String,
        /// `writable`, or `read-only again`.
        rights: &'static str,
        /// Cause given by the system.
        #[source]
        cause: io::Error,
    },
    /// The swap did not restore the protection of a page.
    #[error("the memory of {what} at {address:#x} does not have the protection it had before")]
    ProtectionChanged {
        /// Table member, field or slot.
        what: String,
        /// Address of the word.
        address: usize,
    },
    /// Signals could not be blocked for the swap.
    #[error("cannot block signals: {0}")]
    Signals(#[source] io::Error),
    /// The swap failed and could not be undone: the process must end.
    #[error("cannot undo the change of {what} after a failure: {cause}")]
    NotRolledBack {
        /// Table member, field or slot.
        what: String,
        /// The first failure.
        #[source]
        cause: Box<Error>,
    },
}
