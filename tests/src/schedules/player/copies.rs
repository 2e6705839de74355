//! Standbys and backups.

use anyhow::{Context, Result, bail, ensure};

use super::{Player, expect_noise};
use crate::backup::Backup;
use crate::cluster::column;
use crate::installation::run;
use crate::schedules::database::{OPEN, SECRET};
use crate::schedules::judge::{self, Server};
use crate::schedules::operation::{Operation, Target};
use crate::schedules::world::{self, MAIN, database_name};
use crate::standby::{Standby, wait_for};
use crate::{Cluster, StopMode};

impl Player {
    pub(super) fn copy(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::MakeStandby => {
                let mut standby = Standby::default().start(&self.primary)?;
                expect_noise(&mut standby);
                self.standby = Some(standby);
                self.judge()
            }
            Operation::CrashStandby => match &mut self.standby {
                Some(standby) => {
                    standby.kill()?;
                    standby.start_after_crash().map(drop)
                }
                None => Ok(()),
            },
            Operation::MakeSlot => {
                self.seen.clear();
                self.primary
                    .sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')")
            }
            Operation::Decode => self.decode(),
            Operation::Promote { crash, rewind } => self.promote(*crash, *rewind),
            Operation::BackUp { meanwhile } => {
                let backup = Backup::begin(&self.primary)?;
                let mut world = self.world.clone();
                for statement in meanwhile {
                    let sql = statement.sql(&world.databases[&MAIN], &world.context);
                    self.sql_in(MAIN, &sql).context("while a backup is made")?;
                    world.commit(MAIN, statement);
                }
                let mut backup = backup.end()?;
                expect_noise(&mut backup);
                self.backups.push(backup);
                Ok(())
            }
            Operation::Dump { database, of } => {
                self.dump(&database_name(*of), &database_name(*database))
            }
            Operation::Restore { backup, to } => {
                let restored = self.backups.remove(usize::from(*backup));
                self.restore(restored, *to, &self.world.backups[usize::from(*backup)])
            }
            _ => bail!("{operation:?} copies nothing"),
        }
    }

    fn promote(&mut self, crash: bool, rewind: bool) -> Result<()> {
        let new = self.standby.take().context("a standby")?;
        wait_for(&new, &self.primary)?;
        self.disconnect();
        if crash {
            self.primary.kill()?;
        } else {
            self.primary.stop(StopMode::Fast)?;
        }
        new.promote()?;
        self.wal_is_hidden = false;
        let mut old = std::mem::replace(&mut self.primary, new);
        // Its settings are those of when it was made.
        let world = self.world.clone();
        self.set(&world)?;
        if !rewind {
            return old.finish();
        }
        old.start_after_crash()?;
        old.sql(
            "CREATE TABLE IF NOT EXISTS public.diverged (id int);
             INSERT INTO public.diverged SELECT generate_series(1, 1000);
             SELECT pagevault.rotate_database_key()",
        )?;
        old.stop(StopMode::Fast)?;
        self.primary.sql("CHECKPOINT")?;
        let source = self.primary.directory().display();
        let mut program = if self.world.wal_was_encrypted {
            let mut exec = old.program("pagevault-keyring");
            exec.args(["exec", "--", "pg_rewind"]);
            exec
        } else {
            old.program("pg_rewind")
        };
        program.arg("--target-pgdata").arg(old.data_directory());
        program.arg(format!("--source-server=host={source} user=postgres dbname=postgres"));
        run(&mut program)?;
        Standby::default().follow(&old, &self.primary)?;
        // Nothing is kept for `pg_rewind` then, and the server says to make a new copy.
        let may_be_refused = self.world.setup.forgets;
        let too_late = "is of a later time than the data directory";
        match old.start_server() {
            Err(_) if may_be_refused && old.log().contains(too_late) => {
                drop(old);
                let mut standby = Standby::default().start(&self.primary)?;
                expect_noise(&mut standby);
                self.standby = Some(standby);
                Ok(())
            }
            started => {
                self.standby = Some(old);
                started
            }
        }
    }

    /// Decodes what is new. Each row must be whole, those that the model has must have been seen by
    /// now, and those that were rolled back must not.
    fn decode(&mut self) -> Result<()> {
        let changes = "SELECT data FROM pg_logical_slot_get_changes('slot', NULL, NULL)
             WHERE data ~ '^table (open|vault).t[0-9]+: INSERT'";
        for change in column(&mut self.primary.client()?, changes)? {
            let value = |column: &str| {
                let (_, value) = change.split_once(column)?;
                Some(value.split(' ').next().unwrap_or_default().trim_matches('\''))
            };
            let id = value(" id[bigint]:").with_context(|| change.clone())?;
            let mark = value(" mark[text]:").with_context(|| change.clone())?;
            let marker = mark.strip_suffix(id).and_then(|mark| mark.strip_suffix('-'));
            let marker = marker.filter(|marker| [SECRET, OPEN].contains(marker));
            let wide = marker.map(|marker| marker.repeat(150));
            let id: i64 = id.parse()?;
            let whole = match value(" wide[text]:") {
                Some("null") => id % 10 != 0,
                found => found == wide.as_deref(),
            };
            ensure!(marker.is_some() && whole, "decoded as {change}");
            ensure!(!self.world.undone.iter().any(|ids| ids.contains(&id)), "never was: {change}");
            self.seen.insert(id);
        }
        let missing: Vec<_> =
            self.world.decoded().difference(&self.seen).copied().take(5).collect();
        ensure!(missing.is_empty(), "never decoded: {missing:?}");
        Ok(())
    }

    /// Restores a dump of one database into another, which is made for it.
    fn dump(&self, of: &str, database: &str) -> Result<()> {
        self.primary.sql(&format!("CREATE DATABASE {database} TEMPLATE template0"))?;
        let host = self.primary.directory();
        let file = host.join("dump");
        let with = |program: &str, database: &str| {
            let mut command = self.primary.program(program);
            command.arg("--host").arg(host).args(["--username=postgres", "--dbname", database]);
            command.arg("--file").arg(&file);
            command
        };
        run(&mut with("pg_dump", of))?;
        run(with("psql", database).args(["--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1"]))?;
        std::fs::remove_file(&file)?;
        Ok(())
    }

    fn restore(&self, mut restored: Cluster, to: Target, backup: &world::Backup) -> Result<()> {
        match (to, &backup.mark) {
            (Target::Itself, _) => {
                restored.start_after_crash()?;
                judge::judge(&restored, &backup.then, Server::Primary).context("on a backup")?;
            }
            (Target::Mark, Some((mark, then))) => {
                Standby::default().follow(&restored, &self.primary)?;
                restored.append_conf(&format!(
                    "recovery_target_name = 'mark {mark}'\nrecovery_target_action = 'promote'"
                ))?;
                restored.start_server()?;
                restored.eventually("SELECT pg_is_in_recovery()", "f")?;
                judge::judge(&restored, then, Server::Primary)
                    .context("on a backup restored to a point")?;
            }
            (Target::Mark, None) => bail!("no restore point since the backup"),
            (Target::Present, _) => {
                Standby::default().follow(&restored, &self.primary)?;
                // What is encrypted now may be on the copy's disk as it was before, until a restart
                // point, for which it needs the record of a checkpoint.
                self.primary.sql("CHECKPOINT")?;
                restored.start_server()?;
                for _ in 0..2 {
                    wait_for(&restored, &self.primary)?;
                    judge::judge(&restored, &self.world, Server::Standby)
                        .context("on a backup that follows")?;
                    restored.kill()?;
                    restored.start_after_crash()?;
                }
            }
        }
        judge::hides(&restored, false).context("on a backup")?;
        restored.finish()
    }
}
