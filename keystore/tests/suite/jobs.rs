//! The table of rekey jobs in shared memory equals the state from the logs.

use std::sync::atomic::AtomicU32;

use pagevault_keystore::Record;
use pagevault_keystore::job::{JobId, JobState};
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
