//! A model of relations, their files, and the processes that write to them.
//!
//! For each page it records the state in the file, as a reader sees it; the state on the medium,
//! which a power failure leaves; and whether replay of WAL would write it. A writer looks up the
//! key first and writes later. Every action holds the locks that it holds in the server, so it is
//! atomic here; anything may happen between two steps of a job.

mod events;
mod held;

use std::collections::BTreeSet;

use pagevault_cipher::{CipherId, DataKeyVersion};
use pagevault_core::page::{Fork, PageState, Target};
use pagevault_core::policy::Oid;
use pagevault_core::rekey::file::StepResult;
use pagevault_core::rekey::run::{Member, Run};
use pagevault_keystore::RelFile;
use pagevault_keystore::job::JobKind;

use self::held::Held;
use crate::random::Random;

pub(crate) const AES_256: CipherId = CipherId::Aes256Xts;
pub(crate) const AES_128: CipherId = CipherId::Aes128Xts;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Page {
    /// State in the file.
    pub(crate) seen: PageState,
    /// State on the medium.
    durable: PageState,
    /// Changed in shared buffers, with WAL.
    changed: bool,
    /// Changed in shared buffers without WAL: hint bits.
    hinted: bool,
    /// WAL since the last checkpoint restores it.
    in_wal: bool,
}

impl Page {
    fn written(state: PageState) -> Page {
        Page { seen: state, durable: state, changed: false, hinted: false, in_wal: false }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) id: RelFile,
    pub(crate) forks: [Vec<Page>; 4],
    /// Version of the newest key.
    pub(crate) last: u16,
    /// The cipher for new pages.
    pub(crate) cipher: Option<CipherId>,
    /// The keystore says that pages may be under several keys.
    rewriting: bool,
    /// Keys up to this version are not in use any more.
    pub(crate) retired: u16,
    /// The target that was proven last, and must hold since.
    proven: Option<Target>,
    destroyed: bool,
}

impl File {
    pub(crate) fn current(&self) -> Option<DataKeyVersion> {
        self.cipher.and_then(|_| DataKeyVersion::new(self.last))
    }

    pub(crate) fn target(&self) -> Target {
        Target { file: self.id, version: self.current() }
    }

    fn state(&self) -> PageState {
        self.current().map_or(PageState::Plaintext, PageState::Sealed)
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = &Page> {
        self.forks.iter().flatten()
    }
}

/// A process that has looked up the key of a file and will write one page.
#[derive(Clone, Debug)]
struct Writer {
    number: usize,
    file: RelFile,
    fork: usize,
    block: usize,
    state: PageState,
    /// The file was being rewritten when the key was looked up.
    rewriting: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Relation {
    pub(crate) oid: Oid,
    pub(crate) file: Option<File>,
    /// A command has the right to rewrite it.
    busy: bool,
    /// A job has the right to rewrite it.
    claimed: bool,
    /// A session has locked it to change its label.
    labelled_now: bool,
    logged: bool,
    /// The label: encrypted, plaintext, or none.
    pub(crate) label: Option<bool>,
}

#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) kind: JobKind,
    pub(crate) cipher: Option<CipherId>,
    /// Relations whose key it has changed, as the log says.
    begun: BTreeSet<Oid>,
    /// The part of `begun` that survives a power failure.
    begun_durable: BTreeSet<Oid>,
    /// Version of the newest key of each file when the job was requested.
    before: Vec<(RelFile, u16)>,
}

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) relations: Vec<Relation>,
    writers: Vec<Writer>,
    /// A writer that could proceed does so with a probability of 1 in this number.
    slow: usize,
    next: usize,
    pub(crate) job: Job,
    /// The process of the job ends after this many more effects.
    pub(crate) ends_in: Option<usize>,
    /// The writers that the job waits for.
    awaited: Option<Vec<usize>>,
    pub(crate) story: Vec<String>,
}

/// Why the job does not continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The process has ended.
    Killed,
    Destroyed,
}

impl World {
    pub(crate) fn new(random: &mut Random) -> World {
        let kind = random.pick(&[JobKind::Encrypt, JobKind::Rotate, JobKind::Decrypt]).unwrap();
        let named = random.pick(&[None, Some(AES_256), Some(AES_128)]).unwrap();
        let cipher = named.filter(|_| kind == JobKind::Encrypt);
        let mut world = World {
            relations: Vec::new(),
            writers: Vec::new(),
            slow: random.pick(&[1, 2, 10]).unwrap(),
            next: 0,
            job: Job {
                kind,
                cipher,
                begun: BTreeSet::new(),
                begun_durable: BTreeSet::new(),
                before: Vec::new(),
            },
            ends_in: None,
            awaited: None,
            story: Vec::new(),
        };
        let label = match kind {
            JobKind::Encrypt => random.pick(&[None, Some(true)]).unwrap(),
            JobKind::Decrypt => random.pick(&[None, Some(false)]).unwrap(),
            JobKind::Rotate => None,
        };
        for oid in 0..1 + random.below(3) as u32 {
            let logged = !random.one_in(4);
            let file = world.any_file(random);
            world.relations.push(Relation {
                oid,
                file: Some(file),
                busy: false,
                claimed: false,
                labelled_now: false,
                logged,
                label,
            });
        }
        let files = world.relations.iter().filter_map(|relation| relation.file.as_ref());
        world.job.before = files.map(|file| (file.id, file.last)).collect();
        world
    }

    fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    /// A file with pages under several keys and in plaintext, as an interrupted job leaves it, or
    /// in one state throughout.
    fn any_file(&mut self, random: &mut Random) -> File {
        let last = random.below(4) as u16;
        let cipher = random.pick(&[None, Some(AES_256), Some(AES_128)]).unwrap();
        let cipher = cipher.filter(|_| last > 0);
        let mut file = self.empty_file(last, cipher);
        let mixed = random.one_in(2);
        file.rewriting = mixed;
        for fork in 0..4 {
            for _ in 0..random.below(8) {
                let state = match random.below(6) {
                    0 => PageState::Empty,
                    1 if mixed => PageState::Plaintext,
                    2 if mixed && last > 0 => {
                        let version = 1 + random.below(last.into()) as u16;
                        PageState::Sealed(DataKeyVersion::new(version).unwrap())
                    }
                    _ => file.state(),
                };
                file.forks[fork].push(Page::written(state));
            }
        }
        file
    }

    fn empty_file(&mut self, last: u16, cipher: Option<CipherId>) -> File {
        File {
            id: RelFile { tablespace: 1, database: 5, relation: self.number() as u32 },
            forks: [const { Vec::new() }; 4],
            last,
            cipher,
            rewriting: false,
            retired: 0,
            proven: None,
            destroyed: false,
        }
    }

    /// The relations that the job has to process.
    pub(crate) fn run(&self) -> Run {
        Run::new(self.members())
    }

    fn members(&self) -> Vec<Member> {
        let members = self.relations.iter().filter_map(|relation| {
            let file = relation.file.as_ref()?;
            let pages = file.pages().count() as i64;
            Some(Member { relation: relation.oid, file: file.id, pages })
        });
        members.collect()
    }

    fn tell(&mut self, what: impl Into<String>) {
        self.story.push(what.into());
    }

    /// One step of the job; an error if the job does not continue.
    pub(crate) fn step(&mut self, run: &mut Run) -> Result<Option<StepResult>, Stop> {
        let Some((relation, state)) = run.next() else {
            let follows = run.follow(&self.members(), self.job.kind);
            return if follows { self.step(run) } else { Ok(None) };
        };
        self.tell(format!("{relation}: {state:?}"));
        let result = run.step(&mut Held::<false> { world: self, relation })?;
        if let StepResult::Ended(_) = result {
            self.of(relation).claimed = false;
        }
        self.check();
        Ok(Some(result))
    }

    /// Ends the process of the job.
    pub(crate) fn stop(&mut self) {
        self.relations.iter_mut().for_each(|relation| relation.claimed = false);
        self.awaited = None;
        self.ends_in = None;
    }

    fn of(&mut self, oid: Oid) -> &mut Relation {
        self.relations.iter_mut().find(|relation| relation.oid == oid).unwrap()
    }

    /// Counts one effect of the job.
    fn effect(&mut self) -> Result<(), Stop> {
        match &mut self.ends_in {
            Some(0) => Err(Stop::Killed),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// All processes end; with `power`, so does the kernel. Then WAL is replayed.
    pub(crate) fn crash(&mut self, random: &mut Random, power: bool) {
        self.tell(if power { "power cut" } else { "crash" });
        self.stop();
        self.writers.clear();
        if power && random.one_in(2) {
            self.job.begun = self.job.begun_durable.clone();
        }
        self.job.begun_durable = self.job.begun.clone();
        for relation in &mut self.relations {
            (relation.busy, relation.labelled_now) = (false, false);
            let Some(file) = &mut relation.file else { continue };
            let state = file.state();
            for (number, fork) in file.forks.iter_mut().enumerate() {
                if !relation.logged && number != Fork::Init as usize {
                    fork.clear();
                }
                for page in fork {
                    if power && random.one_in(2) {
                        page.seen = page.durable;
                    }
                    if page.in_wal && !file.destroyed {
                        page.seen = state;
                    }
                    *page = Page::written(page.seen);
                }
            }
        }
        self.check();
    }

    /// Only the job continues.
    pub(crate) fn quiet(&mut self) {
        self.writers_end();
        for relation in &mut self.relations {
            (relation.busy, relation.labelled_now) = (false, false);
        }
        self.check();
    }

    fn fail(&self, what: &str) -> ! {
        panic!("{what}\n{:?}\n{}", self.job, self.story.join("\n"));
    }

    /// Conditions that always hold.
    fn check(&self) {
        for file in self.relations.iter().filter_map(|relation| relation.file.as_ref()) {
            let Some(proven) = file.proven.filter(|_| !file.destroyed) else { continue };
            if proven != file.target() {
                self.fail("keys were changed after they were proven");
            }
            for page in file.pages() {
                let after = if page.in_wal { file.state() } else { page.durable };
                let is_retired = |state: PageState| match state {
                    PageState::Sealed(version) => version.get() <= file.retired,
                    PageState::Plaintext | PageState::Empty => false,
                };
                if is_retired(page.seen) || is_retired(after) {
                    self.fail("a key is retired, and a page is under it");
                }
                if !proven.is_met_by(page.seen) || !proven.is_met_by(after) {
                    self.fail("a page is not as it was proven to be");
                }
            }
        }
    }

    /// Conditions that hold when the job is complete.
    pub(crate) fn check_done(&self) {
        for relation in &self.relations {
            let Some(file) = relation.file.as_ref().filter(|file| !file.destroyed) else {
                continue;
            };
            let met = match self.job.kind {
                JobKind::Encrypt => {
                    file.cipher.is_some()
                        && self.job.cipher.is_none_or(|it| file.cipher == Some(it))
                }
                JobKind::Decrypt => file.cipher.is_none(),
                JobKind::Rotate => {
                    let before = self.job.before.iter().find(|(id, _)| *id == file.id);
                    file.cipher.is_none() || before.is_none_or(|(_, last)| file.last > *last)
                }
            };
            if !met {
                self.fail("the job is done, and a file is not written as it wants");
            }
            let rotates_plaintext = self.job.kind == JobKind::Rotate && file.cipher.is_none();
            if !rotates_plaintext && file.pages().any(|page| !file.target().is_met_by(page.seen)) {
                self.fail("the job is done, and a page is not as it wants");
            }
        }
    }
}
