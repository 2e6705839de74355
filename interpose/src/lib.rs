//! Redirects functions of the executable of this process: all that a plan names, or none.
//!
//! A shared library that a server has loaded can find the functions the server exports. But the
//! server does not call them by name: it calls through tables of constants and through its global
//! offset table (GOT). This crate finds those words, checks every one of them, and only then swaps
//! all of them.
//!
//! ```no_run
//! use pagevault_interpose::{Executable, Expected, Plan};
//!
//! extern "C" fn my_read() {}
//! extern "C" fn my_pwrite() {}
//!
//! # fn main() -> Result<(), pagevault_interpose::Error> {
//! let executable = Executable::of_this_process()?;
//! let mut plan = Plan::new(&executable);
//! let originals = plan.table("smgrsw", &[("mdread", my_read as *const ())], &["mdnblocks"])?;
//! let pwrite = plan.got("pwrite", my_pwrite as *const ())?;
//! // Store `originals` and `pwrite` where the replacements find them, then:
//! // SAFETY: the replacements have the signatures of what they replace, are never unloaded, and
//! // this process has one thread.
//! let installed = unsafe { plan.install() }?;
//! installed.verify()?;
//! # Ok(()) }
//! ```
//!
//! The parts, from pure to unsafe:
//!
//! | module | subject |
//! |---|---|
//! | `elf` | program headers, dynamic symbols and GOT relocations, from bytes |
//! | `maps` | `/proc/self/maps` |
//! | `find` | the exactly-once search, over slices of words |
//! | `program` | functions, objects and tables of a program, running or not |
//! | `calls` | direct calls in machine code |
//! | `file` | a program in a file, examined without being started |
//! | `executable` | the image of the running program |
//! | `got` | the slots of an imported symbol and their targets |
//! | `owner` | which library an address belongs to |
//! | `patch` | the swap: making pages writable, exchanging words, rollback |
//! | `plan` | what is to be swapped, and the result |
//! | `process_local` | state for functions that may be entered again while they run |

#[cfg(not(all(
    target_os = "linux",
    target_endian = "little",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("pagevault-interpose supports Linux on x86-64 and aarch64 only");

mod calls;
pub mod elf;
mod error;
mod executable;
mod file;
pub mod find;
mod got;
pub mod maps;
mod owner;
mod patch;
mod plan;
mod process_local;
mod program;

pub use error::Error;
pub use executable::{Code, Executable};
pub use file::ProgramFile;
pub use plan::{Expected, Installed, Plan};
pub use process_local::{ProcessLocal, any_in_use};
pub use program::{Object, TABLE_WINDOW};
