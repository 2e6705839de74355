//! What there is beside the records of key files: those that a start cut off, and incomplete ones.

use std::path::Path;

use pagevault_keystore::log::{self, Position, unsettled};
use pagevault_keystore::protocol::ErrorClass;
use pagevault_keystore::{FormatError, Record, Scope};

use super::{DIRECTORY, Keystore, scopes_in};
use crate::access::read_trusted;
use crate::failure::Failure;

impl Keystore {
    /// Records that failed starts of the server cut off from key files, by scope.
    ///
    /// # Errors
    /// Those of [`Keystore::read`].
    pub fn unsettled(&self) -> Result<Vec<(Scope, Vec<Record>)>, Failure> {
        let directory = self.data_directory.join(DIRECTORY);
        let mut found = Vec::new();
        for scope in scopes_in(&directory, unsettled::scope_of)? {
            let path = directory.join(unsettled::name(scope));
            let records = unsettled::decode(&read_trusted(self.kind, &path)?, scope, &self.id);
            let mut records = records.map_err(|error| unreadable(&path, &error))?;
            self.of_cluster.bring_into_line(&mut records);
            found.push((scope, records));
        }
        Ok(found)
    }

    /// The ends of the key files, and how many bytes each has behind its last complete record: an
    /// unfinished write, while the server runs and after a crash.
    ///
    /// # Errors
    /// Those of [`Keystore::read`].
    pub(crate) fn ends(&self) -> Result<Vec<(Position, u64)>, Failure> {
        let end = |scope: &Scope| {
            let path = self.data_directory.join(DIRECTORY).join(log::file_name(*scope));
            let contents = log::replay(&read_trusted(self.kind, &path)?, *scope);
            let contents = contents.map_err(|error| unreadable(&path, &error))?;
            Ok((contents.position, contents.torn))
        };
        self.scopes.iter().map(end).collect()
    }
}

fn unreadable(path: &Path, error: &FormatError) -> Failure {
    let what = format!("key file \"{}\" is not readable: {error}", path.display());
    Failure::new(ErrorClass::Internal, what)
}
