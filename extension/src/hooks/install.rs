//! Replacing the server's function pointers: which ones, in which major version.

use pagevault_cipher::{CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, PageKey, page};
use pagevault_interpose::{Code, Executable, Expected, Plan};
use pgrx::PgSqlErrorCode;

use super::calls_seen::{self, Call};
use super::forward::Forward;
use super::{aio, files, smgr, sync, writing};
use crate::fault;
use crate::pg::compat::MAJOR;
use crate::pg::report::{Report, Result};
use crate::pg::wal;

/// A storage manager function to replace: its name, the bit that records its calls, the
/// replacement, and where the original is stored.
struct Swap {
    name: &'static str,
    call: Call,
    ours: *const (),
    keep: &'static dyn StoreOriginal,
}

/// Stores the server's function.
trait StoreOriginal {
    fn store(&self, code: Code);
}

impl<F: Copy> StoreOriginal for Forward<F> {
    fn store(&self, code: Code) {
        self.resolve(code.as_ptr());
    }
}

fn swap(name: &'static str, call: Call, ours: *const (), keep: &'static dyn StoreOriginal) -> Swap {
    Swap { name, call, ours, keep }
}

/// The functions replaced in `smgrsw[0]` of this major.
fn storage_manager() -> Vec<Swap> {
    let mut swaps = vec![
        swap("mdextend", Call::Extend, writing::mdextend as *const (), &smgr::MDEXTEND),
        swap("mdcreate", Call::Create, writing::mdcreate as *const (), &smgr::MDCREATE),
    ];
    if MAJOR >= 17 {
        swaps.push(swap("mdreadv", Call::Read, smgr::mdreadv as *const (), &smgr::MDREADV));
        swaps.push(swap("mdwritev", Call::Write, writing::mdwritev as *const (), &smgr::MDWRITEV));
    } else {
        swaps.push(swap("mdread", Call::Read, smgr::mdread as *const (), &smgr::MDREAD));
        swaps.push(swap("mdwrite", Call::Write, writing::mdwrite as *const (), &smgr::MDWRITE));
    }
    if MAJOR >= 16 {
        swaps.push(swap(
            "mdzeroextend",
            Call::ZeroExtend,
            smgr::mdzeroextend as *const (),
            &smgr::MDZEROEXTEND,
        ));
    }
    if MAJOR >= 18 {
        swaps.push(swap(
            "mdstartreadv",
            Call::StartRead,
            smgr::mdstartreadv as *const (),
            &smgr::MDSTARTREADV,
        ));
    }
    swaps
}

/// Other functions that must be in the same table.
fn storage_manager_anchors() -> Vec<&'static str> {
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
    if MAJOR >= 17 {
        anchors.push("mdregistersync");
    }
    if MAJOR >= 18 {
        anchors.extend(["mdmaxcombine", "mdfd"]);
    }
    anchors
}

/// Finds all pointers, checks all, then replaces all. Fails closed: in any doubt nothing is
/// replaced and the server does not start.
pub(crate) fn install() -> Result<()> {
    self_check()?;
    wal::check_layout().map_err(|problem| refused(&problem))?;
    let exe = Executable::of_this_process().map_err(|e| refused(&e))?;
    let mut plan = Plan::new(&exe);
    let (mut swaps, mut anchors) = (storage_manager(), storage_manager_anchors());
    swaps.iter().for_each(|swap| calls_seen::expect(swap.call));
    for left_out in swaps.extract_if(.., |swap| fault::leaves_out(swap.name)) {
        anchors.push(left_out.name);
    }
    let replaced: Vec<_> = swaps.iter().map(|swap| (swap.name, swap.ours)).collect();
    let originals = plan.table("smgrsw", &replaced, &anchors).map_err(|e| refused(&e))?;
    for (swap, original) in swaps.iter().zip(originals) {
        swap.keep.store(original);
    }
    plan_sync_handler(&mut plan).map_err(|e| refused(&e))?;
    if MAJOR >= 18 {
        plan_read_completion(&exe, &mut plan).map_err(|e| refused(&e))?;
    }
    calls_seen::expect(Call::Open);
    calls_seen::expect(Call::WriteWal);
    // Last: finding the tables above reads files, which must use the original calls.
    files::plan(&mut plan).map_err(|e| refused(&e))?;
    // SAFETY: one thread, in the postmaster; each replacement has the signature of the original in
    // this major version, forwards to it (every `keep` above), and lives as long as the process.
    let installed = unsafe { plan.install() }.map_err(|e| refused(&e))?;
    installed.verify().map_err(|e| refused(&e))
}

/// `syncsw` of sync.c, the table of sync handlers that a checkpoint calls.
fn plan_sync_handler(plan: &mut Plan<'_>) -> std::result::Result<(), pagevault_interpose::Error> {
    const ANCHORS: &[&str] = &[
        "mdunlinkfiletag",
        "mdfiletagmatches",
        "clogsyncfiletag",
        "committssyncfiletag",
        "multixactoffsetssyncfiletag",
        "multixactmemberssyncfiletag",
    ];
    let ours = [("mdsyncfiletag", sync::mdsyncfiletag as *const ())];
    for original in plan.table("syncsw", &ours, ANCHORS)? {
        sync::MDSYNCFILETAG.resolve(original.as_ptr());
    }
    Ok(())
}

/// PostgreSQL 18: `aio_md_readv_cb` and `aio_local_buffer_readv_cb`, each a `PgAioHandleCallbacks`
/// of four pointers: stage, complete_shared, complete_local, report. For the processes that call
/// them, see [`super::aio`].
fn plan_read_completion(
    exe: &Executable,
    plan: &mut Plan<'_>,
) -> std::result::Result<(), pagevault_interpose::Error> {
    const OF_FILES: &str = "aio_md_readv_cb";
    const OF_LOCAL_BUFFERS: &str = "aio_local_buffer_readv_cb";
    const COMPLETE_SHARED: usize = size_of::<*const ()>();
    const COMPLETE_LOCAL: usize = 2 * size_of::<*const ()>();
    aio::GET_TARGET_DATA.resolve(exe.function("pgaio_io_get_target_data")?.as_ptr());
    aio::GET_HANDLE_DATA.resolve(exe.function("pgaio_io_get_handle_data")?.as_ptr());
    aio::LEAVE_BATCH.resolve(exe.function("pgaio_error_cleanup")?.as_ptr());
    aio::RELEASE.resolve(exe.function("pgaio_io_release")?.as_ptr());
    // With these callbacks the server would verify pages before we open them, or complete reads of
    // temporary relations in any process.
    plan.require_null(OF_FILES, COMPLETE_LOCAL)?;
    plan.require_null(OF_LOCAL_BUFFERS, COMPLETE_SHARED)?;
    calls_seen::expect(Call::CompleteRead);
    if !fault::leaves_out(OF_FILES) {
        let ours = aio::md_readv_complete as *const ();
        let original = plan.pointer(OF_FILES, COMPLETE_SHARED, Expected::OwnFunction, ours)?;
        aio::MD_READV_COMPLETE.resolve(original.as_ptr());
    }
    let ours = aio::local_readv_complete as *const ();
    let original = plan.pointer(OF_LOCAL_BUFFERS, COMPLETE_LOCAL, Expected::OwnFunction, ours)?;
    aio::LOCAL_READV_COMPLETE.resolve(original.as_ptr());
    Ok(())
}

fn refused(error: &dyn std::fmt::Display) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("pagevault cannot work with this server: {error}"),
    )
    .detail("Nothing was changed in the server.")
    .hint("Remove pagevault from shared_preload_libraries to start without it; encrypted relations are then refused, not damaged.")
}

/// Seals and opens a page with every cipher, before any real page depends on it.
fn self_check() -> Result<()> {
    let failed = || {
        Report::new(
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            "pagevault: the page cipher failed its self-check",
        )
        .detail("A test page that was encrypted and decrypted again is not what it was.")
    };
    let version = DataKeyVersion::FIRST;
    for cipher in CipherId::ALL {
        let bytes: [u8; 64] = std::array::from_fn(|i| i as u8);
        let key = DataKey::from_bytes(cipher, &bytes[..cipher.key_len()]);
        let key = PageKey::new(&key.map_err(|_| failed())?);
        let mut original = [0u8; PAGE_SIZE];
        for (i, byte) in original.iter_mut().enumerate().skip(24) {
            *byte = i as u8;
        }
        // pd_pagesize_version
        original[18..20].copy_from_slice(&(PAGE_SIZE as u16 | 4).to_le_bytes());
        let mut copy = original;
        page::seal(&mut copy, &key, version, 7, Fork::Main, true);
        let sealed = copy != original && page::version_of(&copy) == Some(version);
        let opened = page::open(&mut copy, &key, 7, Fork::Main, true);
        if !sealed || opened.is_err() || copy[16..] != original[16..] {
            return Err(failed());
        }
    }
    Ok(())
}
