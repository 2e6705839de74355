//! What is wanted of a relation, and what says so: the nearest label, or the setting. Which of
//! several labels decides is said by [`pagevault_core::policy::precedence`], without a server; here is
//! what they are the labels of.

use pagevault_cipher::CipherId;
use pagevault_core::policy::precedence::{self, Decided, Location, Surroundings};
use pgrx::pg_sys::Oid;

use super::label::Label;
use super::{catalogs, memo, repack};
use crate::keys::store::directory;
use crate::pg::guc;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;

/// What is wanted, and why.
#[derive(Clone, Copy)]
pub(crate) struct Decision {
    pub(crate) label: Label,
    pub(crate) source: Source,
    /// The cipher of the relation it follows.
    like: Option<CipherId>,
}

/// What decides.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The label of the relation, or of the one it follows.
    Own(Oid),
    /// The label of something around it: partitioned table, schema, tablespace, database.
    Around(Object),
    /// It follows this relation, which is encrypted.
    Leader(Oid),
    /// The setting of this name.
    Setting(&'static str),
}

impl Source {
    /// Kind and name of what decides.
    pub(crate) fn describe(self) -> ServerText {
        match self {
            Source::Own(oid) | Source::Leader(oid) => Object::relation(oid).describe(),
            Source::Around(object) => object.describe(),
            Source::Setting(name) => ServerText::join(&[b"setting ", name.as_bytes()]),
        }
    }
}

impl Decision {
    pub(super) fn new(label: Label, source: Source) -> Decision {
        Decision { label, source, like: None }
    }

    /// True if the relation is to be sealed.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self.label, Label::Encrypted(_))
    }

    /// True if someone said of this very relation that it is not to be sealed. Anything less does
    /// not take encryption away from a relation that has it.
    pub(crate) fn is_plain_by_own_label(&self) -> bool {
        self.label == Label::Plain && matches!(self.source, Source::Own(_))
    }

    /// True if a relation that is written so is what is wanted.
    pub(crate) fn is_met_by(&self, current: Option<CipherId>) -> bool {
        match (self.label, current) {
            (Label::Encrypted(named), Some(cipher)) => named.is_none_or(|named| named == cipher),
            (Label::Encrypted(_), None) | (Label::Plain, Some(_)) => false,
            (Label::Plain, None) => true,
        }
    }

    /// The cipher that the label names.
    pub(crate) fn named_cipher(&self) -> Option<CipherId> {
        match self.label {
            Label::Encrypted(named) => named,
            Label::Plain => None,
        }
    }

    /// The cipher for a new file: the one that the label names, else that of the file it replaces,
    /// of the relation it follows, or the default.
    pub(crate) fn cipher(&self, replaced: Option<CipherId>) -> CipherId {
        self.named_cipher().or(replaced).or(self.like).unwrap_or_else(guc::cipher)
    }
}

/// The labels as they are, or as they would be after a change.
#[derive(Clone, Copy, Default)]
pub(super) struct Labels {
    /// This object has this label.
    instead: Option<(Object, Option<Label>)>,
}

impl Labels {
    /// As they are, but for this one.
    pub(super) fn with(object: Object, label: Option<Label>) -> Labels {
        Labels { instead: Some((object, label)) }
    }
}

impl Surroundings for Labels {
    type Object = Object;
    type Error = Report;

    fn label_of(&self, object: Object) -> Result<Option<Label>> {
        match self.instead {
            Some((changed, label)) if changed == object => Ok(label),
            _ => memo::label_of(object),
        }
    }

    fn parent_of(&self, object: Object) -> Result<Option<Object>> {
        let is_partition = relation::facts(object.oid).is_some_and(|table| table.is_partition);
        let parent = if is_partition { memo::parent_of(object.oid)? } else { None };
        Ok(parent.map(Object::relation))
    }

    fn default_encryption(&self) -> bool {
        guc::default_encryption()
    }
}

/// What is wanted of a relation; `None` if nothing says.
pub(crate) fn wanted(facts: &Facts) -> Result<Option<Decision>> {
    wanted_in(facts, facts.tablespace)
}

/// As [`wanted`], for a file in this tablespace: the relation may be on its way there.
pub(crate) fn wanted_in(facts: &Facts, tablespace: Oid) -> Result<Option<Decision>> {
    wanted_by(Labels::default(), facts, tablespace)
}

/// As [`wanted_in`], if these were the labels.
pub(super) fn wanted_by(
    labels: Labels,
    facts: &Facts,
    tablespace: Oid,
) -> Result<Option<Decision>> {
    if let Some(decision) = own_label(labels, facts)? {
        return Ok(Some(decision));
    }
    let Some(leader) = leader_of(facts)? else { return wanted_around(labels, facts, tablespace) };
    let Some(leader) = relation::facts(leader) else { return Ok(None) };
    let decision = wanted_of_follower(labels, facts, &leader, tablespace)?;
    let copied = facts.kind == Kind::Table && facts.rewrites.is_none();
    let firm = decision.is_some_and(|decision| decision.is_encrypted());
    if copied && !firm && !repack::may_be_plain_like(&leader, facts) {
        return wanted_around(labels, facts, tablespace);
    }
    Ok(decision)
}

fn wanted_of_follower(
    labels: Labels,
    facts: &Facts,
    leader: &Facts,
    tablespace: Oid,
) -> Result<Option<Decision>> {
    let decision = match facts.kind {
        // The original of a transient relation follows nothing, whatever it is called.
        Kind::Table | Kind::MaterializedView => match own_label(labels, leader)? {
            Some(decision) => Some(decision),
            None => wanted_around(labels, leader, tablespace)?,
        },
        // Indexes and sequences may lie elsewhere than their table.
        Kind::Index | Kind::Sequence => wanted_by(labels, leader, leader.tablespace)?,
        _ => wanted_by(labels, leader, tablespace)?,
    };
    Ok(follow(leader, decision))
}

/// What follows an encrypted relation is encrypted, unless the label of that relation says
/// otherwise.
fn follow(leader: &Facts, decision: Option<Decision>) -> Option<Decision> {
    let like = directory::current_cipher(leader.file).filter(|_| leader.kind.has_storage());
    let firm = decision.is_some_and(|d| d.is_encrypted() || d.is_plain_by_own_label());
    if like.is_some() && !firm {
        let decision = Decision::new(Label::Encrypted(None), Source::Leader(leader.oid));
        return Some(Decision { like, ..decision });
    }
    decision.map(|decision| Decision { like: like.or(decision.like), ..decision })
}

fn own_label(labels: Labels, facts: &Facts) -> Result<Option<Decision>> {
    if !facts.user_made || !takes_labels(facts.kind) {
        return Ok(None);
    }
    let label = labels.label_of(Object::relation(facts.oid))?;
    Ok(label.map(|label| Decision::new(label, Source::Own(facts.oid))))
}

fn wanted_around(labels: Labels, facts: &Facts, tablespace: Oid) -> Result<Option<Decision>> {
    let parent = labels.parent_of(Object::relation(facts.oid))?;
    wanted_beneath(labels, parent, facts, tablespace)
}

/// What is said around a relation that follows no other: by the partitioned table `parent` and
/// those above it, schema, tablespace, database, setting.
pub(crate) fn wanted_below(
    parent: Option<Oid>,
    facts: &Facts,
    tablespace: Oid,
) -> Result<Option<Decision>> {
    wanted_beneath(Labels::default(), parent.map(Object::relation), facts, tablespace)
}

fn wanted_beneath(
    labels: Labels,
    parent: Option<Object>,
    facts: &Facts,
    tablespace: Oid,
) -> Result<Option<Decision>> {
    if !facts.user_made {
        return catalogs::wanted(facts);
    }
    let at = Location {
        parent,
        schema: Object::schema(facts.schema),
        tablespace: Object::tablespace(tablespace),
        database: Object::my_database(),
    };
    precedence::below(&labels, at).map(around)
}

/// What tablespace, database and setting say.
pub(crate) fn wanted_of_place(tablespace: Oid) -> Result<Option<Decision>> {
    let tablespace = Object::tablespace(tablespace);
    precedence::of_place(&Labels::default(), tablespace, Object::my_database()).map(around)
}

fn around(decided: Decided<Object>) -> Option<Decision> {
    decided.map(|(label, source)| {
        let source = match source {
            precedence::Source::Label(object) => Source::Around(object),
            precedence::Source::Setting => Source::Setting(DEFAULT_ENCRYPTION),
        };
        Decision::new(label, source)
    })
}

/// The last that is asked.
pub(super) const DEFAULT_ENCRYPTION: &str = "pagevault.default_encryption";

/// The kinds of relations that labels are put on.
pub(crate) fn takes_labels(kind: Kind) -> bool {
    matches!(kind, Kind::Table | Kind::MaterializedView | Kind::Sequence | Kind::PartitionedTable)
}

/// The relation whose choice a relation follows.
pub(crate) fn leader_of(facts: &Facts) -> Result<Option<Oid>> {
    Ok(match facts.kind {
        Kind::Index => facts.indexed_table.or_else(|| relation::table_of_index(facts.oid)),
        // Nobody else makes relations of this kind, or gives them other names
        // (RangeVarCallbackForAlterRelation).
        Kind::Toast => repack::oid_after(&facts.name, "pg_toast_"),
        Kind::Sequence => memo::owner_of(facts.oid)?,
        Kind::Table => facts.rewrites.or_else(|| repack::original_of(facts)),
        Kind::MaterializedView => facts.rewrites,
        Kind::PartitionedTable | Kind::WithoutStorage => None,
    })
}
