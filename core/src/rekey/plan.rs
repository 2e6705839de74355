//! What a job does to a relation's present file. Evaluated in the transaction that does it.

use pagevault_cipher::CipherId;
use pagevault_keystore::job::JobKind;

/// What to do before pages are rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// There is nothing to do.
    Nothing,
    /// Keep the key for new pages; older pages have to be rewritten.
    Keep,
    /// Create a new data key with this cipher.
    NewKey(CipherId),
    /// Write new pages as plaintext.
    Plaintext,
}

/// Facts about a file that [`plan`] needs.
pub trait PlanFacts {
    /// Why a fact could not be determined.
    type Error;

    /// The cipher for new pages; `None`: plaintext.
    fn current(&self) -> Option<CipherId>;

    /// The cipher for a plaintext file where the job names none, and for one whose cipher is not
    /// for new keys: that of labels, or the default.
    ///
    /// # Errors
    /// If it cannot be determined.
    fn wanted_cipher(&self) -> Result<CipherId, Self::Error>;

    /// Whether the file's data key is under another key group than that of the relation.
    ///
    /// # Errors
    /// If it cannot be determined.
    fn is_in_other_key_group(&self) -> Result<bool, Self::Error>;

    /// Whether the job has already given the relation a new key.
    ///
    /// # Errors
    /// If it cannot be determined.
    fn has_begun(&self) -> Result<bool, Self::Error>;
}

/// What a job of this kind does to a file; `named` is the cipher that was named for the job.
///
/// # Errors
/// Those of `asked`.
pub fn plan<A: PlanFacts>(
    kind: JobKind,
    named: Option<CipherId>,
    asked: &A,
) -> Result<Plan, A::Error> {
    let current = asked.current();
    Ok(match (kind, current) {
        (JobKind::Encrypt, _) => {
            let wanted = named.or(current).map_or_else(|| asked.wanted_cipher(), Ok)?;
            let is_right = current == Some(wanted) && !asked.is_in_other_key_group()?;
            if is_right { Plan::Keep } else { Plan::NewKey(wanted) }
        }
        (JobKind::Rotate, None) => Plan::Nothing,
        // A file that was created after the job has a key that is new enough.
        (JobKind::Rotate, Some(_)) if asked.has_begun()? => Plan::Keep,
        (JobKind::Rotate, Some(cipher)) if cipher.is_for_new_keys() => Plan::NewKey(cipher),
        (JobKind::Rotate, Some(_)) => Plan::NewKey(asked.wanted_cipher()?),
        (JobKind::Decrypt, None) => Plan::Keep,
        (JobKind::Decrypt, Some(_)) => Plan::Plaintext,
    })
}
