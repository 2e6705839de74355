//! What was found on looking at a provider, thing by thing.

use crate::failure::Failure;
use pagevault_keystore::protocol::Finding;

/// Findings in the order in which a person would look; the first failure is the last.
#[derive(Debug, Default)]
pub struct Findings(Vec<Finding>);

impl Findings {
    /// Notes `what` should be, with what was seen or what is wrong. `None` after a failure: what
    /// comes after it need not be looked at.
    pub fn note<T>(
        &mut self,
        what: &str,
        found: Result<T, Failure>,
        seen: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        let (value, seen, failure) = match found {
            Ok(value) => {
                let seen = seen(&value);
                (Some(value), seen, None)
            }
            Err(error) => (None, String::new(), Some(error)),
        };
        self.0.push(Finding { what: what.to_owned(), seen, failure });
        value
    }

    /// All of them.
    pub fn into_vec(self) -> Vec<Finding> {
        self.0
    }
}
