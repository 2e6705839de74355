//! The moment at which recovery says that the data directory is consistent.
//!
//! PostgreSQL has no hook there. But it tells its log, "consistent recovery state reached"
//! (`CheckRecoveryConsistency`, xlogrecovery.c, 15 to 18), after it has set `reachedConsistency`
//! and before it lets anybody in; and it shows messages to `emit_log_hook` first. (After a crash it
//! is never consistent before all WAL is replayed, and says nothing; the resource managers are told
//! then.)

use pgrx::{pg_guard, pg_sys};

use super::process::ProcessLocal;
use super::report::logs_line;

#[derive(Clone, Copy)]
struct Watch {
    /// What is done then.
    then: Option<fn()>,
    /// Who else wants to see messages before they are logged.
    others: pg_sys::emit_log_hook_type,
    /// `log_min_messages` as it was set; messages below are kept out of the log here.
    least: i32,
}

static WATCH: ProcessLocal<Watch> = ProcessLocal::new(Watch { then: None, others: None, least: 0 });

/// Has the startup process call `then` when the data directory is consistent; once, before it
/// replays anything.
pub(crate) fn watch(then: fn()) {
    // SAFETY: plain globals of this process, which has one thread; both texts are constants, and
    // the value is one that the setting takes.
    unsafe {
        // A standby that was shut down cleanly says so before it replays anything.
        if pg_sys::reachedConsistency {
            return then();
        }
        let least = pg_sys::log_min_messages;
        let others = pg_sys::emit_log_hook;
        WATCH.set(Watch { then: Some(then), others, least });
        // The hook is not shown what is not logged (`should_output_to_server`, elog.c: LOG is
        // between ERROR and FATAL).
        if least > pg_sys::PGERROR as i32 {
            pg_sys::SetConfigOption(
                c"log_min_messages".as_ptr(),
                c"error".as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
        pg_sys::emit_log_hook = Some(look);
    }
}

/// `emit_log_hook`. Contract: called by EmitErrorReport, in any context, for each message that is
/// to be logged.
#[pg_guard]
unsafe extern "C-unwind" fn look(message: *mut pg_sys::ErrorData) {
    let Watch { then, others, least } = WATCH.get();
    // SAFETY: a plain global; the message that is being reported; another library's hook, called as
    // the server would.
    unsafe {
        if let Some(then) = then.filter(|_| pg_sys::reachedConsistency) {
            WATCH.set(Watch { then: None, others, least });
            then();
        }
        if least > pg_sys::PGERROR as i32 && (*message).elevel < least && !logs_line() {
            (*message).output_to_server = false;
        } else if let Some(hook) = others {
            hook(message);
        }
    }
}
