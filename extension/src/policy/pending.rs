//! What a command has made necessary for the catalogs of its database, and what is to be done when
//! it ends: state only. `commands` does it.

use crate::pg::process::ProcessLocal;

/// What is to be encrypted when the command ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pending {
    Nothing,
    /// Catalogs with values of user tables.
    Statistics,
    /// A label was put on this database.
    Everything,
}

static PENDING: ProcessLocal<Pending> = ProcessLocal::new(Pending::Nothing);

/// A relation of this database is encrypted, or a label here wants that.
pub(crate) fn note_encryption() {
    note(Pending::Statistics);
}

/// A label on this database wants encryption.
pub(crate) fn note_database_label() {
    note(Pending::Everything);
}

fn note(what: Pending) {
    PENDING.with(|pending| *pending = what.max(*pending));
}

/// What is to be done.
#[inline]
pub(crate) fn get() -> Pending {
    PENDING.with(|pending| *pending)
}

/// True if that is something.
#[inline]
pub(crate) fn any() -> bool {
    get() != Pending::Nothing
}

/// It is done, or the transaction was rolled back.
pub(crate) fn forget() {
    PENDING.with(|pending| *pending = Pending::Nothing);
}
