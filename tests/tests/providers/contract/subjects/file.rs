//! Key files.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::{Installation, KeyFile};
use serde_json::json;
use tempfile::TempDir;

use super::super::subject::never;
use super::super::{Group, KEY, NEXT, Point, State, Subject};

pub(super) struct OfFile {
    directory: TempDir,
}

impl OfFile {
    fn path(&self) -> PathBuf {
        self.directory.path().join("keys")
    }

    /// Where the file is while it is away, or another is in its place.
    fn kept(&self) -> PathBuf {
        self.directory.path().join("kept")
    }

    fn create(&self, names: &[&str]) -> Result<()> {
        for name in names {
            KeyFile::create(Installation::get()?, &self.path(), name)?;
        }
        Ok(())
    }
}

impl Subject for OfFile {
    const NAME: &str = "file";
    const LACKS: &[(Point, &str)] = &[
        (Point::Disabled, "keys in a file have no state"),
        (Point::Enabled, "keys in a file have no state"),
        (Point::Deleted, "what is removed from a file is gone"),
        (Point::Throttled, "there is no service that limits requests"),
        (Point::Failing, "there is no service: a file can be read, or it cannot (unreachable)"),
        (Point::Slow, "only regular files are opened, and they answer at once"),
        (Point::AnotherKeyIsTold, "a file gives no answers; another file is another key"),
    ];
    /// Nothing that a request could wait for: the server asks again later.
    const WAITS: bool = false;

    fn start(_: Group) -> Result<OfFile> {
        let directory = tempfile::Builder::new().prefix("pagevault-file-").tempdir()?;
        let data = directory.path().join("data");
        fs::create_dir(&data)?;
        for place in [directory.path(), &data] {
            Installation::get()?.give(place)?;
        }
        let subject = OfFile { directory };
        subject.create(&[KEY, NEXT])?;
        Ok(subject)
    }

    fn provider(&self) -> Provider {
        let mut provider = Provider::new("file", json!({"path": self.path()}));
        // It must exist, because no key may be in it.
        provider.data_directory = self.directory.path().join("data");
        provider
    }

    fn bring(&mut self, state: State) -> Result<()> {
        match state {
            State::Destroyed => {
                fs::remove_file(self.path())?;
                self.create(&[NEXT])
            }
            State::Away => Ok(fs::rename(self.path(), self.kept())?),
            State::AnotherKey => {
                fs::rename(self.path(), self.kept())?;
                self.create(&[KEY, NEXT])
            }
            State::Repaired => Ok(fs::rename(self.kept(), self.path())?),
            state => never(state),
        }
    }

    fn uses(&mut self) -> Result<usize> {
        Ok(0)
    }
}
