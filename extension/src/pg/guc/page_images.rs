//! `full_page_writes`, a setting of the server. The assign hook is free (guc_tables.c), and called
//! in each process that has read the configuration, before the value is used.

use std::ffi::{CStr, c_void};

use pgrx::pg_sys;

use crate::pg::compat;
use crate::pg::process::{ProcessLocal, is_checkpointer};
use crate::pg::report::{Result, internal};

/// Called with the new value.
pub(crate) type Assigned = fn(bool);

static ASSIGNED: ProcessLocal<Option<Assigned>> = ProcessLocal::new(None);
static PREVIOUS: ProcessLocal<pg_sys::GucBoolAssignHook> = ProcessLocal::new(None);

/// Calls `assigned` with each new value of `full_page_writes`, in the postmaster and in the
/// checkpointer. The postmaster assigns it before it tells the others. The checkpointer makes it
/// take effect, at once (`UpdateSharedMemoryConfig`, checkpointer.c), but does not read the
/// configuration during an immediate checkpoint (`CheckpointWriteDelay`). From `_PG_init`.
pub(crate) fn watch(assigned: Assigned) -> Result<()> {
    let (settings, count) = compat::settings();
    for index in 0..count {
        // SAFETY: an array of that many pointers to settings with names, which live as long as the
        // process; in the postmaster, before any process is forked.
        unsafe {
            let setting = *settings.add(index);
            if CStr::from_ptr((*setting).name) != c"full_page_writes"
                || (*setting).vartype != pg_sys::config_type::PGC_BOOL
            {
                continue;
            }
            let hook = compat::assign_hook(setting);
            ASSIGNED.set(Some(assigned));
            PREVIOUS.set(*hook);
            *hook = Some(assign);
            return Ok(());
        }
    }
    Err(internal("the server has no setting full_page_writes".into()))
}

/// Contract: guc.c assigns a new value; must not raise errors.
unsafe extern "C-unwind" fn assign(value: bool, extra: *mut c_void) {
    // SAFETY: plain globals of this process; the previous hook gets what the server has passed.
    unsafe {
        if let Some(previous) = PREVIOUS.get() {
            previous(value, extra);
        }
        let concerns_all = !pg_sys::IsUnderPostmaster || is_checkpointer();
        if let Some(assigned) = ASSIGNED.get().filter(|_| concerns_all) {
            assigned(value);
        }
    }
}
