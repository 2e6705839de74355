//! Kills and outages.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::Player;
use crate::cluster::{column, run_sql};
use crate::fault::STOPPED;
use crate::schedules::database::Database;
use crate::schedules::judge::{self, Server};
use crate::schedules::operation::{Operation, Process};
use crate::schedules::statement::Statement;
use crate::schedules::world::{MAIN, NEW_ROWS, database_name};
use crate::{StopMode, process};

impl Player {
    pub(super) fn disturb(&mut self, operation: &Operation) -> Result<bool> {
        match operation {
            Operation::Restart => {
                self.disconnect();
                self.primary.stop(StopMode::Fast)?;
                self.verify(&self.primary)?;
                self.primary.start_server()?;
            }
            Operation::StopImmediately => {
                self.disconnect();
                self.primary.stop(StopMode::Immediate)?;
                self.verify(&self.primary)?;
                self.primary.start_after_crash()?;
            }
            Operation::Crash => {
                self.primary.kill()?;
                self.disconnect();
                self.verify(&self.primary)?;
                self.primary.start_after_crash()?;
            }
            Operation::Kill { process } => return self.kill(*process),
            Operation::CrashAt { point, only_there, operation } => {
                self.crash_at(point, *only_there, operation)?;
            }
            Operation::Together { statements, kill_after } => {
                self.together(statements, *kill_after)?;
            }
            Operation::CrashInRecovery { point } => self.crash_in_recovery(point)?,
            Operation::CrashWithoutGroups { again } => self.crash_without_groups(*again)?,
            Operation::KeysAway => self.keys.take_away()?,
            Operation::KeysBack => {
                self.keys.bring_back()?;
                if self.world.locked {
                    // Nobody can log in where catalogs are encrypted; the server tries by itself.
                    let _ = self.primary.sql("SELECT pagevault.unlock()");
                    self.primary.eventually("SELECT state FROM pagevault.status", "unlocked")?;
                }
            }
            _ => bail!("{operation:?} disturbs nobody"),
        }
        Ok(true)
    }

    /// Kills one process; false if there is none of the kind.
    fn kill(&mut self, process: Process) -> Result<bool> {
        let data = self.primary.data_directory();
        if process == Process::Postmaster {
            let postmaster = process::postmaster(&data).context("a postmaster")?;
            kill_process(postmaster, Signal::KILL)?;
            self.disconnect();
            // The others notice.
            self.primary.eventually_that("processes of a dead postmaster", || {
                let left = process::processes_in(&data);
                ensure!(left.iter().all(|pid| *pid == postmaster), "{left:?} are there");
                Ok(())
            })?;
            self.primary.kill()?;
            self.primary.start_after_crash()?;
            return Ok(true);
        }
        let mut victim = self.primary.client()?;
        let kind = match process {
            Process::Backend | Process::Postmaster => None,
            Process::Bgwriter => Some("background writer"),
            Process::Checkpointer => Some("checkpointer"),
            Process::RekeyWorker => Some("pagevault rekey"),
            Process::Walwriter => Some("walwriter"),
        };
        let query = kind.map_or("SELECT pg_backend_pid()".to_owned(), |kind| {
            format!("SELECT pid FROM pg_stat_activity WHERE backend_type = '{kind}'")
        });
        let Some(pid) = column(&mut victim, &query)?.into_iter().next() else { return Ok(false) };
        let pid = Pid::from_raw(pid.parse()?).context("a process")?;
        self.kill_one(pid)
    }

    /// Kills a process, after which the postmaster begins anew; false if it was gone.
    fn kill_one(&mut self, pid: Pid) -> Result<bool> {
        const AGAIN: &str = "all server processes terminated; reinitializing";
        let before = self.primary.log().len();
        if kill_process(pid, Signal::KILL).is_err() {
            return Ok(false); // A worker that has ended meanwhile.
        }
        self.disconnect();
        // Whoever else stands at a point.
        self.primary.resume();
        let since = || self.primary.log().get(before..).unwrap_or_default().to_owned();
        let (is_gone, ended) = (Cell::new(false), Cell::new(false));
        self.primary.eventually_that("the crash of a process", || {
            // A worker may have ended by itself before, if nobody had waited for it yet. The
            // postmaster tells of a signal before it listens to anybody.
            ended.set(is_gone.get() && !since().contains("was terminated by signal 9"));
            is_gone.set(test_kill_process(pid).is_err() && self.primary.client().is_ok());
            ensure!(ended.get() || since().contains(AGAIN), "is not noticed");
            Ok(())
        })?;
        if ended.get() {
            // The sessions are gone already.
            let another = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'";
            let pid = self.primary.text(another)?.parse()?;
            return self.kill_one(Pid::from_raw(pid).context("a process")?);
        }
        // By then the postmaster accepts connections again, or has given up.
        let data = self.primary.data_directory();
        let gave_up = || {
            self.primary.failed_by_unlogged_file(&since())
                && process::processes_in(&data).is_empty()
        };
        self.primary.eventually_that("recovery", || match gave_up() {
            true => Ok(()),
            false => self.primary.text("SELECT 1").map(drop),
        })?;
        if gave_up() {
            self.primary.start_after_crash()?;
        }
        Ok(true)
    }

    /// Kills everything, or who stands there, when somebody has come to the point, or the operation
    /// is done.
    fn crash_at(&mut self, point: &str, only_there: bool, operation: &Operation) -> Result<()> {
        let (database, sql) = self.call(operation)?.context("an operation that is one call")?;
        let mut client = judge::connect(&self.primary, &database_name(database))?;
        self.primary.stop_at(point)?;
        let stopped = self.primary.data_directory().join(STOPPED);
        let running = std::thread::spawn(move || run_sql(&mut client, &sql));
        let (mut grace, deadline) = (None, Instant::now() + Duration::from_secs(20));
        while !stopped.exists() {
            ensure!(Instant::now() < deadline, "neither ends nor comes by {point}");
            if running.is_finished() {
                // A worker may come by yet.
                let end = *grace.get_or_insert(Instant::now() + Duration::from_millis(300));
                if Instant::now() > end {
                    break;
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let there = std::fs::read_to_string(&stopped).unwrap_or_default();
        let there = there.split(' ').next().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
        let killed = match there.filter(|_| only_there) {
            Some(pid) => self.kill_one(pid)?,
            None => false,
        };
        if !killed {
            self.primary.kill()?;
            self.disconnect();
            self.primary.resume();
            self.primary.start_after_crash()?;
        }
        let ran = running.join().map_err(|_| anyhow::anyhow!("a session panicked"))?;
        if let Err(error) = ran {
            ensure!(is_end_of_server(&error), "{error}");
            let mut after = self.world.clone();
            after.apply(operation);
            let mut before = self.world.databases[&MAIN].clone();
            if let Operation::Run { statement, .. } = operation {
                before.undo(statement);
            }
            self.possible = vec![after.databases[&MAIN].clone(), before];
            self.possible.iter_mut().for_each(Database::crash);
        }
        Ok(())
    }

    /// Runs statements at the same time, and kills everything if that is wanted.
    fn together(&mut self, statements: &[Statement], kill_after: Option<u16>) -> Result<()> {
        let before = self.world.databases[&MAIN].clone();
        let mut context = self.world.context;
        let mut running = Vec::new();
        for statement in statements {
            let (mut client, sql) =
                (judge::connect(&self.primary, "postgres")?, statement.sql(&before, &context));
            running.push((statement, context, move || run_sql(&mut client, &sql)));
            context.first += NEW_ROWS;
        }
        let ran = std::thread::scope(|scope| -> Result<Vec<_>> {
            let threads: Vec<_> = running
                .into_iter()
                .map(|(statement, context, run)| (statement, context, scope.spawn(run)))
                .collect();
            if let Some(milliseconds) = kill_after {
                std::thread::sleep(Duration::from_millis(milliseconds.into()));
                self.primary.kill()?;
            }
            let joined = threads.into_iter().map(|(statement, context, thread)| {
                let ran = thread.join().map_err(|_| anyhow::anyhow!("a session panicked"))?;
                Ok((statement, context, ran))
            });
            joined.collect()
        })?;
        if kill_after.is_some() {
            self.disconnect();
            self.primary.start_after_crash()?;
        }
        // Of those that were not acknowledged any may be there.
        self.possible = vec![before];
        for (statement, context, ran) in ran {
            let mut without = self.possible.clone();
            without.iter_mut().for_each(|database| database.undo(statement));
            self.possible.iter_mut().for_each(|database| statement.apply(database, &context));
            if let Err(error) = ran {
                ensure!(kill_after.is_some() && is_end_of_server(&error), "{error}");
                self.possible.extend(without);
            }
        }
        if kill_after.is_some() {
            self.possible.iter_mut().for_each(Database::crash);
        }
        Ok(())
    }

    /// Kills everything, and again when recovery has come to the point, or has ended.
    fn crash_in_recovery(&mut self, point: &str) -> Result<()> {
        self.primary.kill()?;
        self.disconnect();
        self.primary.stop_at(point)?;
        let stopped = self.primary.data_directory().join(STOPPED);
        std::thread::scope(|scope| -> Result<()> {
            let start = scope.spawn(|| self.primary.start_server());
            let deadline = Instant::now() + Duration::from_secs(60);
            while !stopped.exists() && !start.is_finished() {
                ensure!(Instant::now() < deadline, "recovery neither ends nor comes by {point}");
                std::thread::sleep(Duration::from_millis(5));
            }
            // If this was too early for it to succeed is no matter.
            self.primary.kill()?;
            let _ = start.join();
            Ok(())
        })?;
        self.primary.resume();
        self.primary.kill()?;
        self.primary.start_after_crash().map(drop)
    }

    fn crash_without_groups(&mut self, again: bool) -> Result<()> {
        self.group_keys.take_away()?;
        for _ in 0..1 + u8::from(again) {
            self.primary.kill()?;
            self.disconnect();
            let before = self.primary.log().len();
            if let Err(error) = self.primary.start_server() {
                // A page of a hash index, perhaps.
                let log = self.primary.log();
                let said = log.get(before..).unwrap_or_default();
                ensure!(said.contains("WAL has no image of this page"), "{error:#}");
                self.group_keys.bring_back()?;
                return self.primary.start_server();
            }
        }
        self.group_keys.bring_back()?;
        let locked = "SELECT count(*) FROM pagevault.key_groups WHERE state = 'locked'";
        self.primary.eventually_that("unlocked groups", || {
            self.primary.sql("SELECT pagevault.unlock()")?;
            let locked = self.primary.text(locked)?;
            ensure!(locked == "0", "{locked} groups are locked");
            Ok(())
        })
    }

    /// A statement that was not acknowledged is there as a whole, or not at all.
    pub(super) fn look_what_came_of(&mut self) -> Result<()> {
        let possible = std::mem::take(&mut self.possible);
        let mut client = judge::connect(&self.primary, "postgres")?;
        let (mut is, mut is_not) = (None::<Database>, String::new());
        for database in &possible {
            match judge::agrees(
                &mut client,
                database,
                &self.world.context,
                Server::Primary,
                &|_| false,
            ) {
                Ok(()) => {
                    is = Some(is.map_or_else(|| database.clone(), |other| other.or(database)));
                }
                Err(error) => is_not += &format!("{error:#}; "),
            }
        }
        if !possible.is_empty() {
            let is = is.with_context(|| format!("half of a statement is there: {is_not}"))?;
            self.world.databases.insert(MAIN, is);
        }
        self.judge()
    }
}

/// Whether a statement failed because its server, or its session, was killed.
fn is_end_of_server(error: &anyhow::Error) -> bool {
    let error = error.to_string();
    let told = [
        "error communicating",
        "connection closed",
        "Connection reset",
        "Broken pipe",
        "57P01",
        "57P02",
        "57P03",
    ];
    told.iter().any(|text| error.contains(text))
        // How many files a table has had the model does not know.
        || error.contains("no keys of files that are gone")
}
