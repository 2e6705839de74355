//! Finds the calls of a scenario, and has each of them fail.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::StopMode;
use postgres::Client;
use rustix::process::Pid;

use crate::catalogue::{During, Scenario};
use crate::injector::Injection;
use crate::judge;
use crate::messages::Documented;
use crate::places::{self, Place};
use crate::server::{Ending, Server};

/// What became of an injection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call was not made this time.
    NotReached,
    /// Nobody noticed.
    Succeeded,
    /// A statement failed.
    Refused,
    /// A process or the server stopped.
    Stopped,
    /// Rows are lost, as PostgreSQL itself loses them.
    Known,
    /// All went well, but for these messages.
    Complaints(Vec<String>),
}

/// A scenario on a server of its own.
pub struct Campaign {
    scenario: &'static Scenario,
    documented: Documented,
    server: Server,
    rounds: u32,
    /// A session whose process will be killed.
    victim: Option<(Client, Pid)>,
    /// Messages that are not in order, without numbers: each is reported once.
    reported: BTreeSet<String>,
    /// Where the log of the present round begins.
    from: usize,
}

impl Campaign {
    /// Starts the server.
    ///
    /// # Errors
    /// When it does not start.
    pub fn new(scenario: &'static Scenario) -> Result<Campaign> {
        let documented = Documented::read()?;
        let server = Server::start(scenario)?;
        Ok(Campaign {
            scenario,
            documented,
            server,
            rounds: 0,
            victim: None,
            reported: BTreeSet::new(),
            from: 0,
        })
    }

    /// Where the scenario makes calls.
    ///
    /// # Errors
    /// When it does not succeed without errors.
    pub fn places(&mut self) -> Result<Vec<Place>> {
        if self.scenario.keys {
            // What is read only once is no part of it.
            self.prepare()?;
            self.act()?;
            self.server.revive()?;
            self.server.end_outage()?;
        }
        self.prepare()?;
        self.server.injector.watch()?;
        let ending = self.act();
        self.server.injector.disarm()?;
        match ending? {
            Ending::Done => {}
            other => bail!("{} without errors: {other}", self.scenario.name),
        }
        let calls = self.server.injector.calls()?;
        self.server.revive()?;
        self.server.end_outage()?;
        // pg_ctl compares its time with that in postmaster.pid, which the server reads first.
        let clock = match self.scenario.during {
            During::Start | During::Recovery => [1, 50],
            During::Statement | During::Stop | During::Crash => [1, 2],
        };
        Ok(places::of(&calls, clock))
    }

    /// What the server has logged at last.
    #[must_use]
    pub fn log(&self) -> String {
        let log = self.server.cluster.log();
        let told = |line: &&str| !line.contains("pagevault audit: {");
        let lines: Vec<_> = log.lines().filter(told).collect();
        lines[lines.len().saturating_sub(25)..].join("\n")
    }

    /// What has stopped the server, or a process, in the last round.
    #[must_use]
    pub fn stops(&self) -> Vec<String> {
        let log = self.server.cluster.log();
        let log = log.get(self.from..).unwrap_or_default();
        let stops = |line: &&str| line.contains(" PANIC:  ") || line.contains(" FATAL:  ");
        log.lines().filter(stops).map(str::to_owned).collect()
    }

    /// One round with an injection.
    ///
    /// # Errors
    /// What is wrong. The server is of no use any more then.
    pub fn inject(&mut self, injection: &Injection) -> Result<Outcome> {
        // Each start unwraps all database keys that there have ever been.
        let is_old = self.rounds > 0 && (!self.scenario.keys || self.rounds.is_multiple_of(48));
        self.rounds += 1;
        if is_old {
            self.server = Server::start(self.scenario)?;
        }
        self.prepare().context("before")?;
        let from = self.server.cluster.log().len();
        self.from = from;
        self.server.injector.arm(injection)?;
        let ending = self.act();
        let fired = self.server.injector.disarm()?;
        let ending = ending?;
        let after = || format!("after: {ending}");
        let restarted = self.server.revive().with_context(after)?;
        self.server.end_outage().context("after the outage")?;
        let complaints = judge::log(&self.server, &self.documented, &injection.fault, from)
            .with_context(after)?;
        if matches!(ending, Ending::Done) {
            self.holds()?;
        }
        let panicked =
            self.server.cluster.log().get(from..).is_some_and(|log| log.contains(" PANIC:  "));
        let encrypted = self.scenario.keys;
        if let Err(error) = judge::contents(&self.server, encrypted) {
            if judge::is_wal_cut_short(&self.server, injection, from) {
                self.server = Server::start(self.scenario)?;
                return Ok(Outcome::Known);
            }
            return Err(error.context("afterwards"));
        }
        self.again().context("the same without errors")?;
        if self.rounds.is_multiple_of(8) {
            self.server.acknowledge()?;
            self.server.cluster.crash().context("crash")?;
            judge::contents(&self.server, true).context("after a crash")?;
            self.server.restart().context("restart")?;
            judge::contents(&self.server, true).context("after a restart")?;
            judge::audit(&self.server)?;
        }
        let complaints = complaints.into_iter().filter(|complaint| {
            let number = |c: char| c.is_ascii_hexdigit() && !c.is_ascii_lowercase();
            self.reported.insert(complaint.replace(number, ""))
        });
        let complaints: Vec<_> = complaints.collect();
        if !complaints.is_empty() {
            return Ok(Outcome::Complaints(complaints));
        }
        Ok(match ending {
            _ if fired == 0 => Outcome::NotReached,
            _ if restarted || panicked => Outcome::Stopped,
            Ending::Done => Outcome::Succeeded,
            Ending::Refused(_) => Outcome::Refused,
            Ending::Lost(_) => Outcome::Stopped,
        })
    }

    fn prepare(&mut self) -> Result<()> {
        self.server.must(self.scenario.before)?;
        self.server.acknowledge()?;
        match self.scenario.during {
            During::Start => self.server.cluster.stop(StopMode::Fast),
            During::Recovery => {
                self.server.cluster.kill()?;
                self.server.begin_outage()
            }
            During::Crash => {
                self.victim = Some(self.server.session()?);
                Ok(())
            }
            During::Statement | During::Stop => Ok(()),
        }
    }

    fn act(&mut self) -> Result<Ending> {
        let server = &self.server;
        let ended = |result: Result<()>| match result {
            Ok(()) => Ok(Ending::Done),
            Err(error) => Ok(Ending::Lost(format!("{error:#}"))),
        };
        match self.scenario.during {
            During::Statement => server.run(self.scenario.sql),
            During::Stop => ended(server.cluster.stop(StopMode::Fast)),
            During::Start | During::Recovery => ended(server.cluster.start_server()),
            During::Crash => match self.victim.take() {
                Some(victim) => ended(server.crash(victim)),
                None => bail!("nobody to kill"),
            },
        }
    }

    fn holds(&self) -> Result<()> {
        let answer = self.server.cluster.text(self.scenario.holds)?;
        ensure!(answer == "t", "it succeeded, but {} is {answer}", self.scenario.holds);
        Ok(())
    }

    /// What failed succeeds now.
    fn again(&mut self) -> Result<()> {
        if self.scenario.during != During::Statement {
            return Ok(());
        }
        // First keys are made in the same place: what the failed attempt made may be there.
        if self.scenario.keys {
            self.server.must(self.scenario.before)?;
            self.server.must(self.scenario.sql)?;
        } else {
            for sql in self.scenario.sql.split(";;") {
                match self.server.run(sql)? {
                    Ending::Done => {}
                    Ending::Refused(error) if error.message.contains("exists") => {}
                    other => bail!("{other} in: {sql}"),
                }
            }
        }
        self.holds()?;
        judge::contents(&self.server, true)
    }
}
