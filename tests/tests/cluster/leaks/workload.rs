//! The statements of a leak test, and where their values may be found.

use pagevault_tests::leaks::Canary;

/// Where a canary is found when nothing is encrypted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// In the first file of a relation of the database.
    Relation(&'static str),
    /// In the first file of the TOAST table of a relation.
    Toast(&'static str),
    /// In a file below a directory of the data directory.
    Below(&'static str),
    /// In a file below the cluster's directory whose path contains this.
    Path(&'static str),
}

/// Statements to run, and the canaries in them.
#[derive(Default)]
pub(super) struct Workload {
    /// Each runs in its own transaction.
    pub(super) statements: Vec<String>,
    pub(super) canaries: Vec<(Canary, Place)>,
}

impl Workload {
    /// Adds a statement without a canary.
    pub(super) fn run(&mut self, statement: impl Into<String>) {
        self.statements.push(statement.into());
    }

    /// Creates a text canary for this place.
    pub(super) fn text(&mut self, name: &str, place: Place) -> String {
        let canary = Canary::text(name);
        let text = canary.as_str().to_owned();
        self.canaries.push((canary, place));
        text
    }

    /// Creates a canary of `count` bytes for this place, in hexadecimal.
    pub(super) fn hex(&mut self, name: &str, count: usize, place: Place) -> String {
        let canary = Canary::binary(name, count);
        let hex = canary.hex();
        self.canaries.push((canary, place));
        hex
    }

    /// Creates a number canary for this place.
    pub(super) fn number(&mut self, name: &str, place: Place) -> i64 {
        let (canary, number) = Canary::number(name);
        self.canaries.push((canary, place));
        number
    }

    /// Adds a canary whose stored bytes are known.
    pub(super) fn stored(&mut self, name: &str, bytes: &[u8], place: Place) {
        self.canaries.push((Canary::stored(name, bytes.to_vec()), place));
    }
}
