//! The SQL function behind the view `pagevault.stats`.

use pgrx::prelude::*;

use crate::pg::report::OrRaise;
use crate::shmem::counters::StatsKind;
use crate::{preload, shmem};

/// Pages encrypted and decrypted since the server started.
#[pg_extern]
#[allow(clippy::type_complexity, reason = "the row type of the function, spelt once")]
fn stats_rows() -> TableIterator<
    'static,
    (
        name!(kind, &'static str),
        name!(pages_encrypted, i64),
        name!(pages_decrypted, i64),
        name!(bytes_encrypted, i64),
        name!(bytes_decrypted, i64),
        name!(encrypt_time_ms, f64),
        name!(decrypt_time_ms, f64),
        name!(decrypt_failures, i64),
    ),
> {
    preload::require_active().or_raise();
    let counters = shmem::required().or_raise().counters;
    TableIterator::new(StatsKind::ALL.map(|(kind, name)| {
        let totals = counters.totals(kind);
        (
            name,
            totals.sealed as i64,
            totals.opened as i64,
            totals.bytes_sealed as i64,
            totals.bytes_opened as i64,
            totals.seal_time,
            totals.open_time,
            totals.failures as i64,
        )
    }))
}
