//! What a server may say in its log after a power cut: exactly what PostgreSQL without pagevault
//! says.

use anyhow::{Result, ensure};

use pagevault_tests::log;

use crate::known;

/// Harmless after a cut:
/// - a state file of a prepared transaction that a checkpoint wrote which did not come to its end:
///   the transaction is in WAL; or one whose transaction has ended, but the name is there again
///   (`ProcessTwoPhaseBuffer`, twophase.c);
/// - statistics are not synced (`pgstat_read_statsfile`, pgstat.c);
/// - a client whose connection a judge has closed (`internal_flush`, pqcomm.c);
/// - a judge's session on a standby that replays DROP DATABASE (`ProcessInterrupts`, postgres.c).
const ORDINARY: [&str; 5] = [
    "removing future two-phase state file for transaction",
    "removing stale two-phase state file for transaction",
    "found incorrect format ID",
    "could not send data to client",
    "terminating connection due to conflict with recovery",
];

const BAD_CHECKSUM: &str = "page verification failed";

/// Finds fault with warnings, and with each word about a damaged page: in a free space map
/// or visibility map one may be, because their pages change without WAL, and are zeroed when they
/// are read (`RBM_ZERO_ON_ERROR`: `fsm_readbuf` and `XLogRecordPageWithFreeSpace`, freespace.c;
/// `vm_readbuf`, visibilitymap.c; `heap_xlog_visible`, heapam.c). A page of another fork is in WAL
/// as a whole before it can be torn. A scenario may have more to be said.
pub(crate) fn judge(said: &str, more: &[&str]) -> Result<()> {
    let lines: Vec<&str> = said.lines().collect();
    let damaged: Vec<(usize, &str, bool)> = lines
        .iter()
        .enumerate()
        .filter_map(|(at, line)| Some((at, *line, is_zeroed_map(line)?)))
        .collect();
    let mut faults: Vec<_> = damaged.iter().filter(|of| !of.2).map(|of| of.1).collect();
    for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.contains(BAD_CHECKSUM)) {
        // PostgreSQL 18 has whoever completes the read say this, at level LOG (`PageIsVerified`).
        let by_another = line.contains("LOG:  ");
        let explained = damaged.iter().any(|(later, what, zeroed)| {
            *later > at && *zeroed && (by_another || process(what) == process(line))
        });
        if !explained {
            faults.push(line);
        }
    }
    let lost = known::skipped_prepared(said);
    let allowed: Vec<String> = ORDINARY
        .iter()
        .chain(more)
        .map(|text| (*text).to_owned())
        .chain(removed_databases(said))
        .chain(lost.iter().flat_map(|xid| [known::kept_file(*xid), known::skipped_record(*xid)]))
        .collect();
    let of_pages = |line: &str| line.contains(BAD_CHECKSUM) || is_zeroed_map(line).is_some();
    faults.extend(log::alarms(said, &allowed).into_iter().filter(|line| !of_pages(line)));
    ensure!(faults.is_empty(), "the server says:\n{}", faults.join("\n"));
    Ok(())
}

/// Whether a line about a damaged page is about one of a map that is made anew; `None`: it is not
/// about damaged pages.
fn is_zeroed_map(line: &str) -> Option<bool> {
    // bufmgr.c: `ReadBuffer_common` and, in PostgreSQL 18, `buffer_readv_report`.
    let about = ["invalid page in block ", " invalid pages among blocks ", "checksum failure"];
    about.iter().find(|words| line.contains(**words))?;
    let (before, after) = line.split_once(" of relation ")?;
    let (path, after) = match after.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
        None => after.split_once(';').unwrap_or((after, "")),
    };
    let zeroed = before.contains("zeroing out") || after.contains("zeroing out");
    Some(zeroed && (path.ends_with("_fsm") || path.ends_with("_vm")))
}

/// The removal of a database is replayed, and its directory is gone already (`dbase_redo`,
/// dbcommands.c; `rmtree`, rmtree.c): the two lines that are said of each.
fn removed_databases(said: &str) -> Vec<String> {
    const LEFT: &str =
        "startup WARNING:  some useless files may be left behind in old database directory ";
    let pair = |line: &str| {
        let left = format!("{LEFT}{}", line.split_once(LEFT)?.1);
        let gone = left.replace(LEFT, "startup WARNING:  could not open directory ");
        let gone = gone + ": No such file or directory";
        said.contains(&gone).then_some([left, gone])
    };
    said.lines().filter_map(pair).flatten().collect()
}

fn process(line: &str) -> Option<&str> {
    Some(line.split_once('[')?.1.split_once(']')?.0)
}

#[cfg(test)]
mod tests {
    use super::judge;

    const BAD: &str =
        "1 [7] startup WARNING:  page verification failed, calculated checksum 1 but expected 2";

    fn may_be_said(lines: &[&str]) -> bool {
        judge(&lines.join("\n"), &["a database is gone"]).is_ok()
    }

    #[test]
    fn pages_of_maps_may_be_torn() {
        for zeroed in [
            "1 [7] startup WARNING:  invalid page in block 0 of relation base/5/16384_fsm; zeroing out page",
            "1 [7] startup WARNING:  invalid page in block 0 of relation \"base/5/16384_vm\"; zeroing out page",
            "1 [7] startup WARNING:  zeroing out 2 invalid pages among blocks 0..3 of relation \"base/5/1_fsm\"",
        ] {
            assert!(may_be_said(&[BAD, "1 [7] startup CONTEXT:  WAL redo", zeroed]), "{zeroed}");
            assert!(!may_be_said(&[zeroed, BAD]), "another page is damaged");
        }
    }

    #[test]
    fn no_other_page_may_be_torn() {
        assert!(!may_be_said(&[BAD]));
        for page in [
            "1 [7] client backend ERROR:  invalid page in block 0 of relation base/5/16384",
            "1 [7] client backend ERROR:  invalid page in block 0 of relation \"base/5/16384_fsm\"",
            "1 [7] client backend WARNING:  invalid page in block 0 of relation base/5/16384; zeroing out page",
            "1 [7] startup WARNING:  invalid page in block 0 of relation base/5/16384_init; zeroing out page",
        ] {
            assert!(!may_be_said(&[BAD, page]), "{page}");
            assert!(!may_be_said(&[page]), "{page}");
        }
    }

    #[test]
    fn another_process_says_that_it_has_zeroed_a_page_only_with_asynchronous_io() {
        let zeroed = "1 [8] x WARNING:  invalid page in block 0 of relation \"base/5/1_fsm\"; zeroing out page";
        assert!(!may_be_said(&[BAD, zeroed]));
        assert!(may_be_said(&[&BAD.replace("WARNING", "LOG"), zeroed]));
    }

    #[test]
    fn the_directory_of_a_dropped_database_may_be_gone() {
        let gone = "1 [7] startup WARNING:  could not open directory \"base/16400\": No such file or directory";
        let left = "1 [7] startup WARNING:  some useless files may be left behind in old database directory \"base/16400\"";
        assert!(may_be_said(&[gone, left]));
        assert!(!may_be_said(&[gone]));
        assert!(!may_be_said(&[left]));
        assert!(!may_be_said(&[&gone.replace("16400", "16401"), left]));
        assert!(!may_be_said(&[&gone.replace("startup", "client backend"), left]));
    }

    #[test]
    fn a_warning_is_a_fault_if_no_scenario_has_it() {
        assert!(may_be_said(&["1 [7] x WARNING:  a database is gone"]));
        assert!(!may_be_said(&["1 [7] x WARNING:  a file is gone"]));
    }
}
