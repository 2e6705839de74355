//! Single files, step by step, without other processes.

use std::ops::Range;

use pagevault_cipher::{CipherId, DataKeyVersion};
use pagevault_core::page::{Fork, PageState, Place, Target};
use pagevault_core::rekey::file::{
    BATCH, Batch, BeginResult, End, FileState, LOOK, MAX_ROUNDS, StepResult, Storage, WaitsFor,
};
use pagevault_core::rekey::plan::{Plan, PlanFacts, plan};
use pagevault_core::rekey::run::{Member, Run};
use pagevault_keystore::RelFile;
use pagevault_keystore::job::JobKind;

const FILE: RelFile = RelFile { tablespace: 1, database: 5, relation: 7 };

fn target() -> Target {
    Target { file: FILE, version: DataKeyVersion::new(2) }
}

/// A storage that gives predefined answers and records its calls.
#[derive(Default)]
struct Scripted<const LOCKED: bool = false> {
    /// Length of the main fork.
    blocks: u32,
    /// No page needs rewriting.
    as_wanted: bool,
    /// How often the proof fails.
    stale: u32,
    /// Another process changes the key before the proof fails.
    changed: bool,
    looks: bool,
    not_yet: u32,
    calls: Vec<String>,
}

impl<const LOCKED: bool> Scripted<LOCKED> {
    fn record(&mut self, what: impl Into<String>) {
        self.calls.push(what.into());
    }

    fn length(&self, fork: Fork) -> u32 {
        if fork == Fork::Main { self.blocks } else { 0 }
    }
}

impl<const LOCKED: bool> Storage for Scripted<LOCKED> {
    type Error = &'static str;
    const IS_LOCKED: bool = LOCKED;

    fn take_right(&mut self) -> Result<bool, Self::Error> {
        self.record("right");
        Ok(true)
    }

    fn begin(&mut self, looked_at: Option<RelFile>) -> Result<BeginResult, Self::Error> {
        self.record("begin");
        if self.not_yet > 0 {
            self.not_yet -= 1;
            return Ok(BeginResult::Undecided);
        }
        let wants = self.looks && looked_at != Some(FILE);
        Ok(if wants { BeginResult::NeedsLook(FILE) } else { BeginResult::Target(target()) })
    }

    fn look(&mut self, _: RelFile, fork: Fork, blocks: Range<u32>) -> Result<bool, Self::Error> {
        self.record(format!("look {fork:?} {}", blocks.start));
        Ok(blocks.end < self.length(fork))
    }

    fn writers_are_done(&mut self, _: Target) -> Result<bool, Self::Error> {
        self.record("writers");
        Ok(true)
    }

    fn rewrite(&mut self, _: Target, fork: Fork, blocks: Range<u32>) -> Result<Batch, Self::Error> {
        let pages = blocks.end.min(self.length(fork)).saturating_sub(blocks.start);
        if pages == 0 {
            return Ok(Batch::End);
        }
        self.record(format!("rewrite {fork:?} {}", blocks.start));
        Ok(Batch::Done { pages, rewritten: if self.as_wanted { 0 } else { pages } })
    }

    fn flush(&mut self, _: Target) -> Result<bool, Self::Error> {
        self.record("flush");
        Ok(true)
    }

    fn sync(&mut self, _: Target, fork: Fork, segment: u32) -> Result<bool, Self::Error> {
        self.record(format!("sync {fork:?} {segment}"));
        Ok(fork == Fork::Main && segment == 0)
    }

    fn is_proven(
        &mut self,
        _: Target,
        fork: Fork,
        blocks: Range<u32>,
    ) -> Result<(bool, bool), Self::Error> {
        self.record(format!("prove {fork:?} {}", blocks.start));
        let proven = self.stale == 0;
        self.stale = self.stale.saturating_sub(1);
        Ok((proven, blocks.end < self.length(fork)))
    }

    fn finish(&mut self, _: Target) -> Result<bool, Self::Error> {
        self.record("finish");
        Ok(true)
    }

    fn is_present(&mut self, _: Target) -> Result<bool, Self::Error> {
        self.record("present");
        Ok(!std::mem::take(&mut self.changed))
    }
}

fn finish<const LOCKED: bool>(storage: &mut Scripted<LOCKED>) -> End {
    let mut state = FileState::START;
    for _ in 0..10_000 {
        if let StepResult::Ended(end) = state.step(storage).unwrap() {
            return end;
        }
    }
    panic!("it does not end: {state:?}");
}

#[test]
fn a_file_of_two_parts() {
    let mut storage = Scripted::<false> { blocks: LOOK + 1, looks: true, ..Default::default() };
    assert_eq!(finish(&mut storage), End::Proven);
    let calls: Vec<&str> = storage.calls.iter().map(String::as_str).collect();
    let (rewritten, steps): (Vec<&str>, Vec<&str>) =
        calls.into_iter().partition(|what| what.starts_with("rewrite"));
    assert_eq!(rewritten.len() as u32, (LOOK + 1).div_ceil(BATCH));
    let expected = "right, begin, look Main 0, look Main 8192, look FreeSpace 0, \
        look Visibility 0, look Init 0, begin, writers, flush, sync Main 0, sync Main 1, \
        sync FreeSpace 0, sync Visibility 0, sync Init 0, prove Main 0, prove Main 8192, \
        prove FreeSpace 0, prove Visibility 0, prove Init 0, finish";
    assert_eq!(steps.join(", "), expected.split_whitespace().collect::<Vec<_>>().join(" "));
}

#[test]
fn pages_that_turn_up_in_the_proof_are_rewritten_but_not_for_ever() {
    let mut storage = Scripted::<false> { blocks: 1, stale: MAX_ROUNDS - 1, ..Default::default() };
    assert_eq!(finish(&mut storage), End::Proven);
    let rounds = |storage: &Scripted| storage.calls.iter().filter(|what| *what == "flush").count();
    assert_eq!(rounds(&storage), MAX_ROUNDS as usize);
    let mut storage = Scripted::<false> { blocks: 1, stale: MAX_ROUNDS, ..Default::default() };
    assert_eq!(finish(&mut storage), End::NeverEnds);
    assert_eq!(rounds(&storage), MAX_ROUNDS as usize);
    assert!(!storage.calls.iter().any(|what| what == "finish"), "not finished");
}

/// Pages that already meet the target may not be on disk yet: free space maps are not in WAL.
#[test]
fn older_keys_are_retired_only_when_the_file_is_on_disk() {
    let mut storage = Scripted::<true> { blocks: 1, as_wanted: true, ..Default::default() };
    assert_eq!(finish(&mut storage), End::Proven);
    let expected = "right, begin, writers, rewrite Main 0, sync Main 0, sync Main 1, \
        sync FreeSpace 0, sync Visibility 0, sync Init 0, finish";
    assert_eq!(storage.calls.join(", "), expected.split_whitespace().collect::<Vec<_>>().join(" "));
}

/// If the key has changed before the proof, another round for the old key would be useless.
#[test]
fn a_key_that_changes_before_the_proof_is_noticed_at_once() {
    let mut storage =
        Scripted::<false> { blocks: 1, stale: 1, changed: true, ..Default::default() };
    assert_eq!(finish(&mut storage), End::Proven);
    let calls: Vec<&str> = storage.calls.iter().map(String::as_str).collect();
    let tail = calls.iter().skip_while(|what| **what != "present").copied().take(4);
    assert_eq!(tail.collect::<Vec<_>>(), ["present", "begin", "writers", "rewrite Main 0"]);
    assert_eq!(calls.iter().filter(|what| **what == "begin").count(), 2);
}

#[test]
fn a_session_that_may_change_the_label_is_waited_for() {
    let mut storage = Scripted::<false> { not_yet: 3, ..Default::default() };
    let mut state = FileState::START;
    assert_eq!(state.step(&mut storage), Ok(StepResult::Done));
    for _ in 0..3 {
        let before = state;
        assert_eq!(state.step(&mut storage), Ok(StepResult::Waits(WaitsFor::Labeller)));
        assert_eq!(state, before);
    }
    assert_eq!(state.step(&mut storage), Ok(StepResult::Done));
    assert!(matches!(state, FileState::Writers { .. }));
}

/// All forks in order, none twice.
#[test]
fn places() {
    let mut at = Some(Place::START);
    let mut seen = Vec::new();
    while let Some(place) = at {
        seen.push((place.fork, place.first));
        at = place.next(10, place.first < 10);
    }
    let expected: Vec<_> = Fork::ALL.into_iter().flat_map(|fork| [(fork, 0), (fork, 10)]).collect();
    assert_eq!(seen, expected);
    let last = Place { fork: Fork::Main, first: u32::MAX - 1 };
    assert_eq!(last.blocks(64), u32::MAX - 1..u32::MAX);
}

#[test]
fn pages_and_targets() {
    let (two, three) = (DataKeyVersion::new(2).unwrap(), DataKeyVersion::new(3).unwrap());
    let sealed = Target { file: FILE, version: Some(two) };
    let plaintext = Target { file: FILE, version: None };
    for (page, as_sealed, as_plaintext) in [
        (PageState::Empty, true, true),
        (PageState::Plaintext, false, true),
        (PageState::Sealed(two), true, false),
        (PageState::Sealed(three), false, false),
    ] {
        assert_eq!(sealed.is_met_by(page), as_sealed, "{page:?}");
        assert_eq!(plaintext.is_met_by(page), as_plaintext, "{page:?}");
    }
}

/// Without other processes the total does not change, and all pages are done at the end.
#[test]
fn progress() {
    let members = [(1, 100), (2, 0), (3, 200)];
    let members = members.map(|(relation, pages)| Member { relation, file: FILE, pages });
    let mut run = Run::new(members.to_vec());
    let mut before = 0;
    let mut stale = 1;
    while let Some((relation, _)) = run.next() {
        let blocks = members.iter().find(|member| member.relation == relation).unwrap().pages;
        // Only the first proof finds a page in another state.
        let mut storage = Scripted::<false> { blocks: blocks as u32, stale, ..Default::default() };
        let result = run.step(&mut storage).unwrap();
        stale = if storage.calls.iter().any(|what| what.starts_with("prove")) { 0 } else { stale };
        let progress = run.progress();
        assert_eq!(progress.pages_total, 300);
        assert!(progress.pages_done >= before || result == StepResult::StartedOver);
        assert!(progress.pages_done <= 300);
        before = progress.pages_done;
    }
    assert_eq!(before, 300);
}

/// Pages by which a file grows count as done and in the total.
#[test]
fn a_file_that_grows() {
    let mut run = Run::new(vec![Member { relation: 1, file: FILE, pages: 10 }]);
    while run.next().is_some() {
        run.step(&mut Scripted::<false> { blocks: 500, ..Default::default() }).unwrap();
        assert!(run.progress().pages_done <= run.progress().pages_total);
    }
    assert_eq!((run.progress().pages_done, run.progress().pages_total), (500, 500));
}

/// A file that is proven is left, whatever relation has it; another one is followed.
#[test]
fn files_that_pass_to_other_relations() {
    use JobKind::{Decrypt, Encrypt, Rotate};
    let file = |relation| RelFile { relation, ..FILE };
    let member = |relation, file| Member { relation, file, pages: 4 };
    let mut run = Run::new(vec![member(1, FILE), member(2, file(8))]);
    while run.next().is_some() {
        // The second relation is gone.
        run.step(&mut Scripted::<false> { blocks: 4, ..Default::default() }).unwrap();
    }
    for kind in [Decrypt, Encrypt, Rotate] {
        let mut run = run.clone();
        assert!(!run.follow(&[member(1, FILE), member(2, file(8)), member(3, FILE)], kind));
        assert_eq!(run.follow(&[member(4, file(9))], kind), kind != Rotate);
        assert!(run.follow(&[member(5, file(8)), member(4, file(9))], kind));
        assert!(!run.follow(&[member(5, file(8)), member(4, file(9))], kind));
    }
}

struct Facts {
    current: Option<CipherId>,
    wanted: CipherId,
    other_group: bool,
    begun: bool,
}

impl PlanFacts for Facts {
    type Error = &'static str;

    fn current(&self) -> Option<CipherId> {
        self.current
    }

    fn wanted_cipher(&self) -> Result<CipherId, Self::Error> {
        Ok(self.wanted)
    }

    fn is_in_other_key_group(&self) -> Result<bool, Self::Error> {
        Ok(self.other_group)
    }

    fn has_begun(&self) -> Result<bool, Self::Error> {
        Ok(self.begun)
    }
}

/// All kinds of jobs, and all states of a file.
#[test]
fn plans() {
    let (aes_256, aes_128) = (CipherId::Aes256Xts, CipherId::Aes128Xts);
    let ciphers = [None, Some(aes_256), Some(aes_128)];
    for current in ciphers {
        for named in ciphers {
            for wanted in [aes_256, aes_128] {
                for (begun, other_group) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let facts = Facts { current, wanted, other_group, begun };
                    let plan = |kind| plan(kind, named, &facts).unwrap();
                    let encrypt = match (named, current) {
                        (None, None) => Plan::NewKey(wanted),
                        (None, Some(cipher)) if other_group => Plan::NewKey(cipher),
                        (None, Some(_)) => Plan::Keep,
                        (Some(named), current) if current == Some(named) && !other_group => {
                            Plan::Keep
                        }
                        (Some(named), _) => Plan::NewKey(named),
                    };
                    assert_eq!(plan(JobKind::Encrypt), encrypt);
                    let rotate = match current {
                        None => Plan::Nothing,
                        Some(_) if begun => Plan::Keep,
                        Some(cipher) => Plan::NewKey(cipher),
                    };
                    assert_eq!(plan(JobKind::Rotate), rotate);
                    let decrypt = if current.is_some() { Plan::Plaintext } else { Plan::Keep };
                    assert_eq!(plan(JobKind::Decrypt), decrypt);
                }
            }
        }
    }
}
