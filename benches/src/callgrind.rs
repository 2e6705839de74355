//! Instructions that one page takes through the cipher, counted by callgrind: the same on any
//! machine of an architecture, however noisy.
//!
//! Valgrind knows no AVX-512, so what is counted on x86-64 is at most the code for AES-NI or VAES
//! on 256 bits; the name of the code that ran is part of the result's.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pagevault_cipher::{
    Backend, CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, Page, PageKey, page,
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
        let mut content: Page = [0x5a; PAGE_SIZE];
        for block in 0..self.pages {
            match self.operation.as_str() {
                "seal" => {
                    let page = black_box(&mut content);
                    page::seal(page, &key, DataKeyVersion::FIRST, block, Fork::Main, true);
                }
                "open" => {
                    // The mark is set anew each time: opening takes it away.
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

/// Few and many pages: their difference leaves out what starting the program takes.
const PAGES: [u32; 2] = [64, 1064];

/// For each cipher, both ways, with checksums. The names say architecture and code path.
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
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "valgrind: {}\n{said}", output.status);
    parse(&said).with_context(|| format!("understand what valgrind says:\n{said}"))
}

fn parse(said: &str) -> Option<(f64, String)> {
    let line = said.lines().find(|line| line.contains("Collected :"))?;
    let count = line.rsplit(':').next()?.split_ascii_whitespace().next()?.parse().ok()?;
    let backend = said.lines().find_map(|line| line.strip_prefix("backend: "))?;
    Some((count, backend.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_valgrind_says_is_understood() {
        let said =
            "==12== Callgrind\nbackend: aes-ni\n==12== Events    : Ir\n==12== Collected : 123456\n";
        assert_eq!(parse(said), Some((123_456.0, "aes-ni".to_owned())));
        assert_eq!(parse("==12== Collected : x\nbackend: a"), None);
    }
}
