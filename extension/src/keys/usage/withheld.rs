//! Whether an operation of this process has failed for something that ends by itself: a database
//! key is locked or refused, or pages have no images in WAL before the next checkpoint. The state
//! does not tell that afterwards: it may have changed.

use crate::pg::process::ProcessLocal;

static MET: ProcessLocal<bool> = ProcessLocal::new(false);

/// Notes that an error is reported for that cause.
pub(crate) fn note() {
    MET.set(true);
}

/// Whether one was noted since the last call.
pub(crate) fn take() -> bool {
    MET.replace(false)
}
