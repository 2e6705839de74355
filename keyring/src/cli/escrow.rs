//! `pagevault-keyring escrow`: exporting, checking and restoring recovery bundles.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use pagevault_keystore::protocol::ProviderSpec;

use super::access::{AccessOptions, TimeLimit};
use super::check::options;
use crate::escrow::{self, Form, Holder};
use crate::failure::{Failure, unprintable};
use crate::module;

#[derive(Subcommand)]
pub(super) enum Escrow {
    /// Write all database keys to a bundle that only your private key can decrypt; the server may
    /// be running
    Export {
        /// The data directory
        data_directory: PathBuf,
        /// Your public key, as shown by age-keygen; can be given several times
        #[arg(long, value_name = "age1...", required = true)]
        recipient: Vec<String>,
        /// Path of the new bundle
        #[arg(long, value_name = "FILE")]
        output: PathBuf,
        /// Write the bundle as text (ASCII armor)
        #[arg(long)]
        armor: bool,
        #[command(flatten)]
        access: AccessOptions,
    },
    /// Test whether a bundle unwraps all keys of a data directory; nothing is changed, and the
    /// server may be running
    Check {
        /// The bundle
        bundle: PathBuf,
        /// File with your private key, as written by age-keygen; - for standard input
        #[arg(long, value_name = "FILE")]
        identity: PathBuf,
        /// The data directory, or a backup
        #[arg(long, value_name = "DIR")]
        data_directory: PathBuf,
    },
    /// Transfer the keys in a bundle to another provider; the server must be down
    Restore {
        /// The bundle
        bundle: PathBuf,
        /// File with your private key, as written by age-keygen; - for standard input
        #[arg(long, value_name = "FILE")]
        identity: PathBuf,
        /// The data directory, or a restored backup
        #[arg(long, value_name = "DIR")]
        data_directory: PathBuf,
        /// Kind of the new provider, such as "file"
        #[arg(long, value_name = "KIND")]
        provider_kind: String,
        /// Options of the new provider, as JSON, such as '{"path": "/etc/pagevault/keys"}'
        #[arg(long, value_name = "JSON")]
        options: String,
        /// Name of the master key of the new provider; it must exist
        #[arg(long, value_name = "NAME")]
        key: String,
        /// Name of the new provider in SQL
        #[arg(long, value_name = "NAME", default_value = "restored")]
        provider_name: String,
        /// Transfer only the keys of this provider, which is lost; can be given several times
        #[arg(long, value_name = "NAME")]
        lost: Vec<String>,
        #[command(flatten)]
        limit: TimeLimit,
    },
}

impl Escrow {
    pub(super) fn run(self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        module::refuse_bundles()?;
        let said = match self {
            Self::Export { data_directory, recipient, output, armor, access } => {
                let recipients = escrow::recipients(&recipient)?;
                let form = if armor { Form::Armored } else { Form::Binary };
                let access = access.access()?;
                let keys = escrow::export(&data_directory, &recipients, &output, form, access)?;
                format!(
                    "Database keys in {}: {keys}.\nKeep the bundle apart from the private key and from backups of the data. Test it with: pagevault-keyring escrow check",
                    output.display()
                )
            }
            Self::Check { bundle, identity, data_directory } => {
                let identities = escrow::identities(&identity)?;
                let checked = escrow::check(&bundle, &identities, &data_directory)?;
                let passed_over: Vec<_> = checked.passed_over.iter().map(|it| it.name()).collect();
                let passed_over = match passed_over.is_empty() {
                    true => String::new(),
                    false => format!(
                        "\nPassed over, as dropped databases, whose keys it does not contain: {}.",
                        passed_over.join(", ")
                    ),
                };
                format!(
                    "The bundle contains {} database keys, which unwrap all {} data keys of the data directory.{passed_over}",
                    checked.database_keys, checked.data_keys
                )
            }
            Self::Restore {
                bundle,
                identity,
                data_directory,
                provider_kind,
                options: text,
                key,
                provider_name,
                lost,
                limit,
            } => {
                let identities = escrow::identities(&identity)?;
                let provider = ProviderSpec {
                    name: provider_name,
                    kind: provider_kind,
                    options: options(&text)?,
                    // Whoever gives the options here can already run programs as the server's user.
                    programs: true,
                };
                let holder = Holder { provider, key, instead_of: lost };
                let keys =
                    escrow::restore(&bundle, &identities, &data_directory, &holder, limit.time())?;
                let (key, name) = (&holder.key, &holder.provider.name);
                format!(
                    "Database keys now wrapped by key \"{key}\" of provider \"{name}\": {keys}.\n{}Start the server. Create its standbys again.",
                    later_keys(&data_directory)
                )
            }
        };
        writeln!(out, "{said}").map_err(unprintable)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A warning where WAL from elsewhere is to be replayed: it may have newer database keys than the
/// bundle.
fn later_keys(data_directory: &Path) -> &'static str {
    if data_directory.join("recovery.signal").exists() {
        "If a database key was made after the bundle, recovery waits for it: set a recovery target before that, or use a newer bundle.\n"
    } else {
        ""
    }
}
