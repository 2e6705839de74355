//! How much later than its record a switch of WAL begins, so that standbys have replayed the record
//! when they receive what follows the switch.

use pagevault_cipher::Lsn;

/// The least lead in bytes: for standbys that replay what they receive at once.
pub const LEAST: u64 = 4 << 20;

/// The greatest lead. WAL is filled up to the switch if nobody writes as much, so that each switch
/// may cost that: little of what replication slots may keep (`max_slot_wal_keep_size`).
pub const GREATEST: u64 = 32 << 20;

/// The lead of a switch that is decided when WAL ends at `end`, and standbys have replayed it up to
/// these addresses.
///
/// Until a standby has replayed the record, which takes it what it lags by, as much WAL is written,
/// as long as it replays as fast as others write. It gets twice as much. One that lags by more than
/// half of [`GREATEST`] is not waited for: it is paused, or delayed on purpose.
pub fn lead(end: Lsn, replayed: impl IntoIterator<Item = Lsn>) -> u64 {
    let lags = replayed.into_iter().map(|replayed| end.0.saturating_sub(replayed.0));
    let longest = lags.filter(|lag| *lag <= GREATEST / 2).max();
    longest.map_or(LEAST, |lag| LEAST.max(2 * lag))
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: Lsn = Lsn(1 << 40);

    fn lead_for(lags: &[u64]) -> u64 {
        lead(END, lags.iter().map(|lag| Lsn(END.0 - lag)))
    }

    #[test]
    fn the_lead_is_twice_the_longest_lag() {
        assert_eq!(lead_for(&[]), LEAST);
        assert_eq!(lead_for(&[0, 1000]), LEAST);
        assert_eq!(lead_for(&[1000, 12 << 20, 3 << 20]), 24 << 20);
        assert_eq!(lead_for(&[GREATEST / 2]), GREATEST);
    }

    #[test]
    fn standbys_that_cannot_catch_up_do_not_count() {
        assert_eq!(lead_for(&[GREATEST / 2 + 1]), LEAST);
        assert_eq!(lead_for(&[END.0, 10 << 20]), 20 << 20);
        // A standby that tells more than was known to be written.
        assert_eq!(lead(END, [Lsn(END.0 + 8192)]), LEAST);
    }
}
