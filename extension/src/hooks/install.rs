//! Replacing the server's function pointers: which ones, in which major version.

use std::sync::OnceLock;

use pagevault_cipher::{CipherId, DataKey, DataKeyVersion, Fork, PAGE_SIZE, PageKey, page};
use pagevault_interpose::{Code, Error, Executable, Expected, Installed, Plan};
use pagevault_targets as targets;
use pgrx::PgSqlErrorCode;

use super::calls_seen::{self, Call};
use super::forward::Forward;
use super::{aio, files, smgr, sync, writing};
use crate::fault;
use crate::pg::compat::{BUILT_FOR, MAJOR};
use crate::pg::report::{Report, Result};
use crate::pg::wal;

/// A replacement: the bit that records its calls, the function, and where the original is stored.
struct Swap {
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

fn swap(call: Call, ours: *const (), keep: &'static dyn StoreOriginal) -> Swap {
    Swap { call, ours, keep }
}

/// The replacement of a storage manager function.
fn replacement(name: &str) -> Option<Swap> {
    Some(match name {
        "mdextend" => swap(Call::Extend, writing::mdextend as *const (), &smgr::MDEXTEND),
        "mdcreate" => swap(Call::Create, writing::mdcreate as *const (), &smgr::MDCREATE),
        "mdread" => swap(Call::Read, smgr::mdread as *const (), &smgr::MDREAD),
        "mdreadv" => swap(Call::Read, smgr::mdreadv as *const (), &smgr::MDREADV),
        "mdwrite" => swap(Call::Write, writing::mdwrite as *const (), &smgr::MDWRITE),
        "mdwritev" => swap(Call::Write, writing::mdwritev as *const (), &smgr::MDWRITEV),
        "mdzeroextend" => {
            swap(Call::ZeroExtend, smgr::mdzeroextend as *const (), &smgr::MDZEROEXTEND)
        }
        "mdstartreadv" => {
            swap(Call::StartRead, smgr::mdstartreadv as *const (), &smgr::MDSTARTREADV)
        }
        _ => return None,
    })
}

/// Finds all pointers, checks all, then replaces all. Fails closed: in any doubt nothing is
/// replaced and the server does not start.
pub(crate) fn install() -> Result<()> {
    self_check()?;
    wal::check_layout().map_err(|problem| refused(&problem))?;
    let exe = Executable::of_this_process().map_err(|e| refused(&e))?;
    let mut plan = Plan::new(&exe);
    plan_storage_manager(&mut plan)?;
    plan_sync_handler(&mut plan).map_err(|e| table_refused(&e))?;
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
    installed.verify().map_err(|e| refused(&e))?;
    INSTALLED.set(installed).map_err(|_| refused(&"pagevault is loaded already"))
}

/// What was replaced.
static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// The library, by its path, that has replaced pagevault's version of a function since.
pub(super) fn replaced_since(function: &str) -> Option<String> {
    let quoted = format!("\"{function}\"");
    let mut replaced = INSTALLED.get()?.replaced_since();
    replaced.find_map(|(what, library)| what.contains(&quoted).then_some(library))
}

fn plan_storage_manager(plan: &mut Plan<'_>) -> Result<()> {
    let mut table = targets::storage_manager(MAJOR);
    let mut swaps = Vec::new();
    for name in table.replaced {
        let missing = || refused(&format!("pagevault has no replacement of \"{name}\""));
        let swap = replacement(name).ok_or_else(missing)?;
        calls_seen::expect(swap.call);
        if fault::leaves_out(name) {
            table.anchors.push(name);
        } else {
            swaps.push((name, swap));
        }
    }
    let replaced: Vec<_> = swaps.iter().map(|(name, swap)| (*name, swap.ours)).collect();
    let originals =
        plan.table(table.name, &replaced, &table.anchors).map_err(|e| table_refused(&e))?;
    for ((_, swap), original) in swaps.iter().zip(originals) {
        swap.keep.store(original);
    }
    Ok(())
}

/// `syncsw` of sync.c, the table of sync handlers that a checkpoint calls.
fn plan_sync_handler(plan: &mut Plan<'_>) -> std::result::Result<(), Error> {
    let table = targets::sync_handlers();
    let ours = [("mdsyncfiletag", sync::mdsyncfiletag as *const ())];
    for original in plan.table(table.name, &ours, &table.anchors)? {
        sync::MDSYNCFILETAG.resolve(original.as_ptr());
    }
    Ok(())
}

/// PostgreSQL 18: the callbacks that complete reads. For the processes that call them, see
/// [`super::aio`].
fn plan_read_completion(exe: &Executable, plan: &mut Plan<'_>) -> std::result::Result<(), Error> {
    let [target_data, handle_data, leave_batch, release] = targets::ASYNCHRONOUS_IO;
    aio::GET_TARGET_DATA.resolve(exe.function(target_data)?.as_ptr());
    aio::GET_HANDLE_DATA.resolve(exe.function(handle_data)?.as_ptr());
    aio::LEAVE_BATCH.resolve(exe.function(leave_batch)?.as_ptr());
    aio::RELEASE.resolve(exe.function(release)?.as_ptr());
    let (files, local) = (targets::READS_OF_FILES, targets::READS_OF_LOCAL_BUFFERS);
    plan.require_null(files.object, files.null)?;
    plan.require_null(local.object, local.null)?;
    calls_seen::expect(Call::CompleteRead);
    if !fault::leaves_out(files.object) {
        let ours = aio::md_readv_complete as *const ();
        let original = plan.pointer(files.object, files.replaced, Expected::OwnFunction, ours)?;
        aio::MD_READV_COMPLETE.resolve(original.as_ptr());
    }
    let ours = aio::md_readv_report as *const ();
    let report = targets::REPORT_OF_READS;
    let original = plan.pointer(files.object, report, Expected::OwnFunction, ours)?;
    aio::MD_READV_REPORT.resolve(original.as_ptr());
    let ours = aio::local_readv_complete as *const ();
    let original = plan.pointer(local.object, local.replaced, Expected::OwnFunction, ours)?;
    aio::LOCAL_READV_COMPLETE.resolve(original.as_ptr());
    Ok(())
}

/// [`refused`], with the reason that is known if a table is nowhere, or has other members.
fn table_refused(error: &Error) -> Report {
    match error {
        Error::ReplacedBefore { .. } => refused(error).hint(
            "Name pagevault before that library in shared_preload_libraries, if it calls the functions that it replaces.",
        ),
        Error::TableNotOnce { places: 0, .. } => {
            refused(error).detail(targets::DIRECT_CALLS).hint(targets::OTHER_COMPILER)
        }
        _ => refused(error),
    }
}

fn refused(error: &dyn std::fmt::Display) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("pagevault cannot work with this server: {error}"),
    )
    .detail(format!(
        "Nothing was changed in the server. This pagevault was built for PostgreSQL {}.",
        BUILT_FOR.to_string_lossy()
    ))
    .hint(format!(
        "Install the packages of PostgreSQL that this server had before, or a newer package of \
         pagevault (postgresql-{MAJOR}-pagevault). Remove pagevault from \
         shared_preload_libraries to start without it; encrypted relations are then refused, not \
         damaged."
    ))
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
        // pd_lower, pd_upper, pd_special, pd_pagesize_version
        for (at, value) in [(12, 400), (14, 4000), (16, 8192), (18, PAGE_SIZE as u16 | 4)] {
            original[at..at + 2].copy_from_slice(&u16::to_le_bytes(value));
        }
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
