//! Entries of forgotten files are used again.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use pagevault_keystore::{Phase, RelFile};
use pagevault_models::directory::{DirectoryError, KeyInfo};

use super::{CAPACITY, FILE, Memory, info, version};

/// Two files in one chain of the directory, and one in another chain.
fn in_chains() -> [RelFile; 3] {
    type Plain = std::sync::atomic::AtomicU32;
    static FILES: OnceLock<[RelFile; 3]> = OnceLock::new();
    *FILES.get_or_init(|| {
        use pagevault_keystore::directory::Directory;
        const FIRST_BUCKET: usize = 16;
        let is_first = |file: &RelFile| {
            let words = (0..Directory::words_needed(CAPACITY)).map(|_| Plain::new(0));
            let words: Vec<_> = words.collect();
            let Ok(directory) = Directory::init_zeroed(&words, CAPACITY) else { return false };
            assert!(directory.insert(*file, &plain_info(), &[1; 4]).is_ok());
            words[FIRST_BUCKET].load(Relaxed) != 0
        };
        let (first, second): (Vec<_>, Vec<_>) =
            (1..20).map(|relation| RelFile { relation, ..FILE }).partition(is_first);
        [first[0], first[1], second[0]]
    })
}

fn plain_info() -> pagevault_keystore::directory::KeyInfo {
    let KeyInfo { version, cipher, scope, key_version, length } = info(1, 1);
    pagevault_keystore::directory::KeyInfo { version, cipher, scope, key_version, length }
}

/// A file is forgotten, and its entries are those of another one, in another chain: what comes
/// after it in its own chain is found all the time.
pub(super) fn entry_in_the_way_is_used_again() {
    let [stays, goes, comes] = in_chains();
    let memory = Memory::new();
    memory.insert(stays, 1, 1);
    memory.insert(goes, 1, 2);
    let reader = memory.reader(move |memory| assert_eq!(memory.key(stays, 1), Some(1)));
    memory.forget(goes);
    memory.insert(comes, 1, 3);
    let _ = reader.join();
    assert_eq!([stays, goes, comes].map(|file| memory.key(file, 1)), [Some(1), None, Some(3)]);
}

/// Who holds the place of a file never gets what is of another one.
pub(super) fn slot_is_used_again() {
    let [goes, _, comes] = in_chains();
    let memory = Memory::new();
    let slot = memory.insert(goes, 1, 2);
    let reader = memory.reader(move |memory| {
        assert!(memory.key_at(slot, 1).is_none_or(|mark| mark == 2));
        let current = memory.directory().current(slot);
        assert!(matches!(current, Ok(None) | Err(DirectoryError::Gone)), "{current:?}");
    });
    memory.forget(goes);
    let other = memory.insert(comes, 1, 3);
    let phase = Phase { version: Some(version(1)), plaintext: false };
    assert_eq!(memory.directory().enter(other, phase), Ok(()));
    let _ = reader.join();
}

/// Who goes by the number of files meets a free entry, or one that is used again.
pub(super) fn files_are_listed_while_one_is_forgotten() {
    let [goes, ..] = in_chains();
    // Both of its numbers are others.
    let comes = RelFile { database: FILE.database + 1, relation: FILE.relation + 1, ..FILE };
    let memory = Memory::new();
    memory.insert(goes, 1, 2);
    let reader = memory.reader(move |memory| {
        let files = memory.directory().files().into_iter().flatten();
        assert!(files.flatten().all(|info| info.file == goes || info.file == comes));
    });
    memory.forget(goes);
    memory.insert(comes, 1, 3);
    let _ = reader.join();
}
