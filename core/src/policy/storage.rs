//! The cipher of new files.
//!
//! When the server creates a file it does not say what for. TRUNCATE, REINDEX, SET TABLESPACE and
//! other commands that replace the storage of a relation have locked that relation. So the policy
//! of each locked relation is evaluated ([`Policy::asked`]), and the strongest cipher that one of
//! them requires is taken ([`Policy::for_new_file`]). If the file can belong to none of them, its
//! tablespace and database decide.

use pagevault_cipher::CipherId;
use pagevault_keystore::RelFile;

use super::Catalog;
use super::catalogs::wanted_of_shared;
use super::decision::{Decision, Policy};
use super::relation::{Relation, RelationKind, SHARED};

/// The policy of a locked relation for a file that may be its new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is to be encrypted with this cipher.
    Encrypted(CipherId),
    /// It may be plaintext.
    Plaintext,
    /// The file cannot belong to the relation: it has no permanent storage, or one of the two is
    /// shared and the other belongs to a database.
    NotApplicable,
}

impl<C: Catalog> Policy<'_, C> {
    /// What the policy of a locked relation requires of a new file.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn asked(&self, locked: &Relation, file: RelFile) -> Result<Answer, C::Error> {
        if !locked.is_stored() || locked.file.database != file.database {
            return Ok(Answer::NotApplicable);
        }
        let cipher = self.for_replacement(locked, file)?;
        Ok(cipher.map_or(Answer::Plaintext, Answer::Encrypted))
    }

    /// The cipher for a file that replaces that of an existing relation. An encrypted relation
    /// stays encrypted unless its own label says `plaintext`.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_replacement(
        &self,
        replaced: &Relation,
        file: RelFile,
    ) -> Result<Option<CipherId>, C::Error> {
        // The table may be moving to the file's tablespace. An index follows its table in any
        // tablespace.
        let wanted = match replaced.kind {
            RelationKind::Index => self.wanted(replaced)?,
            _ => self.wanted_in(replaced, file.tablespace)?,
        };
        let current = self.catalog.cipher_of(replaced.file);
        match wanted {
            Some(decision) if decision.is_encrypted() => {
                Ok(Some(decision.cipher(current, self.catalog)))
            }
            Some(decision) if decision.is_plaintext_by_own_label() => Ok(None),
            _ => Ok(current.map(|cipher| self.inherited(cipher))),
        }
    }

    /// The cipher of a new file, from what the locked relations require: the strongest. Otherwise
    /// who may TRUNCATE a table could weaken its cipher, by locking tables of their own.
    ///
    /// # Errors
    /// Those of the catalog, and those in `answers`.
    pub fn for_new_file(
        &self,
        file: RelFile,
        answers: impl IntoIterator<Item = Result<Answer, C::Error>>,
    ) -> Result<Option<CipherId>, C::Error> {
        let mut may_be_plaintext = false;
        let mut required: Option<CipherId> = None;
        for answer in answers {
            match answer? {
                Answer::Encrypted(cipher) => {
                    required = required.into_iter().chain([cipher]).max_by_key(|c| c.strength());
                }
                Answer::Plaintext => may_be_plaintext = true,
                Answer::NotApplicable => {}
            }
        }
        if required.is_some() || may_be_plaintext {
            return Ok(required);
        }
        let wanted = match file.database {
            SHARED => wanted_of_shared(self.catalog),
            _ => self.wanted_of_place(file.tablespace)?,
        };
        Ok(self.cipher_by(wanted))
    }

    /// The cipher for the file of a relation that has just been created; until now
    /// [`Policy::for_new_file`] decided.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_new_relation(&self, relation: &Relation) -> Result<Option<CipherId>, C::Error> {
        match self.cipher_by(self.wanted(relation)?) {
            // The sequence of a serial column is created before it is owned. Its table was locked
            // meanwhile, and has decided on the cipher.
            None if relation.kind == RelationKind::Sequence => {
                Ok(self.catalog.cipher_of(relation.file))
            }
            wanted => Ok(wanted),
        }
    }

    /// The cipher for the file of a new relation with this decision.
    #[must_use]
    pub fn cipher_by(&self, wanted: Option<Decision>) -> Option<CipherId> {
        let wanted = wanted.filter(Decision::is_encrypted);
        wanted.map(|decision| decision.cipher(None, self.catalog))
    }

    /// The cipher for an existing relation with few pages or none, if its file does not meet the
    /// policy. (It now follows another relation, or was attached to one.)
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_altered(&self, relation: &Relation) -> Result<Option<CipherId>, C::Error> {
        let current = self.catalog.cipher_of(relation.file);
        let wanted = self.wanted(relation)?;
        Ok(self.cipher_by(wanted.filter(|decision| !decision.is_met_by(current))))
    }
}
