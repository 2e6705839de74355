//! The cipher of new files.
//!
//! When the server creates a file it does not say what for. TRUNCATE, REINDEX, SET TABLESPACE and
//! other commands that replace the storage of a relation have locked that relation. So the policy
//! of each locked relation is evaluated ([`Policy::asked`]), and the strongest cipher that one of
//! them requires is taken ([`Policy::for_new_file`]). If the file can belong to none of them, its
//! tablespace and database decide. If they are not all in the same key group, the file is in none
//! at first, and whose it is is found out when the command has ended. A command that only makes new
//! relations leaves key groups to [`Policy::for_new_relation`].

use pagevault_cipher::CipherId;
use pagevault_keystore::RelFile;

use super::Catalog;
use super::catalogs::wanted_of_shared;
use super::decision::{Decision, Policy, Source};
use super::key_group::{Age, Named, Sealing};
use super::relation::{Labelled, Oid, Relation, RelationKind, SHARED};

/// The policy of a locked relation for a file that may be its new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is to be encrypted so.
    Encrypted(Sealing),
    /// It may be plaintext.
    Plaintext,
    /// The file cannot belong to the relation: it has no permanent storage, or one of the two is
    /// shared and the other belongs to a database.
    NotApplicable,
}

/// The state of a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewFile {
    /// How it is encrypted; `None`: plaintext.
    pub sealing: Option<Sealing>,
    /// The relations whose file it may be are in different key groups, or one is in a group and
    /// another is not encrypted.
    pub in_doubt: bool,
}

impl Relation {
    /// Whether this decision decrypts the relation when it gets a new file. A sequence can get
    /// another owner, whose label was not meant for it: only a job decrypts it.
    fn may_become_plaintext(&self, decision: &Decision) -> bool {
        decision.is_plaintext_by_own_label()
            && (self.kind != RelationKind::Sequence || decision.source == Source::Own(self.oid))
    }
}

/// Whose new files a command makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Makes {
    /// New relations only, as CREATE TABLE does.
    Relations,
    /// Perhaps those of relations that exist, as TRUNCATE does.
    Storage,
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
        let sealing = self.for_replacement(locked, file)?;
        Ok(sealing.map_or(Answer::Plaintext, Answer::Encrypted))
    }

    /// How a file is encrypted that replaces that of an existing relation. An encrypted relation
    /// stays encrypted unless its own label, or that of the table it belongs to, says `plaintext`.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_replacement(
        &self,
        replaced: &Relation,
        file: RelFile,
    ) -> Result<Option<Sealing>, C::Error> {
        // The table may be moving to the file's tablespace. An index follows its table in any
        // tablespace.
        let tablespace = match replaced.kind {
            RelationKind::Index => replaced.tablespace,
            _ => file.tablespace,
        };
        let wanted = self.wanted_in(replaced, tablespace)?;
        let current = self.catalog.cipher_of(replaced.file);
        let (cipher, decision) = match wanted {
            Some(decision) if decision.is_encrypted() => {
                (Some(decision.cipher(current, self.catalog)), Some(decision))
            }
            Some(decision) if replaced.may_become_plaintext(&decision) => (None, None),
            _ => (current.map(|cipher| self.inherited(cipher)), None),
        };
        let Some(cipher) = cipher else { return Ok(None) };
        let group = self.key_group_for(replaced, tablespace, decision.as_ref(), Age::Existing)?;
        Ok(Some(Sealing { cipher, group }))
    }

    /// The state of a new file, from what the locked relations require: encrypted if one of them
    /// is to be, with the strongest cipher. Otherwise who may TRUNCATE a table could weaken its
    /// cipher, by locking tables of their own.
    ///
    /// In doubt, and in a command that [`Makes::Relations`], it is in no key group: of a group that
    /// is not its relation's it would have a key that is never used, and is kept as long as the
    /// file.
    ///
    /// # Errors
    /// Those of the catalog, and those in `answers`.
    pub fn for_new_file(
        &self,
        file: RelFile,
        makes: Makes,
        answers: impl IntoIterator<Item = Result<Answer, C::Error>>,
    ) -> Result<NewFile, C::Error> {
        let mut may_be_plaintext = false;
        let mut required: Option<Sealing> = None;
        let mut in_doubt = false;
        for answer in answers {
            match answer? {
                Answer::Encrypted(sealing) => {
                    in_doubt |= required.is_some_and(|other| other.group != sealing.group);
                    let both = required.into_iter().chain([sealing]);
                    required = both.max_by_key(|sealing| sealing.cipher.strength());
                }
                Answer::Plaintext => may_be_plaintext = true,
                Answer::NotApplicable => {}
            }
        }
        let in_any = required.is_some_and(|known| known.group.is_some());
        in_doubt |= in_any && (may_be_plaintext || makes == Makes::Relations);
        if let Some(Sealing { cipher, .. }) = required.filter(|_| in_doubt) {
            return Ok(NewFile { sealing: Some(Sealing { cipher, group: None }), in_doubt });
        }
        if required.is_some() || may_be_plaintext {
            return Ok(NewFile { sealing: required, in_doubt });
        }
        let wanted = match file.database {
            SHARED => wanted_of_shared(self.catalog),
            _ => self.wanted_of_place(file.tablespace)?,
        };
        let Some(cipher) = self.cipher_by(wanted) else {
            return Ok(NewFile { sealing: None, in_doubt: false });
        };
        let group = match file.database {
            SHARED => None,
            _ => self.key_group_at(Labelled::Tablespace(file.tablespace))?,
        };
        let group = match group {
            Some(Named::Group(group)) => Some(group),
            // Of a relation in another group, perhaps.
            Some(Named::Missing(_)) | None => None,
        };
        Ok(NewFile { sealing: Some(Sealing { cipher, group }), in_doubt: false })
    }

    /// How the file of a relation is encrypted that has just been created; until now
    /// [`Policy::for_new_file`] decided.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_new_relation(&self, relation: &Relation) -> Result<Option<Sealing>, C::Error> {
        let wanted = self.wanted(relation)?;
        let cipher = match self.cipher_by(wanted) {
            // The sequence of a serial column is created before it is owned. Its table was locked
            // meanwhile, and has decided on the cipher.
            None if relation.kind == RelationKind::Sequence => {
                let Some(cipher) = self.catalog.cipher_of(relation.file) else { return Ok(None) };
                // Which table that was is not known: it gets the group of its owner with the owner.
                return Ok(Some(Sealing { cipher, group: None }));
            }
            wanted => wanted,
        };
        self.in_its_group(relation, cipher, wanted.as_ref(), Age::New)
    }

    /// How the file of a new partition of `parent` is encrypted: the catalogs do not show it yet.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_new_partition(
        &self,
        parent: Oid,
        partition: &Relation,
    ) -> Result<Option<Sealing>, C::Error> {
        Policy::if_attached(self.catalog, partition.oid, Some(parent)).for_new_relation(partition)
    }

    /// A cipher, in the key group of a relation that is new, or was attached to another one.
    fn in_its_group(
        &self,
        relation: &Relation,
        cipher: Option<CipherId>,
        wanted: Option<&Decision>,
        age: Age,
    ) -> Result<Option<Sealing>, C::Error> {
        let Some(cipher) = cipher else { return Ok(None) };
        let group = match wanted.map(|decision| decision.source) {
            // Its file has the group of whatever was locked when it was made.
            Some(Source::Setting(_)) => {
                match self.named_key_group(relation, relation.tablespace)? {
                    Some(_) => self.key_group_for(relation, relation.tablespace, wanted, age)?,
                    None => None,
                }
            }
            _ => self.key_group_for(relation, relation.tablespace, wanted, age)?,
        };
        Ok(Some(Sealing { cipher, group }))
    }

    /// The cipher for the file of a new relation with this decision.
    #[must_use]
    pub fn cipher_by(&self, wanted: Option<Decision>) -> Option<CipherId> {
        let wanted = wanted.filter(Decision::is_encrypted);
        wanted.map(|decision| decision.cipher(None, self.catalog))
    }

    /// How an existing relation with few pages or none is to be encrypted, if its file does not
    /// meet the policy. (It now follows another relation, or was attached to one.)
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_altered(&self, relation: &Relation) -> Result<Option<Sealing>, C::Error> {
        let current = self.catalog.cipher_of(relation.file);
        let Some(wanted) = self.wanted(relation)?.filter(Decision::is_encrypted) else {
            return Ok(None);
        };
        if wanted.is_met_by(current) && !self.is_in_other_key_group(relation)? {
            return Ok(None);
        }
        let cipher = Some(wanted.cipher(current, self.catalog));
        self.in_its_group(relation, cipher, Some(&wanted), Age::Existing)
    }

    /// How a relation is to be encrypted anew, with this cipher.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn for_rekeying(&self, relation: &Relation, cipher: CipherId) -> Result<Sealing, C::Error> {
        let wanted = self.wanted(relation)?.filter(Decision::is_encrypted);
        let (wanted, tablespace) = (wanted.as_ref(), relation.tablespace);
        let group = self.key_group_for(relation, tablespace, wanted, Age::Existing)?;
        Ok(Sealing { cipher, group })
    }
}
