//! Barman: WAL by archive_command and by pg_receivewal, backups by pg_basebackup during key
//! changes, restores. docs/backup-programs.md contains the same configuration.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::installation::run;
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, Settings};

use crate::Test;
use crate::backups::{
    archived, assert_hidden, assert_sealed_wal, check, content, everything, files_of_t, folder,
    insert, interrupted, now, program, rekeyed, rotate, rotate_all,
};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "barman", needs: &["barman"], run: by_archive_command },
    Test { name: "barman_rsync", needs: &["barman"], run: by_rsync },
    Test { name: "barman_streaming", needs: &["barman"], run: by_streaming },
];

/// Barman with its configuration and home next to the data directory of a cluster.
struct Barman<'a> {
    cluster: &'a Cluster,
    config: PathBuf,
}

impl<'a> Barman<'a> {
    fn new(cluster: &'a Cluster, path: &str, server: &str) -> Result<Barman<'a>> {
        folder(cluster, "barman")?;
        let base = cluster.directory().display();
        let user = run(cluster.program("/usr/bin/id").arg("-un"))?;
        let config = cluster.directory().join("barman.conf");
        std::fs::write(
            &config,
            format!(
                "[barman]\n\
                 barman_user = {user}\n\
                 barman_home = {base}/barman\n\
                 log_file = {base}/barman.log\n\
                 path_prefix = {path}\n\
                 [main]\n\
                 description = of the test\n\
                 conninfo = host={base} user=postgres dbname=postgres\n\
                 streaming_conninfo = host={base} user=postgres\n\
                 immediate_checkpoint = true\n\
                 {server}\n"
            ),
        )?;
        Ok(Barman { cluster, config })
    }

    fn home(&self) -> PathBuf {
        self.cluster.directory().join("barman/main")
    }

    fn command(&self) -> Result<Command> {
        let mut command = program(self.cluster, "barman")?;
        command.arg("--config").arg(&self.config);
        Ok(command)
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        run(self.command()?.args(arguments))
    }

    /// An `archive_command` for a Barman on the same machine.
    fn push(&self) -> String {
        format!("rsync --archive %p {}/incoming/%f", self.home().display())
    }

    /// Archives all WAL so far.
    fn archive_all(&self) -> Result<()> {
        // Before the switch: afterwards the server may begin another segment at any time.
        let last = self.cluster.text("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")?;
        self.run(&["switch-wal", "--force", "main"])?;
        // A streamed segment is archived when WAL continues.
        self.cluster.sql("CHECKPOINT")?;
        self.cluster.eventually_that(&last, || {
            self.run(&["cron"])?;
            let there = archived(&self.home().join("wals"))?;
            ensure!(there.iter().any(|segment| segment.path.ends_with(&last)), "it is not there");
            Ok(())
        })
    }

    /// Recovers a backup into a new data directory, with its tablespace next to it.
    fn recovered(&self, backup: &str, arguments: &[&str]) -> Result<Cluster> {
        let copy = Cluster::from_files(|target| {
            let mut command = self.command()?;
            let space = target.with_file_name("space");
            command.arg("recover").arg("--tablespace").arg(format!("space:{}", space.display()));
            run(command.args(arguments).args(["main", backup]).arg(target)).map(drop)
        })?;
        copy.append_conf("archive_mode = off")?;
        Ok(copy)
    }
}

fn by_archive_command() -> Result<()> {
    let (mut cluster, _keys) = everything(Settings::default())?;
    cluster.allow_log("connection to client lost");
    let bin = cluster.installation().program("");
    let barman =
        Barman::new(&cluster, &bin.to_string_lossy(), "backup_method = postgres\narchiver = on")?;
    // The command creates the directories, and reports that no WAL has arrived yet.
    let reported = barman.command()?.args(["check", "main"]).output()?;
    ensure!(!reported.status.success(), "all is well before there is any WAL");
    cluster.set(&[("archive_command", &barman.push())])?;
    barman.archive_all()?;
    barman.run(&["check", "main"])?;

    let mut backup = barman.command()?;
    backup.args(["backup", "--wait", "--bwlimit", "8000", "main"]);
    let half = "SELECT backup_streamed * 2 >= backup_total AND phase LIKE 'streaming%' FROM pg_stat_progress_basebackup";
    let under_way = || -> Result<()> {
        ensure!(cluster.text(half)? == "t", "it has not got half of it");
        Ok(())
    };
    // A process that is blocked in sending does not process the barrier that rekeying waits for, so
    // pages are rewritten later.
    interrupted(&cluster, backup, under_way, || {
        rotate(&cluster)?;
        insert(&cluster, "second", 500)
    })?;
    rekeyed(&cluster)?;
    insert(&cluster, "third", 500)?;
    rotate_all(&cluster)?;
    let (time, then) = (now(&cluster)?, content(&cluster)?);
    cluster.sql("DELETE FROM t WHERE id % 2 = 0")?;
    rotate_all(&cluster)?;
    barman.run(&["backup", "--wait", "main"])?;
    barman.archive_all()?;
    barman.run(&["check-backup", "main", "latest"])?;
    barman.run(&["verify-backup", "main", "latest"])?;
    barman.run(&["check", "main"])?;

    assert_sealed_wal(&archived(&barman.home().join("wals"))?)?;
    let copy = barman.recovered("latest", &[])?;
    assert_sealed(&files_of_t(&cluster, &copy.data_directory())?)?;
    copy.start_server()?;
    check(&copy, &content(&cluster)?)?;
    copy.finish()?;
    let copy =
        barman.recovered("first", &["--target-time", &time, "--target-action", "promote"])?;
    copy.start_server()?;
    check(&copy, &then)?;
    copy.finish()?;
    assert_hidden(&cluster, &barman.home())?;
    cluster.finish()
}

/// `rsync` copies the files; unchanged ones are hard links to the previous backup.
fn by_rsync() -> Result<()> {
    let (cluster, _keys) = everything(Settings::default())?;
    let bin = cluster.installation().program("");
    let options = "backup_method = local-rsync\nreuse_backup = link\narchiver = on";
    let barman = Barman::new(&cluster, &bin.to_string_lossy(), options)?;
    barman.command()?.args(["check", "main"]).output()?;
    cluster.set(&[("archive_command", &barman.push())])?;
    barman.archive_all()?;
    barman.run(&["check", "main"])?;
    barman.run(&["backup", "--wait", "main"])?;
    let then = content(&cluster)?;
    let time = now(&cluster)?;
    // Of WAL after that time Barman copies one segment, and recovery needs a commit in it.
    // Rotations commit nothing, and may begin another segment.
    insert(&cluster, "second", 500)?;
    rotate_all(&cluster)?;
    barman.run(&["backup", "--wait", "main"])?;
    rotate_all(&cluster)?;
    insert(&cluster, "third", 500)?;
    barman.archive_all()?;
    for (backup, arguments, expected) in [
        ("latest", &[][..], content(&cluster)?),
        ("first", &["--target-time", &time, "--target-action", "promote"], then),
    ] {
        let copy = barman.recovered(backup, arguments)?;
        copy.start_server()?;
        check(&copy, &expected)?;
        copy.finish()?;
    }
    assert_hidden(&cluster, &barman.home())?;
    cluster.finish()
}

fn by_streaming() -> Result<()> {
    let (cluster, _keys) = everything(Settings::default())?;
    // As on another machine: the program that receives WAL has a copy of the keystore.
    let keystore = folder(&cluster, "keystore")?;
    let from = cluster.data_directory().join("pagevault");
    run(cluster.program("/bin/cp").arg("-r").arg(from).arg(&keystore))?;
    folder(&cluster, "bin")?;
    let bin = cluster.installation().program("");
    cluster.script(
        "bin/pg_receivewal",
        &format!(
            "[ \"$1\" != --version ] || exec {0}pg_receivewal --version\n\
             exec {0}pagevault-keyring exec --keystore {1} -- {0}pg_receivewal \"$@\"",
            bin.display(),
            keystore.display()
        ),
    )?;
    let path = format!("{}/bin:{}", cluster.directory().display(), bin.display());
    let barman = Barman::new(
        &cluster,
        &path,
        "backup_method = postgres\narchiver = off\nstreaming_archiver = on\nslot_name = barman\ncreate_slot = auto",
    )?;
    barman.command()?.args(["check", "main"]).output()?;
    barman.run(&["cron"])?;
    cluster.eventually("SELECT active FROM pg_replication_slots", "t")?;
    barman.archive_all()?;
    barman.run(&["check", "main"])?;
    insert(&cluster, "second", 500)?;
    barman.run(&["backup", "--wait", "main"])?;
    rotate_all(&cluster)?;
    insert(&cluster, "third", 500)?;
    barman.archive_all()?;
    // These rows are in an incomplete segment when the server is killed.
    insert(&cluster, "fourth", 500)?;
    let expected = content(&cluster)?;
    cluster.eventually(
        "SELECT write_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication",
        "t",
    )?;
    barman.run(&["check", "main"])?;
    cluster.kill()?;
    let pages = archived(&barman.home())?.iter().map(Segment::pages).collect::<Result<Vec<_>>>()?;
    let pages = pages.concat();
    ensure!(pages.contains(&WalPage::Sealed(1)), "nothing is sealed");
    ensure!(!pages.contains(&WalPage::Plain), "pg_receivewal has written plaintext");
    assert_hidden(&cluster, &barman.home())?;

    let get = format!(
        "{} --config {} get-wal --partial main %f > %p",
        program(&cluster, "barman")?.get_program().display(),
        barman.config.display()
    );
    let copy = barman.recovered("latest", &["--get-wal"])?;
    copy.start_server_with(&["-c", &format!("restore_command={get}")])?;
    check(&copy, &expected)?;
    copy.finish()?;

    // Segments sealed by two programs under different keys differ.
    cluster.start_server()?;
    let config = std::fs::read_to_string(&barman.config)?;
    std::fs::write(&barman.config, config.replace("archiver = off", "archiver = on"))?;
    cluster.set(&[("archive_command", &barman.push())])?;
    barman.run(&["cron"])?;
    cluster.eventually("SELECT active FROM pg_replication_slots", "t")?;
    barman.run(&["switch-wal", "--force", "main"])?;
    cluster.eventually_that("barman check", || {
        barman.run(&["cron"])?;
        let reported = barman.command()?.args(["check", "main"]).output()?.stdout;
        let reported = String::from_utf8_lossy(&reported);
        ensure!(reported.contains("archiver errors: FAILED (duplicates: "), "{reported}");
        Ok(())
    })?;
    cluster.finish()
}
