//! The policy for one relation: the label or setting that decides, and the result.
//! [`super::precedence`] decides between several labels; this module finds the labels that apply.

use pagevault_cipher::CipherId;

use super::label::Label;
use super::precedence::{self, Decided, Location, Surroundings};
use super::relation::{Labelled, Oid, Relation, RelationKind};
use super::{Catalog, catalogs};

/// The policy for a relation, and its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// The required state.
    pub label: Label,
    /// What requires it.
    pub source: Source,
    /// The cipher of the relation that this one follows.
    like: Option<CipherId>,
}

/// What a decision is based on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The label of the relation, or of the relation it follows.
    Own(Oid),
    /// The label of the partitioned table, schema, tablespace or database.
    Around(Labelled),
    /// The relation follows this one, which is encrypted.
    Leader(Oid),
    /// A setting.
    Setting(Setting),
}

/// Settings that require encryption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Of new relations to which no label applies.
    DefaultEncryption,
    /// Of catalogs with values of user tables.
    DataCatalogs,
    /// Of shared catalogs.
    SharedCatalogs,
}

impl Setting {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DefaultEncryption => "pagevault.default_encryption",
            Self::DataCatalogs => "pagevault.data_catalog_encryption",
            Self::SharedCatalogs => "pagevault.shared_catalog_encryption",
        }
    }
}

impl Decision {
    /// The decision for a relation that follows no other.
    #[must_use]
    pub fn new(label: Label, source: Source) -> Self {
        Self { label, source, like: None }
    }

    pub(super) fn by(setting: Setting) -> Self {
        Self::new(Label::Encrypted(None), Source::Setting(setting))
    }

    /// True if the relation is to be encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        matches!(self.label, Label::Encrypted(_))
    }

    /// True if the label of this very relation says `plaintext`. Nothing else decrypts an encrypted
    /// relation.
    #[must_use]
    pub fn is_plaintext_by_own_label(&self) -> bool {
        self.label == Label::Plaintext && matches!(self.source, Source::Own(_))
    }

    /// True if a file with the cipher `current` (`None`: plaintext) is in the required state.
    #[must_use]
    pub fn is_met_by(&self, current: Option<CipherId>) -> bool {
        match (self.label, current) {
            (Label::Encrypted(named), Some(cipher)) => named.is_none_or(|named| named == cipher),
            (Label::Encrypted(_), None) | (Label::Plaintext, Some(_)) => false,
            (Label::Plaintext, None) => true,
        }
    }

    /// The cipher that the label names.
    #[must_use]
    pub fn named_cipher(&self) -> Option<CipherId> {
        match self.label {
            Label::Encrypted(named) => named,
            Label::Plaintext => None,
        }
    }

    /// The cipher for a new file: the one that the label names, else that of the file it replaces,
    /// else that of the relation it follows, else the default.
    pub fn cipher<C: Catalog>(&self, replaced: Option<CipherId>, catalog: &C) -> CipherId {
        let inherited = replaced.or(self.like).map(|cipher| Policy::of(catalog).inherited(cipher));
        let known = self.named_cipher().or(inherited);
        known.unwrap_or_else(|| catalog.default_cipher())
    }
}

/// Decides from a catalog as it is, or as it would be after one label, or the partitioned table of
/// one relation, has changed.
#[derive(Debug)]
pub struct Policy<'a, C> {
    pub(super) catalog: &'a C,
    /// Use this label for this object in place of the catalog's.
    instead: Option<(Labelled, Option<Label>)>,
    /// Take this relation for a partition of that table, or for none.
    attached: Option<(Oid, Option<Oid>)>,
}

impl<C: Catalog> Surroundings for Policy<'_, C> {
    type Object = Labelled;
    type Error = C::Error;

    fn label_of(&self, object: Labelled) -> Result<Option<Label>, C::Error> {
        match self.instead {
            Some((changed, label)) if changed == object => Ok(label),
            _ => self.catalog.label_of(object),
        }
    }

    fn parent_of(&self, object: Labelled) -> Result<Option<Labelled>, C::Error> {
        let Labelled::Relation(oid) = object else { return Ok(None) };
        let Some(table) = self.catalog.relation(oid)? else { return Ok(None) };
        Ok(self.partitioned_table_of(&table)?.map(Labelled::Relation))
    }

    fn default_encryption(&self) -> bool {
        self.catalog.default_encryption()
    }
}

impl<'a, C: Catalog> Policy<'a, C> {
    /// The policy as the catalog has it.
    #[must_use]
    pub fn of(catalog: &'a C) -> Self {
        Self { catalog, instead: None, attached: None }
    }

    /// The policy as it would be if `object` had this label.
    #[must_use]
    pub fn if_labelled(catalog: &'a C, object: Labelled, label: Option<Label>) -> Self {
        Self { instead: Some((object, label)), ..Self::of(catalog) }
    }

    /// The same without the label of `object`.
    #[must_use]
    pub fn without_label(self, object: Labelled) -> Self {
        Self { instead: Some((object, None)), ..self }
    }

    /// The policy as it would be if `relation` were a partition of `parent`, or of none.
    #[must_use]
    pub fn if_attached(catalog: &'a C, relation: Oid, parent: Option<Oid>) -> Self {
        Self { attached: Some((relation, parent)), ..Self::of(catalog) }
    }

    /// The decision for a relation; `None` if no label or setting applies.
    ///
    /// # Errors
    /// Those of the catalog, as for all functions here.
    pub fn wanted(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        self.wanted_in(relation, relation.tablespace)
    }

    /// Like [`Policy::wanted`], for a file in this tablespace: the relation may be moving there.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn wanted_in(
        &self,
        relation: &Relation,
        tablespace: Oid,
    ) -> Result<Option<Decision>, C::Error> {
        if let Some(decision) = self.own_label(relation)? {
            return Ok(Some(decision));
        }
        let Some(leader) = self.leader_of(relation)? else {
            return self.wanted_around(relation, tablespace);
        };
        let Some(leader) = self.catalog.relation(leader)? else { return Ok(None) };
        let decision = self.wanted_of_follower(relation, &leader, tablespace)?;
        let copied = relation.kind == RelationKind::Table && relation.rewrites.is_none();
        let firm = decision.is_some_and(|decision| decision.is_encrypted());
        if copied && !firm && !self.may_be_plaintext_like(&leader, relation)? {
            return self.wanted_around(relation, tablespace);
        }
        if copied && !firm && self.follows_by_name(relation)? {
            return self.wanted_by_name(relation, tablespace, decision);
        }
        Ok(decision)
    }

    /// Of a table that has only its name and owner in common with a copy by pg_squeeze: an owner
    /// can give any table such a name. So it is not plaintext where others are encrypted, and what
    /// it has is not taken from it.
    fn wanted_by_name(
        &self,
        relation: &Relation,
        tablespace: Oid,
        of_original: Option<Decision>,
    ) -> Result<Option<Decision>, C::Error> {
        let around = self.wanted_around(relation, tablespace)?;
        if around.is_some_and(|decision| decision.is_encrypted()) {
            return Ok(around);
        }
        Ok(of_original.map(|decision| match decision.source {
            Source::Own(original) => {
                Decision { source: Source::Around(Labelled::Relation(original)), ..decision }
            }
            _ => decision,
        }))
    }

    fn wanted_of_follower(
        &self,
        relation: &Relation,
        leader: &Relation,
        tablespace: Oid,
    ) -> Result<Option<Decision>, C::Error> {
        let decision = match relation.kind {
            // The original of a transient relation follows nothing, whatever its name.
            RelationKind::Table | RelationKind::MaterializedView => {
                match self.own_label(leader)? {
                    Some(decision) => Some(decision),
                    None => self.wanted_around(leader, tablespace)?,
                }
            }
            // Indexes and sequences may be in another tablespace than their table.
            RelationKind::Index | RelationKind::Sequence => self.wanted(leader)?,
            _ => self.wanted_in(leader, tablespace)?,
        };
        Ok(self.follow(leader, decision))
    }

    /// A relation that follows an encrypted relation is encrypted, unless the label of the latter
    /// says `plaintext`.
    fn follow(&self, leader: &Relation, decision: Option<Decision>) -> Option<Decision> {
        let like = leader.kind.has_storage().then(|| self.catalog.cipher_of(leader.file)).flatten();
        let firm = decision.is_some_and(|d| d.is_encrypted() || d.is_plaintext_by_own_label());
        if like.is_some() && !firm {
            let decision = Decision::new(Label::Encrypted(None), Source::Leader(leader.oid));
            return Some(Decision { like, ..decision });
        }
        decision.map(|decision| Decision { like: like.or(decision.like), ..decision })
    }

    fn own_label(&self, relation: &Relation) -> Result<Option<Decision>, C::Error> {
        if !relation.user_made || !relation.kind.takes_labels() {
            return Ok(None);
        }
        let label = self.label_of(Labelled::Relation(relation.oid))?;
        Ok(label.map(|label| Decision::new(label, Source::Own(relation.oid))))
    }

    /// The table of which a relation is a partition.
    pub(super) fn partitioned_table_of(
        &self,
        relation: &Relation,
    ) -> Result<Option<Oid>, C::Error> {
        match self.attached {
            Some((partition, parent)) if partition == relation.oid => Ok(parent),
            _ if relation.is_partition => self.catalog.parent_of(relation.oid),
            _ => Ok(None),
        }
    }

    /// The decision for a relation that follows no other and has no label of its own: from the
    /// partitioned tables above it, schema, tablespace, database, setting.
    fn wanted_around(
        &self,
        relation: &Relation,
        tablespace: Oid,
    ) -> Result<Option<Decision>, C::Error> {
        if !relation.user_made {
            return catalogs::wanted(self, relation);
        }
        let at = Location {
            parent: self.partitioned_table_of(relation)?.map(Labelled::Relation),
            schema: Labelled::Schema(relation.schema),
            tablespace: Labelled::Tablespace(tablespace),
            database: self.my_database(),
        };
        precedence::below(self, at).map(around)
    }

    /// The decision from tablespace, database and setting alone.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn wanted_of_place(&self, tablespace: Oid) -> Result<Option<Decision>, C::Error> {
        let tablespace = Labelled::Tablespace(tablespace);
        precedence::of_place(self, tablespace, self.my_database()).map(around)
    }

    pub(super) fn my_database(&self) -> Labelled {
        Labelled::Database(self.catalog.my_database())
    }

    /// The relation that a relation follows in the policy.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn leader_of(&self, relation: &Relation) -> Result<Option<Oid>, C::Error> {
        match relation.kind {
            RelationKind::Index => match relation.indexed_table {
                Some(table) => Ok(Some(table)),
                None => self.catalog.table_of_index(relation.oid),
            },
            // Only the server creates and names TOAST tables: renaming them is refused
            // (RangeVarCallbackForAlterRelation).
            RelationKind::Toast => Ok(relation.named_for),
            RelationKind::Sequence => self.catalog.owner_of_sequence(relation.oid),
            RelationKind::Table => match relation.rewrites {
                Some(original) => Ok(Some(original)),
                None => match self.repacked_by(relation)? {
                    Some(original) => Ok(Some(original)),
                    None => self.squeezed_by(relation),
                },
            },
            RelationKind::MaterializedView => Ok(relation.rewrites),
            RelationKind::PartitionedTable | RelationKind::WithoutStorage => Ok(None),
        }
    }

    /// The table that pg_repack copies into this relation, or whose changes it logs in it.
    ///
    /// Anyone can create a table with such a name. So the schema must be a member of the extension
    /// (its script contains CREATE SCHEMA, and only superusers install it), whatever its name.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn repacked_by(&self, relation: &Relation) -> Result<Option<Oid>, C::Error> {
        let Some(oid) = relation.named_for.filter(|_| relation.kind == RelationKind::Table) else {
            return Ok(None);
        };
        if !self.catalog.is_schema_of_pg_repack(relation.schema)? {
            return Ok(None);
        }
        Ok(self.catalog.relation(oid)?.filter(is_repacked).map(|original| original.oid))
    }

    /// Whether a relation follows another one only because of its name.
    pub(super) fn follows_by_name(&self, relation: &Relation) -> Result<bool, C::Error> {
        Ok(relation.kind == RelationKind::Table
            && relation.rewrites.is_none()
            && self.repacked_by(relation)?.is_none()
            && self.squeezed_by(relation)?.is_some())
    }

    /// The table that pg_squeeze copies into this relation: in the same schema, of the same owner,
    /// as it creates it (`create_transient_table`, pg_squeeze.c). Only the owner or a superuser
    /// can create another table like that.
    fn squeezed_by(&self, relation: &Relation) -> Result<Option<Oid>, C::Error> {
        let Some(oid) = relation.squeezes else { return Ok(None) };
        let is_beside = |original: &Relation| {
            (original.schema, original.owner) == (relation.schema, relation.owner)
                && original.oid != relation.oid
        };
        let original = self.catalog.relation(oid)?.filter(is_repacked).filter(is_beside);
        Ok(original.map(|original| original.oid))
    }

    /// True if a table may be plaintext because the table it follows is to be plaintext. A role
    /// that may run pg_repack without being superuser has CREATE on its schema. A table that it
    /// creates there may be plaintext like the original only if the same role owns the original,
    /// and so could write into that, too.
    fn may_be_plaintext_like(
        &self,
        original: &Relation,
        relation: &Relation,
    ) -> Result<bool, C::Error> {
        Ok(original.owner == relation.owner || self.catalog.is_superuser(relation.owner)?)
    }

    /// All relations on which the decision for a relation depends: those that it follows, and the
    /// partitioned tables above it and them.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn leaders(&self, relation: &Relation) -> Result<Vec<Oid>, C::Error> {
        let mut found = Vec::new();
        let mut waiting = vec![*relation];
        while let Some(next) = waiting.pop() {
            for leader in [self.leader_of(&next)?, self.partitioned_table_of(&next)?] {
                let Some(leader) = leader.filter(|leader| !found.contains(leader)) else {
                    continue;
                };
                found.push(leader);
                waiting.extend(self.catalog.relation(leader)?);
            }
        }
        Ok(found)
    }

    /// The table at the end of the chain from an index or TOAST table.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn root_of(&self, relation: &Relation) -> Result<Relation, C::Error> {
        let mut root = *relation;
        while matches!(root.kind, RelationKind::Index | RelationKind::Toast) {
            let Some(leader) = self.leader_of(&root)? else { break };
            let Some(leader) = self.catalog.relation(leader)? else { break };
            root = leader;
        }
        Ok(root)
    }

    /// The cipher that a file has from another one with the cipher `from`.
    #[must_use]
    pub fn inherited(&self, from: CipherId) -> CipherId {
        if self.catalog.may_inherit(from) { from } else { self.catalog.default_cipher() }
    }

    /// The cipher for a relation where the command names none: that of its label, or the default.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn cipher_wanted_of(&self, relation: &Relation) -> Result<CipherId, C::Error> {
        let wanted = self.wanted(relation)?;
        Ok(self.cipher_by(wanted).unwrap_or_else(|| self.catalog.default_cipher()))
    }
}

fn is_repacked(original: &Relation) -> bool {
    original.user_made
        && matches!(original.kind, RelationKind::Table | RelationKind::MaterializedView)
}

fn around(decided: Decided<Labelled>) -> Option<Decision> {
    decided.map(|(label, source)| {
        let source = match source {
            precedence::Source::Label(object) => Source::Around(object),
            precedence::Source::Setting => Source::Setting(Setting::DefaultEncryption),
        };
        Decision::new(label, source)
    })
}
