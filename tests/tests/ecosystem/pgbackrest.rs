//! pgBackRest: the archive, full and incremental backups during key changes, restores of each kind.
//! docs/backup-programs.md contains the same configuration.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::installation::run;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Settings, StopMode};
use serde_json::Value;

use crate::Test;
use crate::backups::{
    archive_all, archived, assert_hidden, assert_sealed_wal, check, content, everything,
    files_of_t, folder, insert, interrupted, now, program, rotate_all,
};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "pgbackrest", needs: &["pgbackrest"], run: through_a_week },
    Test { name: "pgbackrest_checks", needs: &["pgbackrest"], run: checks },
    Test { name: "pgbackrest_shredding", needs: &["pgbackrest"], run: shredding },
    Test { name: "pgbackrest_standby", needs: &["pgbackrest"], run: standby },
];

/// pgBackRest with its configuration and repository next to the data directory of a cluster.
struct PgBackRest<'a> {
    cluster: &'a Cluster,
    config: PathBuf,
}

impl<'a> PgBackRest<'a> {
    /// Creates configuration and stanza, and turns on archiving.
    fn new(cluster: &'a Cluster, global: &str) -> Result<PgBackRest<'a>> {
        let config = cluster.directory().join("pgbackrest.conf");
        for name in ["repository", "pgbackrest"] {
            folder(cluster, name)?;
        }
        let base = cluster.directory().display();
        std::fs::write(
            &config,
            format!(
                "[global]\n\
                 repo1-path={base}/repository\n\
                 log-path={base}/pgbackrest\n\
                 lock-path={base}/pgbackrest\n\
                 spool-path={base}/pgbackrest\n\
                 log-level-file=off\n\
                 log-level-stderr=warn\n\
                 start-fast=y\n\
                 repo1-retention-full=9\n\
                 {global}\n\
                 [main]\n\
                 pg1-path={base}/data\n\
                 pg1-socket-path={base}\n\
                 pg1-user=postgres\n"
            ),
        )?;
        let this = PgBackRest { cluster, config };
        this.run(&["stanza-create"])?;
        let push = this.command()?.arg("archive-push").get_program().to_owned();
        let push = format!(
            "{} --config={} --stanza=main archive-push %p",
            push.display(),
            this.config.display()
        );
        cluster.set(&[("archive_command", &push)])?;
        Ok(this)
    }

    fn repository(&self) -> PathBuf {
        self.cluster.directory().join("repository")
    }

    fn command(&self) -> Result<Command> {
        let mut command = program(self.cluster, "pgbackrest")?;
        command.arg(format!("--config={}", self.config.display())).arg("--stanza=main");
        Ok(command)
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        run(self.command()?.args(arguments))
    }

    /// A full backup that is stopped for `meanwhile` after it has copied some files.
    fn interrupted(&self, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut command = self.command()?;
        command.args(["--type=full", "backup"]);
        let under_way = || -> Result<()> {
            let mut find = self.cluster.program("/usr/bin/find");
            find.arg(self.repository().join("backup")).args(["-path", "*/pg_data/base/*"]);
            ensure!(run(&mut find)?.lines().count() > 10, "it has copied nothing");
            Ok(())
        };
        interrupted(self.cluster, command, under_way, meanwhile)
    }

    /// For each backup its type, and whether page checksums were wrong.
    fn backups(&self) -> Result<Vec<String>> {
        let reported: Value = serde_json::from_str(&self.run(&["--output=json", "info"])?)?;
        let backups = reported[0]["backup"].as_array().context("backups")?;
        let words = |backup: &Value| {
            Some(format!("{} {}", backup["type"].as_str()?, backup["error"].as_bool()?))
        };
        backups.iter().map(words).collect::<Option<_>>().context("type and error")
    }

    /// Restores into a data directory, with the tablespace next to it, with a separate
    /// configuration as on another machine. Returns for each file whether it was kept.
    fn restore(&self, target: &Path, arguments: &[&str]) -> Result<String> {
        let (here, there) = (self.cluster.directory(), target.parent().context("a folder")?);
        let mut config = std::fs::read_to_string(&self.config)?;
        for option in ["log-path", "lock-path", "spool-path", "pg1-path", "pg1-socket-path"] {
            let from = format!("{option}={}", here.display());
            config = config.replace(&from, &format!("{option}={}", there.display()));
        }
        let path = there.join("pgbackrest.conf");
        std::fs::write(&path, config)?;
        let mut command = program(self.cluster, "pgbackrest")?;
        command.arg(format!("--config={}", path.display())).arg("--stanza=main");
        command.arg(format!("--tablespace-map=space={}", there.join("space").display()));
        command.args(["--archive-mode=off", "--log-level-console=detail"]);
        run(command.args(arguments).arg("restore"))
    }
}

fn through_a_week() -> Result<()> {
    let (mut cluster, _keys) = everything(Settings::default())?;
    cluster.allow_log("connection to client lost");
    let backrest = PgBackRest::new(&cluster, "archive-header-check=n\ncompress-type=none")?;
    backrest.run(&["check"])?;

    backrest.interrupted(|| {
        rotate_all(&cluster)?;
        cluster.sql("CREATE TABLE during AS SELECT * FROM t")?;
        insert(&cluster, "second", 500)
    })?;
    rotate_all(&cluster)?;
    insert(&cluster, "third", 500)?;
    backrest.run(&["--type=incr", "backup"])?;
    insert(&cluster, "fourth", 500)?;
    rotate_all(&cluster)?;
    let (time, then) = (now(&cluster)?, content(&cluster)?);
    rotate_all(&cluster)?;
    cluster.sql("DELETE FROM t WHERE id % 2 = 0; DROP TABLE during")?;
    backrest.run(&["--type=diff", "backup"])?;
    archive_all(&cluster)?;
    backrest.run(&["verify"])?;
    ensure!(
        backrest.backups()? == ["full false", "incr false", "diff false"],
        "{:?}",
        backrest.backups()?
    );

    assert_sealed_wal(&archived(&backrest.repository().join("archive"))?)?;
    assert_sealed(&files_of_t(
        &cluster,
        &backrest.repository().join("backup/main/latest/pg_data"),
    )?)?;

    let copy = Cluster::from_files(|target| backrest.restore(target, &[]).map(drop))?;
    copy.start_server()?;
    check(&copy, &content(&cluster)?)?;
    // The copy diverges: other keys, other pages.
    rotate_all(&copy)?;
    copy.sql(
        "UPDATE large SET name = 'other' WHERE id % 3 = 0; CREATE TABLE other AS SELECT * FROM t",
    )?;
    copy.stop(StopMode::Fast)?;
    let reported = backrest.restore(
        &copy.data_directory(),
        &["--delta", "--type=time", &format!("--target={time}"), "--target-action=promote"],
    )?;
    for kind in ["exists and matches backup", "restore file"] {
        ensure!(reported.contains(kind), "{kind}: {reported}");
    }
    copy.append_conf(&format!("unix_socket_directories = '{}'", copy.directory().display()))?;
    copy.start_server()?;
    check(&copy, &then)?;
    copy.finish()?;
    assert_hidden(&cluster, &backrest.repository())?;
    cluster.finish()
}

/// Checks by pgBackRest itself: headers of WAL pages, which are sealed, and page checksums, which
/// are computed over sealed pages.
fn checks() -> Result<()> {
    let (mut cluster, _keys) = everything(Settings::default())?;
    cluster.allow_log("archive command failed");
    let backrest = PgBackRest::new(&cluster, "compress-type=none")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    cluster.eventually_logs("do not match stanza version 15")?;
    let config = std::fs::read_to_string(&backrest.config)?;
    let config = config.replace("[global]", "[global]\narchive-header-check=n");
    std::fs::write(&backrest.config, config)?;
    archive_all(&cluster)?;

    let files = cluster.files("large")?;
    cluster.stop(StopMode::Fast)?;
    files[0].flip_bit(3, 5000, 0)?;
    cluster.start_server()?;
    backrest.run(&["--type=full", "backup"])?;
    files[0].flip_bit(3, 5000, 0)?;
    backrest.run(&["--type=full", "backup"])?;
    ensure!(backrest.backups()? == ["full true", "full false"], "{:?}", backrest.backups()?);
    cluster.finish()
}

/// Destroying keys rewrites the key file, longer than the backup listed it. Nevertheless no key is
/// missing.
fn shredding() -> Result<()> {
    let (cluster, _keys) = everything(Settings::default())?;
    let backrest = PgBackRest::new(&cluster, "archive-header-check=n\ncompress-type=none")?;
    let file = cluster.data_directory().join(format!(
        "pagevault/{}.keys",
        cluster.text("SELECT oid FROM pg_database WHERE datname = current_database()")?
    ));
    let shred = |name: &str| -> Result<u64> {
        cluster.sql(&format!("CREATE TABLE {name} AS SELECT 1 AS id"))?;
        let shred = format!("SELECT pagevault.shred('public.{name}', confirm => 'public.{name}')");
        cluster.sql(&shred)?;
        Ok(std::fs::metadata(&file)?.len())
    };
    let before = shred("before")?;
    backrest.interrupted(|| {
        for number in 1..=20 {
            cluster.sql(&format!("CREATE TABLE new{number} (id int PRIMARY KEY)"))?;
        }
        let during = shred("during")?;
        ensure!(during > before, "{during} bytes are not more than {before}");
        Ok(())
    })?;
    cluster.sql("DROP TABLE before, during")?;
    archive_all(&cluster)?;
    let copy = Cluster::from_files(|target| backrest.restore(target, &[]).map(drop))?;
    copy.start_server()?;
    check(&copy, &content(&cluster)?)?;
    copy.finish()?;
    cluster.finish()
}

/// Compressed, parallel, asynchronous, and with a second repository that pgBackRest encrypts
/// itself; for a standby that replays from the archive and is backed up.
fn standby() -> Result<()> {
    let (cluster, _keys) = everything(Settings::default())?;
    let second = folder(&cluster, "second")?;
    let backrest = PgBackRest::new(
        &cluster,
        &format!(
            "archive-header-check=n\ncompress-type=gz\nprocess-max=2\narchive-async=y\n\
             repo2-path={}\nrepo2-cipher-type=aes-256-cbc\nrepo2-cipher-pass=of the test",
            second.display()
        ),
    )?;
    backrest.run(&["--repo=2", "backup"])?;
    let conninfo = format!(
        "--recovery-option=primary_conninfo=host={} user=postgres",
        cluster.directory().display()
    );
    let mut standby = Cluster::from_files(|target| {
        backrest.restore(target, &["--repo=2", "--type=standby", &conninfo]).map(drop)
    })?;
    standby.allow_log("terminating walreceiver process");
    standby.start_server()?;
    rotate_all(&cluster)?;
    insert(&cluster, "second", 500)?;
    archive_all(&cluster)?;
    wait_for(&standby, &cluster)?;
    ensure!(content(&standby)? == content(&cluster)?, "rows");
    let conf = std::fs::read_to_string(&backrest.config)?;
    std::fs::write(
        &backrest.config,
        format!(
            "{conf}pg2-path={base}/data\npg2-socket-path={base}\npg2-user=postgres\n",
            base = standby.directory().display()
        ),
    )?;
    backrest.run(&["--backup-standby", "--repo=1", "backup"])?;
    standby.promote()?;
    check(&standby, &content(&cluster)?)?;
    standby.finish()?;
    let copy = Cluster::from_files(|target| backrest.restore(target, &["--repo=1"]).map(drop))?;
    copy.start_server()?;
    check(&copy, &content(&cluster)?)?;
    copy.finish()?;
    assert_hidden(&cluster, &backrest.repository())?;
    cluster.finish()
}
