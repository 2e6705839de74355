//! Instructions that the cipher executes for one page, counted by callgrind. The count is the same
//! on all machines of an architecture, whatever their load.
//!
//! Valgrind does not emulate AVX-512, so on x86-64 it counts at most the code for AES-NI or VAES on
//! 256 bits. The name of the code path is part of the result's name.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pagevault_cipher::{
    Backend, CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, Page, PageFormat, PageKey, page,
};

/// Seal or open pages.
#[derive(Args)]
pub(crate) struct PagePath {
    /// `seal` or `open`
    operation: String,
    cipher: String,
    pages: u32,
}

impl PagePath {
    pub(crate) fn run(&self) -> Result<()> {
        let cipher = CipherId::ALL
            .into_iter()
            .find(|cipher| cipher.to_string() == self.cipher)
            .with_context(|| format!("there is no cipher {}", self.cipher))?;
        let key = PageKey::new(&DataKey::random(cipher)?);
        if PageFormat::of(cipher) == PageFormat::V2 {
            return self.run_authenticated(&key);
        }
        let mut content: Page = [0x5a; PAGE_SIZE];
        for block in 0..self.pages {
            match self.operation.as_str() {
                "seal" => {
                    let page = black_box(&mut content);
                    page::seal(page, &key, DataKeyVersion::FIRST, block, Fork::Main, true);
                }
                "open" => {
                    // The mark is set again each time, because opening clears it.
                    content[11] = 1;
                    page::open(black_box(&mut content), &key, block, Fork::Main, true)?;
                }
                other => bail!("{other} is neither seal nor open"),
            };
        }
        eprintln!("backend: {}", Backend::detect());
        Ok(())
    }
}

impl PagePath {
    /// A page that was changed does not open. So each page is copied first.
    fn run_authenticated(&self, key: &PageKey) -> Result<()> {
        let mut plain: Page = [0x5a; PAGE_SIZE];
        for (at, value) in [(12, 400_u16), (14, 4000), (16, 8192)] {
            plain[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        plain[400..4000].fill(0);
        let mut sealed = plain;
        page::seal(&mut sealed, key, DataKeyVersion::FIRST, 0, Fork::Main, true);
        let mut content = plain;
        for _ in 0..self.pages {
            let page = black_box(&mut content);
            match self.operation.as_str() {
                "seal" => {
                    *page = plain;
                    page::seal(page, key, DataKeyVersion::FIRST, 0, Fork::Main, true);
                }
                "open" => {
                    *page = sealed;
                    page::open(page, key, 0, Fork::Main, true)?;
                }
                other => bail!("{other} is neither seal nor open"),
            };
        }
        eprintln!("backend: {}", Backend::detect());
        Ok(())
    }
}

/// A small and a large number of pages. The difference excludes the start of the program.
const PAGES: [u32; 2] = [64, 1064];

/// For each cipher, sealing and opening, with checksums. The names contain architecture and code
/// path.
pub(crate) fn instructions() -> Result<BTreeMap<String, f64>> {
    let mut found = BTreeMap::new();
    for cipher in CipherId::ALL {
        for operation in ["seal", "open"] {
            let mut counts = [0.0; 2];
            let mut backend = String::new();
            for (count, pages) in counts.iter_mut().zip(PAGES) {
                (*count, backend) = count_of(operation, &cipher.to_string(), pages)?;
            }
            let each = (counts[1] - counts[0]) / f64::from(PAGES[1] - PAGES[0]);
            let name = format!("{} {backend} {operation} {cipher}", std::env::consts::ARCH);
            found.insert(name, each.round());
        }
    }
    Ok(found)
}

fn count_of(operation: &str, cipher: &str, pages: u32) -> Result<(f64, String)> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe()?)
        .args(["page-path", operation, cipher, &pages.to_string()])
        .output()
        .context("run valgrind (Debian package valgrind; --without-callgrind does without)")?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "valgrind: {}\n{report}", output.status);
    parse(&report).with_context(|| format!("parse the output of valgrind:\n{report}"))
}

fn parse(report: &str) -> Option<(f64, String)> {
    let line = report.lines().find(|line| line.contains("Collected :"))?;
    let count = line.rsplit(':').next()?.split_ascii_whitespace().next()?.parse().ok()?;
    let backend = report.lines().find_map(|line| line.strip_prefix("backend: "))?;
    Some((count, backend.to_owned()))
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
