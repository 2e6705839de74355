//! The program `pagevault-keyring`; see the library.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    pagevault_keyring::cli::main()
}
