//! Identifiers and paths of relation files.

use pagevault_keystore::{RelFile, Scope};
use pgrx::pg_sys;

/// `INVALID_PROC_NUMBER` (17+), `InvalidBackendId` before: the backend number of relations that all
/// backends share.
pub(crate) const SHARED_BACKEND: i32 = -1;

/// A relation file as the storage manager addresses it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SmgrFile {
    /// Tablespace, database and relfilenumber.
    pub(crate) file: RelFile,
    /// For a temporary relation, the backend that owns it and alone reads and writes the file;
    /// otherwise [`SHARED_BACKEND`].
    pub(crate) backend: i32,
}

impl SmgrFile {
    /// Whether the file belongs to a temporary relation.
    #[inline]
    pub(crate) fn is_temporary(self) -> bool {
        self.backend != SHARED_BACKEND
    }
}

#[cfg(feature = "pg15")]
pub(crate) type Locator = pg_sys::RelFileNode;
#[cfg(not(feature = "pg15"))]
pub(crate) type Locator = pg_sys::RelFileLocator;

/// The server's `RelFileLocator` as our type.
#[cfg(feature = "pg15")]
pub(crate) fn rel_file(locator: Locator) -> RelFile {
    RelFile {
        tablespace: locator.spcNode.to_u32(),
        database: locator.dbNode.to_u32(),
        relation: locator.relNode.to_u32(),
    }
}

/// The server's `RelFileLocator` as our type.
#[cfg(not(feature = "pg15"))]
pub(crate) fn rel_file(locator: Locator) -> RelFile {
    RelFile {
        tablespace: locator.spcOid.to_u32(),
        database: locator.dbOid.to_u32(),
        relation: locator.relNumber.to_u32(),
    }
}

/// The file of a block that a WAL record names.
pub(crate) fn file_of_block(block: &pg_sys::DecodedBkpBlock) -> RelFile {
    #[cfg(feature = "pg15")]
    return rel_file(block.rnode);
    #[cfg(not(feature = "pg15"))]
    return rel_file(block.rlocator);
}

/// Our type as the server's `RelFileLocator`.
pub(crate) fn locator(file: RelFile) -> Locator {
    #[cfg(feature = "pg15")]
    return Locator {
        spcNode: file.tablespace.into(),
        dbNode: file.database.into(),
        relNode: file.relation.into(),
    };
    #[cfg(not(feature = "pg15"))]
    return Locator {
        spcOid: file.tablespace.into(),
        dbOid: file.database.into(),
        relNumber: file.relation.into(),
    };
}

/// `RelFileLocator` that identifies a key log in sync requests: no relation is in tablespace 0. The
/// scope takes the place of the relfilenumber, not of the database. Requests for a database are
/// cancelled when it is dropped or moved to another tablespace, on a standby too
/// (`ForgetDatabaseSyncRequests`, md.c), but its keys are still needed.
fn keystore_locator(scope: Scope) -> Locator {
    locator(RelFile { tablespace: 0, database: 0, relation: scope.number() })
}

/// The sync request for the key log of `scope`.
pub(crate) fn keystore_tag(scope: Scope) -> pg_sys::FileTag {
    pg_sys::FileTag {
        handler: pg_sys::SyncRequestHandler::SYNC_HANDLER_MD as i16,
        forknum: pg_sys::ForkNumber::MAIN_FORKNUM as i16,
        #[cfg(feature = "pg15")]
        rnode: keystore_locator(scope),
        #[cfg(not(feature = "pg15"))]
        rlocator: keystore_locator(scope),
        segno: 0,
    }
}

/// The scope whose key log a sync request is for, if it is one of ours.
pub(crate) fn keystore_of_tag(tag: &pg_sys::FileTag) -> Option<Scope> {
    #[cfg(feature = "pg15")]
    let file = rel_file(tag.rnode);
    #[cfg(not(feature = "pg15"))]
    let file = rel_file(tag.rlocator);
    (file.tablespace == 0 && file.database == 0).then_some(Scope::database(file.relation))
}

/// Path of one fork of a permanent relation, relative to the data directory (`relpathperm`).
pub(crate) fn relation_path(file: RelFile, fork: pg_sys::ForkNumber::Type) -> String {
    // SAFETY: GetRelationPath only formats its arguments; the result is palloc'd (18: returned by
    // value).
    unsafe {
        let path = pg_sys::GetRelationPath(
            file.database.into(),
            file.tablespace.into(),
            file.relation.into(),
            SHARED_BACKEND,
            fork,
        );
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return std::ffi::CStr::from_ptr(path.str_.as_ptr()).to_string_lossy().into_owned();
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        return std::ffi::CStr::from_ptr(path).to_string_lossy().into_owned();
    }
}

/// Directory of a database in a tablespace, relative to the data directory (`GetDatabasePath`).
pub(crate) fn database_path(database: u32, tablespace: u32) -> String {
    // SAFETY: only formats its arguments; the result is palloc'd.
    unsafe {
        let path = pg_sys::GetDatabasePath(database.into(), tablespace.into());
        std::ffi::CStr::from_ptr(path).to_string_lossy().into_owned()
    }
}
