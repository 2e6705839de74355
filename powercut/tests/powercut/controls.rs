//! Each judge finds fault with what it is there for: the files of a server that was stopped in good
//! order are spoilt, or what is in it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_powercut::campaign::{Verdict, judge_spoilt, try_cut};
use pagevault_powercut::catalogue::ALL;
use pagevault_powercut::recording::{Cut, Recorded};
use pagevault_powercut::scenarios::Scenario;
use pagevault_powercut_disk::Survival;
use pagevault_tests::choice::named;
use pagevault_tests::{Cluster, Installation};

const PAGE: usize = 8192;

struct Control {
    scenario: &'static Scenario,
    recorded: Recorded,
    /// Of table `t1`, below the data directory.
    file: String,
}

impl Control {
    fn of(name: &str) -> Result<Control> {
        let scenario = named(ALL, name)?;
        let recorded = scenario.record(3, false)?;
        let mut file = String::new();
        let asked = |server: &Cluster| {
            file = server.text("SELECT pg_relation_filepath('t1')")?;
            Ok(())
        };
        let verdict = judge_spoilt(scenario, &recorded, |_| Ok(()), asked);
        ensure!(verdict.context("nothing was spoilt")? == Verdict::Good, "nothing was spoilt");
        Ok(Control { scenario, recorded, file })
    }

    fn finds(&self, what: &str, judged: Result<Verdict>) -> Result<()> {
        let error = judged.err().with_context(|| format!("not found: {what}"))?;
        ensure!(format!("{error:#}").contains(what), "{what} is not what is found: {error:#}");
        Ok(())
    }

    fn finds_in_files(&self, what: &str, spoil: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.finds(what, judge_spoilt(self.scenario, &self.recorded, spoil, |_| Ok(())))
    }

    fn finds_after(&self, sql: &str, what: &str) -> Result<()> {
        let spoil = |server: &Cluster| sql.split(";;").try_for_each(|sql| server.sql(sql));
        self.finds(what, judge_spoilt(self.scenario, &self.recorded, |_| Ok(()), spoil))
    }
}

/// An empty page of a table, in plaintext, without a checksum (bufpage.h).
fn empty_page() -> Vec<u8> {
    let mut page = vec![0; PAGE];
    for (at, word) in [(12, 24_u16), (14, 8192), (16, 8192), (18, 8192 | 4)] {
        page[at..at + 2].copy_from_slice(&word.to_le_bytes());
    }
    page
}

#[test]
fn judges_find_what_is_spoilt() -> Result<()> {
    let control = Control::of("wal-without-checksums")?;
    let path = |data: &Path| data.join(&control.file);

    control.finds_in_files("could not open file", |data| Ok(fs::remove_file(path(data))?))?;
    control.finds_in_files("pagevault", |data| {
        for file in fs::read_dir(data.join("pagevault"))? {
            let file = file?.path();
            if file.extension().is_some_and(|extension| extension == "keys") {
                fs::remove_file(file)?;
            }
        }
        Ok(())
    })?;
    control.finds_in_files("drift without any repair", |data| {
        let file = OpenOptions::new().write(true).open(path(data))?;
        Ok(file.write_all_at(&empty_page(), file.metadata()?.len())?)
    })?;
    // As it was before the first step.
    control.finds_in_files("t1", |data| {
        let before = control.recorded.before();
        let old = before.read(&control.file).context("the file is new")?;
        let new = fs::read(path(data))?;
        let mut pages = old.chunks(PAGE).zip(new.chunks(PAGE));
        let block = pages.position(|(old, new)| old != new).context("no page has changed")?;
        let file = OpenOptions::new().write(true).open(path(data))?;
        Ok(file.write_all_at(&old[block * PAGE..][..PAGE], (block * PAGE) as u64)?)
    })?;

    for (sql, what) in [
        (
            "DELETE FROM ledger WHERE ctid = (SELECT min(ctid) FROM ledger)",
            "acknowledged commits are lost",
        ),
        ("INSERT INTO ledger VALUES (1, 1000000)", "transactions that were not committed"),
        ("UPDATE t2 SET v = v + 1 WHERE id = 1", "t2: "),
        (
            "UPDATE pg_index SET indisvalid = false, indisready = false WHERE indexrelid = 't1_v'::regclass;;
             CREATE TEMP TABLE row AS SELECT * FROM t1 WHERE v > 0 LIMIT 1;
             DELETE FROM t1 WHERE id = (SELECT id FROM row); INSERT INTO t1 TABLE row;;
             UPDATE pg_index SET indisvalid = true, indisready = true 
              WHERE indexrelid = 't1_v'::regclass",
            "t1",
        ),
        ("SECURITY LABEL FOR pagevault ON TABLE t1 IS NULL", "label of table"),
        ("DROP TABLE points", "relation points"),
        (
            "ALTER SYSTEM RESET pagevault.wal_encryption;; SELECT pg_reload_conf()",
            "setting pagevault.wal_encryption",
        ),
        (
            "SELECT pagevault.add_provider('new', 'file', '{\"path\": \"/nowhere\"}')",
            "provider new",
        ),
        ("DO $$ BEGIN RAISE WARNING 'something is odd'; END $$", "something is odd"),
    ] {
        control.finds_after(sql, what).with_context(|| sql.to_owned())?;
    }
    Ok(())
}

/// With files as the last process left them, cut around what checkpoints do to the files of
/// prepared transactions. PostgreSQL 17 and 18 lose some; no other one does.
#[test]
fn a_prepared_transaction_is_lost_where_postgresql_is_known_to() -> Result<()> {
    let scenario = named(ALL, "stock-prepared")?;
    let recorded = scenario.record(5, false)?;
    let places = recorded.places_at(b"pg_twophase");
    let step = (places.len() / 10).max(1);
    let mut known = 0;
    for place in places.into_iter().step_by(step) {
        let cut = Cut { place, seed: 1, survival: Some(Survival::Everything), twice: false };
        let verdict = try_cut(scenario, &recorded, cut, None, false)?;
        known += usize::from(verdict != Verdict::Good);
    }
    let loses = Installation::get()?.major >= 17;
    ensure!((known > 0) == loses, "{known} cuts lost prepared transactions");
    Ok(())
}
