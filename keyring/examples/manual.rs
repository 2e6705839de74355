//! Writes the manual pages of `pagevault-keyring` into a directory: `manual DIR`. They have the
//! text of `--help`.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: manual DIR");
        return ExitCode::FAILURE;
    };
    match clap_mangen::generate_to(pagevault_keyring::cli::command(), &directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}
