//! The command line.

mod access;
mod audit;
mod check;
mod check_server;
mod connection;
mod doctor;
mod escrow;
mod file;
mod give_up;
mod init;
mod report;
#[cfg(feature = "vault")]
mod secret_id;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::failure::{Failure, unprintable};
#[cfg(feature = "pkcs11")]
use crate::providers::pkcs11;
use crate::visible::visible_lines;
use crate::{
    accept_restore, exec, harden, inspect, module, program, providers, restore_unsettled, serve,
    verify,
};

/// Wraps and unwraps pagevault's keys with master keys, outside the server process.
#[derive(Parser)]
#[command(name = "pagevault-keyring", version = module::version())]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Process one request of the server: JSON on standard input, JSON on standard output
    Serve,
    /// Test a provider and a master key, and print the result of each check
    Check(check::Check),
    /// Tell whether pagevault will work in a PostgreSQL server, from the server's file, without
    /// starting it
    CheckServer(check_server::CheckServer),
    /// Set up a server that has pagevault installed: settings, key file or provider, extension,
    /// master key; prints the statements, or executes them with --apply
    ///
    /// A second run changes nothing. The exit code is 2 if the server has to be restarted before
    /// the rest can be done.
    Init(init::Init),
    /// Tell what is missing, risky or forgotten in a running server, and what cures it
    ///
    /// Asks the server through psql, all of its databases; changes nothing. The exit code is 0 if
    /// nothing is found, 1 if something is, and 2 if the server could not be looked at.
    Doctor(doctor::Doctor),
    /// Write a report about a running server for people who have to judge it, such as auditors
    ///
    /// Asks the server through psql, all of its databases; changes nothing.
    Report(report::Report),
    /// Create and list key files for providers of kind "file"
    #[command(subcommand)]
    File(FileCommand),
    /// Export the database keys, encrypted for your own public key, and restore them after the loss
    /// of a provider
    #[command(subcommand)]
    Escrow(escrow::Escrow),
    /// Verify the audit trail of a cluster
    #[command(subcommand)]
    Audit(audit::Audit),
    /// Show what can be read from key files, relation files and WAL segments without keys
    Inspect {
        /// Files, or data directories, whose key files are shown
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Decrypt and check every page and every WAL record of a data directory whose server is down,
    /// or of a backup
    ///
    /// The exit code is 0 if no damage is found, 2 if something is damaged, and 1 if the data
    /// directory, or a key group in it, could not be verified.
    Verify {
        /// The data directory
        data_directory: PathBuf,
        #[command(flatten)]
        options: verify::Options,
        #[command(flatten)]
        access: access::AccessOptions,
    },
    /// Seal the manifest of a base backup with the cluster's key, so that `verify` notices when
    /// files of the backup, and the manifest with them, were changed or removed
    SealManifest {
        /// The base backup, as pg_basebackup --manifest-checksums=SHA256 has taken it
        data_directory: PathBuf,
        #[command(flatten)]
        access: access::AccessOptions,
    },
    /// Restore records that failed starts of the server cut off from key files; only for use after
    /// pg_resetwal, if WAL is permanently lost
    RestoreUnsettled {
        /// The data directory; its server must be down
        data_directory: PathBuf,
    },
    /// Destroy a key group in a data directory whose server is down, because recovery needs its
    /// key, and no provider will ever unwrap that again; the last resort
    ///
    /// The relations of the group can never be read again. Everything else is recovered when the
    /// server is started. The command is recorded in the audit trail.
    GiveUpKeyGroup(give_up::GiveUp),
    /// Tell the anchor that this data directory is the cluster from now on; after a restore, a
    /// recovery to a point in time, a failover that lost WAL, or pg_upgrade
    ///
    /// The server may be running. The command is recorded in the audit trail.
    AcceptRestore {
        /// The data directory
        data_directory: PathBuf,
        /// The file that describes the anchor's store, as in the setting pagevault.anchor
        #[arg(long, value_name = "FILE")]
        anchor: PathBuf,
        /// Why, in one line; for the note and the audit trail
        #[arg(long, value_name = "TEXT")]
        reason: String,
        #[command(flatten)]
        access: access::AccessOptions,
    },
    /// Run one of PostgreSQL's own programs, such as pg_waldump, pg_rewind or pg_upgrade, with the
    /// keys of a data directory
    Exec {
        /// Data directory with the keystore, or a directory with a copy of it; by default the data
        /// directory in the arguments of the program, else PGDATA
        #[arg(long, value_name = "DIR")]
        keystore: Option<PathBuf>,
        /// Path of pagevault_preload.so, if it is not in PostgreSQL's library directory
        #[arg(long, value_name = "FILE")]
        library: Option<PathBuf>,
        /// Run the program as it is if there is no keystore, or WAL was never encrypted
        #[arg(long)]
        if_needed: bool,
        #[command(flatten)]
        access: access::AccessOptions,
        /// The program and its arguments
        #[arg(
            value_name = "COMMAND",
            trailing_var_arg = true,
            allow_hyphen_values = true,
            required = true
        )]
        line: Vec<OsString>,
    },
    /// List the kinds of providers, and whether they are built into this program
    Providers,
    /// Unwrap a response-wrapped secret id of Vault or OpenBao into the file of the option
    /// "secret_id_file"
    #[cfg(feature = "vault")]
    UnwrapSecretId(secret_id::UnwrapSecretId),
    /// Used by providers of kind "pkcs11" to load the module of a token
    #[cfg(feature = "pkcs11")]
    #[command(hide = true)]
    Pkcs11,
    /// Used by `serve` and `check` to run programs of the operator
    #[command(hide = true)]
    Run {
        program: OsString,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

#[derive(Subcommand)]
enum FileCommand {
    /// Create a key, and the key file if it does not exist
    Create {
        /// Absolute path of the key file
        path: String,
        /// Name of the new key
        #[arg(long, value_name = "NAME")]
        key: String,
        /// The server's data directory; a key file inside it is refused
        #[arg(long, value_name = "DIR")]
        data_directory: Option<PathBuf>,
    },
    /// List the names and versions of the keys in a key file, but not the keys themselves
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

/// Writes the kinds of providers, one a line.
fn providers(out: &mut impl Write) -> Result<ExitCode, Failure> {
    for (name, is_built_in) in providers::kinds() {
        let state = if is_built_in { "built in" } else { "not built in" };
        writeln!(out, "{name:<8} {state}").map_err(unprintable)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the program.
pub fn main() -> ExitCode {
    if let Err(error) = harden::harden() {
        eprintln!("pagevault-keyring: could not protect this process: {error}");
        return ExitCode::FAILURE;
    }
    let command = Arguments::parse().command;
    if let Err(error) = module::require_validated_tls() {
        return failed(&error);
    }
    let done = match command {
        Command::Serve => return serve::serve(),
        #[cfg(feature = "pkcs11")]
        Command::Pkcs11 => return pkcs11::worker::serve(),
        Command::Run { program, arguments } => program::supervise(&program, &arguments),
        Command::Escrow(escrow) => escrow.run(&mut io::stdout().lock()),
        Command::Audit(audit) => audit.run(&mut io::stdout().lock()),
        Command::Inspect { paths } => {
            inspect::inspect(&paths, &mut io::stdout().lock()).map(|()| ExitCode::SUCCESS)
        }
        Command::Verify { data_directory, options, access } => {
            let out = &mut io::stdout().lock();
            let verify = |access| verify::verify(&data_directory, &options, access, out);
            let code = |verdict| match verdict {
                verify::Verdict::Sound => ExitCode::SUCCESS,
                verify::Verdict::NotAll => ExitCode::FAILURE,
                verify::Verdict::Damaged => ExitCode::from(2),
            };
            access.access().and_then(verify).map(code)
        }
        Command::SealManifest { data_directory, access } => {
            let out = &mut io::stdout().lock();
            let seal = |access| verify::seal_manifest(&data_directory, access, out);
            access.access().and_then(seal).map(|()| ExitCode::SUCCESS)
        }
        Command::RestoreUnsettled { data_directory } => {
            restore_unsettled::restore_unsettled(&data_directory, &mut io::stdout().lock())
                .map(|()| ExitCode::SUCCESS)
        }
        Command::AcceptRestore { data_directory, anchor, reason, access } => {
            let out = &mut io::stdout().lock();
            let accept = |access| {
                accept_restore::accept_restore(&data_directory, &anchor, &reason, access, out)
            };
            access.access().and_then(accept).map(|()| ExitCode::SUCCESS)
        }
        Command::GiveUpKeyGroup(give_up) => give_up.run(&mut io::stdout().lock()),
        Command::Exec { keystore, library, if_needed, access, line } => {
            let (keystore, library) = (keystore.as_deref(), library.as_deref());
            let run = |access| exec::exec(keystore, library, if_needed, access, &line);
            Err(access.access().map_or_else(|error| error, run))
        }
        #[cfg(feature = "vault")]
        Command::UnwrapSecretId(unwrap) => unwrap.run(&mut io::stdout().lock()),
        Command::Providers => providers(&mut io::stdout().lock()),
        Command::Doctor(doctor) => {
            return doctor.run(&mut io::stdout().lock()).unwrap_or_else(|error| {
                failed(&error);
                ExitCode::from(2)
            });
        }
        Command::Report(report) => report.run(&mut io::stdout().lock()),
        Command::Init(init) => init.run(&mut io::stdout().lock()),
        Command::CheckServer(check) => check.run(&mut io::stdout().lock()),
        Command::Check(check) => check.run(&mut io::stdout().lock()),
        Command::File(FileCommand::Create { path, key, data_directory }) => {
            file::create(&mut io::stdout().lock(), &path, &key, data_directory.as_deref())
        }
        Command::File(FileCommand::List { path }) => file::list(&mut io::stdout().lock(), &path),
    };
    match done {
        Ok(code) => code,
        Err(error) => failed(&error),
    }
}

fn failed(error: &Failure) -> ExitCode {
    eprintln!("pagevault-keyring: {}", visible_lines(&error.message));
    for (label, text) in [("Detail", &error.detail), ("Hint", &error.hint)] {
        if let Some(text) = text {
            eprintln!("{label}: {}", visible_lines(text));
        }
    }
    ExitCode::FAILURE
}
