//! The content of a core dump, without making one: `/proc/PID/mem`, by the flags of
//! `/proc/PID/smaps`.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use rustix::process::{Pid, geteuid};

/// Length of a searched piece in bytes: half of an AES-256 key, or a round key.
pub const PIECE: usize = 16;

/// Number of bytes read at once.
const CHUNK: usize = 1 << 20;

/// Whether the memory of a process can be read. Under Yama, users other than root may read only
/// their descendants, and the servers under test are not descendants of the tests.
///
/// # Errors
/// When the tests run as root and cannot read it.
pub fn is_readable(pid: Pid) -> Result<bool> {
    match File::open(format!("/proc/{}/mem", pid.as_raw_nonzero())) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !geteuid().is_root() => {
            eprintln!("skipped: this user may not read the memory of servers");
            Ok(false)
        }
        // It has ended.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
        opened => Ok(opened.map(|_| true)?),
    }
}

/// A part of a process's memory.
#[derive(Clone, Debug)]
pub struct Mapping {
    start: u64,
    end: u64,
    /// `[stack]`, `[heap]`, a file, or nothing.
    pub name: String,
    /// The inode of the mapped file, if other processes share the memory.
    shared: Option<u64>,
    writable: bool,
    /// Whether a core dump contains it: `MADV_DONTDUMP` excludes it.
    pub dumped: bool,
}

impl Mapping {
    /// All mappings of a process, ascending.
    ///
    /// # Errors
    /// When the process has ended, or belongs to another user.
    pub fn all(pid: Pid) -> Result<Vec<Mapping>> {
        let path = format!("/proc/{}/smaps", pid.as_raw_nonzero());
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let mut mappings: Vec<Mapping> = Vec::new();
        for line in text.lines() {
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                let last = mappings.last_mut().context("flags before a mapping")?;
                last.dumped = !flags.split_whitespace().any(|flag| flag == "dd" || flag == "io");
            } else if let Some(mapping) = Mapping::parse(line) {
                mappings.push(mapping);
            }
        }
        Ok(mappings)
    }

    /// `start-end rwxp offset device inode   name`
    fn parse(line: &str) -> Option<Mapping> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let inode = words.nth(2)?.parse().ok()?;
        Some(Mapping {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            name: words.collect::<Vec<_>>().join(" "),
            shared: rights.ends_with('s').then_some(inode),
            writable: rights.starts_with("rw"),
            dumped: true,
        })
    }
}

/// Pieces of secrets, by name.
#[derive(Debug, Default)]
pub struct Pieces {
    names: HashMap<[u8; PIECE], String>,
    /// Whether any piece begins with these two bytes.
    beginnings: Vec<bool>,
}

/// A piece that was found.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Found {
    /// The process that contained it.
    pub process: String,
    /// The name of the mapping, and the distance from its end.
    pub place: String,
    /// The name of the piece.
    pub piece: String,
    /// Whether a core dump contains it.
    pub dumped: bool,
}

impl Pieces {
    /// Adds a secret, split into pieces.
    pub fn add(&mut self, name: &str, secret: &[u8]) {
        self.beginnings.resize(1 << 16, false);
        for (number, piece) in secret.as_chunks::<PIECE>().0.iter().enumerate() {
            self.names.entry(*piece).or_insert_with(|| format!("{name}, piece {number}"));
            self.beginnings[usize::from(u16::from_ne_bytes([piece[0], piece[1]]))] = true;
        }
    }

    /// Number of pieces.
    #[must_use]
    pub fn count(&self) -> usize {
        self.names.len()
    }

    /// Offset and name of each piece in `bytes`.
    pub fn search(&self, bytes: &[u8]) -> Vec<(usize, &str)> {
        let mut found = Vec::new();
        for (page, at) in bytes.chunks(4096).zip((0..).step_by(4096)) {
            // Most memory was never written to. A piece does not begin with zeros, except by
            // chance.
            if page.iter().all(|byte| *byte == 0) {
                continue;
            }
            let end = (at + 4096 + PIECE - 1).min(bytes.len());
            for (offset, window) in bytes[at..end].windows(PIECE).enumerate() {
                if self.beginnings[usize::from(u16::from_ne_bytes([window[0], window[1]]))]
                    && let Some(name) = window.first_chunk().and_then(|w| self.names.get(w))
                {
                    found.push((at + offset, name.as_str()));
                }
            }
        }
        found
    }

    /// The pieces found in the memory of these processes. Shared memory is read once.
    ///
    /// # Errors
    /// When memory cannot be read.
    pub fn in_memory(&self, processes: &[Pid]) -> Result<Vec<Found>> {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for pid in processes {
            let Some(process) = title(*pid) else { continue };
            let path = format!("/proc/{}/mem", pid.as_raw_nonzero());
            let opened = || -> Result<_> {
                let memory = File::open(&path).with_context(|| format!("read {path}"))?;
                Ok((memory, Mapping::all(*pid)?))
            };
            let (memory, mappings) = match opened() {
                Err(_) if title(*pid).is_none() => continue,
                opened => opened?,
            };
            for mapping in mappings.iter().filter(|mapping| mapping.writable) {
                if mapping.shared.is_some_and(|inode| !seen.insert((inode, mapping.start))) {
                    continue;
                }
                self.in_mapping(&memory, mapping, |place, piece| {
                    found.push(Found {
                        process: process.clone(),
                        place,
                        piece: piece.to_owned(),
                        dumped: mapping.dumped,
                    });
                });
            }
        }
        found.sort();
        found.dedup();
        Ok(found)
    }

    fn in_mapping(&self, memory: &File, mapping: &Mapping, mut tell: impl FnMut(String, &str)) {
        let mut chunk = vec![0; CHUNK + PIECE - 1];
        let mut at = mapping.start;
        while at < mapping.end {
            let length = (mapping.end - at).min(chunk.len() as u64) as usize;
            // Guard pages and the like cannot be read.
            if memory.read_exact_at(&mut chunk[..length], at).is_ok() {
                for (offset, piece) in self.search(&chunk[..length]) {
                    let from_end = mapping.end - at - offset as u64;
                    tell(format!("{} (end - {from_end:#x})", mapping.name), piece);
                }
            }
            at += CHUNK as u64;
        }
    }
}

/// The title of a process; `None` if it has ended.
fn title(pid: Pid) -> Option<String> {
    let words = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
    let words = String::from_utf8_lossy(&words).replace('\0', " ");
    (!words.is_empty()).then(|| words.trim().to_owned())
}
