//! The moment when recovery reaches consistency.
//!
//! PostgreSQL has no hook for this. But it logs "consistent recovery state reached"
//! (`CheckRecoveryConsistency`, xlogrecovery.c, 15 to 18) after it has set `reachedConsistency` and
//! before it admits sessions, and `emit_log_hook` gets each message before it is logged. In crash
//! recovery the state is consistent only when all WAL is replayed, and nothing is logged; the
//! resource manager's `rm_cleanup` callback is used instead.

use pgrx::{pg_guard, pg_sys};

use super::compat;
use super::process::ProcessLocal;
use super::report::logs_line;

#[derive(Clone, Copy)]
struct Watch {
    /// Called at consistency.
    then: Option<fn()>,
    /// The previous `emit_log_hook`.
    others: pg_sys::emit_log_hook_type,
    /// The configured `log_min_messages`. The hook keeps messages below it out of the log.
    least: i32,
}

static WATCH: ProcessLocal<Watch> = ProcessLocal::new(Watch { then: None, others: None, least: 0 });

/// Makes the startup process call `then` when the data directory is consistent; once, before it
/// replays any WAL.
pub(crate) fn watch(then: fn()) {
    // SAFETY: plain globals of this process, which has one thread; both texts are constants, and
    // the value is valid for the setting.
    unsafe {
        // After a clean shutdown a standby is consistent before it replays anything.
        if pg_sys::reachedConsistency {
            return then();
        }
        let least = *compat::log_min_messages();
        let others = pg_sys::emit_log_hook;
        WATCH.set(Watch { then: Some(then), others, least });
        // The hook only gets messages that are to be logged (`should_output_to_server`, elog.c: LOG
        // is between ERROR and FATAL).
        if least > pg_sys::PGERROR as i32 {
            pg_sys::SetConfigOption(
                c"log_min_messages".as_ptr(),
                c"error".as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
        pg_sys::emit_log_hook = Some(on_log_message);
    }
}

/// `emit_log_hook`. Contract: called by EmitErrorReport, in any context, for each message that is
/// to be logged.
#[pg_guard]
unsafe extern "C-unwind" fn on_log_message(message: *mut pg_sys::ErrorData) {
    let Watch { then, others, least } = WATCH.get();
    // SAFETY: a plain global; the message that is being reported; the previous hook, called as the
    // server would call it.
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
