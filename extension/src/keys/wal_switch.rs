//! Switching WAL encryption on and off, and rotating its key.
//!
//! In this order:
//!
//! 1. The new key, wrapped, goes to the keystore, where it is safe, and to WAL. Nobody uses it yet.
//! 2. A barrier goes to WAL behind it. Recovery reads ahead, and must have replayed the key before it
//!    meets a page that is sealed with it. Records that have no room in its buffer for decoded records
//!    it decodes only when those before them are replayed.
//! 3. The switch is put into shared memory. It begins with the first page behind the barrier that is
//!    not begun on disk, and while WAL is written that cannot change: WALWriteLock is held.
//! 4. The switch goes to the keystore and to WAL, where standbys find it.
//!
//! Killed after 1 or 2, the server has a key too many. After 3, pages may be sealed with a key that it
//! has, though it knows nothing of the switch: pages say what they are, so they are read; it goes on as
//! before the switch, and the worker switches again.

use pagevault_cipher::CipherId;
use pagevault_keystore::wal::{Switch, Switches, WalPhase, key_place};
use pagevault_keystore::{Record, batch};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::persist::{self, internal, shared_memory};
use super::{data_keys, revoked, shared};
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, wal};

/// The cluster's database key wraps WAL keys.
const SCOPE: u32 = 0;

/// Smallest barrier, in bytes. Standbys may have a larger buffer for decoded records than this server.
const BARRIER_MIN: usize = 1 << 20;

/// Makes a new WAL key and has it used from now on; returns its generation.
///
/// # Errors
/// When WAL is not encrypted.
pub(crate) fn rotate() -> Result<u32> {
    let lock = KeystoreLock::acquire();
    if shared_memory()?.wal.switches.newest().sealed().is_none() {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "WAL is not encrypted",
        )
        .hint("Turn on pagevault.wal_encryption first."));
    }
    seal_with_new_key(&lock)
}

/// Brings WAL to what `pagevault.wal_encryption` wants; for the worker. Remembers for the status why
/// that was not possible.
pub(crate) fn reconcile() -> Result<()> {
    let done = guc::wal_encryption().map_or(Ok(()), switch_to);
    let problem = done.as_ref().err().map_or("", |report| report.message());
    {
        let _lock = KeystoreLock::acquire();
        shared_memory()?.wal.set_problem(problem);
    }
    done
}

fn switch_to(sealed: bool) -> Result<()> {
    let lock = KeystoreLock::acquire();
    let switches = &shared_memory()?.wal.switches;
    // Not the newest switch: after pg_resetwal or recovery to a point WAL may end before it.
    if switches.at(wal::end()).phase.sealed().is_some() == sealed {
        return Ok(());
    }
    if sealed {
        let generation = seal_with_new_key(&lock)?;
        said(format!("pagevault: WAL is encrypted from now on, key generation {generation}"));
    } else {
        let phase = WalPhase { plaintext: true, ..switches.newest() };
        switch(&lock, phase, 0)?;
        said("pagevault: WAL is not encrypted any more".to_owned());
    }
    Ok(())
}

fn said(message: String) {
    Report::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message).send(PgLogLevel::LOG);
}

/// Steps 1 to 4.
fn seal_with_new_key(lock: &KeystoreLock) -> Result<u32> {
    let cipher = guc::cipher().map_err(|name| {
        Report::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("unknown cipher \"{name}\""),
        )
    })?;
    require_room()?;
    let generation = next_generation()?;
    let record = new_key(generation, cipher)?;
    let end = persist::append(lock, SCOPE, &[record])?;
    wal::flush(end);
    let behind = wal::insert_barrier(BARRIER_MIN.max(2 * guc::wal_decode_buffer_size()));
    switch(lock, WalPhase { generation, plaintext: false }, behind)?;
    Ok(generation)
}

/// Before anything is written.
fn require_room() -> Result<()> {
    // One is left for switching off.
    if (shared_memory()?.wal.switches.count() as usize) < Switches::CAPACITY - 1 {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        format!("the WAL key has been changed {} times", Switches::CAPACITY),
    )
    .detail("All changes are kept, for WAL that is archived."))
}

/// The generation after all for which there is a key, be it that it was never used.
fn next_generation() -> Result<u32> {
    let mut generation = shared_memory()?.wal.switches.newest().generation;
    loop {
        generation = generation
            .checked_add(1)
            .ok_or_else(|| internal("WAL has used up its key generations".to_owned()))?;
        let (file, epoch) = key_place(generation);
        if !shared::has_key(file, epoch) {
            return Ok(generation);
        }
    }
}

fn new_key(generation: u32, cipher: CipherId) -> Result<Record> {
    if shared_memory()?.secrets.newest(SCOPE).is_none() {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "cannot encrypt WAL: the cluster has no master key",
        )
        .hint("Set one with pagevault.set_cluster_master_key()."));
    }
    revoked::require_usable(SCOPE)?;
    let (file, epoch) = key_place(generation);
    data_keys::make_key(file, epoch, cipher)
}

/// Steps 3 and 4: the switch begins at `behind` or later.
fn switch(lock: &KeystoreLock, phase: WalPhase, behind: u64) -> Result<()> {
    let switches = &shared_memory()?.wal.switches;
    let (added, start) =
        wal::at_unwritten_page(behind, |start| (switches.add(Switch { start, phase }), start));
    added.map_err(|full| internal(full.to_string()))?;
    persist::append(lock, SCOPE, &[Record::WalSwitch(Switch { start, phase })])?;
    // What anyone logs after this call is behind the switch.
    let end = wal::fill_up_to(start);
    wal::flush(end);
    Ok(())
}

/// Logs the newest switch once more, after a start: if the server crashed before its record was
/// durable, the keystore has it and standbys do not.
pub(crate) fn repeat_newest() -> Result<()> {
    let _lock = KeystoreLock::acquire();
    let shared = shared_memory()?;
    let newest = shared.wal.switches.iter().max_by_key(|switch| (switch.start, switch.phase));
    let (Some(switch), Some(id)) = (newest, shared.control.keystore_id()) else { return Ok(()) };
    let batch = batch::encode(&[Record::WalSwitch(switch)]);
    let batch = batch.map_err(|error| internal(format!("keystore: {error}")))?;
    wal::insert_keys(SCOPE, &id, &batch);
    Ok(())
}
