//! All files of a job, one relation after the other, and its progress.

use pagevault_keystore::job_table::Progress;

use super::file::{End, FileState, StepResult, Storage};

/// A relation with storage, as of the start of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Its OID.
    pub relation: u32,
    /// Number of pages in all forks.
    pub pages: i64,
}

/// A job in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    members: Vec<Member>,
    current: usize,
    file: FileState,
    /// Pages of finished files, and of the current one.
    done: (i64, i64),
    total: i64,
}

impl Run {
    /// Starts with the first member.
    #[must_use]
    pub fn new(members: Vec<Member>) -> Self {
        let total = members.iter().map(|member| member.pages).sum();
        Self { members, current: 0, file: FileState::START, done: (0, 0), total }
    }

    /// The current relation and its next step; `None` if the job is complete.
    #[must_use]
    pub fn next(&self) -> Option<(u32, FileState)> {
        self.members.get(self.current).map(|member| (member.relation, self.file))
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
        let result = self.file.step(storage)?;
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
