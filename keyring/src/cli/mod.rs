//! The command line.

mod access;
mod audit;
mod check;
mod escrow;
mod file;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::failure::Failure;
use crate::{exec, harden, inspect, program, serve, take_back, verify};

/// Wraps and unwraps pagevault's keys with master keys, outside the server process.
#[derive(Parser)]
#[command(name = "pagevault-keyring", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one request of the server: JSON on standard input, JSON on standard output
    Serve,
    /// Try out a provider and a key, and tell in plain words what works
    Check(check::Check),
    /// Make and list key files for providers of kind "file"
    #[command(subcommand)]
    File(FileCommand),
    /// Keep the database keys under a public key of yours, for the day on which the provider is
    /// lost
    #[command(subcommand)]
    Escrow(escrow::Escrow),
    /// The audit trail of a cluster
    #[command(subcommand)]
    Audit(audit::Audit),
    /// Tell what key files, files of relations and WAL segments say of themselves; no key is needed
    Inspect {
        /// Files, or a data directory for its key files
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Open every page and every WAL record of a data directory whose server is down, or of a
    /// backup
    ///
    /// Ends with 0 if everything opens, with 2 if something is damaged, with 1 if it could not be
    /// looked at.
    Verify {
        /// The data directory
        data_directory: PathBuf,
        #[command(flatten)]
        access: access::AccessOptions,
    },
    /// Have key files say again what starts that failed have cut off them; for when WAL is lost for
    /// good, after pg_resetwal
    TakeBack {
        /// The data directory, whose server is down
        data_directory: PathBuf,
    },
    /// Run one of PostgreSQL's own programs, such as pg_waldump, pg_rewind or pg_upgrade, with the
    /// keys of a data directory
    Exec {
        /// Data directory whose keystore holds the keys, or a copy of it; by default the data
        /// directory that the program is told, else PGDATA
        #[arg(long, value_name = "DIR")]
        keystore: Option<PathBuf>,
        /// Where pagevault_preload.so is, if not where PostgreSQL keeps its libraries
        #[arg(long, value_name = "FILE")]
        library: Option<PathBuf>,
        #[command(flatten)]
        access: access::AccessOptions,
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        line: Vec<OsString>,
    },
    /// What `serve` and `check` start a program of the operator's with
    #[command(hide = true)]
    Run {
        program: OsString,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

#[derive(Subcommand)]
enum FileCommand {
    /// Make a key, and the key file if there is none
    Create {
        /// Absolute path of the key file
        path: String,
        /// Name of the new key
        #[arg(long, value_name = "NAME")]
        key: String,
        /// The server's data directory, in which no key may lie
        #[arg(long, value_name = "DIR")]
        data_directory: Option<PathBuf>,
    },
    /// List the keys of a key file with their versions, never the keys themselves
    List {
        /// Absolute path of the key file
        path: String,
    },
}

/// The command line as a clap structure, from which manual pages are made.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program.
pub fn main() -> ExitCode {
    if let Err(error) = harden::harden() {
        eprintln!("pagevault-keyring: could not protect this process: {error}");
        return ExitCode::FAILURE;
    }
    let done = match Arguments::parse().command {
        Command::Serve => return serve::serve(),
        Command::Run { program, arguments } => return program::supervise(&program, &arguments),
        Command::Escrow(escrow) => escrow.run(&mut io::stdout().lock()),
        Command::Audit(audit) => audit.run(&mut io::stdout().lock()),
        Command::Inspect { paths } => {
            inspect::inspect(&paths, &mut io::stdout().lock()).map(|()| ExitCode::SUCCESS)
        }
        Command::Verify { data_directory, access } => {
            let access = access.access();
            access
                .and_then(|access| {
                    verify::verify(&data_directory, access, &mut io::stdout().lock())
                })
                .map(|well| if well { ExitCode::SUCCESS } else { ExitCode::from(2) })
        }
        Command::TakeBack { data_directory } => {
            take_back::take_back(&data_directory, &mut io::stdout().lock())
                .map(|()| ExitCode::SUCCESS)
        }
        Command::Exec { keystore, library, access, line } => {
            let run = |access| exec::exec(keystore.as_deref(), library.as_deref(), access, &line);
            Err(access.access().map_or_else(|error| error, run))
        }
        Command::Check(check) => check.run(&mut io::stdout().lock()),
        Command::File(FileCommand::Create { path, key, data_directory }) => {
            file::create(&mut io::stdout().lock(), &path, &key, data_directory.as_deref())
        }
        Command::File(FileCommand::List { path }) => file::list(&mut io::stdout().lock(), &path),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pagevault-keyring: {}", error.message);
            for (label, text) in [("Detail", &error.detail), ("Hint", &error.hint)] {
                if let Some(text) = text {
                    eprintln!("{label}: {text}");
                }
            }
            ExitCode::FAILURE
        }
    }
}

/// An error of writing to standard output.
fn unprintable(error: io::Error) -> Failure {
    use pagevault_keystore::protocol::ErrorClass;
    Failure::new(ErrorClass::Internal, "could not write to standard output")
        .with_detail(format!("{error}."))
}
