//! The table of rekey jobs in shared memory equals the state from the logs.

use std::sync::atomic::AtomicU32;

use pagevault_keystore::Record;
use pagevault_keystore::job::{JobId, JobKind, JobState, Request, Step};
use pagevault_keystore::job_table::JobTable;
use pagevault_keystore::state::State;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::arbitrary::{any_job, is_too_early};

const CAPACITY: usize = 40;

fn memory() -> Vec<AtomicU32> {
    (0..JobTable::words_needed(CAPACITY)).map(|_| AtomicU32::new(0)).collect()
}

fn check(table: &JobTable<'_>, records: &[Record]) -> Result<(), TestCaseError> {
    let state = State::from_records(records.iter().cloned()).unwrap();
    for database in 1..3 {
        let shown = table.select(|head| head.job.database == database);
        let wanted: Vec<_> =
            state.jobs(database).into_iter().flat_map(|jobs| jobs.iter()).collect();
        prop_assert_eq!(shown.len(), wanted.len());
        for (known, (number, job)) in shown.iter().zip(wanted) {
            prop_assert_eq!(known.job, JobId { database, number });
            prop_assert_eq!(known.request, job.request);
            prop_assert_eq!(known.step, job.step.as_ref().map_or(0, |step| step.step));
            let stands = job.step.as_ref().map_or(JobState::Waiting, |step| step.state);
            prop_assert_eq!(known.state, stands);
            let error = job.step.as_ref().map_or("", |step| &step.error);
            prop_assert_eq!(&known.error, error);
            for relation in 1..4 {
                let begun = job.begun.contains(&relation);
                prop_assert_eq!(table.has_begun(known.job, relation), begun);
            }
            prop_assert_eq!(table.has_begun_any(known.job), !job.begun.is_empty());
        }
        let forgotten = state.jobs(database).map_or(0, |jobs| jobs.forgotten());
        prop_assert_eq!(table.forgotten(database), forgotten);
        prop_assert!(table.next_number(database) > forgotten);
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_table_equals_the_log(records in vec(any_job(), 0..60)) {
        let mut state = State::default();
        let mut written = Vec::new();
        for record in records {
            if !is_too_early(&record, &state) {
                state.apply(record.clone()).unwrap();
                written.push(record);
            }
        }
        let records = written;
        let memory = memory();
        let table = JobTable::new(&memory, CAPACITY);
        for (at, record) in records.iter().enumerate() {
            let news = table.would_change(record);
            let before = table.select(|_| true);
            table.apply(record).unwrap();
            prop_assert!(news || table.select(|_| true) == before);
            check(&table, &records[..=at])?;
        }
        // Redo may repeat all records, and a restart begins with an empty table.
        records.iter().for_each(|record| table.apply(record).unwrap());
        check(&table, &records)?;
        table.reset();
        records.iter().for_each(|record| table.apply(record).unwrap());
        check(&table, &records)?;
    }
}

/// More jobs than are kept, of relations that get several.
#[test]
fn the_table_equals_the_log_when_jobs_are_forgotten() {
    const JOBS: u64 = 1500;
    let capacity = 2 * JOBS as usize;
    let memory: Vec<_> = (0..JobTable::words_needed(capacity)).map(|_| AtomicU32::new(0)).collect();
    let table = JobTable::new(&memory, capacity);
    let mut records = Vec::new();
    for number in 1..=JOBS {
        let job = JobId { database: 1, number };
        // Some relations have had a job before.
        let relation = if number % 5 == 0 { number / 2 } else { number } as u32;
        let state = match number % 6 {
            0 => JobState::Paused,
            1 => JobState::Done,
            2 => JobState::Cancelled,
            _ => JobState::Failed,
        };
        let request = Request {
            relation,
            kind: JobKind::Encrypt,
            cipher: 0,
            requested_by: 10,
            at: 1,
            transaction: 700,
        };
        let step = Step { step: 1, state, started: 0, at: 2, error: String::new() };
        records.extend([Record::Job { job, request }, Record::JobStep { job, step }]);
    }
    records.iter().for_each(|record| table.apply(record).unwrap());
    check(&table, &records).unwrap();
    assert!(table.forgotten(1) > 0);
    // Redo may repeat them.
    records.iter().for_each(|record| table.apply(record).unwrap());
    check(&table, &records).unwrap();
}
