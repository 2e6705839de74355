//! Drift: differences between policy and actual state.

use pagevault_cipher::CipherId;

use super::Catalog;
use super::decision::{Decision, Policy, Source};
use super::label::Label;
use super::relation::Relation;
use crate::page::PageState;

/// The difference between a relation and its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drift {
    /// The required state, and its reason.
    pub wanted: Decision,
    /// The cipher of its file now; `None`: plaintext.
    pub current: Option<CipherId>,
    /// Number of pages on disk that are plaintext but should be encrypted, or the reverse.
    pub stray: i64,
    /// Nothing else differs, but there may be such pages, because not all have been rewritten.
    pub unfinished: bool,
}

/// What a file may contain besides pages in the state of new ones: they are being rewritten, or an
/// earlier rewriting has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixture {
    /// Pages in the same state, perhaps under other keys.
    None,
    /// Pages in plaintext.
    WithPlaintext,
    /// Sealed pages.
    WithSealed,
}

impl Decision {
    /// True if a page on disk is not in the required state.
    #[must_use]
    pub fn is_stray(&self, page: PageState) -> bool {
        match page {
            PageState::Empty => false,
            PageState::Plaintext => self.is_encrypted(),
            PageState::Sealed(_) => !self.is_encrypted(),
        }
    }

    /// True if there may be pages that are not in the required state.
    #[must_use]
    pub fn may_leave_stray(&self, mixture: Mixture) -> bool {
        match mixture {
            Mixture::None => false,
            Mixture::WithPlaintext => self.is_encrypted(),
            Mixture::WithSealed => !self.is_encrypted(),
        }
    }
}

impl<C: Catalog> Policy<'_, C> {
    /// The decision for a relation. Where no label or setting applies, an encrypted relation is to
    /// be encrypted throughout.
    ///
    /// # Errors
    /// Those of the catalog, as for all functions here.
    pub fn wanted_or_kept(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        let kept = || {
            let is_encrypted = self.catalog.cipher_of(relation.file).is_some();
            let source = Source::Own(relation.oid);
            is_encrypted.then(|| Decision::new(Label::Encrypted(None), source))
        };
        Ok(self.wanted(relation)?.or_else(kept))
    }

    /// Compares a relation with its policy. `stray` counts its pages on disk that differ; `mixture`
    /// is what its file may contain.
    ///
    /// # Errors
    /// Those of the catalog and of `stray`.
    pub fn drift_of(
        &self,
        relation: &Relation,
        mixture: Mixture,
        stray: impl FnOnce(&Decision) -> Result<i64, C::Error>,
    ) -> Result<Option<Drift>, C::Error> {
        let Some(wanted) = self.wanted_or_kept(relation)? else { return Ok(None) };
        let current = self.catalog.cipher_of(relation.file);
        let stray = stray(&wanted)?;
        let differs =
            !wanted.is_met_by(current) || stray > 0 || self.is_in_other_key_group(relation)?;
        let unfinished = !differs && wanted.may_leave_stray(mixture);
        Ok((differs || unfinished).then_some(Drift { wanted, current, stray, unfinished }))
    }
}
