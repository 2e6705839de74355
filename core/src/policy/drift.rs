//! What is not as it is wanted.

use pagevault_cipher::CipherId;

use super::Catalog;
use super::decision::{Decision, Policy, Source};
use super::label::Label;
use super::relation::Relation;
use crate::page::PageState;

/// How a relation differs from what is wanted of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drift {
    /// What is wanted, and why.
    pub wanted: Decision,
    /// How its file is written now; `None`: in plaintext.
    pub current: Option<CipherId>,
    /// Pages on disk that are in plaintext where they should be encrypted, or the other way round.
    pub stray: i64,
}

impl Decision {
    /// True if a page on disk is not as it should be.
    #[must_use]
    pub fn is_stray(&self, page: PageState) -> bool {
        match page {
            PageState::Empty => false,
            PageState::Plaintext => self.is_encrypted(),
            PageState::Sealed(_) => !self.is_encrypted(),
        }
    }
}

impl<C: Catalog> Policy<'_, C> {
    /// What is wanted of a relation; where nothing is, one that is encrypted is to be so
    /// throughout.
    ///
    /// # Errors
    /// Those of the catalog, as all these.
    pub fn wanted_or_kept(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        let kept = || {
            let is_encrypted = self.catalog.cipher_of(relation.file).is_some();
            let source = Source::Own(relation.oid);
            is_encrypted.then(|| Decision::new(Label::Encrypted(None), source))
        };
        Ok(self.wanted(relation)?.or_else(kept))
    }

    /// How a relation differs from what is wanted of it. `stray` counts its pages on disk that do.
    ///
    /// # Errors
    /// Those of the catalog and of `stray`.
    pub fn drift_of(
        &self,
        relation: &Relation,
        stray: impl FnOnce(&Decision) -> Result<i64, C::Error>,
    ) -> Result<Option<Drift>, C::Error> {
        let Some(wanted) = self.wanted_or_kept(relation)? else { return Ok(None) };
        let current = self.catalog.cipher_of(relation.file);
        let stray = stray(&wanted)?;
        let differs = !wanted.is_met_by(current) || stray > 0;
        Ok(differs.then_some(Drift { wanted, current, stray }))
    }
}
