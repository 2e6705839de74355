//! The `pagevault-keyring` program. See the library for what it does.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    pagevault_keyring::cli::main()
}
