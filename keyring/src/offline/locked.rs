//! Key groups whose key cannot be had. Their master keys belong to others, and one of them must not
//! keep everything else from being examined.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::KeyVersion;
use pagevault_keystore::Scope;

use super::{DatabaseKeys, Keystore};
use crate::failure::Failure;

/// Database keys of key groups that could not be unwrapped, and why.
#[derive(Default)]
pub(crate) struct Locked(BTreeMap<(Scope, KeyVersion), Failure>);

impl Locked {
    /// Whether this database key is one of them.
    pub(crate) fn has(&self, place: (Scope, KeyVersion)) -> bool {
        self.0.contains_key(&place)
    }

    /// The groups, with the first failure of each.
    pub(crate) fn groups(&self) -> BTreeMap<Scope, &Failure> {
        let newest_last = self.0.iter().rev().map(|((scope, _), failure)| (*scope, failure));
        newest_last.collect()
    }
}

impl Keystore {
    /// As [`Keystore::unlock`], but keys of key groups may fail.
    ///
    /// # Errors
    /// The first failure of another key.
    pub(crate) fn unlock_but_groups(
        &self,
        wanted: &BTreeSet<(Scope, KeyVersion)>,
    ) -> Result<(DatabaseKeys, Locked), Failure> {
        let (mut keys, mut locked) = (BTreeMap::new(), Locked::default());
        let mut lock = |place: (Scope, KeyVersion), failure| match place.0.key_group() {
            Some(_) => {
                locked.0.insert(place, failure);
                Ok(())
            }
            None => Err(failure),
        };
        let mut asked = Vec::new();
        for (place, key) in self.records_of(wanted)? {
            // Options may be missing that permit to reach a provider.
            match self.operations(place.0, key) {
                Ok(operations) => asked.push((place, key, operations)),
                Err(failure) => lock(place, failure)?,
            }
        }
        for (place, key) in self.answers(asked) {
            match key {
                Ok(key) => drop(keys.insert(place, key)),
                Err(failure) => lock(place, failure)?,
            }
        }
        Ok((DatabaseKeys { keys }, locked))
    }

    /// The name of a key group that exists.
    pub(crate) fn name_of_group(&self, scope: Scope) -> Option<&str> {
        Some(&self.state.key_group(scope.key_group()?)?.name)
    }
}
