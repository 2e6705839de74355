//! Custom resource manager: wrapped keys are logged in WAL, so that crash recovery, standbys and
//! point-in-time recovery have the same data keys as the primary.
//!
//! Redo adds missing keys. It removes only keys that were destroyed on purpose. Pages from which
//! deleted rows were cleared are logged as images, see [`remnants`].

use pagevault_keystore::{Lsn, batch};
use pgrx::{PgSqlErrorCode, pg_guard, pg_sys};

use super::{proof, restart_points, smgr};
use crate::keys::redo as key_redo;
use crate::keys::store::directory;
use crate::keys::usage::{authenticated, destruction, interim, overwriting};
use crate::page::{placeholders, proven, raw_copies, standby_map, undecided};
use crate::pg::report::{Report, Result};
use crate::pg::{consistency, process, redo_of_copies, redo_record, remnants, wal};
use crate::shmem;

static MANAGER: Manager = Manager(pg_sys::RmgrData {
    rm_name: c"pagevault".as_ptr(),
    rm_redo: Some(redo),
    rm_desc: Some(desc),
    rm_identify: Some(identify),
    rm_startup: Some(startup),
    rm_cleanup: Some(cleanup),
    rm_mask: None,
    rm_decode: None,
});

struct Manager(pg_sys::RmgrData);
// SAFETY: a constant table of static pointers.
unsafe impl Sync for Manager {}

/// Registers the resource manager; from `_PG_init`.
pub(crate) fn register() {
    // SAFETY: in the postmaster while libraries are preloaded; the server only reads the static
    // table.
    unsafe { pg_sys::RegisterCustomRmgr(wal::RMGR_ID, (&raw const MANAGER.0).cast_mut()) }
}

/// Op code and payload of the record being replayed.
///
/// # Safety
/// `record` is a reader with a decoded record.
unsafe fn parts<'a>(record: *mut pg_sys::XLogReaderState) -> (u8, &'a [u8]) {
    // SAFETY: the caller's reader has a record; main_data has main_data_len bytes, valid until the
    // next record is read.
    unsafe {
        let decoded = &*(*record).record;
        let op = decoded.header.xl_info & !(pg_sys::XLR_INFO_MASK as u8);
        if decoded.main_data.is_null() {
            return (op, &[]);
        }
        (op, std::slice::from_raw_parts(decoded.main_data.cast(), decoded.main_data_len as usize))
    }
}

/// Contract: startup process, not in a critical section; errors end recovery.
#[pg_guard]
unsafe extern "C-unwind" fn redo(record: *mut pg_sys::XLogReaderState) {
    // SAFETY: the server passes a reader that has decoded the record, which is valid until we
    // return.
    let (op, payload) = unsafe {
        let (op, payload) = parts(record);
        if op == wal::OP_PAGE {
            remnants::redo(record);
        }
        (op, payload)
    };
    match op {
        wal::OP_KEYS => {}
        wal::OP_BARRIER | wal::OP_PAGE => return,
        _ => unknown_op(op).send(pgrx::prelude::PgLogLevel::PANIC),
    }
    // SAFETY: numbers in the server's reader, as above.
    let place = unsafe { (Lsn((*record).ReadRecPtr), Lsn((*record).EndRecPtr)) };
    if let Err(report) = replay_keys(payload, place) {
        report.send(pgrx::prelude::PgLogLevel::PANIC);
    }
}

/// Replays records of the keystore.
fn replay_keys(payload: &[u8], place: (Lsn, Lsn)) -> Result<()> {
    let (scope, id, batch) = wal::split_payload(payload).ok_or_else(damaged)?;
    let records = key_redo::decode(batch)?;
    proven::replaying(&records);
    key_redo::replay(scope, id, &records, place)?;
    standby_map::replayed(&records);
    if placeholders::any_awaited() {
        placeholders::replayed(&records);
    }
    Ok(())
}

/// Contract: startup process, before it replays the first record; not in a critical section.
#[pg_guard]
unsafe extern "C-unwind" fn startup() {
    proof::require_of_server();
    process::note_recovery();
    restart_points::watch_exit();
    redo_record::watch(|file| directory::locked_group(file).is_some());
    redo_of_copies::watch(|from, to| {
        raw_copies::replayed(from, to).unwrap_or_else(|report| report.fatal());
    });
    consistency::watch(consistent);
}

fn consistent() {
    restart_points::at_consistency(|| {
        placeholders::require_none(smgr::unknown_version_on_disk);
        undecided::judge(smgr::is_authentic_on_disk);
        proven::write();
        let is_first = shmem::get().is_some_and(|shared| !shared.control.was_consistent());
        if is_first {
            overwriting::destroy_former().unwrap_or_else(|report| report.fatal());
        }
        interim::drop_locked_pages().unwrap_or_else(|report| report.fatal());
        if let Some(shared) = shmem::get() {
            shared.control.set_consistent();
        }
    });
}

/// Contract: startup process, when all WAL is replayed, before the checkpoint that ends recovery.
#[pg_guard]
unsafe extern "C-unwind" fn cleanup() {
    consistent();
    destruction::after_redo();
    authenticated::page_images_after_redo();
    if let Some(shared) = shmem::get().filter(|_| process::is_archive_recovery()) {
        shared.control.set_was_standby();
    }
}

/// Contract: any process that describes WAL (pg_walinspect, error contexts); must not raise errors.
#[pg_guard]
unsafe extern "C-unwind" fn desc(buffer: pg_sys::StringInfo, record: *mut pg_sys::XLogReaderState) {
    // SAFETY: the server passes a reader that has decoded the record, which is valid until we
    // return.
    let (op, payload) = unsafe { parts(record) };
    let text = describe(op, payload);
    // SAFETY: appends a copy of `text` to the server's string buffer.
    unsafe {
        pg_sys::appendBinaryStringInfo(buffer, text.as_ptr().cast(), text.len() as i32);
    }
}

fn describe(op: u8, payload: &[u8]) -> String {
    if op != wal::OP_KEYS {
        return String::new();
    }
    let Some((scope, _, records)) = wal::split_payload(payload) else { return "damaged".into() };
    match batch::decode(records) {
        Ok(records) => {
            let list: Vec<String> = records.iter().map(batch::describe).collect();
            format!("scope {scope}: {}", list.join("; "))
        }
        Err(error) => format!("scope {scope}: damaged ({error})"),
    }
}

/// Contract: any process that describes WAL; must not raise errors.
#[pg_guard]
unsafe extern "C-unwind" fn identify(info: u8) -> *const std::ffi::c_char {
    match info & !(pg_sys::XLR_INFO_MASK as u8) {
        wal::OP_KEYS => c"KEYS".as_ptr(),
        wal::OP_BARRIER => c"BARRIER".as_ptr(),
        wal::OP_PAGE => c"PAGE".as_ptr(),
        _ => std::ptr::null(),
    }
}

fn unknown_op(op: u8) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("pagevault: unknown WAL op code {op:#04x}"),
    )
    .detail("The record was written by a newer version of pagevault, or it is damaged.")
    .hint("Install the pagevault version that wrote this WAL.")
}

fn damaged() -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_DATA_CORRUPTED, "pagevault: damaged WAL record")
}
