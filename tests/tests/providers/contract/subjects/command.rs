//! A program with OpenSSL.

use std::fs;

use anyhow::Result;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::program::Program;

use super::super::{Group, KEY, NEXT, Point, State, Subject};

pub(super) struct OfProgram {
    program: Program,
    /// What is there instead of the directory of keys, or of the key.
    state: State,
    counted: usize,
}

impl OfProgram {
    /// The next runs end with these exit statuses.
    fn instead(&self, status: &str, times: usize) -> Result<()> {
        self.program.write("keys/instead", &format!("{status}\n").repeat(times.min(1000)), 0o600)
    }
}

impl Subject for OfProgram {
    const NAME: &str = "command";
    const LACKS: &[(Point, &str)] =
        &[(Point::AnotherKeyIsTold, "the answer of a program names no key")];
    const STRIDE: usize = 4;

    fn start(_: Group) -> Result<OfProgram> {
        let program = Program::new()?;
        program.make_key(NEXT)?;
        Ok(OfProgram { program, state: State::Repaired, counted: 0 })
    }

    fn provider(&self) -> Provider {
        let mut provider = Provider::new("command", self.program.options_with_rotation());
        // It must exist, because programs may not be in it.
        provider.data_directory = self.program.path("data");
        provider
    }

    fn bring(&mut self, state: State) -> Result<()> {
        let path = |name: &str| self.program.path(name);
        match state {
            State::Disabled | State::Deleted => {
                self.program.write(&format!("keys/{KEY}.off"), "", 0o600)?;
            }
            State::Enabled => fs::remove_file(path(&format!("keys/{KEY}.off")))?,
            State::Destroyed => {
                fs::remove_file(path(&format!("keys/{KEY}.off")))?;
                fs::remove_file(path(&format!("keys/{KEY}")))?;
            }
            State::Throttled(times) => self.instead("16", times)?,
            State::Failing(times) => self.instead("10", times)?,
            State::Silent => self.instead("sleep", 1000)?,
            State::Away => fs::rename(path("keys"), path("away"))?,
            State::AnotherKey => {
                fs::rename(path(&format!("keys/{KEY}")), path("kept"))?;
                self.program.make_key(KEY)?;
            }
            State::Repaired if self.state == State::AnotherKey => {
                fs::rename(path("kept"), path(&format!("keys/{KEY}")))?;
            }
            State::Repaired => fs::remove_file(path("keys/instead"))?,
        }
        self.state = state;
        Ok(())
    }

    fn uses(&mut self) -> Result<usize> {
        let before = self.counted;
        self.counted = fs::read_to_string(self.program.path("log"))?.matches("unwrap").count();
        Ok(self.counted - before)
    }
}
