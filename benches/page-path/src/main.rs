//! Seals or opens pages, or looks up keys, and does nothing else: `pagevault-page-path OPERATION
//! CIPHER PAGES`, where the operation is `seal` or `open` (pages of relations), `seal-wal`,
//! `open-wal`, `seal-temporary`, `open-temporary`, or `look-up`, which finds the keys of so many
//! relation files. The regression gate counts the instructions of this program
//! (benches/src/callgrind.rs). A package of its own, because building it as the library for servers
//! is built takes seconds then.

use std::error::Error;
use std::hint::black_box;
use std::sync::atomic::AtomicU32;

use pagevault_cipher::wal::{self, Mark};
use pagevault_cipher::{
    Backend, CipherId, DataKey, DataKeyVersion, Fork, KeyVersion, PAGE_SIZE, Page, PageFormat,
    PageKey, page, stream,
};
use pagevault_keystore::directory::Directory;
use pagevault_keystore::record::{MAX_WRAPPED_DATA_KEY, wrapped_len};
use pagevault_keystore::{Record, RelFile, Scope};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [operation, cipher, pages] = arguments.as_slice() else {
        return Err("usage: pagevault-page-path OPERATION CIPHER PAGES".into());
    };
    let cipher = CipherId::ALL
        .into_iter()
        .find(|known| known.to_string() == *cipher)
        .ok_or_else(|| format!("there is no cipher {cipher}"))?;
    let key = PageKey::new(&DataKey::random(cipher)?);
    let pages = pages.parse()?;
    match (operation.as_str(), PageFormat::of(cipher)) {
        ("look-up", _) => look_up(cipher, pages)?,
        ("seal-wal" | "open-wal", _) => run_wal(operation == "open-wal", &key, pages),
        ("seal-temporary" | "open-temporary", _) => {
            run_temporary(operation == "open-temporary", &key, pages);
        }
        (_, PageFormat::V1) => run(operation, &key, pages)?,
        (_, PageFormat::V2) => run_authenticated(operation, &key, pages)?,
    }
    eprintln!("backend: {}", Backend::detect());
    Ok(())
}

fn run(operation: &str, key: &PageKey, pages: u32) -> Result<(), Box<dyn Error>> {
    let mut content: Page = [0x5a; PAGE_SIZE];
    for block in 0..pages {
        let page = black_box(&mut content);
        match operation {
            "seal" => {
                page::seal(page, key, DataKeyVersion::FIRST, block, Fork::Main, true);
            }
            "open" => {
                // The mark is set again each time, because opening clears it.
                page[11] = 1;
                page::open(page, key, block, Fork::Main, true)?;
            }
            other => return Err(format!("{other} is neither seal nor open").into()),
        }
    }
    Ok(())
}

/// A page that was changed does not open. So each page is copied first.
fn run_authenticated(operation: &str, key: &PageKey, pages: u32) -> Result<(), Box<dyn Error>> {
    let mut plain: Page = [0x5a; PAGE_SIZE];
    for (at, value) in [(12, 400_u16), (14, 4000), (16, 8192)] {
        plain[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }
    plain[400..4000].fill(0);
    let mut sealed = plain;
    page::seal(&mut sealed, key, DataKeyVersion::FIRST, 0, Fork::Main, true);
    let mut content = plain;
    for _ in 0..pages {
        let page = black_box(&mut content);
        match operation {
            "seal" => {
                *page = plain;
                page::seal(page, key, DataKeyVersion::FIRST, 0, Fork::Main, true);
            }
            "open" => {
                *page = sealed;
                page::open(page, key, 0, Fork::Main, true)?;
            }
            other => return Err(format!("{other} is neither seal nor open").into()),
        }
    }
    Ok(())
}

/// Pages of WAL, with the mark that opening clears.
fn run_wal(opens: bool, key: &PageKey, pages: u32) {
    let mark = Mark::of_version(KeyVersion::FIRST);
    let mut content = [0x5a; PAGE_SIZE];
    content[2..4].fill(0);
    wal::seal(&mut content, key, mark);
    for address in 0..u64::from(pages) {
        let page = black_box(&mut content);
        page[8..16].copy_from_slice(&(address * PAGE_SIZE as u64).to_le_bytes());
        if opens {
            // Bits above the flags of PostgreSQL.
            page[2..4].copy_from_slice(&(mark.get() << 4).to_le_bytes());
            wal::open(page, key);
        } else {
            wal::seal(page, key, mark);
        }
    }
}

/// Finds files in the directory of keys, with their present versions, as each first access of a
/// process does.
fn look_up(cipher: CipherId, times: u32) -> Result<(), Box<dyn Error>> {
    const FILES: u32 = 10_000;
    let file = |relation| RelFile { tablespace: 1663, database: 5, relation: 16384 + relation };
    let words = Directory::words_needed(FILES);
    let words: Vec<AtomicU32> = (0..words).map(|_| AtomicU32::new(0)).collect();
    let directory = Directory::init_zeroed(&words, FILES)?;
    let version = DataKeyVersion::FIRST;
    let wrapped = vec![7; wrapped_len(cipher as u8).unwrap_or_default()];
    for relation in 0..FILES {
        directory.apply(&Record::DataKey {
            file: file(relation),
            version,
            cipher: cipher as u8,
            scope: Scope::CLUSTER,
            key_version: KeyVersion::FIRST,
            wrapped: wrapped.clone(),
            created: 0,
        })?;
        directory.apply(&Record::Current { file: file(relation), version })?;
    }
    let mut known = [0; MAX_WRAPPED_DATA_KEY];
    for time in 0..times {
        let found = directory.find(black_box(file(time.wrapping_mul(7919) % FILES)))?;
        let slot = found.ok_or("a file is missing")?;
        black_box((directory.current(slot)?, directory.key(slot, version, &mut known)?));
    }
    Ok(())
}

/// Blocks of a temporary file.
fn run_temporary(opens: bool, key: &PageKey, pages: u32) {
    let mut content = [0x5a; PAGE_SIZE];
    for number in 0..u64::from(pages) {
        let block = black_box(&mut content);
        let offset = number * PAGE_SIZE as u64;
        if opens { stream::open(key, offset, block) } else { stream::seal(key, offset, block) }
    }
}
