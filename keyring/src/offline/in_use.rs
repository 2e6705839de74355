//! Whether a master key unwraps the database keys in use that it has wrapped.

use std::collections::BTreeSet;

use pagevault_keystore::{Scope, Wrapping};
use serde_json::{Map, Value};

use super::{Keystore, unwrapped};
use crate::failure::Failure;

impl Keystore {
    /// Has a master key unwrap all database keys that are needed and that it wraps, by whichever
    /// providers have this kind and these options. Returns their number.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn unwrap_by(
        &self,
        kind: &str,
        options: &Map<String, Value>,
        master_key: &str,
    ) -> Result<usize, Failure> {
        let mut needed = self.needed();
        let scopes: BTreeSet<Scope> = self.state.database_keys().map(|(scope, ..)| scope).collect();
        let newest = scopes.into_iter().filter(|scope| !self.is_gone(*scope));
        needed.extend(newest.filter_map(|scope| {
            self.state.current_database_key(scope).map(|(version, _)| (scope, version))
        }));
        let is_it = |by: &&Wrapping| {
            let provider = self.state.provider(&by.provider);
            by.master_key == master_key
                && provider.is_some_and(|known| {
                    known.kind == kind
                        && serde_json::from_str(&known.options)
                            .is_ok_and(|of: Map<_, _>| of == *options)
                })
        };
        let mut places = Vec::new();
        let mut operations = Vec::new();
        for (scope, version) in needed {
            let Some(key) = self.state.database_key(scope, version) else { continue };
            if let Some(wrapping) = key.wrappings().find(is_it) {
                operations.push(self.unwrap_operation(scope, wrapping, false)?);
                places.push(((scope, version), key, wrapping));
            }
        }
        for ((place, key, wrapping), outcome) in places.iter().zip(self.ask(operations)) {
            let plain = unwrapped(outcome).map_err(|failure| {
                let (whose, version) = (self.name(place.0), place.1);
                let message =
                    format!("version {version} of the key of {whose}: {}", failure.message);
                Failure { message, ..failure }
            })?;
            self.require_recorded(*place, key, wrapping, &plain)?;
        }
        Ok(places.len())
    }
}
