//! Random schedules against a model; `make schedules` plays more of them.
//!
//! | variable | means |
//! |---|---|
//! | `PAGEVAULT_SCHEDULES` | how many seeds; 100 |
//! | `PAGEVAULT_SEED` | the first of them; 1 |
//! | `PAGEVAULT_OPERATIONS` | operations of each; 16 |
//! | `PAGEVAULT_SCHEDULE` | a file with a schedule, instead of those in tests/schedules |
//! | `PAGEVAULT_SHRINK` | how many shorter schedules to try for one that fails; 0 |

use std::fmt::Write as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::schedules::{Failure, Schedule};

fn setting<T: FromStr>(name: &str, otherwise: T) -> T {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Plays schedules in several threads, and tells of all that fail.
fn play(schedules: u64, schedule: impl Fn(u64) -> Result<(String, Schedule)> + Sync) -> Result<()> {
    let shrink: usize = setting("PAGEVAULT_SHRINK", 0);
    let (next, failures) = (AtomicU64::new(0), Mutex::new(String::new()));
    let work = || -> Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= schedules {
                return Ok(());
            }
            if number > 0 && number % 100 == 0 {
                eprintln!("{number} of {schedules} have begun");
            }
            let (name, schedule) = schedule(number)?;
            let Err(failure) = schedule.play() else { continue };
            let Failure { error, schedule } = failure.shrink(shrink);
            let told = format!("{name}: {error:#}\n{}", schedule.text()?);
            eprintln!("{told}");
            if let Ok(mut failures) = failures.lock() {
                writeln!(failures, "{name}: {error:#}")?;
            }
        }
    };
    let threads = setting("RUST_TEST_THREADS", 4);
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(())
    })?;
    let failures = failures.into_inner().unwrap_or_default();
    ensure!(failures.is_empty(), "these failed, see above:\n{failures}");
    Ok(())
}

#[test]
fn drawn_schedules_agree_with_the_model() -> Result<()> {
    let first = setting("PAGEVAULT_SEED", 1);
    let count = setting("PAGEVAULT_SCHEDULES", 100);
    let length = setting("PAGEVAULT_OPERATIONS", 16);
    play(count, |number| {
        let seed = first + number;
        let again = format!("make schedules SEED={seed} COUNT=1 OPERATIONS={length}");
        Ok((again, Schedule::draw(seed, length)))
    })
}

/// Drawing a schedule asks the model what is possible. For one of these seeds it never ended.
#[test]
fn longer_schedules_can_be_drawn() {
    (1_000_000..1_000_100).for_each(|seed| drop(Schedule::draw(seed, 30)));
}

/// Schedules that have failed once.
#[test]
fn saved_schedules_agree_with_the_model() -> Result<()> {
    let paths = match std::env::var_os("PAGEVAULT_SCHEDULE") {
        Some(path) => vec![PathBuf::from(path)],
        None => saved()?,
    };
    play(paths.len() as u64, |number| {
        let path = &paths[usize::try_from(number)?];
        let text =
            std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let schedule = Schedule::parse(&text).with_context(|| path.display().to_string())?;
        Ok((format!("make schedules FILE={}", path.display()), schedule))
    })
}

/// The schedules in tests/schedules.
fn saved() -> Result<Vec<PathBuf>> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("schedules");
    let mut paths: Vec<_> = std::fs::read_dir(&directory)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    Ok(paths)
}

/// What a defect would do: something of which the model does not hear.
#[test]
fn what_the_model_does_not_foresee_is_noticed() -> Result<()> {
    let noticed = [
        ("DELETE FROM t1 WHERE id = (SELECT min(id) FROM t1)", "t1 holds"),
        ("UPDATE t1 SET mark = upper(mark) WHERE id = (SELECT max(id) FROM t1)", "t1 holds"),
        ("UPDATE t1 SET wide = NULL", "t1 holds"),
        (
            "SECURITY LABEL FOR pagevault ON TABLE t1 IS NULL",
            "t1 open r p - encrypted is not there",
        ),
        ("DROP TABLE t1", "t1 open r p - encrypted is not there"),
        ("CREATE TABLE t7 (id int)", "there is t7"),
        ("CREATE TABLE copy AS SELECT * FROM t1; CHECKPOINT", "a secret is in plaintext"),
        (
            "UPDATE pg_seclabel SET label = 'plaintext' WHERE provider = 'pagevault';
             SELECT pagevault.reconcile('t1'); SELECT pagevault.wait_for_rekey('t1'::regclass);
             UPDATE pg_seclabel SET label = 'encrypted' WHERE provider = 'pagevault'",
            "plaintext",
        ),
        ("SELECT * FROM pagevault.shred('t1', 'open.t1')", "were destroyed"),
    ];
    for (sql, expected) in noticed {
        let schedule = Schedule::parse(&format!(
            r#"{{"setup": {{"wal_encryption": false, "checksums": true, "tablespace": false}},
                "operations": [
                    {{"run": {{"session": 0, "statement":
                        {{"create": {{"table": 1, "asked": "by_label", "schema": 0, "unlogged": false}}}}}}}},
                    {{"run": {{"session": 0, "statement": {{"insert": {{"table": 1, "rows": 20}}}}}}}},
                    {{"unforeseen": {{"sql": {sql:?}}}}}]}}"#
        ))?;
        let Err(failure) = schedule.play() else { bail!("nobody notices: {sql}") };
        let told = format!("{:#}", failure.error);
        ensure!(told.contains(expected), "{sql}: {told}");
    }
    Ok(())
}

/// What a defect would do in one place of many. Of the rest of the schedule nothing stays, and what
/// is printed fails again.
#[test]
fn a_schedule_that_fails_shrinks_to_what_fails() -> Result<()> {
    let needed = [
        r#"{"run": {"session": 0, "statement":
            {"create": {"table": 1, "asked": "by_label", "schema": 0, "unlogged": false}}}}"#,
        r#"{"run": {"session": 1, "statement": {"insert": {"table": 1, "rows": 20}}}}"#,
        r#"{"unforeseen": {"sql": "DO 'BEGIN DELETE FROM t1; EXCEPTION WHEN undefined_table THEN END'"}}"#,
    ];
    let schedule = |operations: &[&str]| {
        Schedule::parse(&format!(
            r#"{{"setup": {{"wal_encryption": false, "checksums": true, "tablespace": false}},
                "operations": [{}]}}"#,
            operations.join(",")
        ))
    };
    let other = r#"{"run": {"session": 2, "statement":
        {"create": {"table": 2, "asked": "by_label", "schema": 0, "unlogged": false}}}}"#;
    let among_others =
        [other, needed[0], r#"{"begin": {"session": 2}}"#, needed[1], needed[2], "\"checkpoint\""];
    let Err(failure) = schedule(&among_others)?.play() else { bail!("nobody notices") };
    let shortest = failure.shrink(30).schedule;
    ensure!(shortest == schedule(&needed)?, "not the shortest: {}", shortest.text()?);
    let Err(again) = Schedule::parse(&shortest.text()?)?.play() else { bail!("it fails no more") };
    let told = format!("{:#}", again.error);
    ensure!(told.contains("t1 holds 0 0 0 0 t instead of 20"), "{told}");
    Ok(())
}
