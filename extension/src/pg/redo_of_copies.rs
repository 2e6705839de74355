//! Redo of raw copies of databases: `CREATE DATABASE` with the strategy `file_copy`, and `ALTER
//! DATABASE ... SET TABLESPACE`. The server copies the files of one tablespace for each record.

use pgrx::pg_guard;
use pgrx::pg_sys::{self, XLogReaderState, xl_dbase_create_file_copy_rec};

use super::process::ProcessLocal;

type Redo = unsafe extern "C-unwind" fn(*mut XLogReaderState);

const DATABASE: usize = pg_sys::RmgrIds::RM_DBASE_ID as usize;

/// `XLOG_DBASE_CREATE_FILE_COPY` (dbcommands_xlog.h)
const FILE_COPY: u8 = 0x00;

/// `XLR_INFO_MASK` (xlogrecord.h)
const INFO_OF_SERVER: u8 = 0x0F;

/// Files of a database in one tablespace.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) tablespace: u32,
    pub(crate) database: u32,
}

#[derive(Clone, Copy)]
struct Watch {
    /// The server's function.
    redo: Option<Redo>,
    /// What is done when files have been copied.
    copied: fn(from: Place, to: Place),
}

static WATCH: ProcessLocal<Watch> = ProcessLocal::new(Watch { redo: None, copied: |_, _| () });

/// In the process that replays WAL, before it replays any.
pub(crate) fn watch(copied: fn(from: Place, to: Place)) {
    // SAFETY: a table of the server, in memory of this process, which custom resource managers are
    // entered in as well (`RegisterCustomRmgr`, rmgr.c). Nobody else uses it now.
    unsafe {
        let manager = (&raw mut pg_sys::RmgrTable).cast::<pg_sys::RmgrData>().add(DATABASE);
        let redo = (*manager).rm_redo;
        WATCH.with(|watch| *watch = Watch { redo, copied });
        (*manager).rm_redo = Some(database_redo);
    }
}

/// Contract: called by ApplyWalRecord with a record of a database, as the server's function.
#[pg_guard]
unsafe extern "C-unwind" fn database_redo(record: *mut XLogReaderState) {
    let Watch { redo, copied } = WATCH.with(|watch| *watch);
    let Some(redo) = redo else { return };
    // SAFETY: the server's function, with its own argument.
    unsafe { redo(record) };
    // SAFETY: the record is still the one that was replayed.
    if let Some((from, to)) = unsafe { copy_of(record) } {
        copied(from, to);
    }
}

/// The places from which and to which the record has copied files.
///
/// # Safety
/// The record is decoded, and is one of a database.
unsafe fn copy_of(record: *mut XLogReaderState) -> Option<(Place, Place)> {
    // SAFETY: main_data has main_data_len bytes, as long as the record is the reader's; the struct
    // consists of numbers, and is read wherever it is.
    let copy = unsafe {
        let decoded = (*record).record.as_ref()?;
        let is_copy = decoded.header.xl_info & !INFO_OF_SERVER == FILE_COPY
            && decoded.main_data_len as usize >= size_of::<xl_dbase_create_file_copy_rec>();
        if !is_copy {
            return None;
        }
        decoded.main_data.cast::<xl_dbase_create_file_copy_rec>().read_unaligned()
    };
    let place = |tablespace: pg_sys::Oid, database: pg_sys::Oid| Place {
        tablespace: tablespace.to_u32(),
        database: database.to_u32(),
    };
    Some((place(copy.src_tablespace_id, copy.src_db_id), place(copy.tablespace_id, copy.db_id)))
}
