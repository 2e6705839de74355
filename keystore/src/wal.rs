//! WAL keys: where they are kept, and from where in WAL each is used.
//!
//! Versions count from 1. The key of a version is a data key as any other, recorded as that
//! of a relation file that cannot exist ([`key_place`]), so that all that is done for data keys is
//! done for it.
//!
//! Which key a WAL page is sealed with depends on the page's address alone: a page is written again
//! and again as it fills, and must not change its key meanwhile. [`Switches`] says it: each switch
//! is an address, that of a page not begun yet, and how WAL is written from there on.
//!
//! Switches have a number, in the order in which they were decided. In one history of WAL addresses
//! have the same order; but a switch may be safe in the keystore when WAL is lost before it came
//! there, in a crash or by recovery to a point before it. WAL then takes another course, to which
//! that switch does not belong: what is decided later counts against it wherever both apply.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use crate::rel_file::RelFile;

/// How WAL is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct WalPhase {
    /// Of the key; `None` before the first: in plaintext.
    pub version: Option<KeyVersion>,
    /// Written in plaintext, although there were keys up to `version`.
    pub plaintext: bool,
}

impl WalPhase {
    /// Sealed under this version.
    pub const fn under(version: KeyVersion) -> Self {
        Self { version: Some(version), plaintext: false }
    }

    /// The version to write with, `None` for plaintext.
    pub const fn sealed(self) -> Option<KeyVersion> {
        if self.plaintext { None } else { self.version }
    }
}

impl fmt::Display for WalPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sealed() {
            Some(version) => write!(f, "version {version}"),
            None => {
                write!(f, "plaintext after version {}", KeyVersion::get_or_zero(self.version))
            }
        }
    }
}

/// Versions of the WAL key that are recorded as versions of one file's data key.
const IN_ONE_FILE: u32 = DataKeyVersion::LAST.get() as u32;

/// The file, and the version of its data key, under which a version of the WAL key is recorded. No
/// relation is in tablespace 0.
pub const fn key_place(version: KeyVersion) -> (RelFile, DataKeyVersion) {
    let before = version.get() - 1;
    let file = RelFile { tablespace: 0, database: 0, relation: 1 + before / IN_ONE_FILE };
    match DataKeyVersion::new((before % IN_ONE_FILE + 1) as u16) {
        Some(there) => (file, there),
        // The number is within 1 to IN_ONE_FILE.
        None => (file, DataKeyVersion::LAST),
    }
}

/// The version of the WAL key that is recorded at a place, see [`key_place`].
pub fn version_at(file: RelFile, there: DataKeyVersion) -> Option<KeyVersion> {
    let before = file.relation.checked_sub(1)?.checked_mul(IN_ONE_FILE)?;
    KeyVersion::new(before.checked_add(there.get().into())?)
}

/// Whether a file stands for WAL keys.
pub const fn is_key_place(file: RelFile) -> bool {
    file.tablespace == 0
}

/// A change of how WAL is written. The greater of two was decided later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Switch {
    /// Its number among the decisions, from 1.
    pub step: u32,
    /// Address of the first page that is concerned.
    pub start: Lsn,
    /// How it is written.
    pub phase: WalPhase,
}

/// How WAL is written in a stretch of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Its first address.
    pub from: Lsn,
    /// The address behind its last.
    pub to: Lsn,
    /// How it is written.
    pub phase: WalPhase,
}

/// How the page at `address` is written, after all switches, and how far around it that is so: of
/// those that apply there the one that was decided last counts.
pub fn stretch_at<I>(switches: I, address: Lsn) -> Stretch
where
    I: IntoIterator<Item = Switch, IntoIter: Clone>,
{
    let switches = switches.into_iter();
    let last = switches.clone().filter(|switch| switch.start <= address).max();
    let later = switches.filter(|switch| switch.start > address && Some(*switch) > last);
    let to = later.map(|switch| switch.start).min().unwrap_or(Lsn::MAX);
    match last {
        Some(Switch { start, phase, .. }) => Stretch { from: start, to, phase },
        None => Stretch { from: Lsn(0), to, phase: WalPhase::default() },
    }
}

/// No room for another switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {} switches of WAL keys are in use", Switches::CAPACITY)]
pub struct Full;

/// All switches, in shared memory, in any order.
///
/// ```text
/// count u32, then for each switch: start u64, version u32, plaintext u32, step u32
/// ```
///
/// Switches are only added, so readers need no lock: they see the first `count`, whole. One writer
/// at a time.
#[derive(Debug, Clone, Copy)]
pub struct Switches<'a> {
    words: &'a [AtomicU32],
}

const ENTRY: usize = 5;

impl<'a> Switches<'a> {
    /// Most switches.
    pub const CAPACITY: usize = 1 << 14;
    /// Words of shared memory.
    pub const WORDS: usize = 1 + Self::CAPACITY * ENTRY;

    /// The switches in `words`, of which there are [`Switches::WORDS`], zero at first.
    pub fn new(words: &'a [AtomicU32]) -> Self {
        Self { words }
    }

    /// Forgets everything; no one else looks at the words.
    pub fn reset(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// How many there are. As long as this is the same, so is everything else.
    #[inline]
    pub fn count(&self) -> u32 {
        self.words.first().map_or(0, |count| count.load(Ordering::Acquire))
    }

    /// All switches, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = Switch> + Clone + use<'a> {
        let entries = self.words.get(1..).unwrap_or_default().chunks_exact(ENTRY);
        entries.take(self.count() as usize).map(|entry| {
            let [low, high, version, plaintext, step] =
                [0, 1, 2, 3, 4].map(|at| entry.get(at).map_or(0, |w| w.load(Ordering::Relaxed)));
            let (version, plaintext) = (KeyVersion::new(version), plaintext != 0);
            Switch {
                step,
                start: Lsn(u64::from(low) | u64::from(high) << 32),
                phase: WalPhase { version, plaintext },
            }
        })
    }

    /// Adds a switch, unless it is there.
    ///
    /// # Errors
    /// [`Full`]
    pub fn add(&self, switch: Switch) -> Result<(), Full> {
        if self.contains(switch) {
            return Ok(());
        }
        let count = self.count();
        let at = 1 + count as usize * ENTRY;
        let (Some(entry), Some(counter)) = (self.words.get(at..at + ENTRY), self.words.first())
        else {
            return Err(Full);
        };
        let Switch { step, start, phase } = switch;
        let (low, high) = (start.0 as u32, (start.0 >> 32) as u32);
        let version = KeyVersion::get_or_zero(phase.version);
        let values = [low, high, version, u32::from(phase.plaintext), step];
        entry.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        counter.store(count + 1, Ordering::Release);
        Ok(())
    }

    /// Whether [`Switches::add`] would find room for a switch.
    pub fn has_room_for(&self, switch: Switch) -> bool {
        (self.count() as usize) < Self::CAPACITY || self.contains(switch)
    }

    /// Whether a switch is known.
    pub fn contains(&self, switch: Switch) -> bool {
        self.iter().any(|known| known == switch)
    }

    /// How the page at `address` is written, and how far around it that is so. Costs the number of
    /// switches.
    pub fn at(&self, address: Lsn) -> Stretch {
        stretch_at(self.iter(), address)
    }

    /// The switch that was decided last.
    pub fn newest(&self) -> Option<Switch> {
        self.iter().max()
    }

    /// Whether any page at `address` or behind it is sealed.
    pub fn is_sealed_from(&self, address: Lsn) -> bool {
        self.at(address).phase.sealed().is_some()
            || self.iter().any(|switch| switch.start > address && switch.phase.sealed().is_some())
    }
}
