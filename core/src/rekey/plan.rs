//! What a job does to the file that a relation has: asked in one transaction with doing it.

use pagevault_cipher::CipherId;
use pagevault_keystore::job::JobKind;

/// What is to be done before pages are rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// There is nothing to do.
    Nothing,
    /// It is written as it is to be; older pages are not.
    Keep,
    /// A new data key with this cipher.
    NewKey(CipherId),
    /// Write plaintext.
    Plaintext,
}

/// What a file asks of the job.
pub trait Asked {
    /// Why there is no answer.
    type Error;

    /// How the file is written now; `None`: in plaintext.
    fn current(&self) -> Option<CipherId>;

    /// The cipher for a file in plaintext where the job names none: that of labels, or the default.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn wanted_cipher(&self) -> Result<CipherId, Self::Error>;

    /// Whether the job has given the relation a new key already.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn has_begun(&self) -> Result<bool, Self::Error>;
}

/// What a job of this kind, for which this cipher was named, does to a file.
///
/// # Errors
/// Those of `asked`.
pub fn plan<A: Asked>(kind: JobKind, named: Option<CipherId>, asked: &A) -> Result<Plan, A::Error> {
    let current = asked.current();
    Ok(match (kind, current) {
        (JobKind::Encrypt, _) => {
            let wanted = named.or(current).map_or_else(|| asked.wanted_cipher(), Ok)?;
            if current == Some(wanted) { Plan::Keep } else { Plan::NewKey(wanted) }
        }
        (JobKind::Rotate, None) => Plan::Nothing,
        // Of a file that came later than the job the key is new enough.
        (JobKind::Rotate, Some(_)) if asked.has_begun()? => Plan::Keep,
        (JobKind::Rotate, Some(cipher)) => Plan::NewKey(cipher),
        (JobKind::Decrypt, None) => Plan::Keep,
        (JobKind::Decrypt, Some(_)) => Plan::Plaintext,
    })
}
