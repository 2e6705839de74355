//! Seals or opens pages and does nothing else: `pagevault-page-path seal|open CIPHER PAGES`. The
//! regression gate counts the instructions of this program (benches/src/callgrind.rs). A package of
//! its own, because building it as the library for servers is built takes seconds then.

use std::error::Error;
use std::hint::black_box;

use pagevault_cipher::{
    Backend, CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, Page, PageFormat, PageKey, page,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [operation, cipher, pages] = arguments.as_slice() else {
        return Err("usage: pagevault-page-path seal|open CIPHER PAGES".into());
    };
    let cipher = CipherId::ALL
        .into_iter()
        .find(|known| known.to_string() == *cipher)
        .ok_or_else(|| format!("there is no cipher {cipher}"))?;
    let key = PageKey::new(&DataKey::random(cipher)?);
    let pages = pages.parse()?;
    match PageFormat::of(cipher) {
        PageFormat::V1 => run(operation, &key, pages)?,
        PageFormat::V2 => run_authenticated(operation, &key, pages)?,
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
