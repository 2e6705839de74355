//! Random schedules against a model: one program plays operations of every kind on real servers and
//! knows what must be readable, what must be refused, and what must not be in plaintext.
//!
//! ```text
//!   draw        seed -> setup and operations, each of which fits where it stands
//!   operation   what a schedule is made of; statement: what a session does
//!   world       the model: databases, open transactions, keys, servers; database: its tables
//!   player      carries operations out: servers, sessions, kills, outages, standbys, backups
//!   judge       compares a server with the model: rows, labels, pages on disk, refusals
//! ```
//!
//! An operation that does not fit where it stands is passed over. So operations can be left out of
//! a schedule, and it is still one: [`Failure::shrink`] looks for the fewest that fail.

mod database;
mod draw;
mod judge;
mod operation;
mod player;
mod statement;
mod world;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use operation::{Operation, Setup};
use player::Player;

/// Operations, and the cluster that they begin with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Why it is kept; empty for one that was drawn.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    setup: Setup,
    operations: Vec<Operation>,
}

/// Servers and model have parted.
#[derive(Debug)]
pub struct Failure {
    /// How.
    pub error: anyhow::Error,
    /// The schedule up to there.
    pub schedule: Schedule,
}

impl Schedule {
    /// So many operations, drawn from a seed.
    #[must_use]
    pub fn draw(seed: u64, length: usize) -> Schedule {
        let (setup, operations) = draw::schedule(seed, length);
        Schedule { reason: String::new(), setup, operations }
    }

    /// Reads a schedule as [`Schedule::text`] writes it.
    ///
    /// # Errors
    /// When it is none.
    pub fn parse(text: &str) -> Result<Schedule> {
        serde_json::from_str(text).context("not a schedule")
    }

    /// JSON, an operation a line.
    ///
    /// # Errors
    /// None in practice.
    pub fn text(&self) -> Result<String> {
        let reason = serde_json::to_string(&self.reason)?;
        let setup = serde_json::to_string(&self.setup)?;
        let operations: Vec<_> =
            self.operations.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let operations = operations.join(",\n  ");
        Ok(format!(
            "{{\"reason\": {reason},\n \"setup\": {setup},\n \"operations\": [\n  {operations}\n ]}}\n"
        ))
    }

    /// Plays it on new servers.
    ///
    /// # Errors
    /// Says at which operation servers and model part.
    pub fn play(&self) -> Result<(), Failure> {
        let reached = Cell::new(0);
        // A panic would end the schedules of other seeds as well.
        let played = catch_unwind(AssertUnwindSafe(|| self.play_all(&reached)))
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the player panicked")));
        played.map_err(|error| {
            let mut schedule = self.clone();
            schedule.operations.truncate(reached.get() + 1);
            Failure { error, schedule }
        })
    }

    fn play_all(&self, reached: &Cell<usize>) -> Result<()> {
        let mut player = Player::start(self.setup).context("before the first operation")?;
        for (number, operation) in self.operations.iter().enumerate() {
            reached.set(number);
            let played = player.play(operation);
            played.with_context(|| format!("operation {number}, {operation:?}"))?;
        }
        player.finish()
    }
}

impl Failure {
    /// Leaves operations out as long as the schedule fails, by whatever error, at most `tries`
    /// times.
    #[must_use]
    pub fn shrink(self, tries: usize) -> Failure {
        let mut shortest = self;
        let mut left = tries;
        let mut step = shortest.schedule.operations.len().div_ceil(2);
        while step > 0 && left > 0 {
            let mut at = 0;
            while at < shortest.schedule.operations.len() && left > 0 {
                let mut shorter = shortest.schedule.clone();
                let end = (at + step).min(shorter.operations.len());
                shorter.operations.drain(at..end);
                left -= 1;
                match shorter.play() {
                    Err(failure) => shortest = failure,
                    Ok(()) => at += step,
                }
            }
            step = if step == 1 { 0 } else { step.div_ceil(2) };
        }
        shortest
    }
}
