//! Switching WAL encryption on and off, and rotating its key.
//!
//! In this order:
//!
//! 1. The new key, wrapped, goes to the keystore, where it is safe, and to WAL. Nobody uses it yet.
//! 2. A barrier goes to WAL behind it. Recovery reads ahead, and must have replayed the key before
//!    it meets a page that is sealed with it. Records that have no room in its buffer for decoded
//!    records it decodes only when those before them are replayed.
//! 3. The switch is put into shared memory. It begins with the first page behind the barrier that
//!    is not begun on disk, and while WAL is written that cannot change: WALWriteLock is held.
//! 4. The switch goes to the keystore and to WAL, where standbys find it.
//!
//! Killed after 1 or 2, the server has a key too many. After 3, pages may be sealed with a key that
//! it has, though it knows nothing of the switch: pages say what they are, so they are read; it
//! goes on as before the switch, and the worker switches again. After the first half of 4, or when
//! WAL up to the switch is lost, the keystore has a switch to which WAL never came. It must not
//! apply when WAL comes to its address on another course: whoever begins to write WAL leaves out
//! all that is known of switches behind it ([`Wal::begin`](super::wal::Wal::begin)), and the worker
//! decides anew what holds, for the next start and for standbys ([`reconcile`]).
//!
//! Where the first half of 4 fails, as on a full disk, the switch stays in force: pages may be
//! sealed already. It is remembered as unrecorded; whoever comes next, the worker at the latest,
//! records it before anything else is decided ([`record_newest`]), and until then it is a problem.
//! After a crash it is as if killed after 3.
//!
//! The keystore lock is held in 1, and in 3 and 4 up to the record: not while the barrier is
//! written, nor while anything waits for WAL. So others may rotate the key or switch meanwhile:
//! each has its own key and barrier, and in 3 it is asked once more whether the switch is still
//! wanted. What others log before or within a barrier makes it longer. A barrier that nobody uses,
//! or half of one, does no harm.

use pagevault_cipher::{CipherId, KeyVersion, Lsn};
use pagevault_keystore::wal::{Switch, Switches, WalPhase, key_place};
use pagevault_keystore::{Record, Scope, batch};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::{data_keys, refused};
use crate::audit::{self, Operation};
use crate::keys::store::{directory, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result, internal};
use crate::pg::{guc, process, wal};
use crate::shmem::wal::Wal;
use crate::{fault, shmem};

/// The cluster's database key wraps WAL keys.
const SCOPE: Scope = Scope::CLUSTER;

/// Makes a new WAL key and has it used from now on; returns its version, or that of a key which
/// somebody else made after it.
///
/// # Errors
/// When WAL is not encrypted.
pub(crate) fn rotate() -> Result<KeyVersion> {
    seal_with_new_key(true)?.ok_or_else(not_encrypted)
}

fn not_encrypted() -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "WAL is not encrypted")
        .hint("Turn on pagevault.wal_encryption first.")
}

/// Brings WAL to what `pagevault.wal_encryption` wants; for the worker. Remembers for the status
/// why that was not possible.
pub(crate) fn reconcile() -> Result<()> {
    shmem::required()?.wal.set_worker();
    let done = guc::wal_encryption().map_or(Ok(()), switch_to).and(lead_back());
    let problem = done.as_ref().err().map_or("", |report| report.message());
    {
        let _lock = KeystoreLock::acquire();
        shmem::required()?.wal.set_problem(problem);
    }
    done
}

/// Why WAL is not written as `pagevault.wal_encryption` wants it, here or on standbys.
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
        let done = audited("on", shmem::required()?.wal.heading().sealed().is_none(), || {
            seal_with_new_key(false)
        });
        if let Some(version) = done? {
            said(format!("pagevault: WAL is encrypted from now on, WAL key version {version}"));
        }
        return Ok(());
    }
    let is_sealed = {
        let lock = KeystoreLock::acquire();
        begun(&lock)?.heading().sealed().is_some()
    };
    let done = audited("off", is_sealed, || {
        let lock = KeystoreLock::acquire();
        if begun(&lock)?.heading().sealed().is_none() {
            return Ok(None);
        }
        switch(&lock, in_plaintext, Lsn::INVALID).map(Some)
    });
    if let Some(start) = done? {
        reach(start);
        said("pagevault: WAL is not encrypted any more".to_owned());
    }
    Ok(())
}

/// A switch by the worker, between two lines of the audit trail if it `changes` anything.
fn audited<T>(to: &str, changes: bool, switch: impl FnOnce() -> Result<T>) -> Result<T> {
    let operation = Operation {
        action: "wal_encryption",
        by: "wal_worker",
        to: Some(to.to_owned()),
        ..Operation::default()
    };
    if changes { audit::audited(operation, switch) } else { switch() }
}

/// Where the keystore has a switch to which WAL never came, decides anew that WAL is written as it
/// is.
fn lead_back() -> Result<()> {
    let start = {
        let lock = KeystoreLock::acquire();
        if !begun(&lock)?.is_led_astray() {
            return Ok(());
        }
        switch(&lock, as_it_is, Lsn::INVALID)?
    };
    reach(start);
    said("pagevault: a switch of WAL encryption that was lost with WAL does not count".to_owned());
    Ok(())
}

fn said(message: String) {
    Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message).send(PgLogLevel::LOG);
}

/// What is known of WAL keys, once this server has begun to write WAL and what is in force is
/// recorded.
fn begun(lock: &KeystoreLock) -> Result<&'static Wal> {
    let wal = &shmem::required()?.wal;
    wal::at_unwritten_page(Lsn::INVALID, |end, _| wal.begin(end));
    if let Some(switch) = wal.unrecorded() {
        record_newest(lock, switch)?;
        // Under the lock, so that nobody finds it recorded before WAL is there; the record was
        // waited for as well.
        reach(switch.start);
        said(
            "pagevault: a switch of WAL encryption that could not be recorded is recorded now"
                .to_owned(),
        );
    }
    Ok(wal)
}

/// Steps 1 to 4, if WAL is sealed, or not yet, as the caller expects. `None` if it is not so, from
/// the beginning or after the barrier.
fn seal_with_new_key(is_sealed: bool) -> Result<Option<KeyVersion>> {
    let cipher = guc::cipher();
    let expected = |wal: &Wal| wal.heading().sealed().is_some() == is_sealed;
    // Looked at before the lock is taken, for what it says of a refused key stands in the keystore.
    let usable = refused::require_usable(SCOPE);
    let (version, end) = {
        let lock = KeystoreLock::acquire();
        if !expected(begun(&lock)?) {
            return Ok(None);
        }
        require_room()?;
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
        if let Some(newer) = wal.heading().sealed().filter(|newer| *newer > version) {
            return Ok(Some(newer));
        }
        switch(&lock, |_| WalPhase::under(version), behind)?
    };
    reach(start);
    Ok(Some(version))
}

/// Before anything is written.
fn require_room() -> Result<()> {
    // Some are left for switching off.
    if (shmem::required()?.wal.switches.count() as usize) < Switches::CAPACITY - 16 {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("the WAL key has been changed {} times", Switches::CAPACITY),
    )
    .detail("All changes are kept, for WAL that is archived."))
}

/// The newest version that any switch is to, be it that WAL never came there.
fn newest_version() -> Result<Option<KeyVersion>> {
    let switches = shmem::required()?.wal.switches.iter();
    Ok(switches.filter_map(|switch| switch.phase.version).max())
}

/// The version after all for which there is a key, be it that it was never used.
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
    data_keys::make_key(file, data_key_version, cipher)
}

/// Steps 3 and 4 up to the record: the switch begins at `behind` or later. Returns where; WAL must
/// come there ([`reach`]), once the lock is given back.
fn switch(
    lock: &KeystoreLock,
    phase: impl FnOnce(WalPhase) -> WalPhase,
    behind: Lsn,
) -> Result<Lsn> {
    let wal = &shmem::required()?.wal;
    let last = wal.switches.newest();
    let step = last.map_or(0, |switch| switch.step).checked_add(1);
    let step = step.ok_or_else(|| internal("WAL has used up its switches".to_owned()))?;
    let phase = phase(wal.heading());
    // Plaintext has the number of a key as well: that of one that there is.
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
    // The worker tries again; it may be asleep, and this be another process.
    record_newest(lock, switch).inspect_err(|_| wal.wake_worker())?;
    Ok(switch.start)
}

/// Step 4 up to the record. An error leaves the switch in force and unrecorded: it cannot be taken
/// back, for pages may be written after it.
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

/// Has WAL come to the beginning of a switch: what anyone logs after this is behind it.
fn reach(start: Lsn) {
    wal::flush(wal::fill_up_to(start));
}

/// Logs the newest switch once more, after a start: if the server crashed before its record was
/// durable, the keystore has it and standbys do not. One that is not recorded at all is left to
/// [`reconcile`].
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
