//! docs/formats.md: its layouts equal those in the named modules. A page decrypted by its
//! description, with OpenSSL, is the plaintext page. Independent programs wrote the golden files
//! (`vectors/`).

use std::fs;

use anyhow::{Context, Result, ensure};
use openssl::symm::{Cipher, Crypter, Mode};
use pagevault_cipher::{CipherId, page, wal};
use pagevault_keystore::{batch, log};

pub(crate) fn are_golden() -> Result<()> {
    let text = fs::read_to_string(crate::root().join("docs/formats.md"))?;
    layouts(&text)?;
    constants(&text)?;
    relation_page()?;
    wal_page()?;
    key_log()
}

/// Every block after `<!-- not run: as in FILE -->` occurs in that file's comments.
fn layouts(text: &str) -> Result<()> {
    let mut compared = 0;
    for part in text.split("<!-- not run: as in ").skip(1) {
        let (file, rest) = part.split_once(" -->").context("no end of a comment")?;
        let block = rest.split("```").nth(1).and_then(|block| block.split_once('\n'));
        let (_, layout) = block.with_context(|| format!("no block as in {file}"))?;
        let source = fs::read_to_string(crate::root().join(file))?;
        let comments: String = source
            .lines()
            .filter_map(|line| line.strip_prefix("//!").or_else(|| line.strip_prefix("///")))
            .map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line)))
            .collect();
        ensure!(comments.contains(layout), "docs/formats.md differs from {file} in:\n{layout}");
        compared += 1;
    }
    ensure!(compared > 10, "only {compared} layouts were compared");
    Ok(())
}

/// Numbers that the page repeats in prose.
fn constants(text: &str) -> Result<()> {
    let says = |what: &str| ensure_says(text, what);
    for cipher in CipherId::ALL {
        says(&format!("| {} | `{}` | {} bytes", cipher as u8, cipher, cipher.key_len()))?;
    }
    ensure!(page::PAGE_SIZE == 8192 && page::HEADER_SIZE == 16 && wal::HEADER_SIZE == 16, "sizes");
    ensure!(page::PageFormat::V1 as u8 == 1 && wal::FORMAT_VERSION == 1, "versions");
    ensure!(batch::VERSION == 1 && batch::HEADER == 36, "batch");
    let server = fs::read_to_string(crate::root().join("extension/src/pg/wal.rs"))?;
    for (name, value) in [
        ("RMGR_ID: u8", "161"),
        ("OP_KEYS: u8", "0x10"),
        ("OP_BARRIER: u8", "0x20"),
        ("OP_PAGE: u8", "0x30"),
    ] {
        ensure!(server.contains(&format!("{name} = {value};")), "{name}");
        says(value)?;
    }
    Ok(())
}

fn ensure_says(text: &str, what: &str) -> Result<()> {
    ensure!(text.contains(what), "docs/formats.md does not say {what:?}");
    Ok(())
}

fn golden(name: &str) -> Result<Vec<u8>> {
    let path = crate::root().join("cipher/vectors").join(name);
    fs::read(&path).with_context(|| path.display().to_string())
}

/// The key of the golden pages, and OpenSSL's name for the cipher.
fn ciphers() -> [(&'static str, Vec<u8>, Cipher); 2] {
    [
        ("aes-256-xts", (0..64).collect(), Cipher::aes_256_xts()),
        ("aes-128-xts", (0..32).collect(), Cipher::aes_128_xts()),
    ]
}

fn decrypt(cipher: Cipher, key: &[u8], tweak: &[u8; 16], body: &mut [u8]) -> Result<()> {
    let mut crypter = Crypter::new(cipher, Mode::Decrypt, key, Some(tweak))?;
    let mut out = vec![0; body.len() + 16];
    let length = crypter.update(body, &mut out)?;
    body.copy_from_slice(out.get(..length).context("length")?);
    Ok(())
}

fn relation_page() -> Result<()> {
    const BLOCK: u32 = 3;
    let plain = golden("plain-v1.page")?;
    for (name, key, cipher) in ciphers() {
        let mut page = golden(&format!("sealed-v1-{name}.page"))?;
        let flags = u16::from_le_bytes([page[10], page[11]]);
        ensure!(flags >> 3 == 4711, "the version is in the 13 high bits");
        let mut tweak = [0; 16];
        tweak[..8].copy_from_slice(&page[..8]);
        tweak[8..12].copy_from_slice(&BLOCK.to_le_bytes());
        decrypt(cipher, &key, &tweak, &mut page[16..])?;
        // Bytes 18 and 19 contained the checksum of the plaintext page; before sealing they were
        // 0x2004.
        page.copy_within(18..20, 8);
        page[18..20].copy_from_slice(&0x2004_u16.to_le_bytes());
        page[10..12].copy_from_slice(&(flags & 7).to_le_bytes());
        ensure!(page == plain, "{name}: not the page that was sealed");
    }
    Ok(())
}

fn wal_page() -> Result<()> {
    const VERSION: u16 = 4095 + 1234;
    let plain = golden("plain-v1.wal")?;
    for (name, key, cipher) in ciphers() {
        let mut page = golden(&format!("sealed-v1-{name}.wal"))?;
        let info = u16::from_le_bytes([page[2], page[3]]);
        ensure!(info >> 4 == (VERSION - 1) % 4095 + 1, "the mark is in the 12 high bits");
        let mut tweak = [0; 16];
        tweak[..8].copy_from_slice(&page[8..16]);
        tweak[8..12].copy_from_slice(&page[4..8]);
        tweak[12..].copy_from_slice(b"WAL1");
        decrypt(cipher, &key, &tweak, &mut page[16..])?;
        page[2..4].copy_from_slice(&(info & 15).to_le_bytes());
        ensure!(page == plain, "{name}: not the WAL page that was sealed");
    }
    Ok(())
}

fn key_log() -> Result<()> {
    let path = crate::root().join("keystore/vectors/v1/5.keys");
    let file = fs::read(&path).with_context(|| path.display().to_string())?;
    let u32_at = |at: usize| {
        file.get(at..at + 4).and_then(|four| Some(u32::from_le_bytes(four.try_into().ok()?)))
    };
    ensure!(file.starts_with(&log::MAGIC) && log::MAGIC == *b"pvkeys\r\n", "magic");
    ensure!(file.get(8..10) == Some(&[1, 0]) && u32_at(28) == Some(5), "version and scope");
    ensure!(u32_at(36) == file.get(..36).map(crc32c), "checksum");
    ensure!(file.get(40..44) == Some(&batch::MAGIC), "the first batch");
    let length = u32_at(48).context("length of the body")? as usize;
    ensure!(u32_at(52) == file.get(76..76 + length).map(crc32c), "checksum of the body");
    ensure!(u32_at(72) == file.get(40..72).map(crc32c), "checksum of the header");
    Ok(())
}

/// CRC-32C (RFC 3720, appendix B.4), bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 }
        })
    })
}
