//! WAL keys: where they are recorded, and the WAL addresses from which each is used.
//!
//! Versions count from 1. The key of a version is recorded as the data key of a relation file that
//! cannot exist ([`key_place`]), so that everything done for data keys is done for it, too.
//!
//! The key of a WAL page depends on its address only: a page is written repeatedly as it fills, and
//! must not change its key meanwhile. [`Switches`] holds the addresses: each switch is the address
//! of a page that was not begun yet, and the state of WAL from there on.
//!
//! Switches are numbered in the order in which they were decided. In one history of WAL, addresses
//! have the same order. But a switch may be durable in the keystore although WAL before its address
//! was lost, in a crash or by recovery to an earlier point. WAL then takes another course, to which
//! that switch does not belong: where both apply, a later decision counts.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use crate::rel_file::RelFile;

/// Whether WAL is encrypted, and under which key version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct WalPhase {
    /// Version of the key; `None`: there was none yet, WAL is plaintext.
    pub version: Option<KeyVersion>,
    /// Plaintext, although there are keys up to `version`.
    pub plaintext: bool,
}

impl WalPhase {
    /// Encrypted under this version.
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

/// Number of WAL key versions that are recorded as versions of one file's data key.
const IN_ONE_FILE: u32 = DataKeyVersion::LAST.get() as u32;

/// The file, and the version of its data key, under which a version of the WAL key is recorded. No
/// relation is in tablespace 0.
pub const fn key_place(version: KeyVersion) -> (RelFile, DataKeyVersion) {
    let before = version.get() - 1;
    let file = RelFile { tablespace: 0, database: 0, relation: 1 + before / IN_ONE_FILE };
    match DataKeyVersion::new((before % IN_ONE_FILE + 1) as u16) {
        Some(there) => (file, there),
        // Cannot happen: the number is within 1 to IN_ONE_FILE.
        None => (file, DataKeyVersion::LAST),
    }
}

/// The version of the WAL key that is recorded there, see [`key_place`].
pub fn version_at(file: RelFile, there: DataKeyVersion) -> Option<KeyVersion> {
    let before = file.relation.checked_sub(1)?.checked_mul(IN_ONE_FILE)?;
    KeyVersion::new(before.checked_add(there.get().into())?)
}

/// Whether a file stands for WAL keys.
pub const fn is_key_place(file: RelFile) -> bool {
    file.tablespace == 0
}

/// A change of WAL's key. The greater of two was decided later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Switch {
    /// Number of the decision, from 1.
    pub step: u32,
    /// Address of the first page concerned.
    pub start: Lsn,
    /// The state from there on.
    pub phase: WalPhase,
}

/// A range of WAL with one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// First address.
    pub from: Lsn,
    /// Address behind the last.
    pub to: Lsn,
    /// State of the range.
    pub phase: WalPhase,
}

/// The state of the page at `address`, and the range around it with the same state. Of the switches
/// that apply, the one decided last counts.
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

/// The switches of a copy of the keystore, for a program that encrypts what it receives. The server
/// may have switched since the copy was made; so where WAL is plaintext after the last switch that
/// the copy knows, it is encrypted under the newest key then. WAL before that switch need not have
/// brought that key yet.
pub fn for_receiving(switches: impl IntoIterator<Item = Switch>) -> Vec<Switch> {
    let mut switches: Vec<_> = switches.into_iter().collect();
    if let Some(last) = switches.iter_mut().max() {
        last.phase.plaintext = false;
    }
    switches
}

/// The highest version of which WAL from `address` on has no page, according to all switches: the
/// one before the lowest that still applies somewhere.
pub fn before_all<I>(switches: I, address: Lsn) -> Option<KeyVersion>
where
    I: IntoIterator<Item = Switch, IntoIter: Clone>,
{
    let switches = switches.into_iter();
    let there = switches.clone().filter(|switch| switch.start <= address).max()?;
    let later = switches.filter(|switch| switch.start > address);
    let lowest = later.chain([there]).map(|switch| switch.phase.version).min()??;
    KeyVersion::new(lowest.get() - 1)
}

/// There is no room for another switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {} switches of WAL keys are in use", Switches::CAPACITY)]
pub struct Full;

/// All switches, in shared memory, in any order.
///
/// ```text
/// count u32, then for each switch: start u64, version u32, plaintext u32, step u32
/// ```
///
/// Switches are only added, so readers need no lock: the first `count` are complete. There is one
/// writer at a time.
#[derive(Debug, Clone, Copy)]
pub struct Switches<'a> {
    words: &'a [AtomicU32],
}

const ENTRY: usize = 5;

impl<'a> Switches<'a> {
    /// Highest number of switches.
    pub const CAPACITY: usize = 1 << 14;
    /// Size in words of shared memory.
    pub const WORDS: usize = 1 + Self::CAPACITY * ENTRY;

    /// The switches in `words`, [`Switches::WORDS`] in number and initially zero.
    pub fn new(words: &'a [AtomicU32]) -> Self {
        Self { words }
    }

    /// Removes all switches. No other process may access the words.
    pub fn reset(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// The number of switches. While it is unchanged, so are the switches.
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

    /// Adds a switch, unless it is known.
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

    /// The state of the page at `address`, and the range with the same state. Takes time
    /// proportional to the number of switches.
    pub fn at(&self, address: Lsn) -> Stretch {
        stretch_at(self.iter(), address)
    }

    /// The switch that was decided last.
    pub fn newest(&self) -> Option<Switch> {
        self.iter().max()
    }

    /// Whether any page at or behind `address` is encrypted.
    pub fn is_sealed_from(&self, address: Lsn) -> bool {
        self.at(address).phase.sealed().is_some()
            || self.iter().any(|switch| switch.start > address && switch.phase.sealed().is_some())
    }
}
