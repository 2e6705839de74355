//! A server whose I/O is written down.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_powercut_disk::journal::{HEADER, Kind, Record, header, records};
use pagevault_powercut_disk::{Disk, Ignore, Image, Order, Random, Survival};
use pagevault_tests::installation::run;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Installation, Standby};

/// Numbers of servers in the journal.
const SERVER: u8 = 0;
const STANDBY: u8 = 1;

/// A mark: the server is down.
pub(crate) const STOPPED: &str = "stopped";

/// The key file of the provider of key groups.
pub(crate) const GROUP_KEYS: &str = "group_keys";

const KEY_FILES: [&str; 2] = ["keys", GROUP_KEYS];

const LIBRARY: &str = "libpagevault_powercut_recorder.so";

/// A server that is being recorded.
#[derive(Debug)]
pub struct Recording {
    cluster: Cluster,
    base: Disk,
    /// A standby that follows it.
    standby: Option<(Cluster, Disk)>,
    journal: Journal,
}

/// What clients write to.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// Says something between the operations of the server.
    pub(crate) fn mark(&self, text: &str) -> Result<()> {
        let header = header(Kind::Mark, SERVER, 0, 0, 0, text.len()).context("too long")?;
        Ok((&self.file).write_all(&[&header, text.as_bytes()].concat())?)
    }

    /// A file that is there, and its inode.
    fn is_there(&self, server: u8, inode: u64, path: &[u8]) -> Result<()> {
        let header = header(Kind::Open, server, inode, 0, path.len(), 0).context("too long")?;
        Ok((&self.file).write_all(&[&header, path].concat())?)
    }
}

impl Journal {
    /// From its next start on the server of a cluster, which is down, is written down here.
    fn follow(&self, cluster: &mut Cluster, server: u8) -> Result<Disk> {
        let data = cluster.data_directory().canonicalize()?;
        let base = Disk::of(&data, Order::Kept, None)?;
        introduce(self, server, &data, &data)?;
        without_syncs(cluster)?;
        cluster.set_environment("PAGEVAULT_POWERCUT_JOURNAL", &self.path);
        cluster.set_environment("PAGEVAULT_POWERCUT_ROOT", &data);
        cluster.set_environment("PAGEVAULT_POWERCUT_SERVER", server.to_string());
        cluster.set_environment("PAGEVAULT_POWERCUT_SYNC_US", "300");
        Ok(base)
    }
}

impl Recording {
    /// Starts the server of a cluster, which is down, and records it. Setting `fsync` must be on.
    ///
    /// # Errors
    /// When the server does not start.
    pub fn begin(mut cluster: Cluster) -> Result<Recording> {
        let path = cluster.directory().join("journal");
        let _ = std::fs::remove_file(&path);
        let file = OpenOptions::new().append(true).create_new(true).open(&path)?;
        cluster.installation().give(&path)?;
        let journal = Journal { file, path };
        let base = journal.follow(&mut cluster, SERVER)?;
        cluster.start_server()?;
        Ok(Recording { cluster, base, standby: None, journal })
    }

    /// Attaches a standby, which is recorded as well: by the same journal.
    ///
    /// # Errors
    /// When its server does not start.
    pub fn add_standby(&mut self) -> Result<()> {
        let mut standby =
            Standby::default().conf("hot_standby_feedback = on").create(&self.cluster)?;
        standby.keep_quiet();
        let base = self.journal.follow(&mut standby, STANDBY)?;
        standby.start_server()?;
        wait_for(&standby, &self.cluster)?;
        self.standby = Some((standby, base));
        Ok(())
    }

    /// The server.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    pub(crate) fn has_standby(&self) -> bool {
        self.standby.is_some()
    }

    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Kills the server, if it is still there.
    ///
    /// # Errors
    /// When it survives, or the journal contradicts itself.
    pub fn end(mut self) -> Result<Recorded> {
        self.cluster.kill()?;
        self.cluster.keep_quiet();
        if let Some((standby, _)) = &self.standby {
            standby.kill()?;
        }
        let journal = std::fs::read(&self.journal.path)?;
        std::fs::remove_file(&self.journal.path)?;
        Ok(Recorded {
            directory: self.cluster.directory().to_owned(),
            cluster: Some(self.cluster),
            base: self.base,
            standby: self.standby,
            journal,
        })
    }
}

/// Puts the recorder under a server, without a journal: what it syncs need not reach a disk.
pub(crate) fn without_syncs(cluster: &mut Cluster) -> Result<()> {
    let library = cluster.directory().join(LIBRARY);
    if !library.exists() {
        std::fs::copy(recorder()?, &library)?;
        cluster.installation().give(&library)?;
    }
    cluster.set_environment("LD_PRELOAD", library);
    Ok(())
}

/// The recorder's library, beside the program that runs.
fn recorder() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let found = program.ancestors().skip(1).map(|directory| directory.join(LIBRARY));
    found.clone().find(|path| path.exists()).with_context(|| {
        format!("{LIBRARY} is not there: cargo build -p pagevault-powercut-recorder")
    })
}

fn introduce(journal: &Journal, server: u8, root: &Path, directory: &Path) -> Result<()> {
    let below = directory.strip_prefix(root)?.as_os_str().as_bytes();
    journal.is_there(server, std::fs::metadata(directory)?.ino(), below)?;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            introduce(journal, server, root, &entry.path())?;
        } else if kind.is_file() {
            let path = entry.path();
            let below = path.strip_prefix(root)?.as_os_str().as_bytes();
            journal.is_there(server, entry.metadata()?.ino(), below)?;
        }
    }
    Ok(())
}

/// Base directory and journal: any cut of it can be made again.
#[derive(Debug)]
pub struct Recorded {
    /// Where the key files are that images refer to.
    directory: PathBuf,
    cluster: Option<Cluster>,
    base: Disk,
    standby: Option<(Cluster, Disk)>,
    journal: Vec<u8>,
}

/// A cut, and what survives of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Offset in the journal: what is recorded there has not happened.
    pub place: u64,
    /// By which the rest is drawn.
    pub seed: u64,
    /// What survives; `None`: by the seed.
    pub survival: Option<Survival>,
    /// Whether a second cut comes while a server recovers from this one.
    pub twice: bool,
}

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "--place {} --cut-seed {}", self.place, self.seed)?;
        f.write_str(if self.survival.is_some() { " --torn" } else { "" })?;
        f.write_str(if self.twice { " --twice" } else { "" })
    }
}

impl Recorded {
    /// All that the server did, and its clients said.
    pub fn records(&self) -> impl Iterator<Item = Record<'_>> {
        records(&self.journal).filter(|record| record.server == SERVER)
    }

    /// The cluster that was recorded.
    #[must_use]
    pub fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_ref()
    }

    /// The key file of the provider of key groups.
    pub(crate) fn group_keys(&self) -> PathBuf {
        self.directory.join(GROUP_KEYS)
    }

    /// The files at the beginning of the journal.
    #[must_use]
    pub fn before(&self) -> Image {
        self.base.after_cut(&Survival::Nothing, 0)
    }

    /// The files of the standby, if there is one, that lives on while the server's power is cut: as
    /// its last process left them.
    ///
    /// # Errors
    /// When the journal contradicts itself.
    pub fn standby_at(&self, place: u64) -> Result<Option<Image>> {
        let Some((_, base)) = &self.standby else { return Ok(None) };
        let mut disk = base.clone();
        let of_standby = records(&self.journal).filter(|record| record.server == STANDBY);
        for record in of_standby.take_while(|record| record.place < place) {
            ensure!(disk.happens(&record), "the standby's contradicts itself: {}", shown(&record));
        }
        Ok(Some(disk.after_cut(&Survival::Everything, 0)))
    }

    /// Length of the journal.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.journal.len() as u64
    }

    /// What clients had said before a place.
    pub fn marks(&self, before: u64) -> impl Iterator<Item = (u64, &str)> {
        self.records()
            .take_while(move |record| record.place < before)
            .filter(|record| record.kind == Kind::Mark)
            .map(|record| (record.place, std::str::from_utf8(record.rest).unwrap_or_default()))
    }

    /// Where the server was down, in the middle of the recording.
    #[must_use]
    pub fn stopped(&self) -> Option<u64> {
        self.marks(u64::MAX).find(|(_, mark)| *mark == STOPPED).map(|(place, _)| place)
    }

    /// Where power can be cut: before any operation that changes something.
    #[must_use]
    pub fn places(&self) -> Vec<u64> {
        let changes = |record: &Record<'_>| !matches!(record.kind, Kind::Open | Kind::Mark);
        self.records().filter(changes).map(|record| record.place).collect()
    }

    /// Places after operations on files whose path begins so.
    #[must_use]
    pub fn places_at(&self, prefix: &[u8]) -> Vec<u64> {
        let mut disk = self.base.clone();
        let is_it = |record: &Record<'_>| {
            disk.happens(record);
            let path = disk.path(record.inode).unwrap_or_default();
            record.kind != Kind::Open
                && (record.path.starts_with(prefix) || path.starts_with(prefix))
        };
        self.after_each(is_it)
    }

    /// Places after a page was written over with another content and the same LSN: no image of it
    /// is in WAL.
    #[must_use]
    pub fn places_without_wal(&self) -> Vec<u64> {
        const PAGE: usize = 8192;
        let mut pages: HashMap<(u64, u64), &[u8]> = HashMap::new();
        let is_it = |record: &Record<'_>| {
            let whole =
                record.rest.len().is_multiple_of(PAGE) && record.number.is_multiple_of(PAGE as u64);
            if record.kind != Kind::Write || !whole {
                return false;
            }
            let mut found = false;
            let at = (record.number..).step_by(PAGE);
            // Borrowed from the journal, not from the record.
            let start = usize::try_from(record.place).unwrap_or_default() + HEADER;
            let bytes = &self.journal[start..start + record.rest.len()];
            for (at, page) in at.zip(bytes.chunks(PAGE)) {
                let before = pages.insert((record.inode, at), page);
                found |= before.is_some_and(|before| before[..8] == page[..8] && before != page);
            }
            found
        };
        self.after_each(is_it)
    }

    fn after_each(&self, mut is_it: impl FnMut(&Record<'_>) -> bool) -> Vec<u64> {
        let mut places = Vec::new();
        let mut was = false;
        for record in self.records() {
            if was {
                places.push(record.place);
            }
            was = is_it(&record);
        }
        places
    }

    /// What the cut leaves.
    ///
    /// # Errors
    /// When the journal contradicts itself.
    pub fn after(&self, cut: Cut, ignore: Ignore) -> Result<Image> {
        let mut random = Random::new(cut.seed);
        let order = if random.percent(50) { Order::Kept } else { Order::Free };
        let survival = cut.survival.unwrap_or_else(|| Survival::by_chance(&mut random));
        let mut disk = self.base.clone().with(order, ignore);
        for record in self.records().take_while(|record| record.place < cut.place) {
            ensure!(disk.happens(&record), "the journal contradicts itself: {}", shown(&record));
        }
        Ok(disk.after_cut(&survival, random.number()))
    }

    /// A cluster whose files are what the cut leaves; its server is not started.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn cluster_after(&self, cut: Cut, ignore: Ignore) -> Result<Cluster> {
        cluster_of(&self.after(cut, ignore)?)
    }

    /// What happened around a place, for people.
    #[must_use]
    pub fn around(&self, place: u64) -> String {
        let all: Vec<_> = self.records().filter(|record| record.kind != Kind::Open).collect();
        let at = all.partition_point(|record| record.place < place);
        let shown = all[at.saturating_sub(12)..all.len().min(at + 2)].iter().map(shown);
        shown.collect::<Vec<_>>().join("\n")
    }

    /// What was done to one block of a file before a place, for people: with LSN, key version and
    /// checksum as in the page's header.
    ///
    /// # Errors
    /// When the journal contradicts itself.
    pub fn history(&self, path: &str, block: u64, before: u64) -> Result<String> {
        let mut disk = self.base.clone();
        let (start, mut told) = (block * 8192, String::new());
        for record in self.records().take_while(|record| record.place < before) {
            ensure!(disk.happens(&record), "the journal contradicts itself: {}", shown(&record));
            let is_it = disk.path(record.inode).is_some_and(|at| at == path.as_bytes());
            let end = record.number + record.rest.len() as u64;
            match record.kind {
                Kind::Write if is_it && record.number < start + 8192 && end > start => {
                    let from = usize::try_from(start.saturating_sub(record.number))?;
                    let word = |at: usize| {
                        let bytes = record.rest.get(from + at..from + at + 4).unwrap_or_default();
                        bytes.iter().rev().fold(0_u32, |n, byte| n << 8 | u32::from(*byte))
                    };
                    let (high, low, marks) = (word(0), word(4), word(8));
                    told += &format!(
                        "{} write {high:X}/{low:X} checksum {:04X} flags {:04X}\n",
                        record.place,
                        marks & 0xffff,
                        marks >> 16
                    );
                }
                Kind::Write => {}
                _ if is_it => told += &format!("{}\n", shown(&record)),
                _ => {}
            }
        }
        Ok(told)
    }

    /// Writes base and journal to a directory, which does not exist yet.
    ///
    /// # Errors
    /// When it cannot.
    pub fn save(&self, to: &Path) -> Result<()> {
        std::fs::create_dir_all(to)?;
        if let Some(cluster) = &self.cluster {
            let directory = cluster.directory();
            std::fs::write(to.join("directory"), directory.as_os_str().as_bytes())?;
            for keys in KEY_FILES {
                if directory.join(keys).exists() {
                    std::fs::copy(directory.join(keys), to.join(keys))?;
                }
            }
        }
        self.base.after_cut(&Survival::Everything, 0).write(&to.join("base"))?;
        Ok(std::fs::write(to.join("journal"), &self.journal)?)
    }

    /// What was saved. Key files are put back to where they were.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn load(from: &Path) -> Result<Recorded> {
        let base = Disk::of(&from.join("base"), Order::Kept, None)?;
        let directory = PathBuf::from(std::fs::read_to_string(from.join("directory"))?);
        let installation = Installation::get()?;
        for keys in KEY_FILES {
            if from.join(keys).exists() {
                std::fs::create_dir_all(&directory)?;
                installation.give(&directory)?;
                std::fs::copy(from.join(keys), directory.join(keys))?;
                installation.give(&directory.join(keys))?;
            }
        }
        Ok(Recorded {
            directory,
            cluster: None,
            base,
            standby: None,
            journal: std::fs::read(from.join("journal"))?,
        })
    }
}

/// A cluster with these files; its server is not started.
pub(crate) fn cluster_of(image: &Image) -> Result<Cluster> {
    let mut cluster = Cluster::from_files(|target| {
        image.write(target)?;
        let _ = std::fs::remove_file(target.join("postmaster.pid"));
        give(target)
    })?;
    without_syncs(&mut cluster)?;
    cluster.keep_quiet();
    Ok(cluster)
}

fn give(path: &Path) -> Result<()> {
    let owner = std::fs::metadata(path.parent().context("a directory")?)?;
    let owner = format!("{}:{}", owner.uid(), owner.gid());
    run(std::process::Command::new("chown").args(["-R", &owner]).arg(path)).map(drop)
}

fn shown(record: &Record<'_>) -> String {
    let path = String::from_utf8_lossy(record.path);
    let rest = match record.kind {
        Kind::Write => format!("{} bytes", record.rest.len()),
        _ => String::from_utf8_lossy(record.rest).into_owned(),
    };
    let Record { place, kind, inode, number, .. } = record;
    format!("{place} {kind:?} inode {inode} at {number} {path} {rest}")
}
