//! Whose key wraps the data key of a relation: that of a key group, or of its database.
//!
//! Labels that require encryption may name a key group. That of the innermost object whose label
//! names one counts, whichever label decides about encryption: a table with a label of its own that
//! names a cipher is still in the group of its schema. Relations that follow another one are in its
//! group. System catalogs are in none.

use pagevault_cipher::CipherId;
use pagevault_keystore::{KeyGroup, RelFile};

use super::Catalog;
use super::decision::{Decision, Policy, Source};
use super::relation::{Labelled, Oid, Relation, RelationKind};

/// How a file is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealing {
    /// The cipher of its data key.
    pub cipher: CipherId,
    /// The key group whose key wraps the data key; `None`: that of the database, or the cluster's.
    pub group: Option<KeyGroup>,
}

/// Whether the file of a relation is in a key group by decision, or not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// Its file has just been created.
    New,
    /// It was decided about before.
    Existing,
}

/// The key group that a label names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// This one.
    Group(KeyGroup),
    /// One that does not exist, by the label of this object.
    Missing(Labelled),
}

impl<C: Catalog> Policy<'_, C> {
    /// The key group that labels name for a relation, in this tablespace; `None` if they name none.
    ///
    /// # Errors
    /// Those of the catalog, as for all functions here.
    pub fn named_key_group(
        &self,
        relation: &Relation,
        tablespace: Oid,
    ) -> Result<Option<Named>, C::Error> {
        self.named_key_group_of(relation, tablespace, Age::Existing)
    }

    fn named_key_group_of(
        &self,
        relation: &Relation,
        tablespace: Oid,
        age: Age,
    ) -> Result<Option<Named>, C::Error> {
        if !relation.user_made {
            return Ok(None);
        }
        if let Some(named) = self.own_key_group(relation)? {
            return Ok(Some(named));
        }
        if let Some(leader) = self.leader_of(relation)? {
            let Some(leader) = self.catalog.relation(leader)? else { return Ok(None) };
            // Who owns a table can give it such a name, but not put it into another group.
            if self.follows_by_name(relation)? {
                let around = self.key_group_around(relation, tablespace)?;
                if around.is_some() || self.keeps_its_group(relation, age)? {
                    let has = || self.catalog.key_group_of(relation.file).map(Named::Group);
                    return Ok(around.or_else(has));
                }
            }
            return match relation.kind {
                // The original of a transient relation follows nothing, whatever its name: names
                // may lead in a circle.
                RelationKind::Table | RelationKind::MaterializedView => {
                    match self.own_key_group(&leader)? {
                        Some(named) => Ok(Some(named)),
                        None => self.key_group_around(&leader, tablespace),
                    }
                }
                // Indexes and sequences may be in another tablespace than their table.
                RelationKind::Index | RelationKind::Sequence => {
                    self.named_key_group(&leader, leader.tablespace)
                }
                _ => self.named_key_group(&leader, tablespace),
            };
        }
        self.key_group_around(relation, tablespace)
    }

    /// The key group that a relation's own label names.
    fn own_key_group(&self, relation: &Relation) -> Result<Option<Named>, C::Error> {
        if !relation.user_made || !relation.kind.takes_labels() {
            return Ok(None);
        }
        self.key_group_at(Labelled::Relation(relation.oid))
    }

    /// Whether only its name says that an encrypted relation follows another one.
    fn keeps_its_group(&self, relation: &Relation, age: Age) -> Result<bool, C::Error> {
        Ok(age == Age::Existing
            && self.catalog.cipher_of(relation.file).is_some()
            && self.follows_by_name(relation)?)
    }

    /// The key group that labels around a relation name: of the partitioned tables above it, of its
    /// schema, of the tablespace.
    fn key_group_around(
        &self,
        relation: &Relation,
        tablespace: Oid,
    ) -> Result<Option<Named>, C::Error> {
        let mut parent = self.partitioned_table_of(relation)?;
        while let Some(table) = parent {
            if let Some(named) = self.key_group_at(Labelled::Relation(table))? {
                return Ok(Some(named));
            }
            let table = self.catalog.relation(table)?;
            parent = table.map(|table| self.partitioned_table_of(&table)).transpose()?.flatten();
        }
        match self.key_group_at(Labelled::Schema(relation.schema))? {
            Some(named) => Ok(Some(named)),
            None => self.key_group_at(Labelled::Tablespace(tablespace)),
        }
    }

    /// The key group that the label of an object names.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn key_group_at(&self, object: Labelled) -> Result<Option<Named>, C::Error> {
        self.catalog.key_group_of_label(object)
    }

    /// The key group for a file that a relation gets, with this decision about encryption. Where no
    /// label says anything, the relation stays in the group in which it is.
    ///
    /// # Errors
    /// Also if labels name a group that does not exist.
    pub fn key_group_for(
        &self,
        relation: &Relation,
        tablespace: Oid,
        decision: Option<&Decision>,
        age: Age,
    ) -> Result<Option<KeyGroup>, C::Error> {
        match self.named_key_group_of(relation, tablespace, age)? {
            Some(named) => self.existing(named).map(Some),
            None if self.keeps_its_group(relation, age)? => {
                Ok(self.catalog.key_group_of(relation.file))
            }
            None => self.kept_key_group(relation, decision),
        }
    }

    /// The key group in which a relation stays if no label names one.
    fn kept_key_group(
        &self,
        relation: &Relation,
        decision: Option<&Decision>,
    ) -> Result<Option<KeyGroup>, C::Error> {
        let of = |file: RelFile| self.catalog.key_group_of(file);
        match decision.map(|decision| decision.source) {
            Some(Source::Own(_) | Source::Around(_)) => Ok(None),
            Some(Source::Leader(leader)) => {
                let leader = self.catalog.relation(leader)?;
                Ok(leader.filter(|leader| leader.kind.has_storage()).and_then(|l| of(l.file)))
            }
            Some(Source::Setting(_)) | None => {
                let leader = match self.leader_of(relation)? {
                    Some(leader) => self.catalog.relation(leader)?,
                    None => None,
                };
                // A partitioned table has no file: its sequence stays where it is.
                let holder = leader.filter(|leader| leader.kind.has_storage());
                let holder = holder.unwrap_or(*relation);
                Ok(Some(holder.file).filter(|_| holder.kind.has_storage()).and_then(of))
            }
        }
    }

    pub(super) fn existing(&self, named: Named) -> Result<KeyGroup, C::Error> {
        match named {
            Named::Group(group) => Ok(group),
            Named::Missing(object) => Err(self.catalog.no_such_key_group(object)),
        }
    }

    /// Whether an encrypted relation is in another key group than it should be.
    ///
    /// # Errors
    /// Those of the catalog.
    pub fn is_in_other_key_group(&self, relation: &Relation) -> Result<bool, C::Error> {
        let wanted = self.wanted(relation)?.filter(Decision::is_encrypted);
        let Some(decision) = wanted else { return Ok(false) };
        if self.catalog.cipher_of(relation.file).is_none() {
            return Ok(false);
        }
        let group = match self.named_key_group(relation, relation.tablespace)? {
            Some(Named::Group(group)) => Some(group),
            Some(Named::Missing(_)) => return Ok(true),
            None if self.keeps_its_group(relation, Age::Existing)? => return Ok(false),
            None => self.kept_key_group(relation, Some(&decision))?,
        };
        Ok(group != self.catalog.key_group_of(relation.file))
    }
}
