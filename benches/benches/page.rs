//! The cost of sealing, opening and checksumming one 8 KiB page, compared with memcpy and with
//! OpenSSL's XTS.
//!
//! `cargo bench -p pagevault-benches --bench page`
//!
//! Pages and keys stay in the first-level cache. The subjects take turns within each round, so a
//! change of clock frequency or other load on the machine affects all of them equally. Each figure
//! is given twice: the minimum over the rounds, which shows what the code can do and repeats well
//! even on a shared machine, and the median. `taskset -c 1` before the command keeps the benchmark
//! on one core.
#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::hint::black_box;
use std::time::Instant;

use aes::Aes256Enc;
use aes::cipher::{Array, BlockCipherEncrypt, KeyInit};
use openssl::cipher::{Cipher, CipherRef};
use openssl::cipher_ctx::CipherCtx;
use openssl::error::ErrorStack;
use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::{
    Backend, CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, Page, PageFormat, PageKey, page,
};

/// Number of rounds, and of passes over the page within a round. A round of one subject takes about
/// a tenth of a millisecond, which is short compared with the scheduler's time slice.
const ROUNDS: usize = 4000;
const PASSES: u32 = 50;

const VERSION: DataKeyVersion = DataKeyVersion::FIRST;

/// One line of the table: a name and an operation on the page.
struct Subject {
    name: String,
    pass: Box<dyn FnMut(&mut Page)>,
    nanoseconds: Vec<f64>,
}

impl Subject {
    fn new(name: impl Into<String>, pass: impl FnMut(&mut Page) + 'static) -> Self {
        Self { name: name.into(), pass: Box::new(pass), nanoseconds: Vec::with_capacity(ROUNDS) }
    }

    fn round(&mut self, page: &mut Page) {
        let start = Instant::now();
        for _ in 0..PASSES {
            (self.pass)(black_box(page));
        }
        self.nanoseconds.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(PASSES));
    }

    /// The minimum and the median.
    fn figures(&mut self) -> [f64; 2] {
        self.nanoseconds.sort_by(f64::total_cmp);
        [self.nanoseconds[0], self.nanoseconds[self.nanoseconds.len() / 2]]
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut subjects = vec![memcpy(), aes_alone(), checksum()];
    let of = |format| CipherId::ALL.into_iter().filter(move |id| PageFormat::of(*id) == format);
    for cipher in of(PageFormat::V1) {
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            for checksums in [false, true] {
                subjects.extend(page_subjects(cipher, backend, checksums)?);
            }
        }
        subjects.extend(openssl_subjects(cipher)?);
    }
    for cipher in of(PageFormat::V2) {
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let (one, two) = (PageKey::with_backend, PageKey::in_two_passes);
            subjects.extend(authenticated_subjects(cipher, one, "one pass", backend)?);
            subjects.extend(authenticated_subjects(cipher, two, "two passes", backend)?);
        }
    }

    let mut page = [0; PAGE_SIZE];
    for (byte, i) in page.iter_mut().zip(0_u32..) {
        *byte = i.wrapping_mul(2_654_435_761).to_le_bytes()[3];
    }
    for _ in 0..ROUNDS {
        for subject in &mut subjects {
            subject.round(&mut page);
        }
    }

    println!("8 KiB page in the first-level cache, one core, {ROUNDS} rounds");
    println!("backend in use: {}; {}", Backend::detect(), openssl::version::version());
    println!("{:<54} {:>18}  {:>18}", "", "minimum", "median");
    println!("{:<54} {:>9} {:>8}  {:>9} {:>8}", "", "ns/page", "GB/s", "ns/page", "GB/s");
    for subject in &mut subjects {
        let [minimum, median] = subject.figures();
        let rate = |nanoseconds| PAGE_SIZE as f64 / nanoseconds;
        println!(
            "{:<54} {minimum:>9.0} {:>8.2}  {median:>9.0} {:>8.2}",
            subject.name,
            rate(minimum),
            rate(median)
        );
    }
    Ok(())
}

fn memcpy() -> Subject {
    let mut target = Box::new([0; PAGE_SIZE]);
    Subject::new("memcpy", move |page| {
        target.copy_from_slice(page);
        black_box(&mut target);
    })
}

/// AES without a mode, as a reference for the modes: the `aes` crate on all blocks of a page.
fn aes_alone() -> Subject {
    let cipher = Aes256Enc::new(&Array([1; 32]));
    Subject::new("aes-256, blocks alone (aes crate)", move |page| {
        cipher.encrypt_blocks(Array::cast_slice_from_core_mut(page.as_chunks_mut().0));
    })
}

fn checksum() -> Subject {
    Subject::new("checksum", |page| {
        black_box(page_checksum(page, 1));
    })
}

fn page_subjects(
    cipher: CipherId,
    backend: Backend,
    checksums: bool,
) -> Result<[Subject; 2], Box<dyn std::error::Error>> {
    let data_key = DataKey::random(cipher)?;
    let key = || PageKey::with_backend(&data_key, backend).ok_or("the backend went away");
    let (seal_key, open_key) = (key()?, key()?);
    let suffix = if checksums { " with checksums" } else { "" };
    let name = |operation| format!("{cipher} {backend} {operation}{suffix}");
    Ok([
        Subject::new(name("seal"), move |page| {
            page::seal(page, &seal_key, VERSION, 1, Fork::Main, checksums);
        }),
        Subject::new(name("open"), move |page| {
            // The mark is set again in each pass, because opening clears it.
            page[11] = 1;
            let _ = black_box(page::open(page, &open_key, 1, Fork::Main, checksums));
        }),
    ])
}

/// Format 2, without checksums. The page has a hole, as nearly all have.
fn authenticated_subjects(
    cipher: CipherId,
    new: fn(&DataKey, Backend) -> Option<PageKey>,
    passes: &str,
    backend: Backend,
) -> Result<[Subject; 2], Box<dyn std::error::Error>> {
    let data_key = DataKey::random(cipher)?;
    let key = || new(&data_key, backend).ok_or("the backend went away");
    let (seal_key, open_key) = (key()?, key()?);
    let name = |operation| format!("{cipher} {backend} {operation}, {passes}");
    let mut plain: Page = [0x5a; PAGE_SIZE];
    for (at, value) in [(12, 400_u16), (14, 4000), (16, 8192)] {
        plain[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }
    plain[400..4000].fill(0);
    let mut sealed = plain;
    page::seal(&mut sealed, &key()?, VERSION, 1, Fork::Main, false);
    // The copies are a few percent of the figures; line "memcpy" shows them.
    Ok([
        Subject::new(name("seal"), move |page| {
            page.copy_from_slice(&plain);
            black_box(page::seal(page, &seal_key, VERSION, 1, Fork::Main, false));
        }),
        Subject::new(name("open"), move |page| {
            page.copy_from_slice(&sealed);
            assert!(page::open(page, &open_key, 1, Fork::Main, false).is_ok());
        }),
    ])
}

fn openssl_subjects(cipher: CipherId) -> Result<[Subject; 2], Box<dyn std::error::Error>> {
    let data_key = DataKey::random(cipher)?;
    let algorithm = match cipher {
        CipherId::Aes256Xts => Cipher::aes_256_xts(),
        CipherId::Aes128Xts => Cipher::aes_128_xts(),
        other => return Err(format!("OpenSSL has nothing like {other}").into()),
    };
    let mut seal = CipherCtx::new()?;
    seal.encrypt_init(Some(algorithm), Some(data_key.expose()), None)?;
    let mut open = CipherCtx::new()?;
    open.decrypt_init(Some(algorithm), Some(data_key.expose()), None)?;
    openssl_matches(algorithm, &data_key)?;

    // The context is reused and only the tweak is set, which is the cheapest way to use EVP.
    let tweak = [7; 16];
    let mut out = Box::new([0; PAGE_SIZE]);
    let seal_pass = move |page: &mut Page| {
        let sealed = seal
            .encrypt_init(None, None, Some(&tweak))
            .and_then(|()| seal.cipher_update(&page[16..], Some(&mut out[16..])));
        assert!(sealed.is_ok());
        black_box(&mut out);
    };
    let mut out = Box::new([0; PAGE_SIZE]);
    let open_pass = move |page: &mut Page| {
        let opened = open
            .decrypt_init(None, None, Some(&tweak))
            .and_then(|()| open.cipher_update(&page[16..], Some(&mut out[16..])));
        assert!(opened.is_ok());
        black_box(&mut out);
    };
    Ok([
        Subject::new(format!("{cipher} openssl encrypt"), seal_pass),
        Subject::new(format!("{cipher} openssl decrypt"), open_pass),
    ])
}

/// Verifies that both sides compute the same; otherwise the comparison would be meaningless.
fn openssl_matches(algorithm: &CipherRef, data_key: &DataKey) -> Result<(), ErrorStack> {
    let key = PageKey::new(data_key);
    let plain: Page = [0x5a; PAGE_SIZE];
    let mut sealed = plain;
    page::seal(&mut sealed, &key, VERSION, 1, Fork::Main, false);

    let mut tweak = [0; 16];
    tweak[..8].copy_from_slice(&plain[..8]);
    tweak[8] = 1;
    let mut inner = plain;
    inner[18..20].fill(0);
    let mut expected = vec![0; PAGE_SIZE];
    let mut context = CipherCtx::new()?;
    context.encrypt_init(Some(algorithm), Some(data_key.expose()), Some(&tweak))?;
    context.cipher_update(&inner[16..], Some(&mut expected[16..]))?;
    assert_eq!(sealed[16..], expected[16..], "OpenSSL and pagevault disagree");
    Ok(())
}
