//! Other processes of this server, by their number among them ([`super::compat::process_number`]).

use std::sync::atomic::{AtomicU32, Ordering::Acquire};

use pgrx::{Spi, pg_sys};

use super::session;

/// The entry of a process; `None` if there is no such number.
fn entry(process: usize) -> Option<*mut pg_sys::PGPROC> {
    // SAFETY: the array is made at start-up, and never moves nor changes its length.
    unsafe {
        let all = pg_sys::ProcGlobal;
        if all.is_null() || process >= (*all).allProcCount as usize {
            return None;
        }
        Some((*all).allProcs.add(process))
    }
}

/// The process id of a process; before 17 an entry that is free keeps the last one's.
pub(crate) fn pid(process: usize) -> u32 {
    // SAFETY: a number that the owner of the entry writes.
    entry(process).map_or(0, |entry| unsafe { (&raw const (*entry).pid).read_volatile() as u32 })
}

/// Sets the latch of a process. If its entry belongs to another one by now, or to nobody, no harm
/// is done: latches may be set for no reason, and one that nobody owns wakes nobody (`SetLatch`,
/// latch.c).
pub(crate) fn wake(process: usize) {
    if let Some(entry) = entry(process) {
        // SAFETY: a latch in shared memory that is there as long as the server; may be called
        // anywhere.
        unsafe { pg_sys::SetLatch(&raw mut (*entry).procLatch) }
    }
}

/// True if a process has certainly left whatever it was at when it had this pid and what it does
/// was looked at last: it waits in its main loop or for its client, has made room for another, or
/// is gone.
pub(crate) fn has_left_its_work(process: usize, then: u32) -> bool {
    const CLASS: u32 = 0xFF00_0000;
    let Some(entry) = entry(process) else { return true };
    // SAFETY: an aligned word that its owner writes, and anyone may read
    // (pgstat_report_wait_start).
    let wait = unsafe { AtomicU32::from_ptr(&raw mut (*entry).wait_event_info) }.load(Acquire);
    if matches!(wait & CLASS, pg_sys::PG_WAIT_ACTIVITY | pg_sys::PG_WAIT_CLIENT)
        || pid(process) != then
    {
        return true;
    }
    // SAFETY: sends nothing; only asks whether there is such a process.
    let asked = unsafe { libc::kill(then as libc::pid_t, 0) };
    asked != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

/// What `pg_stat_activity` says of a process, as a sentence. In a transaction.
pub(crate) fn description(pid: u32) -> Option<String> {
    const QUERY: &str = "SELECT pg_catalog.concat('It is of type \"', backend_type, '\"',
                CASE WHEN wait_event IS NOT NULL THEN pg_catalog.concat(', waiting for ', wait_event_type, ' / ', wait_event) END, '.')
           FROM pg_catalog.pg_stat_activity WHERE pid = $1";
    let pid = i32::try_from(pid).ok()?;
    session::as_owner_of_the_cluster(|| {
        Spi::get_one_with_args::<String>(QUERY, &[pid.into()]).ok().flatten()
    })
}
