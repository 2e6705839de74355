//! Instructions that the cipher executes for one page, and that finding a key takes, counted by
//! callgrind. The count is the same on all machines of an architecture, whatever their load.
//!
//! Valgrind does not emulate AVX-512, so on x86-64 it counts at most the code for AES-NI or VAES on
//! 256 bits. The name of the code path is part of the result's name.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_cipher::{CipherId, PageFormat};

/// Finding a key costs the same for all ciphers and code paths.
const LOOK_UP: (&str, CipherId) = ("look-up", CipherId::Aes256Xts);

/// A small and a large number of pages. The difference excludes the start of the program.
const PAGES: [u32; 2] = [64, 1064];

/// For each cipher, sealing and opening a page, with checksums, by the program of
/// benches/page-path; for ciphers of WAL and of temporary files their pages and blocks as well; and
/// finding a key. The names contain architecture and code path.
pub(crate) fn instructions(page_path: &Path) -> Result<BTreeMap<String, f64>> {
    let mut found = BTreeMap::new();
    let elsewhere = ["seal-wal", "open-wal", "seal-temporary", "open-temporary"];
    for cipher in CipherId::ALL {
        // Both are encrypted without tags.
        let others = elsewhere.iter().filter(|_| PageFormat::of(cipher) == PageFormat::V1);
        for operation in ["seal", "open"].iter().chain(others).copied() {
            let (each, backend) = count_of_each(page_path, operation, cipher)?;
            let name = format!("{} {backend} {operation} {cipher}", std::env::consts::ARCH);
            found.insert(name, each);
        }
    }
    let (operation, cipher) = LOOK_UP;
    let (each, _) = count_of_each(page_path, operation, cipher)?;
    found.insert(format!("{} {operation}", std::env::consts::ARCH), each);
    Ok(found)
}

/// The count for one page, and the code path.
fn count_of_each(page_path: &Path, operation: &str, cipher: CipherId) -> Result<(f64, String)> {
    let mut counts = [0.0; 2];
    let mut backend = String::new();
    for (count, pages) in counts.iter_mut().zip(PAGES) {
        (*count, backend) = count_of(page_path, operation, &cipher.to_string(), pages)?;
    }
    let each: f64 = (counts[1] - counts[0]) / f64::from(PAGES[1] - PAGES[0]);
    Ok((each.round(), backend))
}

fn count_of(page_path: &Path, operation: &str, cipher: &str, pages: u32) -> Result<(f64, String)> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(page_path)
        .args([operation, cipher, &pages.to_string()])
        .output()
        .context("run valgrind (Debian package valgrind)")?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "valgrind: {}\n{report}", output.status);
    parse(&report).with_context(|| format!("parse the output of valgrind:\n{report}"))
}

fn parse(report: &str) -> Option<(f64, String)> {
    let backend = report.lines().find_map(|line| line.strip_prefix("backend: "))?;
    Some((collected(report)?, backend.to_owned()))
}

/// The instructions of the program that ran under callgrind.
pub(crate) fn collected(report: &str) -> Option<f64> {
    let line = report.lines().find(|line| line.contains("Collected :"))?;
    line.rsplit(':').next()?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valgrind_output_is_parsed() {
        let report =
            "==12== Callgrind\nbackend: aes-ni\n==12== Events    : Ir\n==12== Collected : 123456\n";
        assert_eq!(parse(report), Some((123_456.0, "aes-ni".to_owned())));
        assert_eq!(parse("==12== Collected : x\nbackend: a"), None);
    }
}
