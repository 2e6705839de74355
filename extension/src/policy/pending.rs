//! What a command has made necessary for the catalogs of its database, to be done when it ends.
//! This is the state only; `commands` does the work.

use crate::pg::process::ProcessLocal;

/// What is to be encrypted when the command ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pending {
    Nothing,
    /// Catalogs with values of user tables.
    Statistics,
    /// All catalogs for which the policy requires it: this database got a label.
    Everything,
}

static PENDING: ProcessLocal<Pending> = ProcessLocal::new(Pending::Nothing);

/// A relation of this database is encrypted, or a label in it requires that.
pub(crate) fn note_encryption() {
    note(Pending::Statistics);
}

/// The label of this database requires encryption.
pub(crate) fn note_database_label() {
    note(Pending::Everything);
}

fn note(what: Pending) {
    PENDING.with(|pending| *pending = what.max(*pending));
}

/// The pending work.
#[inline]
pub(crate) fn get() -> Pending {
    PENDING.with(|pending| *pending)
}

/// Whether there is pending work.
#[inline]
pub(crate) fn any() -> bool {
    get() != Pending::Nothing
}

/// Called when the work is done, or the transaction was rolled back.
pub(crate) fn forget() {
    PENDING.with(|pending| *pending = Pending::Nothing);
}
