//! The actions of a job, or of a command that rewrites a relation at once, on the model. The
//! extension does the same with PostgreSQL.

use std::ops::Range;

use pagevault_cipher::CipherId;
use pagevault_core::page::{Fork, PageState, Target};
use pagevault_core::policy::Oid;
use pagevault_core::rekey::file::{Batch, BeginResult, Storage};
use pagevault_core::rekey::plan::{Plan, PlanFacts, plan};
use pagevault_keystore::RelFile;
use pagevault_keystore::job::JobKind;

use super::{AES_256, File, Stop, World, Writer};

/// Blocks per segment.
const SEGMENT: usize = 3;

/// A relation that is being rewritten by a job, or at once by a command that has it locked.
pub(super) struct Held<'a, const AT_ONCE: bool> {
    pub(super) world: &'a mut World,
    pub(super) relation: Oid,
}

struct Wanted<'a>(&'a World, Oid, Option<CipherId>);

impl PlanFacts for Wanted<'_> {
    type Error = Stop;

    fn current(&self) -> Option<CipherId> {
        self.2
    }

    fn is_in_other_key_group(&self) -> Result<bool, Stop> {
        Ok(false)
    }

    fn wanted_cipher(&self) -> Result<CipherId, Stop> {
        Ok(AES_256)
    }

    fn has_begun(&self) -> Result<bool, Stop> {
        Ok(self.0.job.begun.contains(&self.1))
    }
}

impl<const AT_ONCE: bool> Held<'_, AT_ONCE> {
    /// The file of the relation, if it is this one.
    fn file(&mut self, id: RelFile) -> Option<&mut File> {
        let file = self.world.of(self.relation).file.as_mut();
        file.filter(|file| file.id == id)
    }

    fn pages(&mut self, id: RelFile, fork: Fork) -> Vec<PageState> {
        let pages = self.file(id).map(|file| file.forks[fork as usize].iter());
        pages.into_iter().flatten().map(|page| page.seen).collect()
    }
}

impl<const AT_ONCE: bool> Storage for Held<'_, AT_ONCE> {
    type Error = Stop;
    const BATCH: u32 = 2;
    const LOOK: u32 = 3;
    const IS_LOCKED: bool = AT_ONCE;

    fn take_right(&mut self) -> Result<bool, Stop> {
        let relation = self.world.of(self.relation);
        assert!(!relation.claimed, "one right at a time");
        relation.claimed = !relation.busy;
        Ok(!relation.busy)
    }

    fn begin(&mut self, looked_at: Option<RelFile>) -> Result<BeginResult, Stop> {
        self.world.awaited = None;
        let oid = self.relation;
        let relation = self.world.of(oid);
        assert!(relation.claimed, "without the right to rewrite it");
        let labelled_now = relation.labelled_now;
        let Some(file) = relation.file.clone() else { return Ok(BeginResult::Nothing) };
        if file.destroyed {
            return Err(Stop::Destroyed);
        }
        if AT_ONCE {
            return Ok(BeginResult::Target(file.target()));
        }
        if self.world.job.kind == JobKind::Decrypt && labelled_now {
            return Ok(BeginResult::Undecided);
        }
        let job = &self.world.job;
        let next = plan(job.kind, job.cipher, &Wanted(self.world, oid, file.cipher))?;
        if matches!(next, Plan::NewKey(_)) && looked_at != Some(file.id) {
            return Ok(BeginResult::NeedsLook(file.id));
        }
        self.world.effect()?;
        let changed = self.file(file.id).unwrap();
        match next {
            Plan::Nothing => return Ok(BeginResult::Nothing),
            Plan::Keep => {}
            Plan::NewKey(cipher) => {
                changed.last += 1;
                changed.cipher = Some(cipher);
            }
            Plan::Plaintext => changed.cipher = None,
        }
        if next != Plan::Keep {
            (changed.rewriting, changed.proven) = (true, None);
        }
        let target = changed.target();
        self.world.effect()?;
        if self.world.job.kind == JobKind::Rotate {
            self.world.job.begun.insert(oid);
        }
        self.world.effect()?;
        Ok(BeginResult::Target(target))
    }

    fn look(&mut self, file: RelFile, fork: Fork, blocks: Range<u32>) -> Result<bool, Stop> {
        self.world.effect()?;
        Ok((blocks.end as usize) < self.pages(file, fork).len())
    }

    fn writers_are_done(&mut self, target: Target) -> Result<bool, Stop> {
        if AT_ONCE {
            self.world.finish_writers_of(target.file);
        }
        let others = self.world.writers.iter().filter(|writer| writer.file == target.file);
        let others: Vec<_> = others.map(|writer| writer.number).collect();
        let awaited = self.world.awaited.get_or_insert_with(|| others.clone());
        Ok(!awaited.iter().any(|number| others.contains(number)))
    }

    fn rewrite(&mut self, target: Target, fork: Fork, blocks: Range<u32>) -> Result<Batch, Stop> {
        let Some(file) = self.file(target.file) else { return Ok(Batch::Replaced) };
        let length = file.forks[fork as usize].len() as u32;
        let blocks = blocks.start..blocks.end.min(length);
        if blocks.is_empty() {
            return Ok(Batch::End);
        }
        let mut rewritten = 0;
        for block in blocks.clone() {
            let seen = self.pages(target.file, fork)[block as usize];
            if target.is_met_by(seen) {
                continue;
            }
            self.world.effect()?;
            let destroyed = self.file(target.file).unwrap().destroyed;
            if destroyed {
                return Err(Stop::Destroyed);
            }
            // A writer holds a lock on the page, so it finishes first.
            let same = |writer: &Writer| {
                (writer.file, writer.fork, writer.block)
                    == (target.file, fork as usize, block as usize)
            };
            while let Some(at) = self.world.writers.iter().position(same) {
                self.world.writer_ends(at);
            }
            let logged = self.world.of(self.relation).logged;
            let page = &mut self.file(target.file).unwrap().forks[fork as usize][block as usize];
            page.changed = true;
            page.in_wal |= logged || fork == Fork::Init;
            rewritten += 1;
        }
        Ok(Batch::Done { pages: blocks.end - blocks.start, rewritten })
    }

    fn flush(&mut self, target: Target) -> Result<bool, Stop> {
        if self.file(target.file).is_none() {
            return Ok(false);
        }
        // Flushing waits for pages that are being written; pages that are added are not in buffers.
        let lengths = self.file(target.file).unwrap().forks.each_ref().map(Vec::len);
        let is_there = |w: &Writer| w.file == target.file && w.block < lengths[w.fork];
        while let Some(at) = self.world.writers.iter().position(is_there) {
            self.world.writer_ends(at);
        }
        for (fork, length) in lengths.into_iter().enumerate() {
            for block in 0..length {
                self.world.effect()?;
                let file = self.file(target.file).unwrap();
                if file.destroyed && file.forks[fork][block].changed {
                    return Err(Stop::Destroyed);
                }
                World::write(file, fork, block);
            }
        }
        Ok(true)
    }

    fn sync(&mut self, target: Target, fork: Fork, segment: u32) -> Result<bool, Stop> {
        self.world.effect()?;
        let Some(file) = self.file(target.file) else { return Ok(false) };
        let pages = &mut file.forks[fork as usize];
        let from = segment as usize * SEGMENT;
        // The first segment exists even if it is empty.
        let exists = from < pages.len() || segment == 0;
        pages.iter_mut().skip(from).take(SEGMENT).for_each(|page| page.durable = page.seen);
        Ok(exists)
    }

    fn is_proven(
        &mut self,
        target: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<(bool, bool), Stop> {
        let pages = self.pages(target.file, fork);
        let range =
            (blocks.start as usize).min(pages.len())..(blocks.end as usize).min(pages.len());
        let proven = pages[range].iter().all(|page| target.is_met_by(*page));
        Ok((proven, (blocks.end as usize) < pages.len()))
    }

    fn finish(&mut self, target: Target) -> Result<bool, Stop> {
        self.world.effect()?;
        let Some(file) = self.file(target.file) else { return Ok(false) };
        if file.current() != target.version {
            return Ok(false);
        }
        file.retired = if file.cipher.is_some() { file.last - 1 } else { file.last };
        (file.rewriting, file.proven) = (false, Some(target));
        self.world.effect()?;
        Ok(true)
    }

    fn is_present(&mut self, target: Target) -> Result<bool, Stop> {
        Ok(self.file(target.file).is_some_and(|file| file.target() == target))
    }
}
