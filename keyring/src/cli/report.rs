//! `pagevault-keyring report`: a page for people who have to judge a cluster.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::access::AccessOptions;
use super::connection::Connection;
use crate::failure::{Failure, refuse, unprintable};
use crate::report;

#[derive(Args)]
pub(super) struct Report {
    #[command(flatten)]
    connection: Connection,
    /// The page to write, in HTML; an existing file is replaced
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The same as one JSON document, for programs and for later comparisons
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// An earlier JSON document: the page says what has changed since
    #[arg(long, value_name = "FILE", requires = "output")]
    compare: Option<PathBuf>,
    /// Have the server read all files of relations, and count their pages by state
    #[arg(long)]
    check_files: bool,
    /// Server logs or files of pagevault.audit_file: who did what
    #[arg(long, value_name = "FILE", num_args = 1..)]
    audit: Vec<PathBuf>,
    /// The data directory, to verify the audit trail with its keys
    #[arg(short = 'D', long, value_name = "DIR", requires = "audit")]
    data_directory: Option<PathBuf>,
    /// A secret key of minisign: signs what is written, beside it in FILE.minisig
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
    #[command(flatten)]
    access: AccessOptions,
}

impl Report {
    /// Writes the files, and names them.
    pub(super) fn run(self, out: &mut impl Write) -> Result<ExitCode, Failure> {
        if self.output.is_none() && self.json.is_none() {
            return Err(refuse("there is nothing to write")
                .with_hint("Specify --output FILE.html, --json FILE, or both."));
        }
        let signer = self.sign_key.as_deref().map(report::Signer::read).transpose()?;
        let earlier = self.compare.as_deref().map(report::read).transpose()?;
        let mut made = report::make(&self.connection.psql()?, self.check_files)?;
        if !self.audit.is_empty() {
            let access = self.access.access()?;
            let directory = self.data_directory.as_deref();
            made["audit"] = report::read_trail(&self.audit, directory, access)?;
        }
        let mut files = Vec::new();
        if let Some(path) = self.json {
            let document = serde_json::to_vec_pretty(&made).map_err(|error| {
                refuse("the report is not JSON").with_detail(format!("{error}."))
            })?;
            files.push((path, document));
        }
        if let Some(path) = self.output {
            files.push((path, report::page(&made, earlier.as_ref()).into_bytes()));
        }
        let made_at = made["made_at"].as_str().unwrap_or_default();
        let mut signatures = Vec::new();
        if let Some(signer) = signer {
            for (path, content) in &files {
                let (path, signature) = signer.sign(path, content, made_at)?;
                signatures.push((path, signature.into_bytes()));
            }
        }
        for (path, content) in files.into_iter().chain(signatures) {
            report::write(&path, &content)?;
            writeln!(out, "Wrote {}", path.display()).map_err(unprintable)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
