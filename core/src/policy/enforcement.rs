//! What is refused. `pagevault.enforce_encryption` prevents that anything becomes plaintext where
//! the policy requires encryption. Decrypting a relation against its label is refused in any case.
//!
//! New storage follows the policy by itself. So two things are left to refuse: removing a policy,
//! and moving a plaintext relation to a place where the policy requires encryption.

use super::Catalog;
use super::decision::{Decision, Policy, Setting, Source};
use super::label::Label;
use super::precedence::{Change, DecidedBy, among};
use super::relation::{Labelled, Oid, Relation, RelationKind};

/// Returns the change if it removes encryption or makes an exception from it, which only an
/// administrator may do. Owners may add encryption: then `None`.
#[must_use]
pub fn takes_encryption_away(from: Option<Label>, to: Option<Label>) -> Option<Change> {
    let says_encrypted = matches!(from, Some(Label::Encrypted(_)));
    let takes_away = to == Some(Label::Plaintext) || (to.is_none() && says_encrypted);
    takes_away.then_some(Change { from, to })
}

impl<C: Catalog> Policy<'_, C> {
    /// The reason why a relation must not be plaintext in the place where it is now.
    ///
    /// # Errors
    /// Those of the catalog, as for all functions here.
    pub fn against_plaintext(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        let concerns = relation.is_stored() && self.catalog.cipher_of(relation.file).is_none();
        if !self.catalog.enforces() || !concerns {
            return Ok(None);
        }
        Ok(self.wanted(relation)?.filter(Decision::is_encrypted))
    }

    /// The reason why a relation in plaintext, whose own label says so, must not be in the place
    /// where it is now: the exception was made elsewhere. It still holds if what requires
    /// encryption without that label is the same as before, and not a place that the command has
    /// brought the relation to, or another one that the relation follows.
    ///
    /// `before`: what [`Policy::required_without_label`] has given for the former place; `entered`:
    /// the new schema and tablespace.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn against_moving_plaintext(
        self,
        relation: &Relation,
        before: Option<Source>,
        entered: &[Labelled],
    ) -> Result<Option<Decision>, C::Error> {
        // New partitions and sequences of a partitioned table take its label.
        let concerns = relation.is_stored() || relation.kind == RelationKind::PartitionedTable;
        if !self.catalog.enforces() || !concerns {
            return Ok(None);
        }
        if !self.wanted(relation)?.is_some_and(|it| it.is_plaintext_by_own_label()) {
            return Ok(None);
        }
        // Its file may still be encrypted: a job is to decrypt it then.
        let required = self.without_own_label(relation).wanted(relation)?;
        Ok(required.filter(Decision::is_encrypted).filter(|required| {
            let is_entered = match required.source {
                Source::Around(place) => entered.contains(&place),
                _ => false,
            };
            is_entered || before != Some(required.source)
        }))
    }

    /// What requires encryption of a relation without its own label.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn required_without_label(self, relation: &Relation) -> Result<Option<Source>, C::Error> {
        let required = self.without_own_label(relation).wanted(relation)?;
        Ok(required.filter(Decision::is_encrypted).map(|required| required.source))
    }

    fn without_own_label(self, relation: &Relation) -> Self {
        self.without_label(Labelled::Relation(relation.oid))
    }

    /// The reason why the label of the relation `labelled` must not be changed: the decision for
    /// one of `relations` (itself and its partitions) that would lose encryption.
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

    /// The reason why a job in progress must not decrypt a relation: a label requires encryption,
    /// or a setting does and is enforced. (The session that requested the job may have had other
    /// settings.)
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn against_decrypting(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        Ok(self.wanted(relation)?.filter(|decision| match decision.source {
            Source::Setting(_) => {
                decision.is_encrypted() && self.catalog.enforces() && relation.user_made
            }
            // It follows a relation that is still encrypted; the job decrypts that one, too.
            Source::Leader(_) => false,
            Source::Own(_) | Source::Around(_) => decision.is_encrypted(),
        }))
    }

    /// The reason why an interrupted decryption of a relation must not be resumed.
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

/// Label and settings of one of the databases that a change of a tablespace's or database's label
/// affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The database.
    pub database: Oid,
    /// Its label.
    pub label: Option<Label>,
    /// `pagevault.default_encryption` there.
    pub default_encryption: bool,
    /// `pagevault.enforce_encryption` there, or in this session.
    pub enforces: bool,
}

impl View {
    /// Combines what is set for `database` with the values of this session, which is connected to
    /// the database `here`; pairs are (set for the database, in this session). In its own database
    /// a session's values count, since a superuser may have switched enforcement off in it. It
    /// cannot switch off enforcement that is set for another database.
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

/// The database that forbids this change of a tablespace's or database's label: the current one if
/// it would lose encryption, else the one with the lowest OID.
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

/// A change of a schema's label removes encryption. Holds what decides without that label, if
/// anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemaLoss(pub Option<Source>);

/// Whether a change of a schema's label is refused, given all tablespaces and their labels.
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
                (DecidedBy::Tablespace, Some(oid)) => Source::Around(Labelled::Tablespace(oid)),
                (DecidedBy::Setting, _) => Source::Setting(Setting::DefaultEncryption),
                _ => Source::Around(Labelled::Database(database)),
            })));
        }
    }
    None
}
