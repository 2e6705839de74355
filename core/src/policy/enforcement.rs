//! What is refused: by `pagevault.enforce_encryption`, which lets nothing become plaintext where
//! encryption is wanted, and always, where a relation is to be decrypted that a label wants
//! encrypted.
//!
//! New storage follows the policy anyway. What is left to refuse is a policy that is taken away,
//! and a plaintext relation that is brought to where one holds.

use super::Catalog;
use super::decision::{Decision, Policy, Setting, Source};
use super::label::Label;
use super::precedence::{Change, Who, among};
use super::relation::{Labelled, Oid, Relation};

/// Anyone may add encryption to what they own; to take it away, or to make an exception, is the
/// administrator's. `None` if a change of a label does neither.
#[must_use]
pub fn takes_encryption_away(from: Option<Label>, to: Option<Label>) -> Option<Change> {
    let says_encrypted = matches!(from, Some(Label::Encrypted(_)));
    let takes_away = to == Some(Label::Plaintext) || (to.is_none() && says_encrypted);
    takes_away.then_some(Change { from, to })
}

impl<C: Catalog> Policy<'_, C> {
    /// Why a relation must not be where it is, in plaintext.
    ///
    /// # Errors
    /// Those of the catalog, as all these.
    pub fn against_plaintext(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        let concerns = relation.is_stored() && self.catalog.cipher_of(relation.file).is_none();
        if !self.catalog.enforces() || !concerns {
            return Ok(None);
        }
        Ok(self.wanted(relation)?.filter(Decision::is_encrypted))
    }

    /// Why a label of a relation must not be changed that takes encryption away from one of these:
    /// the relation and its partitions.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn against_label(
        &self,
        labelled: Oid,
        label: Option<Label>,
        relations: &[Relation],
    ) -> Result<Option<Decision>, C::Error> {
        if !self.catalog.enforces() {
            return Ok(None);
        }
        let changed = Policy::if_labelled(self.catalog, Labelled::Relation(labelled), label);
        for relation in relations {
            let Some(present) = self.wanted(relation)?.filter(Decision::is_encrypted) else {
                continue;
            };
            if !changed.wanted(relation)?.is_some_and(|after| after.is_encrypted()) {
                return Ok(Some(present));
            }
        }
        Ok(None)
    }

    /// Why a relation must not be decrypted by a job that is under way: a label wants it encrypted,
    /// or a setting while that is enforced. (Who asked for the job may have had other settings.)
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn against_decrypting(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        Ok(self.wanted(relation)?.filter(|decision| match decision.source {
            Source::Setting(_) => {
                decision.is_encrypted() && self.catalog.enforces() && relation.user_made
            }
            // It follows what is encrypted still, and what the job decrypts as well.
            Source::Leader(_) => false,
            Source::Own(_) | Source::Around(_) => decision.is_encrypted(),
        }))
    }

    /// Why nobody is to go on with decrypting a relation.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn against_resuming_decryption(
        &self,
        relation: &Relation,
    ) -> Result<Option<Decision>, C::Error> {
        let wanted = self.wanted(relation)?.filter(Decision::is_encrypted);
        Ok(wanted.filter(|decision| {
            self.catalog.enforces() || !matches!(decision.source, Source::Setting(_))
        }))
    }
}

/// What holds in one of the databases that share a tablespace, or a label of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Which one.
    pub database: Oid,
    /// Its label.
    pub label: Option<Label>,
    /// `pagevault.default_encryption` there.
    pub default_encryption: bool,
    /// `pagevault.enforce_encryption` there, or here.
    pub enforces: bool,
}

impl View {
    /// What holds in a database, by what is set for it and what holds in this session, which is in
    /// the database `here`. (Here a superuser may have turned enforcement off. There it is not this
    /// session's to turn off.)
    #[must_use]
    pub fn new(
        (database, here): (Oid, Oid),
        label: Option<Label>,
        default_encryption: (Option<bool>, bool),
        enforces: (Option<bool>, bool),
    ) -> Self {
        let elsewhere = database != here;
        let (set, of_session) = default_encryption;
        let default_encryption = set.filter(|_| elsewhere).unwrap_or(of_session);
        let enforces = enforces.1 || (elsewhere && enforces.0 == Some(true));
        Self { database, label, default_encryption, enforces }
    }

    /// True if relations without labels of their own are to be encrypted in a tablespace with this
    /// label.
    #[must_use]
    pub fn wants_encryption(&self, tablespace: Option<Label>) -> bool {
        among(tablespace, self.label, self.default_encryption)
            .is_some_and(|(label, _)| matches!(label, Label::Encrypted(_)))
    }
}

/// The database that forbids to change the label of a tablespace or database so: this one if it is
/// among those that would lose something, else the oldest.
#[must_use]
pub fn forbidden_by(views: &[View], here: Oid, object: Labelled, change: Change) -> Option<&View> {
    let loses = |view: &&View| match object {
        Labelled::Tablespace(_) => change.of_tablespace_loses(view.label, view.default_encryption),
        Labelled::Database(oid) => {
            view.database == oid && change.of_database_loses(view.default_encryption)
        }
        Labelled::Relation(_) | Labelled::Schema(_) => false,
    };
    let losing = views.iter().filter(loses).filter(|view| view.enforces);
    losing.min_by_key(|view| (view.database != here, view.database))
}

/// A change of a schema's label that takes encryption away: what would want it else, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemaLoss(pub Option<Source>);

/// Whether a schema's label must not be changed so, with these tablespaces and their labels.
#[must_use]
pub fn against_schema_label(
    change: Change,
    tablespaces: &[(Oid, Option<Label>)],
    (database, label): (Oid, Option<Label>),
    default_encryption: bool,
) -> Option<SchemaLoss> {
    let places = [(None, None)].into_iter();
    let places = places.chain(tablespaces.iter().map(|(oid, label)| (Some(*oid), *label)));
    for (tablespace, tablespace_label) in places {
        if change.of_schema_loses(&[tablespace_label], label, default_encryption) {
            let wanted = among(tablespace_label, label, default_encryption);
            return Some(SchemaLoss(wanted.map(|(_, who)| match (who, tablespace) {
                (Who::Tablespace, Some(oid)) => Source::Around(Labelled::Tablespace(oid)),
                (Who::Setting, _) => Source::Setting(Setting::DefaultEncryption),
                _ => Source::Around(Labelled::Database(database)),
            })));
        }
    }
    None
}
