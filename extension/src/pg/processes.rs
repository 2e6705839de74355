//! Other processes of this server, by process number ([`super::compat::process_number`]).

use std::sync::atomic::{AtomicU32, Ordering::Acquire};

use pagevault_keystore::Lsn;
use pgrx::{Spi, pg_sys};

use super::{compat, session};

/// The entry of a process; `None` if the number is too high.
fn entry(process: usize) -> Option<*mut pg_sys::PGPROC> {
    // SAFETY: the array is allocated at server start; it never moves or changes its length.
    unsafe {
        let all = pg_sys::ProcGlobal;
        if all.is_null() || process >= (*all).allProcCount as usize {
            return None;
        }
        Some((*all).allProcs.add(process))
    }
}

/// The PID of a process. Before 17 a free entry keeps the PID of its last process.
pub(crate) fn pid(process: usize) -> u32 {
    // SAFETY: a number that the owner of the entry writes.
    entry(process).map_or(0, |entry| unsafe { (&raw const (*entry).pid).read_volatile() as u32 })
}

/// Sets the latch of a process. No harm is done if the entry meanwhile belongs to another process
/// or to none: latches may be set without reason, and a latch without owner wakes no process
/// (`SetLatch`, latch.c).
pub(crate) fn wake(process: usize) {
    if let Some(entry) = entry(process) {
        // SAFETY: a latch in shared memory that exists as long as the server; may be set in any
        // state.
        unsafe { pg_sys::SetLatch(&raw mut (*entry).procLatch) }
    }
}

/// True if the process that had PID `then` has certainly finished the work it was doing at that
/// time: it is idle in its main loop, waits for its client, has ended, or its entry belongs to
/// another process.
pub(crate) fn has_left_its_work(process: usize, then: u32) -> bool {
    const CLASS: u32 = 0xFF00_0000;
    let Some(entry) = entry(process) else { return true };
    // SAFETY: an aligned word that its owner writes, and any process may read
    // (pgstat_report_wait_start).
    let wait = unsafe { AtomicU32::from_ptr(&raw mut (*entry).wait_event_info) }.load(Acquire);
    if matches!(wait & CLASS, pg_sys::PG_WAIT_ACTIVITY | pg_sys::PG_WAIT_CLIENT)
        || pid(process) != then
    {
        return true;
    }
    !exists(then)
}

/// Whether the process that had PID `then` still has this entry, as far as can be known.
pub(crate) fn is_there(process: usize, then: u32) -> bool {
    pid(process) == then && exists(then)
}

/// Tells the sessions and workers of a database to end, like `pg_terminate_backend()`.
pub(crate) fn terminate_in(database: pg_sys::Oid) {
    for (number, entry) in (0..).map_while(|number| Some((number, entry(number)?))) {
        let of_session = pid(number) as libc::pid_t;
        // SAFETY: a word that its owner writes. The server looks the process up under its lock: a
        // free entry may keep the PID of its last process, which may be anybody's now.
        unsafe {
            if (&raw const (*entry).databaseId).read_volatile() == database
                && of_session != 0
                && pg_sys::BackendPidGetProc(of_session) == entry
            {
                libc::kill(of_session, libc::SIGTERM);
            }
        }
    }
}

fn exists(pid: u32) -> bool {
    // SAFETY: signal 0 sends nothing; the call only checks whether the process exists.
    let asked = unsafe { libc::kill(pid as libc::pid_t, 0) };
    asked == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Whether a WAL sender runs BASE_BACKUP. Its state says so until the next command
/// (`exec_replication_command`, walsender.c); one that waits for a command has ended it.
pub(crate) fn any_base_backup() -> bool {
    senders().any(|sender| {
        sender.state == pg_sys::WalSndState::WALSNDSTATE_BACKUP && !waits_for_a_command(sender.pid)
    })
}

/// How far the standbys that are connected have replayed WAL, by what they have told last
/// (`ProcessStandbyReplyMessage`, walsender.c). Subscriptions of logical replication are among
/// them; programs that only store WAL are not, when they have caught up.
pub(crate) fn replayed_by_standbys() -> impl Iterator<Item = Lsn> {
    use pg_sys::WalSndState::{WALSNDSTATE_CATCHUP, WALSNDSTATE_STREAMING};
    senders().filter_map(|sender| {
        let tells = sender.state == WALSNDSTATE_STREAMING && sender.replayed != Lsn::INVALID;
        (tells || sender.state == WALSNDSTATE_CATCHUP).then_some(sender.replayed)
    })
}

/// Ends what logical decoding has collected, of one database or of all. WAL senders are ended like
/// `pg_terminate_backend()`: they go on where they have last been told that a client has everything
/// (`restart_lsn`), and decode again. Statements that decode are cancelled, but that which calls.
pub(crate) fn end_logical_decoding(database: Option<u32>) {
    let of_database = |entry: *mut pg_sys::PGPROC| {
        // SAFETY: a word that its owner writes, of an entry that exists.
        let found = || unsafe { (&raw const (*entry).databaseId).read_volatile() }.to_u32();
        !entry.is_null() && database.is_none_or(|database| database == found())
    };
    let senders: Vec<_> = senders().map(|sender| sender.pid).collect();
    let own = std::process::id().cast_signed();
    let decoding = slots().filter(|slot| slot.is_logical && slot.active != 0);
    for pid in decoding.map(|slot| slot.active).filter(|pid| *pid != own) {
        let signal = if senders.contains(&pid) { libc::SIGTERM } else { libc::SIGINT };
        // SAFETY: the server looks the process up under its lock.
        unsafe {
            if of_database(pg_sys::BackendPidGetProc(pid)) {
                libc::kill(pid, signal);
            }
        }
    }
}

/// A replication slot.
struct Slot {
    is_logical: bool,
    is_persistent: bool,
    /// It keeps WAL.
    keeps_wal: bool,
    /// The process that uses it, or 0.
    active: i32,
}

fn slots() -> impl Iterator<Item = Slot> {
    // SAFETY: a setting, which is fixed at server start.
    let count = unsafe { pg_sys::max_replication_slots };
    (0..count).filter_map(|index| {
        // SAFETY: takes and releases a lock of the server; the index is one of the array, which is
        // there if it is not empty (`ReplicationSlotsShmemInit`, slot.c). The server counts the
        // entries, whose size may differ between minor releases. What is read are aligned words of
        // an entry in shared memory, whose offsets do not; one that changes meanwhile is found or
        // not.
        unsafe {
            let mut name = pg_sys::NameData::default();
            if pg_sys::ReplicationSlotCtl.is_null()
                || !pg_sys::ReplicationSlotName(index, &raw mut name)
            {
                return None;
            }
            let slot = pg_sys::SearchNamedReplicationSlot(name.data.as_ptr(), true);
            if slot.is_null() {
                return None;
            }
            use pg_sys::ReplicationSlotPersistency::RS_PERSISTENT;
            let data = &raw const (*slot).data;
            Some(Slot {
                is_logical: (&raw const (*data).database).read_volatile() != pg_sys::Oid::INVALID,
                is_persistent: (&raw const (*data).persistency).read_volatile() == RS_PERSISTENT,
                keeps_wal: (&raw const (*data).restart_lsn).read_volatile() != 0,
                active: compat::user_of(slot),
            })
        }
    })
}

/// Whether a standby, or a program that receives WAL, has a replication slot that keeps WAL for it.
pub(crate) fn any_physical_slot() -> bool {
    slots().any(|slot| !slot.is_logical && slot.is_persistent && slot.keeps_wal)
}

/// From where logical slots need WAL; `None` without any.
pub(crate) fn needed_by_logical_slots() -> Option<Lsn> {
    // SAFETY: takes and releases locks of the server.
    let oldest = Lsn(unsafe { pg_sys::ReplicationSlotsComputeLogicalRestartLSN() });
    (oldest != Lsn::INVALID).then_some(oldest)
}

/// A WAL sender that is connected.
struct Sender {
    pid: i32,
    state: pg_sys::WalSndState::Type,
    replayed: Lsn,
}

fn senders() -> impl Iterator<Item = Sender> {
    // SAFETY: the array is allocated at server start, with `max_wal_senders` entries. What is read
    // are aligned words that their owner writes (`WalSndSetState`, walsender.c).
    let (senders, count) = unsafe {
        let all = pg_sys::WalSndCtl;
        let count = if all.is_null() { 0 } else { pg_sys::max_wal_senders as usize };
        let first: *const pg_sys::WalSnd = match count {
            0 => std::ptr::null(),
            _ => (&raw const (*all).walsnds).cast(),
        };
        (first, count)
    };
    (0..count).filter_map(move |number| {
        // SAFETY: the number is below the length of the array, which is in shared memory for as
        // long as this process runs.
        unsafe {
            let sender = senders.add(number);
            // The state of one that has ended stays (`WalSndKill`).
            let pid = (&raw const (*sender).pid).read_volatile();
            let state = (&raw const (*sender).state).read_volatile();
            let replayed = Lsn((&raw const (*sender).apply).read_volatile());
            (pid != 0).then_some(Sender { pid, state, replayed })
        }
    })
}

/// Whether a backend reads from its client, as it does between commands.
fn waits_for_a_command(pid: i32) -> bool {
    // SAFETY: takes and releases a lock of the server. The entry stays where it is; its word is
    // aligned, and any process may read it (pgstat_report_wait_start).
    unsafe {
        let entry = pg_sys::BackendPidGetProc(pid);
        !entry.is_null()
            && AtomicU32::from_ptr(&raw mut (*entry).wait_event_info).load(Acquire)
                == pg_sys::WaitEventClient::WAIT_EVENT_CLIENT_READ
    }
}

/// A sentence about a process, from `pg_stat_activity`. In a transaction.
pub(crate) fn description(pid: u32) -> Option<String> {
    const QUERY: &str = "SELECT pg_catalog.concat('It is of type \"', backend_type, '\"',
                CASE WHEN wait_event IS NOT NULL THEN pg_catalog.concat(', waiting for ', wait_event_type, ' / ', wait_event) END, '.')
           FROM pg_catalog.pg_stat_activity WHERE pid = $1";
    let pid = i32::try_from(pid).ok()?;
    session::as_owner_of_the_cluster(|| {
        Spi::get_one_with_args::<String>(QUERY, &[pid.into()]).ok().flatten()
    })
}
