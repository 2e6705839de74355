//! All files of a job, one relation after the other, and its progress.

use std::collections::HashSet;

use pagevault_keystore::RelFile;
use pagevault_keystore::job::JobKind;
use pagevault_keystore::job_table::Progress;

use super::file::{End, FileState, StepResult, Storage};

/// A relation with storage, as of the start of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Its OID.
    pub relation: u32,
    /// Its file.
    pub file: RelFile,
    /// Number of pages in all forks.
    pub pages: i64,
}

/// A job in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    members: Vec<Member>,
    current: usize,
    file: FileState,
    /// Files of the members, and those that they got meanwhile.
    files: HashSet<RelFile>,
    /// Files of which every page is in the target state.
    proven: HashSet<RelFile>,
    /// Pages of finished files, and of the current one.
    done: (i64, i64),
    total: i64,
}

impl Run {
    /// Starts with the first member.
    #[must_use]
    pub fn new(members: Vec<Member>) -> Self {
        let total = members.iter().map(|member| member.pages).sum();
        let files = members.iter().map(|member| member.file).collect();
        let proven = HashSet::new();
        Self { members, current: 0, file: FileState::START, files, proven, done: (0, 0), total }
    }

    /// The current relation and its next step; `None` if the job is complete.
    #[must_use]
    pub fn next(&self) -> Option<(u32, FileState)> {
        self.members.get(self.current).map(|member| (member.relation, self.file))
    }

    /// Adds relations that came while the job ran. A file may pass to another relation:
    /// `ALTER TABLE` gives that of an index to a new one (`TryReuseIndex`, tablecmds.c). `present`:
    /// the relations of now. True if there are any.
    ///
    /// A job that rotates keys leaves those that have files of their own, which have new keys.
    pub fn follow(&mut self, present: &[Member], kind: JobKind) -> bool {
        let relations: HashSet<u32> = self.members.iter().map(|known| known.relation).collect();
        let is_open = |member: &&Member| {
            !relations.contains(&member.relation)
                && !self.proven.contains(&member.file)
                && (kind != JobKind::Rotate || self.files.contains(&member.file))
        };
        let added: Vec<Member> = present.iter().filter(is_open).copied().collect();
        self.total += added.iter().map(|member| member.pages).sum::<i64>();
        self.files.extend(added.iter().map(|member| member.file));
        self.members.extend(&added);
        !added.is_empty()
    }

    /// Progress. The total grows with the files, so that it is never less than the pages done.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let done = self.done.0 + self.done.1;
        Progress { pages_done: done, pages_total: self.total, ..Progress::default() }
    }

    /// Performs the next step for the relation that [`Run::next`] returns.
    ///
    /// # Errors
    /// Those of the storage. The position does not change then.
    pub fn step<S: Storage>(&mut self, storage: &mut S) -> Result<StepResult, S::Error> {
        let finished = match self.file {
            FileState::Finish { round } => Some(round.target.file),
            _ => None,
        };
        let result = self.file.step(storage)?;
        if result == StepResult::Ended(End::Proven) {
            self.proven.extend(finished);
        }
        if let FileState::Writers { target } = self.file {
            self.files.insert(target.file);
        }
        match result {
            StepResult::Rewrote { pages, .. } => {
                self.done.1 += i64::from(pages);
                self.total = self.total.max(self.done.0 + self.done.1);
            }
            StepResult::StartedOver => self.done.1 = 0,
            StepResult::Ended(End::Proven | End::Nothing) => {
                self.done = (self.done.0 + self.done.1, 0);
                self.current += 1;
                self.file = FileState::START;
            }
            StepResult::Ended(End::NeverEnds) | StepResult::Done | StepResult::Waits(_) => {}
        }
        Ok(result)
    }
}
