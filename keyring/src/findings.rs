//! Results of examining a provider.

use crate::failure::Failure;
use pagevault_keystore::protocol::Finding;

/// Findings in the order of examination; a failure is always the last.
#[derive(Debug, Default)]
pub struct Findings(Vec<Finding>);

impl Findings {
    /// Records the expectation `what`, with what was seen or what is wrong. `None` after a failure:
    /// nothing else is examined then.
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

    /// Adds findings that were made elsewhere. `None` if the last is a failure.
    pub fn append(&mut self, findings: Vec<Finding>) -> Option<()> {
        let well = findings.last().is_none_or(|last| last.failure.is_none());
        self.0.extend(findings);
        well.then_some(())
    }

    /// All findings.
    pub fn into_vec(self) -> Vec<Finding> {
        self.0
    }
}
