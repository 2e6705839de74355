//! The lists: tables, callbacks and calls of each major.

/// Why a table is not there, in a server that is otherwise as it should be.
pub const DIRECT_CALLS: &str = "The server's compiler has replaced calls through the table by direct \
     calls, and removed it. Clang 20 and newer do that with PostgreSQL's own flags.";

/// The remedy.
pub const OTHER_COMPILER: &str = "Ask for a server that was built by GCC, or by clang with \
     -fwrapv-pointer in CFLAGS. \"pagevault-keyring check-server\" examines a server without starting \
     it.";

/// A table of functions in the server's constants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Its name in PostgreSQL's sources.
    pub name: &'static str,
    /// Members that are replaced.
    pub replaced: Vec<&'static str>,
    /// Other members, which identify the table.
    pub anchors: Vec<&'static str>,
}

/// `smgrsw` of smgr.c: the functions of md.c.
#[must_use]
pub fn storage_manager(major: u32) -> Table {
    let mut replaced = vec!["mdextend", "mdcreate"];
    replaced.extend(if major >= 17 { ["mdreadv", "mdwritev"] } else { ["mdread", "mdwrite"] });
    let mut anchors = vec![
        "mdinit",
        "mdopen",
        "mdclose",
        "mdexists",
        "mdunlink",
        "mdprefetch",
        "mdwriteback",
        "mdnblocks",
        "mdtruncate",
        "mdimmedsync",
    ];
    if major >= 16 {
        replaced.push("mdzeroextend");
    }
    if major >= 17 {
        anchors.push("mdregistersync");
    }
    if major >= 18 {
        replaced.push("mdstartreadv");
        anchors.extend(["mdmaxcombine", "mdfd"]);
    }
    Table { name: "smgrsw", replaced, anchors }
}

/// `syncsw` of sync.c: the sync handlers that a checkpoint calls.
#[must_use]
pub fn sync_handlers() -> Table {
    Table {
        name: "syncsw",
        replaced: vec!["mdsyncfiletag"],
        anchors: vec![
            "mdunlinkfiletag",
            "mdfiletagmatches",
            "clogsyncfiletag",
            "committssyncfiletag",
            "multixactoffsetssyncfiletag",
            "multixactmemberssyncfiletag",
        ],
    }
}

/// A function pointer in an exported `PgAioHandleCallbacks` (PostgreSQL 18), which has four: stage,
/// complete_shared, complete_local, report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Callbacks {
    /// The exported object.
    pub object: &'static str,
    /// Offset of the pointer that is replaced.
    pub replaced: usize,
    /// Offset of the pointer that must be null. With that callback the server would verify pages
    /// before we open them, or complete reads of temporary relations in any process.
    pub null: usize,
}

const COMPLETE_SHARED: usize = 8;
const COMPLETE_LOCAL: usize = 16;

/// Offset of the pointer to `report` in [`READS_OF_FILES`], which is replaced too.
pub const REPORT_OF_READS: usize = 24;

/// Completion of reads of files.
pub const READS_OF_FILES: Callbacks =
    Callbacks { object: "aio_md_readv_cb", replaced: COMPLETE_SHARED, null: COMPLETE_LOCAL };

/// Completion of reads of temporary relations.
pub const READS_OF_LOCAL_BUFFERS: Callbacks = Callbacks {
    object: "aio_local_buffer_readv_cb",
    replaced: COMPLETE_LOCAL,
    null: COMPLETE_SHARED,
};

/// Functions of asynchronous I/O that are called, and not replaced.
pub const ASYNCHRONOUS_IO: [&str; 4] = [
    "pgaio_io_get_target_data",
    "pgaio_io_get_handle_data",
    "pgaio_error_cleanup",
    "pgaio_io_release",
];

/// A function of the C library, under all names by which a build may import it. On 64-bit platforms
/// `x` and `x64` are the same function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Names of the call.
    pub names: &'static [&'static str],
    /// Variants with other arguments that `_FORTIFY_SOURCE` makes.
    pub checked: &'static [&'static str],
    /// Whether every server imports it.
    pub required: bool,
}

const fn call(
    names: &'static [&'static str],
    checked: &'static [&'static str],
    required: bool,
) -> Call {
    Call { names, checked, required }
}

/// The calls of the server on files.
pub const CALLS: [Call; 9] = [
    call(&["open", "open64"], &["__open_2", "__open64_2"], true),
    call(&["close"], &[], true),
    call(&["read"], &["__read_chk"], true),
    call(&["write"], &[], true),
    call(&["pread", "pread64"], &["__pread_chk", "__pread64_chk"], true),
    call(&["pwrite", "pwrite64"], &[], true),
    // Not used before 17.
    call(&["preadv", "preadv64"], &[], false),
    call(&["pwritev", "pwritev64"], &[], true),
    call(&["ftruncate", "ftruncate64"], &[], true),
];
