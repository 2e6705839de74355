//! Pages as a server has written them in plaintext, sealed and opened by the library under every
//! cipher: no byte changes, and ciphers that authenticate pages notice every change and move.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::page::{self, Strength};
use pagevault_cipher::{
    CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, Page, PageFormat, PageKey,
};

use crate::datafile::{DataFile, PageState};

/// The number of pages, by how they were authenticated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// With 128 bits.
    pub full: usize,
    /// With 20 bits, for want of room.
    pub short: usize,
}

/// Seals and opens each page of these files, which are the first segments of their forks.
///
/// # Errors
/// When a byte of a page differs afterwards, or a change is not noticed.
pub fn ensure_pages_survive(files: &[DataFile]) -> Result<Pages> {
    let keys = CipherId::ALL
        .into_iter()
        .map(|cipher| Ok((cipher, PageKey::new(&DataKey::random(cipher)?))))
        .collect::<Result<Vec<_>>>()?;
    let mut found = Pages::default();
    for file in files {
        let fork = fork_of(&file.path)?;
        for (block, bytes) in (0..).zip(file.bytes()?.as_chunks::<PAGE_SIZE>().0) {
            if PageState::of(bytes) == PageState::Zero {
                continue;
            }
            for (cipher, key) in &keys {
                for checksums in [false, true] {
                    let strength = survives(*bytes, key, block, fork, checksums)
                        .with_context(|| format!("{cipher}, block {block} of {file:?}"))?;
                    match strength {
                        Strength::Full => found.full += 1,
                        Strength::Short => found.short += 1,
                        Strength::Unauthenticated => {}
                    }
                }
            }
        }
    }
    Ok(found)
}

fn survives(
    mut plain: Page,
    key: &PageKey,
    block: u32,
    fork: Fork,
    checksums: bool,
) -> Result<Strength> {
    let sum = |page: &Page| if checksums { page_checksum(page, block) } else { 0 };
    let checksum = sum(&plain);
    plain[8..10].copy_from_slice(&checksum.to_le_bytes());
    let mut sealed = plain;
    ensure!(page::seal(&mut sealed, key, DataKeyVersion::FIRST, block, fork, checksums));
    let open = |mut page: Page, block| {
        page::open(&mut page, key, block, fork, checksums).map(|strength| (page, strength))
    };
    let (opened, strength) = open(sealed, block)?;
    ensure!(opened == plain, "the page has changed");
    let strength = strength.context("a sealed page")?;
    if PageFormat::of(key.cipher()) == PageFormat::V2 {
        ensure!(open(sealed, block + 1).is_err(), "a page of another block was opened");
        // Another bit of each block, except of the checksum, which the server compares.
        let at = (block as usize * 193 + 57) % PAGE_SIZE;
        let mut changed = sealed;
        changed[if (8..10).contains(&at) { 0 } else { at }] ^= 1 << (block % 8);
        let checksum = sum(&changed);
        changed[8..10].copy_from_slice(&checksum.to_le_bytes());
        ensure!(open(changed, block).is_err(), "a changed bit was not noticed");
    }
    Ok(strength)
}

fn fork_of(path: &Path) -> Result<Fork> {
    let name = path.file_name().and_then(|name| name.to_str()).context("a file name")?;
    Ok(match name.split_once('_') {
        None => Fork::Main,
        Some((_, "fsm")) => Fork::FreeSpaceMap,
        Some((_, "vm")) => Fork::VisibilityMap,
        Some((_, "init")) => Fork::Init,
        Some(_) => anyhow::bail!("no fork: {name}"),
    })
}
