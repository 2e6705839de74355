//! Verification of an audit trail's lines, taken together.
//!
//! A line with a valid MAC is proven by it. It proves the line before by that line's hash; the
//! first line of a run proves the last line of the run before, and so on backwards. A line that is
//! proven in neither way was not written by the server, or was changed. A line whose MAC key is
//! forgotten, because a later one was in use for long, can only be proven by later lines, like one
//! without a MAC.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::KeyVersion;
use pagevault_keystore::audit::{AuditKey, Line, Link, Run, hex};

/// Where a line was found: number of the file, and number of the line in it.
pub(super) type Spot = (usize, u64);
/// Run, and number of the line in it.
type Number = (Run, u64);

/// Maximum number of lines that are verified together.
const MAX_LINES: usize = 4 << 20;
/// Further forged lines are only counted: any role can log millions with one statement.
const MAX_FORGED: usize = 1000;

/// A line that claims a number of a run; several lines may claim the same.
struct Claim {
    spot: Spot,
    time: Box<str>,
    prev: Option<Link>,
    previous: Option<Number>,
    /// By its own MAC.
    is_proven: bool,
}

/// A violation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// The server has not written this line.
    Forged(Spot, &'static str),
    /// These lines of a run are missing.
    Missing { run: Run, from: u64, to: u64 },
    /// A line follows one that was written later.
    Reordered { spot: Spot, run: Run, seq: u64 },
    /// The line does not have the hash that the following line records.
    Torn { run: Run, seq: u64 },
    /// The run does not name the run before it.
    Unconnected { run: Run },
    /// The run before this one is missing.
    NoRunBefore { run: Run, before: Run, seq: u64 },
}

/// An observation that is not a violation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// Earlier lines are not in these files.
    Begins { run: Run, seq: u64 },
    /// The run continues after an earlier line than the last of the run before.
    Branches { run: Run, before: Run, seq: u64, last: u64 },
    /// The newest line is recorded in the state file, but not written yet.
    Unwritten { run: Run, seq: u64 },
}

/// The result.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) runs: usize,
    /// Lines with a MAC of their own, and lines that others prove.
    pub(super) with_mac: u64,
    pub(super) without_mac: u64,
    pub(super) findings: Vec<Finding>,
    /// Number of forged lines that are not in `findings`.
    pub(super) more_forged: u64,
    pub(super) notes: Vec<Note>,
    /// The lines that the server has written.
    pub(super) accepted: Accepted,
}

/// Lines in the order in which they were written, each once: a run follows the run that its first
/// line names. Times do not matter, because clocks may be set back, except for runs of which the
/// runs before are not known.
#[derive(Debug, Default)]
pub(crate) struct Accepted {
    links: BTreeMap<Number, Link>,
    /// Runs by their order.
    order: BTreeMap<Run, usize>,
}

impl Accepted {
    /// The place of a line in the order, if it is one of these.
    pub(crate) fn place(&self, text: &str) -> Option<(usize, u64)> {
        let line = Line::parse(text)?;
        if self.links.get(&(line.run, line.seq)) != Some(&line.link) {
            return None;
        }
        Some((*self.order.get(&line.run)?, line.seq))
    }
}

/// More than [`MAX_LINES`].
#[derive(Debug)]
pub(super) struct TooMany;

/// Lines of a trail.
pub(super) struct Chain<'a> {
    /// Keys by version of the database key; `None`: accept every MAC.
    keys: Option<&'a BTreeMap<KeyVersion, AuditKey>>,
    claims: BTreeMap<Number, BTreeMap<Link, Claim>>,
    /// In the order of files and lines.
    found: Vec<(Spot, Number, Link)>,
    findings: Vec<Finding>,
    more_forged: u64,
}

impl<'a> Chain<'a> {
    pub(super) fn new(keys: Option<&'a BTreeMap<KeyVersion, AuditKey>>) -> Self {
        let (claims, found, findings) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { keys, claims, found, findings, more_forged: 0 }
    }

    /// Adds a line of a file, given all texts in it that may be a line of the trail.
    pub(super) fn add(&mut self, spot: Spot, candidates: &[String]) -> Result<(), TooMany> {
        let lines: Vec<Line<'_>> = candidates.iter().filter_map(|text| Line::parse(text)).collect();
        // The log's prefix may contain anything, so there may be several. One with a MAC is real.
        let proven = lines.iter().find(|line| self.proves(line));
        let claims: Vec<_> = match proven {
            Some(line) => vec![line],
            None => lines.iter().filter(|line| self.needs_proof(line)).collect(),
        };
        if claims.is_empty() {
            let why = match lines.first() {
                None => "it does not have the format of an audit line",
                Some(line) if self.has_key(line) => "its MAC is wrong",
                Some(_) => "it refers to a MAC key that the cluster does not have",
            };
            self.forged(spot, why);
        }
        for line in claims {
            let number = (line.run, line.seq);
            let claim = Claim {
                spot,
                time: line.time.into(),
                prev: line.prev,
                previous: line.previous,
                is_proven: proven.is_some(),
            };
            if self.found.len() >= MAX_LINES {
                return Err(TooMany);
            }
            self.found.push((spot, number, line.link));
            // The same line may occur again, as in two logs.
            self.claims.entry(number).or_default().entry(line.link).or_insert(claim);
        }
        Ok(())
    }

    fn forged(&mut self, spot: Spot, why: &'static str) {
        if self.findings.len() < MAX_FORGED {
            self.findings.push(Finding::Forged(spot, why));
        } else {
            self.more_forged += 1;
        }
    }

    /// Whether only later lines can prove it: it has no MAC, or one with an unknown key, although a
    /// later one is known.
    fn needs_proof(&self, line: &Line<'_>) -> bool {
        let Some(version) = line.mac_key else { return true };
        let newest = self.keys.and_then(|keys| keys.last_key_value());
        newest.is_some_and(|(newest, _)| version < newest.get()) && !self.has_key(line)
    }

    fn has_key(&self, line: &Line<'_>) -> bool {
        let known = |keys: &BTreeMap<KeyVersion, AuditKey>| {
            let version = line.mac_key.and_then(KeyVersion::new);
            version.is_some_and(|version| keys.contains_key(&version))
        };
        self.keys.is_none_or(known)
    }

    fn proves(&self, line: &Line<'_>) -> bool {
        let Some(version) = line.mac_key else { return false };
        let key = |keys: &'a BTreeMap<KeyVersion, AuditKey>| keys.get(&KeyVersion::new(version)?);
        self.keys.is_none_or(|keys| key(keys).is_some_and(|key| line.is_authentic(key)))
    }

    /// Concludes. `last` is the newest line according to the server's state file, and whether it
    /// was written to the log since.
    pub(super) fn conclude(mut self, last: Option<(&Line<'_>, bool)>) -> Verdict {
        let mut verdict = Verdict::default();
        let good = self.find_proven(last);
        self.report_forged(&good);
        self.report_gaps(&good, last, &mut verdict);
        self.report_order(&good);
        let runs: BTreeSet<Run> = good.keys().map(|(run, _)| *run).collect();
        verdict.runs = runs.len();
        for (number, link) in &good {
            let Some(claim) = self.claim(*number, link) else { continue };
            *(if claim.is_proven { &mut verdict.with_mac } else { &mut verdict.without_mac }) += 1;
        }
        verdict.accepted = Accepted { order: self.order(&good), links: good };
        verdict.findings = self.findings;
        verdict.more_forged = self.more_forged;
        verdict
    }

    /// The runs in their order.
    fn order(&self, good: &BTreeMap<Number, Link>) -> BTreeMap<Run, usize> {
        // The first line of each run that there is.
        let mut first: BTreeMap<Run, &Claim> = BTreeMap::new();
        for ((run, seq), link) in good {
            if let Some(claim) = self.claim((*run, *seq), link) {
                first.entry(*run).or_insert(claim);
            }
        }
        let mut next: BTreeMap<Run, Vec<(u64, &str, Run)>> = BTreeMap::new();
        let mut begins = Vec::new();
        for (run, claim) in &first {
            match claim.previous.filter(|(before, _)| first.contains_key(before)) {
                Some((before, seq)) => {
                    next.entry(before).or_default().push((seq, &claim.time, *run))
                }
                None => begins.push((0, &*claim.time, *run)),
            }
        }
        // Not proven lines may name one another in a circle.
        let circles = first.iter().map(|(run, claim)| (0, &*claim.time, *run));
        let mut order = BTreeMap::new();
        begins.sort_unstable();
        for (_, _, begin) in begins.into_iter().chain(circles) {
            let mut work = vec![begin];
            while let Some(run) = work.pop() {
                if order.contains_key(&run) {
                    continue;
                }
                order.insert(run, order.len());
                let mut following = next.remove(&run).unwrap_or_default();
                following.sort_unstable();
                work.extend(following.into_iter().rev().map(|(_, _, run)| run));
            }
        }
        order
    }

    fn claim(&self, number: Number, link: &Link) -> Option<&Claim> {
        self.claims.get(&number)?.get(link)
    }

    /// The lines that the server has written, by number: those that are proven, and all that these
    /// prove.
    fn find_proven(&mut self, last: Option<(&Line<'_>, bool)>) -> BTreeMap<Number, Link> {
        let mut good: BTreeMap<Number, Link> = BTreeMap::new();
        let mut work: Vec<(Number, Link)> = Vec::new();
        for (number, claims) in &self.claims {
            let proven = claims.iter().filter(|(_, claim)| claim.is_proven);
            work.extend(proven.map(|(link, _)| (*number, *link)));
        }
        // The state file is trusted: it is in the keystore's directory, where only the server can
        // write.
        if let Some((line, _)) = last {
            let before = before((line.run, line.seq), line.previous);
            work.push(((line.run, line.seq), line.link));
            work.extend(before.zip(line.prev));
        }
        let mut torn = BTreeSet::new();
        while let Some((number, link)) = work.pop() {
            if let Some(known) = good.get(&number) {
                if *known != link {
                    torn.insert(number);
                }
                continue;
            }
            let Some(claim) = self.claim(number, &link) else {
                // The proven line is missing, or another line has its number: then it was changed.
                if self.claims.contains_key(&number) {
                    torn.insert(number);
                }
                continue;
            };
            good.insert(number, link);
            work.extend(before(number, claim.previous).zip(claim.prev));
        }
        self.findings.extend(torn.into_iter().map(|(run, seq)| Finding::Torn { run, seq }));
        good
    }

    fn report_forged(&mut self, good: &BTreeMap<Number, Link>) {
        for (number, claims) in &self.claims {
            for (_, claim) in claims.iter().filter(|(link, _)| good.get(number) != Some(link)) {
                let why = match good.contains_key(number) {
                    true => "another line has the same number",
                    false => "there is no proof that the server wrote it",
                };
                self.findings.push(Finding::Forged(claim.spot, why));
            }
        }
    }

    fn report_gaps(
        &mut self,
        good: &BTreeMap<Number, Link>,
        last: Option<(&Line<'_>, bool)>,
        verdict: &mut Verdict,
    ) {
        let mut runs: BTreeMap<Run, Vec<u64>> = BTreeMap::new();
        for (run, seq) in good.keys() {
            runs.entry(*run).or_default().push(*seq);
        }
        let first = self.oldest_run(good, &runs);
        // The last line of each run, according to the following run.
        let mut ends: BTreeMap<Run, u64> = BTreeMap::new();
        for (&run, seqs) in &runs {
            let mut expected = 1;
            for &seq in seqs {
                if seq > expected && expected == 1 && first == Some(run) {
                    verdict.notes.push(Note::Begins { run, seq });
                } else if seq > expected {
                    self.findings.push(Finding::Missing { run, from: expected, to: seq - 1 });
                }
                expected = seq + 1;
            }
            let begins = good.get(&(run, 1)).and_then(|link| self.claim((run, 1), link));
            let Some(begins) = begins else { continue };
            match begins.previous {
                Some((before, seq)) => {
                    let end = ends.entry(before).or_default();
                    *end = seq.max(*end);
                    match runs.get(&before).and_then(|seqs| seqs.last()) {
                        None if first == Some(run) => {
                            verdict.notes.push(Note::Begins { run, seq: 1 })
                        }
                        None => self.findings.push(Finding::NoRunBefore { run, before, seq }),
                        Some(&last) if last > seq => {
                            verdict.notes.push(Note::Branches { run, before, seq, last });
                        }
                        Some(_) => {}
                    }
                }
                None if first != Some(run) => self.findings.push(Finding::Unconnected { run }),
                None => {}
            }
        }
        let mut unwritten = None;
        if let Some((line, written)) = last {
            let end = ends.entry(line.run).or_default();
            *end = line.seq.max(*end);
            unwritten = (!written).then_some((line.run, line.seq));
        }
        for (run, end) in ends {
            let have = runs.get(&run).and_then(|seqs| seqs.last()).copied();
            // A run that is missing altogether was reported above, except the last one.
            if have.is_none() && last.is_none_or(|(line, _)| line.run != run) {
                continue;
            }
            let from = have.unwrap_or(0) + 1;
            if from == end && unwritten == Some((run, end)) {
                verdict.notes.push(Note::Unwritten { run, seq: end });
            } else if from <= end {
                self.findings.push(Finding::Missing { run, from, to: end });
            }
        }
    }

    /// The oldest run: before it there may be others, in files that were not given. It continues
    /// none of those that were. Only if this is true of several runs, their times decide, because
    /// clocks may be set back.
    fn oldest_run(
        &self,
        good: &BTreeMap<Number, Link>,
        runs: &BTreeMap<Run, Vec<u64>>,
    ) -> Option<Run> {
        let oldest = runs.iter().filter_map(|(run, seqs)| {
            let number = (*run, *seqs.first()?);
            let claim = self.claim(number, good.get(&number)?)?;
            let continues = claim.previous.is_some_and(|(before, _)| runs.contains_key(&before));
            (!continues).then_some((&claim.time, *run))
        });
        oldest.min().map(|(_, run)| run)
    }

    /// Lines of one run must be in the order in which they were written; a line may occur twice.
    fn report_order(&mut self, good: &BTreeMap<Number, Link>) {
        let mut last: BTreeMap<(usize, Run), u64> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for (spot, (run, seq), link) in &self.found {
            if good.get(&(*run, *seq)) != Some(link) || !seen.insert((spot.0, *run, *seq)) {
                continue;
            }
            let before = last.entry((spot.0, *run)).or_default();
            if seq < before {
                self.findings.push(Finding::Reordered { spot: *spot, run: *run, seq: *seq });
            }
            *before = (*seq).max(*before);
        }
    }
}

/// The number of the line before one.
fn before((run, seq): Number, previous: Option<Number>) -> Option<Number> {
    if seq > 1 { Some((run, seq - 1)) } else { previous }
}

/// The name of a run in messages: its first digits.
pub(super) fn name(run: &Run) -> String {
    hex(&run[..6])
}

#[cfg(test)]
mod tests;
