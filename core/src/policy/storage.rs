//! How new files are written.
//!
//! Of a file that appears it is not said what it is for. TRUNCATE, REINDEX, SET TABLESPACE and
//! other replacements of an existing relation's storage have locked that relation; so those that
//! are locked are asked, each by itself ([`Policy::asked`]), until one wants the file encrypted
//! ([`Policy::for_new_file`]). Where none of them says anything, its place does.

use pagevault_cipher::CipherId;
use pagevault_keystore::RelFile;

use super::Catalog;
use super::catalogs::wanted_of_shared;
use super::decision::{Decision, Policy};
use super::relation::{Relation, RelationKind, SHARED};

/// What a locked relation says of a file that may be its new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is to be encrypted with this cipher.
    Encrypted(CipherId),
    /// It may be plaintext.
    Plaintext,
    /// The file cannot be its own: it has no storage that lasts, or belongs to the cluster and the
    /// file to a database, or the other way round.
    NotItsOwn,
}

impl<C: Catalog> Policy<'_, C> {
    /// What a locked relation says of a new file.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn asked(&self, locked: &Relation, file: RelFile) -> Result<Answer, C::Error> {
        if !locked.is_stored() || locked.file.database != file.database {
            return Ok(Answer::NotItsOwn);
        }
        let cipher = self.for_replacement(locked, file)?;
        Ok(cipher.map_or(Answer::Plaintext, Answer::Encrypted))
    }

    /// What a relation is now it stays, unless more is wanted of it, or its own label wants it in
    /// plaintext.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_replacement(
        &self,
        replaced: &Relation,
        file: RelFile,
    ) -> Result<Option<CipherId>, C::Error> {
        // The table may be moving to the file's tablespace. An index follows its table, wherever it
        // is.
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
            _ => Ok(current),
        }
    }

    /// The cipher of a new file, by what the relations that are locked say. Who wants it encrypted
    /// is the last that is asked.
    ///
    /// # Errors
    /// Those of the catalog, and of the answers.
    pub fn for_new_file(
        &self,
        file: RelFile,
        answers: impl IntoIterator<Item = Result<Answer, C::Error>>,
    ) -> Result<Option<CipherId>, C::Error> {
        let mut may_be_plaintext = false;
        for answer in answers {
            match answer? {
                Answer::Encrypted(cipher) => return Ok(Some(cipher)),
                Answer::Plaintext => may_be_plaintext = true,
                Answer::NotItsOwn => {}
            }
        }
        if may_be_plaintext {
            return Ok(None);
        }
        let wanted = match file.database {
            SHARED => wanted_of_shared(self.catalog),
            _ => self.wanted_of_place(file.tablespace)?,
        };
        Ok(self.cipher_by(wanted))
    }

    /// The cipher for the file of a relation that has just been made, and that is written as
    /// [`Policy::for_new_file`] has said.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_new_relation(&self, relation: &Relation) -> Result<Option<CipherId>, C::Error> {
        match self.cipher_by(self.wanted(relation)?) {
            // Made for a serial column, it is owned later than it is created; the table is locked,
            // and that has decided.
            None if relation.kind == RelationKind::Sequence => {
                Ok(self.catalog.cipher_of(relation.file))
            }
            wanted => Ok(wanted),
        }
    }

    /// The cipher for the file of a new relation of which this is wanted.
    #[must_use]
    pub fn cipher_by(&self, wanted: Option<Decision>) -> Option<CipherId> {
        let wanted = wanted.filter(Decision::is_encrypted);
        wanted.map(|decision| decision.cipher(None, self.catalog))
    }

    /// The cipher for a relation that exists and has no page, or few, where it is to be encrypted
    /// and is not, or not so. (It came to follow another one, or was attached to it.)
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_altered(&self, relation: &Relation) -> Result<Option<CipherId>, C::Error> {
        let current = self.catalog.cipher_of(relation.file);
        let wanted = self.wanted(relation)?;
        Ok(self.cipher_by(wanted.filter(|decision| !decision.is_met_by(current))))
    }
}
