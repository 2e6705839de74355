//! What PostgreSQL itself does wrong after a power cut, recognised by exactly what it says.

use std::collections::BTreeSet;

use anyhow::Result;
use pagevault_tests::Cluster;

/// What [`lost`] is called.
pub(crate) const PREPARED: &str = "prepared transactions are lost";

/// Prepared transactions that a server has lost by its recovery: those that were not committed
/// afterwards.
pub(crate) fn lost(cluster: &Cluster) -> Result<BTreeSet<u64>> {
    let mut lost = BTreeSet::new();
    for xid in skipped_prepared(&cluster.log()) {
        if cluster.text(&format!("SELECT pg_xact_status('{xid}')"))? != "committed" {
            lost.insert(xid);
        }
    }
    Ok(lost)
}

/// Prepared transactions that PostgreSQL 17 and 18 skip, by their xids, when power was cut during a
/// checkpoint, after it has made their files and before its fsync of `pg_control`. Recovery begins
/// before the transaction, so its state file is one of the future and is removed
/// (`ProcessTwoPhaseBuffer`, twophase.c). But the name of that file is made of the epoch before
/// (`AdjustToFullTransactionId`; `FullTransactionIdFromAllowableAt` for an xid that is not
/// allowable, transam.h), so that it stays. When the record of PREPARE TRANSACTION is replayed, the
/// file is there, and the record is skipped (`PrepareRedoAdd`).
pub(crate) fn skipped_prepared(log: &str) -> BTreeSet<u64> {
    let said = |text: &str| log.lines().any(|line| line.ends_with(text));
    let future = log.lines().filter_map(|line| {
        line.split_once("WARNING:  removing future two-phase state file for transaction ")?
            .1
            .parse()
            .ok()
    });
    future.filter(|xid| said(&kept_file(*xid)) && said(&skipped_record(*xid))).collect()
}

/// It is asked to remove a file of epoch 0 - 1.
pub(crate) fn kept_file(xid: u64) -> String {
    format!(
        "WARNING:  could not remove file \"pg_twophase/FFFFFFFF{xid:08X}\": No such file or directory"
    )
}

pub(crate) fn skipped_record(xid: u64) -> String {
    format!("WARNING:  could not recover two-phase state file for transaction {xid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prepared_transaction_is_lost_only_if_all_three_are_said_of_it() {
        let future =
            "12:00 [1] startup WARNING:  removing future two-phase state file for transaction 747";
        let lost = [future, &kept_file(747), &skipped_record(747)];
        assert_eq!(skipped_prepared(&lost.join("\n")), BTreeSet::from([747]));
        for part in 0..3 {
            let mut less = lost.to_vec();
            less.remove(part);
            assert_eq!(skipped_prepared(&less.join("\n")), BTreeSet::new());
        }
        assert_eq!(
            skipped_prepared(&[future, &kept_file(748), &skipped_record(747)].join("\n")),
            BTreeSet::new()
        );
    }
}
