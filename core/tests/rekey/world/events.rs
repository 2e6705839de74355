//! What other processes do during a job.

use pagevault_cipher::DataKeyVersion;
use pagevault_core::page::PageState;
use pagevault_core::rekey::file::{End, FileState, StepResult};
use pagevault_keystore::RelFile;
use pagevault_keystore::job::JobKind;

use super::held::Held;
use super::{AES_256, File, Page, Relation, World, Writer};
use crate::random::Random;

impl World {
    /// A random event.
    pub(crate) fn event(&mut self, random: &mut Random) {
        match random.below(41) {
            0..10 => self.writer_begins(random),
            10..20 if !self.writers.is_empty() && random.one_in(self.slow) => {
                let at = random.below(self.writers.len());
                self.writer_ends(at);
            }
            20..25 => self.change(random, true),
            25..29 => self.change(random, false),
            29 => self.checkpoint(),
            30 => self.replace(random),
            31 if random.one_in(8) => self.drop_relation(random),
            32 => self.cut(random),
            33 if random.one_in(20) => self.shred(random),
            34 | 35 => self.command_begins_or_ends(random),
            36 => self.encrypt_at_once(random),
            37 | 38 => self.label_locks(random),
            39 => self.exchange(random),
            40 => self.pass_on(random),
            _ => {}
        }
        self.check();
    }

    fn any_relation(&self, random: &mut Random) -> Option<usize> {
        let at = random.below(self.relations.len());
        self.relations[at].file.as_ref().filter(|file| !file.destroyed).map(|_| at)
    }

    pub(crate) fn writer_begins(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        let number = self.number();
        let file = self.relations[at].file.as_ref().unwrap();
        let fork = random.below(4);
        let pages = &file.forks[fork];
        // The block after the last: a page that is added, past shared buffers.
        let block = random.below(pages.len() + 1);
        let is_written =
            |writer: &Writer| (writer.file, writer.fork, writer.block) == (file.id, fork, block);
        let has_reason = pages.get(block).is_none_or(|page| page.changed || page.hinted);
        if pages.len() >= 12 || !has_reason || self.writers.iter().any(is_written) {
            return;
        }
        let (id, state, rewriting) = (file.id, file.state(), file.rewriting);
        self.tell(format!("writer {number} looks up {state:?} for {id} {fork}/{block}"));
        self.writers.push(Writer { number, file: id, fork, block, state, rewriting });
    }

    pub(super) fn writer_ends(&mut self, at: usize) {
        let writer = self.writers.remove(at);
        self.tell(format!("writer {} writes", writer.number));
        let mut files = self.relations.iter_mut();
        let Some(relation) =
            files.find(|r| r.file.as_ref().is_some_and(|file| file.id == writer.file))
        else {
            return;
        };
        let logged = relation.logged;
        let file = relation.file.as_mut().unwrap();
        if file.destroyed {
            return;
        }
        let pages = &mut file.forks[writer.fork];
        while pages.len() <= writer.block {
            // An added page is in WAL, or is gone after a crash.
            let empty = Page::written(PageState::Empty);
            pages.push(Page { changed: true, in_wal: logged, ..empty });
        }
        let page = &mut pages[writer.block];
        // Like `page::io::target_over`: a page with the same LSN as on disk keeps the key of the
        // page on disk.
        let keeps = writer.rewriting && !page.changed && page.seen != PageState::Empty;
        if !keeps {
            page.seen = writer.state;
        }
        (page.changed, page.hinted) = (false, false);
    }

    pub(super) fn finish_writers_of(&mut self, file: RelFile) {
        while let Some(at) = self.writers.iter().position(|writer| writer.file == file) {
            self.writer_ends(at);
        }
    }

    fn change(&mut self, random: &mut Random, in_wal: bool) {
        let Some(at) = self.any_relation(random) else { return };
        let logged = self.relations[at].logged;
        let file = self.relations[at].file.as_mut().unwrap();
        let fork = random.below(4);
        let (id, count) = (file.id, file.forks[fork].len());
        if count == 0 {
            return;
        }
        let block = random.below(count);
        if self.writers.iter().any(|w| (w.file, w.fork, w.block) == (id, fork, block)) {
            return;
        }
        let page = &mut file.forks[fork][block];
        if in_wal {
            page.changed = true;
            page.in_wal |= logged;
        } else {
            page.hinted = true;
        }
    }

    /// Writes a page from shared buffers, under the file's present key.
    pub(super) fn write(file: &mut File, fork: usize, block: usize) {
        let (state, rewriting) = (file.state(), file.rewriting);
        let page = &mut file.forks[fork][block];
        if page.changed || page.hinted {
            let keeps = rewriting && !page.changed && page.seen != PageState::Empty;
            if !keeps {
                page.seen = state;
            }
            (page.changed, page.hinted) = (false, false);
        }
    }

    fn checkpoint(&mut self) {
        while !self.writers.is_empty() {
            self.writer_ends(0);
        }
        self.tell("checkpoint");
        for file in self.relations.iter_mut().filter_map(|relation| relation.file.as_mut()) {
            for fork in 0..4 {
                for block in 0..file.forks[fork].len() {
                    if !file.destroyed {
                        Self::write(file, fork, block);
                    }
                    let page = &mut file.forks[fork][block];
                    (page.durable, page.in_wal) = (page.seen, false);
                }
            }
        }
    }

    /// TRUNCATE, VACUUM FULL: new storage follows the policy.
    fn replace(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        let old = self.relations[at].file.clone().unwrap();
        let cipher = match self.relations[at].label {
            Some(true) => self.job.cipher.or(old.cipher).or(Some(AES_256)),
            Some(false) => None,
            None => old.cipher,
        };
        let mut file = self.empty_file(u16::from(cipher.is_some()), cipher);
        for fork in &mut file.forks {
            let state = cipher.map_or(PageState::Plaintext, |_| {
                PageState::Sealed(DataKeyVersion::new(1).unwrap())
            });
            *fork = vec![Page::written(state); random.below(6)];
        }
        self.tell(format!("{} gets file {} for {}", self.relations[at].oid, file.id, old.id));
        self.relations[at].file = Some(file);
    }

    /// A relation that the job is processing gets a file in any state, as when pg_repack swaps
    /// files: the policy is not consulted.
    fn exchange(&mut self, random: &mut Random) {
        let Some(at) = self.relations.iter().position(|relation| relation.claimed) else { return };
        let file = self.any_file(random);
        self.tell(format!("{} gets file {} of another", self.relations[at].oid, file.id));
        if let Some(old) = &mut self.relations[at].file
            && !old.destroyed
        {
            *old = file;
        }
    }

    /// ALTER TABLE gives the file of an index to a new one.
    fn pass_on(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        let relation = &self.relations[at];
        let id = relation.file.as_ref().unwrap().id;
        // A file that comes while keys are rotated has a new one, but for what is exchanged.
        let is_old = self.job.before.iter().any(|(known, _)| *known == id);
        if relation.busy || (self.job.kind == JobKind::Rotate && !is_old) {
            return;
        }
        let oid = 1000 + self.number() as u32;
        self.tell(format!("{} passes its file {id} on to {oid}", self.relations[at].oid));
        let new = Relation { oid, claimed: false, ..self.relations[at].clone() };
        self.relations[at].file = None;
        self.relations.push(new);
    }

    fn drop_relation(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        self.tell(format!("{} is dropped", self.relations[at].oid));
        self.relations[at].file = None;
    }

    /// VACUUM truncates empty pages.
    fn cut(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        let id = self.relations[at].file.as_ref().unwrap().id;
        self.finish_writers_of(id);
        let file = self.relations[at].file.as_mut().unwrap();
        let fork = random.below(4);
        let length = random.below(file.forks[fork].len() + 1);
        file.forks[fork].truncate(length);
        self.tell(format!("{id} {fork} is cut to {length}"));
    }

    fn shred(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        let file = self.relations[at].file.as_mut().unwrap();
        file.destroyed = true;
        let id = file.id;
        self.tell(format!("{id} is shredded"));
    }

    fn command_begins_or_ends(&mut self, random: &mut Random) {
        let at = random.below(self.relations.len());
        let relation = &mut self.relations[at];
        relation.busy = !relation.busy && !relation.claimed;
    }

    fn label_locks(&mut self, random: &mut Random) {
        let at = random.below(self.relations.len());
        self.relations[at].labelled_now ^= true;
    }

    /// A command that encrypts a relation which is encrypted already or has an unfinished job. It
    /// does so in one step, under a lock that prevents replacing or truncating the file.
    fn encrypt_at_once(&mut self, random: &mut Random) {
        let Some(at) = self.any_relation(random) else { return };
        let relation = &self.relations[at];
        let is_encrypted = relation.file.as_ref().unwrap().cipher.is_some();
        if relation.busy || relation.claimed || !is_encrypted {
            return;
        }
        let oid = relation.oid;
        self.tell(format!("{oid} is encrypted at once"));
        let (ends_in, awaited) = (self.ends_in.take(), self.awaited.take());
        let mut state = FileState::START;
        loop {
            let step = state.step(&mut Held::<true> { world: self, relation: oid });
            match step.unwrap() {
                StepResult::Ended(end) => {
                    assert_ne!(end, End::NeverEnds);
                    break;
                }
                StepResult::Waits(_) => panic!("it has the right, and waits for writers itself"),
                _ => self.check(),
            }
        }
        (self.ends_in, self.awaited) = (ends_in, awaited);
        self.of(oid).claimed = false;
    }

    /// All writers finish.
    pub(crate) fn writers_end(&mut self) {
        while !self.writers.is_empty() {
            self.writer_ends(0);
        }
        self.check();
    }
}
