//! What pg_control says that the data directory contains.

use std::fs::File;
use std::io;
use std::time::Duration;

use pagevault_cipher::Lsn;
use pagevault_keystore::anchor::{Position, start_of_label};
use pgrx::pg_sys;

use super::process;

/// From pg_control.
pub(crate) struct ControlFile {
    /// The system identifier.
    pub(crate) system: u64,
    /// The last checkpoint; in recovery, the last restart point's.
    pub(crate) checkpoint: Position,
    /// The place that recovery must reach at least.
    pub(crate) minimum: Position,
    /// From where recovery would replay WAL.
    pub(crate) redo: Lsn,
    /// Whether WAL got images of changed pages at this checkpoint.
    pub(crate) full_page_writes: bool,
}

/// Like [`read`], which it repeats if the file is being written.
pub(crate) fn read_again() -> Option<ControlFile> {
    const TRIES: u32 = 10;
    const PAUSE: Duration = Duration::from_millis(10);
    (0..TRIES).find_map(|_| {
        let read = read();
        if read.is_none() {
            std::thread::sleep(PAUSE);
        }
        read
    })
}

/// From where this start replays WAL: as `backup_label` says if it exists, else pg_control
/// (`InitWalRecovery`, xlogrecovery.c). [`Lsn::INVALID`] if it is unknown.
pub(crate) fn replayed_from() -> Lsn {
    match std::fs::read(backup_label()) {
        Ok(label) => start_of_label(&String::from_utf8_lossy(&label)).unwrap_or_default(),
        Err(_) => process::redo_start(),
    }
}

/// Whether this start is that of a base backup, or follows `pg_rewind`.
pub(crate) fn is_of_backup() -> bool {
    backup_label().exists()
}

fn backup_label() -> std::path::PathBuf {
    process::data_directory().join("backup_label")
}

/// Reads pg_control; `None` if that fails, also because it is being written.
pub(crate) fn read() -> Option<ControlFile> {
    let mut crc_ok = false;
    let position = |timeline, lsn| Position { timeline, lsn: Lsn(lsn) };
    // SAFETY: reads pg_control in the data directory; the result is null or a whole palloc'd
    // structure, which is freed here: the worker reads it again and again.
    unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &raw mut crc_ok);
        if control.is_null() {
            return None;
        }
        let checkpoint = position((*control).checkPointCopy.ThisTimeLineID, (*control).checkPoint);
        let minimum = position((*control).minRecoveryPointTLI, (*control).minRecoveryPoint);
        let redo = Lsn((*control).checkPointCopy.redo);
        let system = (*control).system_identifier;
        let full_page_writes = (*control).checkPointCopy.fullPageWrites;
        let read = ControlFile { system, checkpoint, minimum, redo, full_page_writes };
        pg_sys::pfree(control.cast());
        crc_ok.then_some(read)
    }
}

/// Makes what [`read`] has returned durable: the server syncs pg_control only after it has written
/// it (`update_controlfile`, controldata_utils.c).
///
/// # Errors
/// If it cannot be synced.
pub(crate) fn sync() -> io::Result<()> {
    if !process::fsync() {
        return Ok(());
    }
    File::open(process::data_directory().join("global/pg_control"))?.sync_all()
}
