//! Which messages of a server are in order: documented ones of ours, and PostgreSQL's about the
//! fault that was injected, and its consequences.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::injector::Fault;

/// Lines of a server's log whose severity is WARNING or worse.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message<'l> {
    pub(crate) severity: &'l str,
    pub(crate) sqlstate: &'l str,
    pub(crate) text: &'l str,
}

/// For `log_line_prefix`: what [`of_log`] expects.
pub(crate) const PREFIX: &str = "log_line_prefix = '%m [%p] %b %e '";

pub(crate) fn of_log(log: &str) -> impl Iterator<Item = Message<'_>> {
    log.lines().filter_map(|line| {
        ["WARNING", "ERROR", "FATAL", "PANIC"].iter().find_map(|severity| {
            let (before, text) = line.split_once(&format!(" {severity}:  "))?;
            let sqlstate = before.rsplit(' ').next()?;
            (sqlstate.len() == 5).then_some(Message { severity, sqlstate, text })
        })
    })
}

/// Codes that say by themselves that a process or connection ends with the server, or before it.
const ENDS: &[&str] = &[
    "57P01", // admin_shutdown
    "57P02", // crash_shutdown
    "57P03", // cannot_connect_now
    "08006", // connection_failure
];

/// What PostgreSQL says as a consequence, without the error of the operating system at its end.
/// That is in DETAIL, or in a message before.
const CONSEQUENCES: &[&str] = &[
    "out of memory",                                                    // mcxt.c
    "insufficient file descriptors available to start server process",  // fd.c
    "canceling statement due to ",                                      // postgres.c
    "checkpoint request failed",                                        // checkpointer.c
    "could not access status of transaction ",                          // slru.c
    "could not locate a valid checkpoint record",                       // xlogrecovery.c
    "invalid primary checkpoint record",                                // xlogrecovery.c
    "some useless files may be left behind in old database directory ", // dbcommands.c
    "could not create any Unix-domain sockets",                         // postmaster.c
    "could not create Unix-domain socket in directory ",                // postmaster.c
    "could not create missing directory ", // xlog.c: what cannot be looked at is missing
    "failed to generate random data",      // Rust's standard library, for a hash table
    "could not generate random ",          // postmaster.c, xlog.c
    // smgrexists opens a file while the new files of a failed transaction are removed
    // (DropRelFileNodesAllBuffers, bufmgr.c).
    "AbortTransaction while in ABORT state",
];

/// What follows in place of an error when fewer bytes were transferred.
const FEWER: &[&str] = &[": read only ", ": wrote only ", ": read ", ": No space left on device"];

/// The messages in the user guide.
#[derive(Debug)]
pub(crate) struct Documented(Vec<Vec<String>>);

impl Documented {
    pub(crate) fn read() -> Result<Documented> {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
        let page = std::fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        // Quoted text in the first column, and where prose is about a message, with `...` for what
        // varies.
        let rows = page.lines().filter_map(|line| match line.strip_prefix('|') {
            Some(row) => row.split(" | ").next(),
            None => line.starts_with('`').then(|| &line[..line[1..].find('`').unwrap_or(0) + 2]),
        });
        let quoted = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let pieces = |text: &str| text.split("...").map(|piece| plain(piece.trim())).collect();
        let documented: Vec<Vec<String>> = quoted.map(pieces).collect();
        ensure!(documented.len() > 80, "only {} messages", documented.len());
        Ok(Documented(documented))
    }

    fn has(&self, text: &str) -> bool {
        let text = plain(text);
        self.0.iter().any(|pieces| {
            let mut rest = text.as_str();
            pieces.iter().all(|piece| {
                rest.find(piece.as_str()).is_some_and(|at| {
                    rest = &rest[at + piece.len()..];
                    true
                })
            })
        })
    }

    /// Fails if a user would find the message nowhere, and it is not PostgreSQL's about this fault.
    /// `directory` is that of the cluster.
    pub(crate) fn judge(
        &self,
        message: &Message<'_>,
        fault: &Fault,
        directory: &str,
    ) -> Result<()> {
        let Message { severity, sqlstate, text } = message;
        let text = text.replace(directory, "");
        // The place in the statement, if there is one.
        let text = text.split(" at character ").next().unwrap_or_default();
        if self.has(text) {
            return Ok(());
        }
        // Rust's text of an error has its number.
        let is_ours =
            ["key file", "keystore", "key provider", "pagevault", "master key", "(os error "]
                .iter()
                .any(|word| text.contains(word));
        ensure!(!is_ours, "not in docs/troubleshooting.md: {severity} {sqlstate} {text}");
        let is_stock = ENDS.contains(sqlstate)
            || CONSEQUENCES.iter().any(|consequence| text.starts_with(consequence))
            || match fault {
                Fault::Fails(cause) | Fault::FailsFromThere(cause) => {
                    text.ends_with(&format!(": {}", text_of(*cause)))
                }
                Fault::Short => FEWER.iter().any(|fewer| text.contains(fewer)),
                Fault::Jumps(_) => false,
            };
        ensure!(is_stock, "not about the fault: {severity} {sqlstate} {text}");
        Ok(())
    }
}

/// The text of an error of the operating system, as PostgreSQL prints it.
fn text_of(cause: i32) -> String {
    let text = std::io::Error::from_raw_os_error(cause).to_string();
    text.split(" (os error ").next().unwrap_or_default().to_owned()
}

fn plain(text: &str) -> String {
    text.replace(['"', '\\'], "")
}
