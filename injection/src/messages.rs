//! Which messages of a server are in order: documented ones of ours, and PostgreSQL's about the
//! operating system.

use std::path::Path;

use anyhow::{Context, Result, ensure};

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

/// What PostgreSQL says of the operating system, and of processes that end with the server.
const CLASSES: &[&str] = &[
    "58",  // of the system
    "53",  // of resources
    "57P", // shutdown and crash
    "08",  // connections
];

/// What PostgreSQL says without such a code, or with that of an internal error.
const STOCK: &[&str] = &[
    // errcode_for_file_access (elog.c) knows these as other codes.
    "could not open file \"",
    "could not create temporary file",
    "could not request parent death signal",
    "failed to generate random data",
    "could not fork",
    "canceling statement due to",
    "the database system is",
    // sync.c, xlog.c, fd.c: causes for which it has no code of their own.
    "could not write to file \"pg_wal/",
    "could not fsync file \"",
    "could not fdatasync file \"",
    "could not write to log file",
    "could not read from log segment",
    "could not seek in file \"",
    "could not stat file \"",
    "could not stat directory \"",
    "checkpoint request failed",
    "could not locate a valid checkpoint record",
    "could not create",
    "could not map anonymous shared memory",
    "some useless files may be left behind",
    "could not stat",
    "could not send",
    "could not receive",
    "could not accept",
    "invalid primary checkpoint record",
    "could not close file",
    "could not rename file",
    "could not remove file",
    "could not link file",
    "could not create file",
    "could not access status of transaction",
    "could not extend file",
    "could not read block",
    "could not write block",
    "could not truncate file",
    "could not open directory",
    "could not read directory",
    "could not rewind",
    "could not read file",
    "could not seek",
    "terminating connection",
    "background worker",
];

/// The messages in the user guide.
#[derive(Debug)]
pub(crate) struct Documented(Vec<Vec<String>>);

impl Documented {
    pub(crate) fn read() -> Result<Documented> {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
        let page = std::fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        let rows = page.lines().filter_map(|line| line.strip_prefix('|')?.split(" | ").next());
        // Quoted text in the first column, with `...` for what varies.
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

    /// Fails if a user would find the message nowhere. `directory` is that of the cluster.
    pub(crate) fn judge(&self, message: &Message<'_>, directory: &str) -> Result<()> {
        let Message { severity, sqlstate, text } = message;
        let text = text.replace(directory, "");
        if self.has(&text) {
            return Ok(());
        }
        let is_ours = ["key file", "keystore", "key provider", "pagevault", "master key"]
            .iter()
            .any(|word| text.contains(word));
        ensure!(!is_ours, "not in docs/troubleshooting.md: {severity} {sqlstate} {text}");
        let is_stock = CLASSES.iter().any(|class| sqlstate.starts_with(class))
            || STOCK.iter().any(|stock| text.starts_with(stock));
        ensure!(is_stock, "not an error of the operating system: {severity} {sqlstate} {text}");
        Ok(())
    }
}

fn plain(text: &str) -> String {
    text.replace(['"', '\\'], "")
}
