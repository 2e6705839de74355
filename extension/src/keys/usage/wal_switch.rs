//! Switching WAL encryption on and off, and rotating the WAL key.
//!
//! The steps are:
//!
//! 1. The new key, wrapped, is settled in the keystore and logged in WAL. It is not used yet.
//! 2. A barrier is inserted in WAL after it. Recovery reads ahead, and must have replayed the key
//!    before it reads a page that is sealed under it. Records that do not fit into recovery's
//!    buffer for decoded records are decoded only when the records before them have been replayed.
//! 3. The switch is put into shared memory. It begins at the first page after the barrier of which
//!    nothing has been written. That page cannot change meanwhile, because WALWriteLock is held.
//! 4. The switch is recorded in the keystore and in WAL, from which standbys get it.
//!
//! A standby's WAL receiver writes pages as the switches say that are replayed there. So while
//! standbys receive WAL, the switch begins some megabytes later, and WAL is extended to it when
//! they have replayed its record. A standby that lags stores WAL the old way until it has replayed
//! it.
//!
//! After a crash following step 1 or 2, there is an unused key. After step 3, pages may be sealed
//! under a key that the server has although it does not know the switch. They can be read, because
//! pages contain their key version; the server continues as before the switch, and the worker
//! switches again. After the first half of step 4, or if WAL up to the switch is lost, the keystore
//! has a switch to an address that WAL never reached. That switch must not apply when other WAL
//! reaches the address. So a server that begins to write WAL excludes all known switches after its
//! end of WAL ([`Wal::begin`]), and the worker makes a new switch with the
//! state that applies, for the next start and for standbys ([`begun`]). It begins before the lost
//! one, where WAL has not come so far yet: at once, because it changes nothing. Else the next start
//! could find WAL behind the lost one, and follow that.
//!
//! If the first half of step 4 fails, as on a full disk, the switch stays in force, because pages
//! may have been sealed already. It is marked as unrecorded; the next change, by the worker at the
//! latest, records it first ([`record_newest`]). Until then the status reports a problem. A crash
//! then is like one after step 3.
//!
//! The keystore lock is held in step 1, and from step 3 up to the record of step 4: not while the
//! barrier is written, nor during any wait for WAL. So other processes may rotate the key or switch
//! meanwhile. Each has its own key and barrier, and step 3 checks again whether the switch is still
//! wanted. Records of others before or within a barrier make it longer. An unused or incomplete
//! barrier does no harm.

use std::time::{Duration, Instant};

use pagevault_cipher::{CipherId, KeyVersion, Lsn};
use pagevault_core::policy::Sealing;
use pagevault_core::wal_lead::lead;
use pagevault_keystore::wal::{Switch, Switches, WalPhase, key_place};
use pagevault_keystore::{Record, Scope, batch};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::{data_keys, refused};
use crate::audit::{self, Operation};
use crate::keys::store::{directory, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{guc, process, processes, wal};
use crate::shmem::wal::Wal;
use crate::{fault, shmem};

/// How long standbys have time to replay the record of a switch. Those that have lost their primary
/// try again after five seconds (`wal_retrieve_retry_interval`).
const PATIENCE: Duration = Duration::from_secs(10);

/// The cluster's database key wraps WAL keys.
const SCOPE: Scope = Scope::CLUSTER;

/// Creates a new WAL key and uses it from now on. Returns its version, or that of a later key which
/// another process has created meanwhile.
///
/// # Errors
/// If WAL is not encrypted.
pub(crate) fn rotate() -> Result<KeyVersion> {
    seal_with_new_key(true)?.ok_or_else(not_encrypted)
}

fn not_encrypted() -> Report {
    let code = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
    let report = Report::new(code, "WAL is not encrypted");
    if guc::wal_encryption() != Some(true) {
        return report.hint("Turn on pagevault.wal_encryption first.");
    }
    report
        .detail("pagevault.wal_encryption is on, but WAL is not switched yet.")
        .hint("Try again in a moment. If it stays so, wal_error in pagevault.status says why.")
}

/// Switches WAL encryption as `pagevault.wal_encryption` requires; for the worker. Stores for the
/// status why that was not possible.
pub(crate) fn reconcile() -> Result<()> {
    shmem::required()?.wal.set_worker();
    let done = guc::wal_encryption().map_or(Ok(()), switch_to).and(replace_lost_switch());
    let problem = done.as_ref().err().map_or("", |report| report.message());
    {
        let _lock = KeystoreLock::acquire();
        shmem::required()?.wal.set_problem(problem);
    }
    done
}

/// Why WAL is not written as `pagevault.wal_encryption` requires, here or on standbys.
pub(crate) fn problem() -> Result<Option<String>> {
    let wal = &shmem::required()?.wal;
    let (unrecorded, known) = {
        let _lock = KeystoreLock::acquire();
        (wal.unrecorded(), wal.problem())
    };
    if unrecorded.is_some() {
        let what = "a switch of WAL encryption is not recorded, and standbys do not follow it";
        let why = if known.is_empty() { "it is about to be" } else { &known };
        return Ok(Some(format!("{what}: {why}")));
    }
    let is_sealed = wal.written().sealed().is_some();
    let Some(wanted) = guc::wal_encryption().filter(|wanted| *wanted != is_sealed) else {
        return Ok(None);
    };
    if !known.is_empty() {
        return Ok(Some(known));
    }
    let how = if is_sealed { "encrypted" } else { "in plaintext" };
    let setting = if wanted { "on" } else { "off" };
    let why = if process::in_recovery() {
        "a standby follows its primary until it is promoted"
    } else {
        "it is about to be switched"
    };
    Ok(Some(format!("WAL is written {how} and pagevault.wal_encryption is {setting}: {why}")))
}

fn switch_to(sealed: bool) -> Result<()> {
    if sealed {
        let done = audited("on", shmem::required()?.wal.latest_phase().sealed().is_none(), || {
            seal_with_new_key(false)
        });
        if let Some(version) = done? {
            log(format!("pagevault: WAL is encrypted from now on, WAL key version {version}"));
        }
        return Ok(());
    }
    let is_sealed = {
        let lock = KeystoreLock::acquire();
        begun(&lock)?.latest_phase().sealed().is_some()
    };
    let done = audited("off", is_sealed, || {
        let lock = KeystoreLock::acquire();
        if begun(&lock)?.latest_phase().sealed().is_none() {
            return Ok(None);
        }
        switch(&lock, in_plaintext, after_standbys(Lsn::INVALID)).map(Some)
    });
    if let Some(start) = done? {
        reach_with_standbys(start);
        log("pagevault: WAL is not encrypted any more".to_owned());
    }
    Ok(())
}

/// A switch by the worker; audited before and after if it `changes` anything.
fn audited<T>(to: &str, changes: bool, switch: impl FnOnce() -> Result<T>) -> Result<T> {
    let operation = Operation {
        action: "wal_encryption",
        by: "wal_worker",
        to: Some(to.to_owned()),
        ..Operation::default()
    };
    if changes { audit::audited(operation, switch) } else { switch() }
}

/// If the keystore has a switch that WAL never reached, makes a new switch with the present state
/// of WAL. In single-user mode there is no worker that would.
pub(crate) fn replace_lost_switch() -> Result<()> {
    begun(&KeystoreLock::acquire()).map(drop)
}

fn log(message: String) {
    Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message).send(PgLogLevel::LOG);
}

/// The shared state, after this server has begun to write WAL, the newest switch is recorded, and
/// none that was lost with WAL is newer than those that apply.
fn begun(lock: &KeystoreLock) -> Result<&'static Wal> {
    let wal = &shmem::required()?.wal;
    wal::at_unwritten_page(Lsn::INVALID, |end, _| wal.begin(end));
    if let Some(switch) = wal.unrecorded() {
        record_newest(lock, switch)?;
        // Under the lock, so that other processes find the switch recorded only when WAL has
        // reached it; recording it needed waiting under the lock as well.
        reach(switch.start);
        log("pagevault: a switch of WAL encryption that could not be recorded is recorded now"
            .to_owned());
    }
    if wal.has_lost_switch() {
        reach(switch(lock, as_it_is, Lsn::INVALID)?);
        log("pagevault: a switch of WAL encryption that was lost with WAL does not count"
            .to_owned());
    }
    Ok(wal)
}

/// Steps 1 to 4, if WAL is sealed or not, as the caller expects (`is_sealed`). `None` if it is
/// otherwise, at the beginning or after the barrier.
fn seal_with_new_key(is_sealed: bool) -> Result<Option<KeyVersion>> {
    let cipher = guc::cipher().map_or(CipherId::Aes256Xts, CipherId::without_tag);
    let expected = |wal: &Wal| wal.latest_phase().sealed().is_some() == is_sealed;
    // Before the lock is taken, because the error for a refused key reads the keystore.
    let usable = refused::require_usable(SCOPE);
    let (version, end) = {
        let lock = KeystoreLock::acquire();
        if !expected(begun(&lock)?) {
            return Ok(None);
        }
        require_room(is_sealed)?;
        usable?;
        let version = next_version()?;
        let record = new_key(version, cipher)?;
        (version, persist::append(&lock, SCOPE, &[record])?)
    };
    wal::flush(end);
    let behind = wal::insert_barrier(|| {
        fault::point("wal_switch.barrier");
        fault::point_of("wal_switch.barrier_of", version.get());
        process::check_for_interrupts();
    });
    let start = {
        let lock = KeystoreLock::acquire();
        let wal = begun(&lock)?;
        if !expected(wal) {
            return Ok(None);
        }
        if let Some(newer) = wal.latest_phase().sealed().filter(|newer| *newer > version) {
            return Ok(Some(newer));
        }
        switch(&lock, |_| WalPhase::under(version), after_standbys(behind))?
    };
    reach_with_standbys(start);
    Ok(Some(version))
}

/// Checked before anything is written. WAL encryption can still be switched off and on when it gets
/// no other key any more.
fn require_room(is_rotation: bool) -> Result<()> {
    let reserved = if is_rotation { 1024 } else { 16 };
    if (shmem::required()?.wal.switches.count() as usize) < Switches::CAPACITY - reserved {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("the WAL key has been changed {} times", Switches::CAPACITY - reserved),
    )
    .detail("All changes are kept, for WAL that is archived. WAL stays as it is.")
    .hint("One change a day would have taken forty years: look at pagevault.rotate_wal_key_after, and at what calls rotate_wal_key()."))
}

/// The newest version of all switches, including those that WAL never reached.
fn newest_version() -> Result<Option<KeyVersion>> {
    let switches = shmem::required()?.wal.switches.iter();
    Ok(switches.filter_map(|switch| switch.phase.version).max())
}

/// The version after the last that has a key, even if the key was never used.
fn next_version() -> Result<KeyVersion> {
    let mut last = newest_version()?;
    loop {
        let version = KeyVersion::after(last)
            .ok_or_else(|| internal("WAL has used up its key versions".to_owned()))?;
        let (file, data_key_version) = key_place(version);
        if !directory::has_key(file, data_key_version) {
            return Ok(version);
        }
        last = Some(version);
    }
}

fn new_key(version: KeyVersion, cipher: CipherId) -> Result<Record> {
    if shmem::required()?.secrets.newest(SCOPE).is_none() {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "cannot encrypt WAL: the cluster has no master key",
        )
        .hint("Set one with pagevault.set_cluster_master_key()."));
    }
    let (file, data_key_version) = key_place(version);
    data_keys::make_key(file, data_key_version, Sealing { cipher, group: None })
}

/// Steps 3 and 4 up to the record: the switch begins at `behind` or later. Returns its address,
/// which WAL must reach ([`reach`]) after the lock is released.
fn switch(
    lock: &KeystoreLock,
    phase: impl FnOnce(WalPhase) -> WalPhase,
    behind: Lsn,
) -> Result<Lsn> {
    let wal = &shmem::required()?.wal;
    let last = wal.switches.newest();
    let step = last.map_or(0, |switch| switch.step).checked_add(1);
    let step = step.ok_or_else(|| internal("WAL has used up its switches".to_owned()))?;
    let phase = phase(wal.latest_phase());
    // A switch to plaintext also has the version of a key, which must exist.
    let version = match phase.version {
        Some(version) => Some(version),
        None => newest_version()?,
    };
    let phase = WalPhase { version, ..phase };
    let (added, switch) = wal::at_unwritten_page(behind, |_, start| {
        let switch = Switch { step, start, phase };
        (wal.put_in_force(switch), switch)
    });
    added.map_err(|full| internal(full.to_string()))?;
    fault::point("wal_switch.in_memory");
    // The worker must retry. It may be asleep, if this is another process.
    record_newest(lock, switch).inspect_err(|_| wal.wake_worker())?;
    Ok(switch.start)
}

/// Where a switch may begin, at `behind` or later. If there may be standbys, some megabytes later
/// than its record ([`lead`]): what they receive meanwhile is written as before the switch.
fn after_standbys(behind: Lsn) -> Lsn {
    let replayed: Vec<Lsn> = processes::replayed_by_standbys().collect();
    if replayed.is_empty() && !processes::any_physical_slot() {
        return behind;
    }
    let end = wal::end();
    behind.max(end + lead(end, replayed))
}

/// Step 4 up to the record. An error leaves the switch in force and unrecorded: it cannot be
/// undone, because pages may have been written after it.
fn record_newest(lock: &KeystoreLock, switch: Switch) -> Result<()> {
    let recorded = persist::append(lock, SCOPE, &[Record::WalSwitch(switch)]);
    recorded.map_err(|report| {
        report.detail("The switch is in force here, standbys do not follow it. Recording it is tried again every few seconds.")
    })?;
    shmem::required()?.wal.set_recorded();
    Ok(())
}

fn in_plaintext(before: WalPhase) -> WalPhase {
    WalPhase { plaintext: true, ..before }
}

fn as_it_is(before: WalPhase) -> WalPhase {
    if before.sealed().is_some() { before } else { in_plaintext(before) }
}

/// Extends WAL to the beginning of a switch, so that later records are after it.
fn reach(start: Lsn) {
    wal::flush(wal::fill_up_to(start));
}

/// The same after standbys have replayed the record of the switch, or [`PATIENCE`] is over. Nobody
/// is held up: it is also over when others have written WAL up to the switch.
fn reach_with_standbys(start: Lsn) {
    let record = wal::insert_little();
    wal::flush(record);
    fault::point("wal_switch.recorded");
    // The server may just have been started, before its standbys have noticed.
    let expects = processes::any_physical_slot();
    let have_replayed = || {
        let mut standbys = processes::replayed_by_standbys().peekable();
        (standbys.peek().is_some() || !expects) && standbys.all(|lsn| lsn >= record)
    };
    let end = Instant::now() + PATIENCE;
    // Who cancels this gets what was begun, a little earlier.
    while !have_replayed()
        && wal::end() < start
        && Instant::now() < end
        && !process::is_told_to_stop()
    {
        // They answer what they receive, and tell what they have replayed by then.
        wal::flush(wal::insert_little());
        std::thread::sleep(Duration::from_millis(20));
    }
    let all = have_replayed();
    reach(start);
    if !all {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            "pagevault: a standby has not replayed a switch of WAL encryption in time",
        )
        .detail("It lags, or is not connected and has a replication slot. It stores WAL the old way until it has: in plaintext if WAL encryption was switched on, under the former key after a rotation.")
        .send(PgLogLevel::LOG);
    }
}

/// Logs the newest switch once more after a start: if the server crashed before its record was
/// durable in WAL, the keystore has it and standbys do not. [`reconcile`] handles one that is not
/// recorded at all.
pub(crate) fn repeat_newest() -> Result<()> {
    let _lock = KeystoreLock::acquire();
    let shared = shmem::required()?;
    if shared.wal.unrecorded().is_some() {
        return Ok(());
    }
    let newest = shared.wal.switches.newest();
    let (Some(switch), Some(id)) = (newest, shared.control.keystore_id()) else { return Ok(()) };
    let batch = batch::encode(&[Record::WalSwitch(switch)]);
    let batch = batch.map_err(|error| internal(format!("keystore: {error}")))?;
    wal::insert_keys(SCOPE, &id, &batch);
    Ok(())
}
